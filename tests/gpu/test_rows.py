"""Proves that a GPU quantises, dequantises, rotates, loads, scores and copies as the contract says.

Method: byte for byte against the CPU library, whose own oracle in double is in tests/kernels; each fast
kernel and its naive one; the deviation score against sums in double. Shapes that the fast kernels do not take
(odd head dimensions, addresses that are not aligned) go the slow way and must give the same bytes.
"""

import mmap
import os

import numpy as np
import pytest
import torch

from kvclient.kernels import contract, cuda
from kvclient.kernels.host_memory import HostMemory
from kvclient.kernels.transfer import extent
from tests.gpu import oracle
from tests.gpu.oracle import DTYPES, Block, noise

SHAPES = [
    (1, 1, 2),
    (2, 31, 64),
    (3, 128, 64),
    (1, 130, 96),
    (2, 33, 128),
    (1, 40, 18),
    (1, 70, 256),
    (1, 5, 512),
]
PATHS = [cuda.FAST, cuda.NAIVE]


def same(found, other):
    assert found.dtype == other.dtype and found.shape == other.shape
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_and_back(device, path, bits, group, dtype):
    for shape in SHAPES:
        x = noise(*shape, dtype=DTYPES[dtype])
        wanted = oracle.quantised(x, bits, group)
        *parts, unfit = cuda.quantise(x.to(device), bits, group, path)
        for found, other in zip(parts, wanted, strict=True):
            same(found, other)
        assert int(unfit) == 0
        for out_dtype in DTYPES.values():
            out = torch.full(shape, 7, dtype=out_dtype, device=device)
            cuda.dequantise(*parts, bits, group, out, path)
            same(out, oracle.dequantised(wanted, bits, group, out_dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -65504.0, 65504.0, 6e-8])
def test_constant_values(device, path, group, value):
    x = torch.full((1, 40, 16), value)
    for found, other in zip(
        cuda.quantise(x.to(device), 8, group, path), oracle.quantised(x, 8, group), strict=False
    ):
        same(found, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 65600.0, -65600.0])
def test_what_cannot_be_held_is_said(device, path, group, bad):
    x = noise(2, 40, 64)
    x[1, 39, 63] = bad
    assert int(cuda.quantise(x.to(device), 8, group, path)[3]) == contract.RANGE


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_elements_are_read_where_they_lie(device, bits):
    layer = noise(2, 3, 50, 64, dtype=torch.bfloat16)
    found = cuda.quantise(layer.to(device)[1, :, 5:45], bits, 32)
    for part, other in zip(found, oracle.quantised(layer[1, :, 5:45].contiguous(), bits, 32), strict=False):
        same(part, other)
    odd = noise(1, 40, 65, dtype=torch.bfloat16)  # rows that begin at any even address
    found = cuda.quantise(odd.to(device)[:, :, 1:], bits, 0)
    for part, other in zip(found, oracle.quantised(odd[:, :, 1:].contiguous(), bits, 0), strict=False):
        same(part, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 20, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [0, -77, 31_000])
def test_rotate(device, path, interleaved, rotary_dim, dtype, delta):
    x, turn = noise(2, 9, 64, dtype=DTYPES[dtype]), oracle.turn_of(rotary_dim, delta)
    found = cuda.rotate(x.to(device), torch.from_numpy(turn).to(device), interleaved, path)
    same(found, oracle.turned(x, turn, interleaved))


def blocks_of(device, head_dim, dtype, interleaved, rotary_dim):
    """Every codec, moved and not, parts of blocks, one token, none."""
    options = {"device": device, "heads": 3, "head_dim": head_dim}
    options |= {"interleaved": interleaved, "rotary_dim": rotary_dim}
    kinds = [(8, 32), (4, 32), (8, 128), (4, 64), (0, 32)]
    made = []
    for seed, (bits, group) in enumerate(kinds):
        made.append(Block.made(tokens=130, dtype=dtype, bits=bits, group=group, seed=seed, **options))
        made.append(
            Block.made(
                tokens=200,
                dtype=dtype,
                bits=bits,
                group=group,
                first=45,
                count=100,
                delta=-900,
                seed=seed,
                **options,
            )
        )
        made.append(
            Block.made(
                tokens=40, dtype=dtype, bits=bits, group=group, first=39, count=1, seed=seed, **options
            )
        )
    made.append(Block.made(tokens=8, dtype=torch.float32, **options))  # another type than the cache's
    made.append(Block.made(tokens=8, dtype=dtype, bits=8, count=0, **options))
    return made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (128, 128), (96, 32), (80, 80), (18, 10), (256, 256)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_load_and_score(device, path, dtype, head_dim, rotary_dim, interleaved):
    blocks = blocks_of(device, head_dim, DTYPES[dtype], interleaved, rotary_dim)
    counts = [block.segment.tokens for block in blocks]
    total = sum(counts)
    columns = np.random.default_rng(1).permutation(len(blocks))  # in another order than the segments'
    starts, at = [0] * len(blocks), 3  # columns 0..3 belong to nobody
    for index in columns:
        starts[index], at = at, at + counts[index]
    segments = cuda.table([block.segment for block in blocks], device)
    storage = torch.full((2, 2, 3, total + 5, head_dim), 7, dtype=DTYPES[dtype], device=device)
    keys, values = storage[0, 1], storage[1, 1]  # the second row of a batch
    places = torch.tensor(starts, device=device) * keys.stride(1) * keys.element_size()
    cuda.load(keys, values, segments, places, max(counts), rotary_dim, interleaved, path)
    wanted = torch.full(storage.shape, 7, dtype=DTYPES[dtype])
    for block, start, count in zip(blocks, starts, counts, strict=True):
        for side in (0, 1):
            wanted[side, 1, :, start : start + count] = block.exact[side].to(DTYPES[dtype])
    same(storage, wanted)

    fresh = noise(2, 3, total + 5, head_dim, dtype=DTYPES[dtype], seed=9).to(device)
    at_column = torch.tensor(starts, device=device)
    square, norm = cuda.score(
        fresh[0], fresh[1], segments, at_column, max(counts), rotary_dim, interleaved, path
    )
    computed = fresh.cpu().double()
    exact_square, exact_norm = torch.zeros(2, total + 5).double(), torch.zeros(2, total + 5).double()
    for block, start, count in zip(blocks, starts, counts, strict=True):
        part = computed[:, :, start : start + count]
        stored = torch.stack([side.double() for side in block.exact])
        exact_square[:, start : start + count] = (stored - part).pow(2).sum((1, 3))
        exact_norm[:, start : start + count] = part.pow(2).sum((1, 3))
    assert torch.allclose(square.cpu().double(), exact_square, rtol=1e-5, atol=1e-6)
    assert torch.allclose(norm.cpu().double(), exact_norm, rtol=1e-5, atol=1e-6)


def test_blocks_that_are_not_aligned(device):
    """Codes that begin at an odd address: element by element, and the same bytes."""
    block = Block.made(device, 2, 64, 64, torch.bfloat16, 8)
    memory = torch.zeros(block.keys[0].numel() + 1, dtype=torch.uint8, device=device)
    memory[1:] = block.keys[0].flatten()
    block.segment.k = memory.data_ptr() + 1
    out = torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16, device=device)
    places = torch.zeros(1, dtype=torch.int64, device=device)
    cuda.load(out[0], out[1], cuda.table([block.segment], device), places, 64, 64, False)
    same(out, torch.stack([side.bfloat16() for side in block.exact]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row_bytes", [256, 64, 36])
def test_pages_between_shared_memory_and_the_device(device, path, row_bytes):
    """[head][token] in the daemon's blocks, [token][head] in the device's pool: gathered, scattered back."""
    pages, heads, tokens = 5, 3, 16
    size = heads * tokens * row_bytes
    with open(os.memfd_create("pool"), "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), 16 * size)
        pool = np.frombuffer(mmap.mmap(file.fileno(), 16 * size), np.uint8)
    pool[:] = np.random.default_rng(2).integers(0, 256, pool.size, np.uint8)
    host = HostMemory(contract.cuda())
    host.look()
    taken = host.take(*(np.array([part], np.int64) for part in extent(pool)))
    if taken is None:
        pytest.skip(f"this device does not read shared memory: {host.why_not}")
    order = [3, 0, 7, 12, 9]
    blocks = [torch.from_numpy(pool[i * size : (i + 1) * size]) for i in order]
    held = torch.zeros(pages, tokens, heads, row_bytes, dtype=torch.uint8, device=device)
    inside = cuda.addresses(list(held), device)
    outside = torch.tensor([int(taken.addresses[0]) + i * size for i in order], device=device)
    there = (tokens * row_bytes, row_bytes, row_bytes, heads * row_bytes)  # of the host, of the device
    cuda.copy_pages(inside, outside, heads, tokens, row_bytes, there, held, 4, path)
    for page, block in zip(held.cpu(), blocks, strict=True):
        same(page, block.reshape(heads, tokens, row_bytes).transpose(0, 1).contiguous())
    before = pool.copy()
    held += 1
    back = (*there[2:], *there[:2])
    cuda.copy_pages(outside, inside, heads, tokens, row_bytes, back, held, 0, path)
    if held.is_cuda:
        torch.cuda.synchronize()
    for index in range(16):
        part = slice(index * size, (index + 1) * size)
        assert np.array_equal(pool[part], before[part] + 1 if index in order else before[part])
    host.give_back(taken)
    host.close()


def test_wrong_arguments_are_refused_before_the_launch(device):
    x = noise(2, 40, 64).to(device)
    with pytest.raises(contract.InvalidArgument, match="head_dim=513"):
        cuda.quantise(torch.zeros(1, 1, 513, device=device), 8, 32)
    with pytest.raises(contract.InvalidArgument, match="group=16"):
        cuda.quantise(x, 8, 16)
    with pytest.raises(contract.InvalidArgument, match="rotary_dim=66"):
        cuda.rotate(x, torch.zeros(2, 33, device=device), False)
