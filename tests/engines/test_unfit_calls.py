"""Proves that a call of attention which the kernels do not take is torch's, and counted by its reason.

Method: the registered function itself, over random tensors that are unfit in one respect each, beside
the same in torch.
"""

import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention import backends, plain, registered
from kvclient.kernels import contract

NONE_HERE = bool(attention.available_backends()["cpu_avx2"])
pytestmark = pytest.mark.skipif(NONE_HERE, reason="no CPU kernels here")


@pytest.fixture
def counts():
    """Calls that torch answered during the test, by reason."""
    before = attention.fallbacks()
    return lambda: {
        reason: count - before.get(reason, 0)
        for reason, count in attention.fallbacks().items()
        if count != before.get(reason, 0)
    }


UNFIT = {
    "a bias by position": ("position_bias", (4, 2, 16, 16), {"position_bias": torch.randn(1, 4, 3, 9)}),
    "values of another width": ("shape", (4, 2, 16, 24), {}),
    "too many heads to one": ("shape", (contract.MAX_GQA + 1, 1, 16, 16), {}),
    "heads too wide": ("head_dim", (4, 2, contract.MAX_HEAD_DIM + 1, contract.MAX_HEAD_DIM + 1), {}),
    "elements of no kernel": ("dtype", (4, 2, 16, 16), {"dtype": torch.float64}),
}


def attended(heads, kv_heads, head_dim, value_dim, dtype=torch.float32, **more):
    """(what attention says, what torch says) of random tensors."""
    generator = torch.Generator().manual_seed(heads)
    sizes = (1, heads, 3, head_dim), (1, kv_heads, 9, head_dim), (1, kv_heads, 9, value_dim)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    backend = backends.backend("cpu_avx2")
    found, _ = registered.attention(backend, torch.nn.Module(), *tensors, None, scaling=0.25, **more)
    seen = plain.visible(3, 9, None, 0, True, torch.device("cpu"))
    return found, plain.attend(*tensors, seen, 0.25, bias=more.get("position_bias"))


@pytest.mark.parametrize("case", UNFIT)
def test_what_the_kernels_do_not_take_goes_to_torch_and_is_counted(case, counts):
    reason, sizes, more = UNFIT[case]
    found, wanted = attended(*sizes, **more)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert counts() == {reason: 1}


def test_dropout_is_torchs_and_counted(counts):
    found, wanted = attended(4, 2, 16, 16, dropout=0.5)
    assert found.shape == wanted.shape and not torch.allclose(found, wanted)
    assert counts() == {"training": 1}


def test_continuous_batching_is_refused(counts):
    with pytest.raises(InvalidArgument, match="continuous batching"):
        attended(4, 2, 16, 16, cache=object())
    assert counts() == {}
