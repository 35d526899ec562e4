"""Proves that a prepared call over segments computes what the contract says, from tensors.

Method: cases of tests/kernels/oracle.py against its oracle in double, on a GPU and on the emulation; the
dense form against torch; a call captured in a CUDA graph and replayed after its tail grew.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvclient.kernels import contract, cuda
from kvclient.kernels.cuda_attention import Call, attend_dense
from tests.gpu import attending
from tests.gpu.oracle import noise
from tests.kernels.compare import calc_diff
from tests.kernels.oracle import Case

SINKS = np.linspace(-3, 9, 8).astype(np.float32)


@pytest.mark.parametrize("path", ["reference", "decode", "auto"])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "window": 40}, {"causal": False}, {"sinks": SINKS}], ids=str
)
def test_a_case_of_everything(device, path, options):
    case = Case(2, 4, 64, 3, "float16", options=options)
    case.row().segment(100, 0, "int8", first=5).segment(50, 100, "int4", delta=-900)
    case.segment(3, 150, tail=True)
    case.row().segment(40, 0, "float16", delta=7).segment(7, 40, "int8", group=64)
    case.queries()
    out, lse = attending.run(case, path, 2, device=device)
    want, want_lse = case.oracle()
    assert np.abs(out - want).max() <= 5e-3 * np.abs(want).max()
    assert calc_diff(out, want) <= 1e-5
    assert np.abs(lse - want_lse).max() <= 3e-3 * np.abs(want_lse).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 70), (5, 5), (3, 70)])
@pytest.mark.parametrize("pads", [None, [0, 2]])
def test_dense_keys(device, dtype, tokens, keys, pads):
    q = noise(2, 8, tokens, 64, dtype=dtype).to(device)
    k, v = noise(2, 2, 2, keys, 64, dtype=dtype, seed=4).to(device)
    starts = None if pads is None else torch.tensor(pads, device=device)
    out = attend_dense(q, k, v, starts, None, 0.1, 0.0, 0, True)
    seen = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)[None, None]
    if starts is not None:
        seen = seen & (torch.arange(keys, device=device) >= starts[:, None, None, None])
    want = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), seen, scale=0.1, enable_gqa=True
    )
    want = want.nan_to_num(0.0).transpose(1, 2)
    assert out.shape == (2, tokens, 8, 64) and out.dtype == dtype
    bound = {torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((out.double() - want).abs().max()) <= bound * float(want.abs().max())


@pytest.mark.parametrize("tokens", [3, 40])
def test_dense_rows_that_do_not_follow_each_other(device, tokens):
    q = noise(1, 8, tokens, 64, dtype=torch.float16).to(device)
    k, v = noise(2, 1, 2, 300, 64, dtype=torch.float16, seed=4).to(device)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    columns = shuffled[:tokens].sort().values.to(device)
    out = attend_dense(q, k, v, None, None, 0.1, 0.0, 0, True, position=columns[None])
    seen = torch.arange(300, device=device)[None] <= columns[:, None]
    want = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), seen, scale=0.1, enable_gqa=True
    ).transpose(1, 2)
    assert float((out.double() - want).abs().max()) <= 4e-3 * float(want.abs().max())


def growing(device):
    """A block, and a tail with room for 16 tokens, of which the call knows 4."""
    block = noise(2, 2, 64, 64, dtype=torch.float16).to(device)
    tail = noise(2, 2, 16, 64, dtype=torch.float16, seed=8).to(device)
    q, position = noise(1, 4, 1, 64, dtype=torch.float16, seed=9).to(device), torch.full((1, 1), 67)
    position = position.to(device)
    rows = [[cuda.segment((block[0],), (block[1],))]]
    tails = [cuda.segment((tail[0],), (tail[1],), tokens=4, position=64)]
    call = Call(q, position, rows, 0.1, kv_heads=2, tails=tails, alive=(block, tail))
    whole = torch.cat([block, tail], 2)

    def wanted(keys):
        k, v = whole[:, None, :, :keys].double()
        return functional.scaled_dot_product_attention(q.double(), k, v, scale=0.1, enable_gqa=True)

    return call, position, wanted


def test_a_tail_that_grows_is_read_when_the_call_runs(device):
    call, position, wanted = growing(device)
    for tokens in (4, 5, 16):
        call.tail_tokens(0).fill_(tokens)
        position.fill_(63 + tokens)
        assert float((call.run().double() - wanted(64 + tokens)).abs().max()) < 2e-2


def test_a_captured_call_sees_what_was_written_since(gpu):
    call, position, wanted = growing(gpu)
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for tokens in (4, 9, 16):
        call.tail_tokens(0).fill_(tokens)
        position.fill_(63 + tokens)
        graph.replay()
        torch.cuda.synchronize()
        assert float((call.out.double() - wanted(64 + tokens)).abs().max()) < 2e-2


def test_wrong_arguments_are_refused(device):
    q, position = noise(1, 4, 1, 64, dtype=torch.float16).to(device), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(contract.InvalidArgument, match="0 rows"):
        Call(q, position.to(device), [], 0.1, kv_heads=2)
    with pytest.raises(contract.InvalidArgument, match="kv_heads=3"):
        Call(q, position.to(device), [[]], 0.1, kv_heads=3)
