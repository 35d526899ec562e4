"""Proves that the kernels over tensors are those over arrays, and that their operators know their shapes.

Method: the operators that a CPU has too, against kvclient.kernels, byte for byte; every operator on the meta
device, where only its fake implementation runs; the structs that segments become, field by field. The kernels
themselves are compared on a GPU (tests/gpu) and, their loops, in native/tests/kernels_cuda_*.
"""

import numpy as np
import pytest
import torch

from kvclient import kernels
from kvclient.errors import InvalidArgument
from kvclient.kernels import contract, cuda
from kvclient.kernels.cuda_attention import arguments


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_quantise_and_back_equal_those_over_arrays(bits, group):
    x = noise(2, 70, 64)
    codes, scale, zero, unfit = cuda.quantise(x, bits, group)
    wanted = kernels.quantise(x.numpy(), bits, group)
    for found, other in ((codes, wanted.codes), (scale, wanted.scale), (zero, wanted.zero)):
        assert np.array_equal(found.numpy(), other)
    assert int(unfit) == 0
    out = torch.empty_like(x)
    cuda.dequantise(codes, scale, zero, bits, group, out)
    assert np.array_equal(out.numpy(), kernels.dequantise(wanted, np.empty((2, 70, 64), np.float32)))


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_rotate_equals_that_over_arrays(rope):
    x, turned = noise(2, 9, 64), kernels.turn(np.float32([1, 0.5, 0.1]), -7)
    out = cuda.rotate(x, torch.from_numpy(turned), rope == "interleaved")
    wanted = kernels.rotate(x.numpy(), turned, rope, np.empty((2, 9, 64), np.float32))
    assert np.array_equal(out.numpy(), wanted)


def test_what_cannot_be_held_raises_on_a_cpu():
    with pytest.raises(contract.NotQuantisable):
        cuda.quantise(torch.full((1, 4, 8), torch.inf), 8, 32)


def test_every_operator_knows_its_shapes():
    x = torch.empty(2, 70, 64, dtype=torch.bfloat16, device="meta")
    codes, scale, zero, unfit = cuda.quantise(x, 4, 32)
    assert codes.shape == (2, 70, 32) and scale.shape == zero.shape == (2, 3, 64) and unfit.shape == (1,)
    assert cuda.quantise(x, 8, 0)[1].shape == (2, 70)
    assert cuda.rotate(x, torch.empty(2, 16, device="meta"), False).shape == x.shape
    segments = torch.empty(3, 136, dtype=torch.uint8, device="meta")
    square, norm = cuda.score(x, x, segments, torch.empty(3, device="meta"), 70, 64, False)
    assert square.shape == norm.shape == (2, 70) and square.dtype == torch.float32
    cuda.load(x, x.clone(), segments, torch.empty(3, device="meta"), 70, 64, False)


def test_a_segment_points_into_its_tensors():
    block = torch.zeros(2, 3, 40, 16, dtype=torch.float16)  # K and V, heads, tokens, elements
    part = cuda.segment((block[0],), (block[1],), first=5, tokens=30)
    assert (part.k, part.v) == (block.data_ptr(), block[1].data_ptr())
    assert (part.k_head_stride, part.k_token_stride) == (40 * 32, 32)
    assert (part.first, part.tokens, part.codec, part.turn) == (5, 30, contract.F16, None)
    x = noise(3, 40, 16)
    k, v = cuda.quantise(x, 4, 32)[:3], cuda.quantise(x, 4, 0)[:3]
    turn = torch.zeros(2, 4)
    part = cuda.segment(k, v, 32, turn=turn, bits=4)
    assert (part.k_scale, part.v_zero, part.turn) == (k[1].data_ptr(), v[2].data_ptr(), turn.data_ptr())
    assert (part.k_scale_head_stride, part.v_scale_head_stride) == (2 * 16 * 2, 40 * 2)
    assert (part.codec, part.k_group, part.tokens) == (contract.INT4, 32, 40)
    flat = cuda.table([part, part], torch.device("cpu"))
    assert flat.shape == (2, 136) and bytes(flat[1].numpy()) == bytes(part)


def back(x, **wrong):
    codes, scale, zero, _ = cuda.quantise(x, 8, 32)
    parts = {"codes": codes, "scale": scale, "zero": zero, **wrong}
    cuda.dequantise(*parts.values(), 8, 32, torch.empty_like(x))


def multiply(**wrong):
    parts = {
        "x": torch.zeros(3, 64), "words": torch.zeros(64, 4, dtype=torch.int32),
        "zeros": torch.zeros(1, 4, dtype=torch.int32), "scales": torch.zeros(1, 32, dtype=torch.float16),
        "bias": None, "group": 64, **wrong,
    }  # fmt: skip
    cuda.awq_multiply(*parts.values())


def coded(x, group=32, v=None):
    cuda.segment(cuda.quantise(x, 8, 32)[:3], (v or cuda.quantise(x, 8, 0))[:3], group, bits=8)


def called(x, out=None, **wrong):
    out = torch.empty_like(x[None]) if out is None else out
    arguments(torch.zeros(8), x[None], torch.zeros(1, 40, dtype=torch.int64), 0.1, out, 2, **wrong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: cuda.quantise(x, 5, 32), "bits=5"),
        (lambda x: cuda.quantise(x.double(), 8, 32), "float64"),
        (lambda x: cuda.quantise(x[:, :, ::2], 8, 32), "rows of elements"),
        (lambda x: cuda.rotate(x, torch.zeros(18), False), "turn"),
        (lambda x: back(x, codes=torch.zeros(2, 39, 16, dtype=torch.uint8)), "expected uint8"),
        (lambda x: back(x, codes=torch.zeros(2, 40, 16)), "codes torch.float32"),
        (lambda x: back(x, scale=torch.zeros(2, 2, 16)), "float16"),
        (lambda x: multiply(x=torch.zeros(3, 63)), "rows of 64 inputs"),
        (lambda x: multiply(zeros=torch.zeros(2, 4, dtype=torch.int32)), "not those of one layer"),
        (lambda x: multiply(scales=torch.zeros(1, 32)), "not those of one layer"),
        (lambda x: multiply(words=torch.zeros(64, 4)), "not those of one layer"),
        (lambda x: multiply(bias=torch.zeros(31)), "bias"),
        (lambda x: multiply(group=0), "groups of 0"),
        (lambda x: cuda.segment((x,), (x,), first=3, tokens=40), "first=3"),
        (lambda x: cuda.segment((x,), (x.half(),)), r"keys torch.float32.*values torch.float16"),
        (lambda x: cuda.segment((x,), (x[:, :39],)), r"values torch.float32\[2, 39, 16\]"),
        (lambda x: coded(x, v=cuda.quantise(x, 8, 32)), r"expected contiguous float16\[2, 40\]"),
        (lambda x: coded(x, group=64), r"expected contiguous float16\[2, 1, 16\]"),
        (lambda x: called(x, sinks=torch.zeros(3)), r"sinks is torch.float32\[3\].*expected .*\[2\]"),
        (lambda x: called(x, sinks=torch.zeros(2).half()), "sinks is torch.float16"),
        (lambda x: called(x, lse=torch.zeros(1, 40, 2).transpose(1, 2)), "lse is .*strides"),
        (lambda x: called(x, out=x[None].half()), "out is torch.float16"),
        (lambda x: called(x, out=x[None].mT.contiguous().mT), "out is .*strides"),
    ],
)
def test_what_is_wrong_is_said(call, words):
    with pytest.raises(InvalidArgument, match=words):
        call(torch.zeros(2, 40, 16))
