"""Proves that a call of attention which the kernels do not take is torch's, and counted by its reason.

Method: the registered function itself, over random tensors that are unfit in one respect each, beside
the same in torch.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention import backends, dense, registered, torch_reference
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.handle import layer_of as layer_of_keys
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.cache.layer import Shape
from kvclient.hf.connector.block_format import BlockFormat
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
    seen = torch_reference.visible(3, 9, None, 0, True, torch.device("cpu"))
    return found, torch_reference.attend(*tensors, seen, 0.25, bias=more.get("position_bias"))


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


@pytest.mark.parametrize("whose", ["value", "s_aux"])
def test_gradients_of_any_operand_are_torchs_and_counted(whose, counts):
    """As training the value projection alone asks for them."""
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16)
    value, sinks = torch.randn(1, 2, 9, 16), torch.randn(4)
    trained = {"value": value, "s_aux": sinks}[whose].requires_grad_()
    backend = backends.backend("cpu_avx2")
    found, _ = registered.attention(
        backend, torch.nn.Module(), query, key, value, None, scaling=0.25, s_aux=sinks
    )
    found.sum().backward()
    assert trained.grad is not None and trained.grad.abs().sum() > 0
    assert counts() == {"training": 1}


def test_values_of_another_dtype_are_torchs_and_counted(counts):
    """As autocast makes them where keys are rotated in float32."""
    tensors = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = registered.attention(
            backends.backend("cpu_avx2"), torch.nn.Module(), *tensors, None, scaling=0.25
        )
        seen = torch_reference.visible(3, 9, None, 0, True, torch.device("cpu"))
        wanted = torch_reference.attend(*tensors, seen, 0.25)
    assert torch.equal(found, wanted)
    assert counts() == {"shape": 1}


@pytest.mark.parametrize("shape", [(1, 2, 9, 16), (3, 2, 8, 16), (3, 1, 9, 16)])
def test_operands_that_do_not_fit_together_are_refused(shape):
    """The operator's own check: C would read beyond them."""
    query, key = torch.randn(3, 4, 3, 16), torch.randn(3, 2, 9, 16)
    with pytest.raises(InvalidArgument, match="values must be as the keys are"):
        dense.attend(query, key, torch.randn(shape), None, None, 0.25, 0.0, 0, True, 0)
    with pytest.raises(InvalidArgument, match="values must be as the keys are"):
        dense.attend(query, key[:1], key[:1], None, None, 0.25, 0.0, 0, True, 0)


def layer_of(tokens):
    shape = Shape(1, 2, 64, torch.float32, torch.device("cpu"), tokens + 4)
    layer = InPlaceLayer(0, shape, None, None, None, [0], lambda reason: None, lambda: True)
    keys, values = torch.randn(1, 2, tokens, 64), torch.randn(1, 2, tokens, 64)
    layer.update(keys, values)
    forget_pending()
    return layer


def test_a_thread_uses_a_workspace_of_its_own():
    """A server's pool decodes where another thread made the cache; both would write to one memory."""
    layer, query = layer_of(4096), torch.randn(1, 8, 1, 64)
    path = backends.backend("cpu_avx2").path
    wanted = layer.attend(query, None, 0.1, 0.0, 0, path)
    here = dense._local.memory
    seen = []

    def there():
        found = layer.attend(query, None, 0.1, 0.0, 0, path)
        seen.append((torch.equal(found, wanted), getattr(dense._local, "memory", here)[0] != here[0]))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(there).result()
    assert seen == [(True, True)]


def test_values_that_want_gradients_make_a_cache_dense():
    keys, values = layer_of(8).update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64, requires_grad=True))
    assert layer_of_keys(keys) is None and values.requires_grad
    forget_pending()


def test_continuous_batching_is_refused(counts):
    with pytest.raises(InvalidArgument, match="continuous batching"):
        attended(4, 2, 16, 16, cache=object())
    assert counts() == {}


@pytest.mark.parametrize("array", [np.zeros(512, np.uint8), np.zeros((2, 2, 7, 16), np.float32)])
def test_a_block_of_another_form_is_not_read_in_place(array):
    """Its last layer may be right: C would read beyond the others."""
    form = BlockFormat(2, 2, 16, torch.float32)
    layers = [array, np.zeros((2, 2, 8, 16), np.float32)]
    view = SimpleNamespace(tokens=8, layer=layers.__getitem__)
    assert form.fits(view, 8, 1) and len(form.in_place(view, 1)) == 2
    with pytest.raises(InvalidArgument, match="no K and V of BlockFormat"):
        form.in_place(view, 0)
