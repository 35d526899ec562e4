"""Proves that the operators are what torch.compile believes them to be.

Method: torch.library.opcheck on a GPU and on the emulation: the schema, what is mutated, the fake
implementation against the real one; and one compiled graph without a break.
"""

import pytest
import torch

from kvclient.kernels import cuda
from tests.gpu.oracle import Block, noise

TESTS = ("test_schema", "test_faketensor")


def segments(device):
    block = Block.made(device, 2, 40, 32, torch.float16, 8)
    table = cuda.table([block.segment], device)
    return block, table, torch.zeros(1, dtype=torch.int64, device=device)


def test_rows(device):
    x = noise(2, 40, 32, dtype=torch.float16).to(device)
    for group in (0, 32):
        torch.library.opcheck(cuda.quantise, (x, 8, group), test_utils=TESTS)
        codes, scale, zero, _ = cuda.quantise(x, 4, group)
        torch.library.opcheck(cuda.dequantise, (codes, scale, zero, 4, group, x.clone()), test_utils=TESTS)
    turn = torch.ones(2, 16, device=device)
    torch.library.opcheck(cuda.rotate, (x, turn, True), test_utils=TESTS)


def test_segments(device):
    block, table, place = segments(device)
    k, v = noise(2, 2, 50, 32, dtype=torch.float16).to(device)
    torch.library.opcheck(cuda.load, (k, v, table, place, 40, 0, False), test_utils=TESTS)
    torch.library.opcheck(cuda.score, (k, v, table, place, 40, 0, False), test_utils=TESTS)
    del block


def test_awq(device):
    words = torch.randint(-(1 << 31), 1 << 31, (128, 2), dtype=torch.int32, device=device)
    zeros = torch.zeros(1, 2, dtype=torch.int32, device=device)
    scales = torch.full((1, 16), 0.01, dtype=torch.float16, device=device)
    x = noise(3, 128, dtype=torch.float16).to(device)
    torch.library.opcheck(cuda.awq_repack, (words, 128), test_utils=TESTS)
    packed = cuda.awq_repack(words, 128)
    torch.library.opcheck(cuda.awq_multiply_op, (x, packed, zeros, scales, None, 128), test_utils=TESTS)
    torch.library.opcheck(
        cuda.awq_dequantise_op, (packed, zeros, scales, 128, torch.bfloat16), test_utils=TESTS
    )


def test_a_graph_without_a_break(device):
    x = noise(2, 40, 32).to(device)

    def there_and_back(x):
        codes, scale, zero, _ = cuda.quantise(x * 2, 8, 32)
        out = torch.empty_like(x)
        cuda.dequantise(codes, scale, zero, 8, 32, out)
        return out / 2

    compiled = torch.compile(there_and_back, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), there_and_back(x))


@pytest.mark.parametrize("rows", [3, 70])
def test_an_awq_layer_compiles(gpu, rows):
    from kvclient.hf.awq import AwqLinear

    layer = AwqLinear(128, 32, 128, True, torch.float16).to(gpu)
    layer.qweight.random_(-(1 << 31), 1 << 31)
    layer.scales.fill_(0.01)
    x = noise(rows, 128, dtype=torch.float16).to(gpu)
    with torch.no_grad():
        wanted = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager")(x), wanted)
