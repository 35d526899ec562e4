"""Proves that the operators are what torch.compile believes them to be.

Method: torch.library.opcheck on a GPU and on the emulation: the schema, what is mutated, the fake
implementation against the real one; and one compiled graph without a break.
"""

import pytest
import torch

from kvclient.kernels import cuda
from kvclient.kernels.cuda_attention import Table, attend_op
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


def test_attention_over_segments(device):
    """Dense keys besides, which torch can attend to as well."""
    k, v = noise(2, 2, 40, 64, dtype=torch.float16).to(device)
    q, position = noise(1, 4, 2, 64, dtype=torch.float16).to(device), torch.tensor([[38, 39]], device=device)
    table = Table([[cuda.segment((k,), (v,), tokens=30)]], device, 4, 2, 64,
                [cuda.segment((k,), (v,), first=30, position=30)], (k, v))  # fmt: skip
    for options in ((), (torch.zeros(4, device=device), True, 16, 5.0)):
        torch.library.opcheck(attend_op, (table.memory, q, position, 0.125, 2, *options), test_utils=TESTS)
    compiled = torch.compile(
        lambda q: attend_op(table.memory, q * 2, position, 0.125, 2) / 2, backend="eager", fullgraph=True
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        2 * q.double(), k[None].double(), v[None].double(), torch.ones(2, 40, device=device).tril(38).bool(),
        scale=0.125, enable_gqa=True,
    )  # fmt: skip
    assert float((compiled(q).double() - wanted / 2).abs().max()) < 4e-3


def test_pages(device):
    pages, pool = torch.arange(128, dtype=torch.uint8, device=device).reshape(2, 64), torch.zeros(4, 64)
    pool = pool.to(torch.uint8).to(device)
    to, source = cuda.addresses([pool[3], pool[1]], device), cuda.addresses(list(pages), device)
    arguments = (to, source, 2, 2, 16, (32, 16, 32, 16), pool)
    torch.library.opcheck(cuda.copy_pages, arguments, test_utils=TESTS)
    cuda.copy_pages(*arguments)
    assert torch.equal(pool[[3, 1]], pages) and not pool[[0, 2]].any()


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
    from kvclient.hf.awq.linear import AwqLinear

    layer = AwqLinear(128, 32, 128, True, torch.float16).to(gpu)
    layer.qweight.random_(-(1 << 31), 1 << 31)
    layer.scales.fill_(0.01)
    x = noise(rows, 128, dtype=torch.float16).to(gpu)
    with torch.no_grad():
        wanted = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager")(x), wanted)
