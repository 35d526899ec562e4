"""Proves that the CPU's AWQ kernels compute what the words stand for, on every path of this machine.

Method: random words, zeros and scales; the oracle unpacks them with NumPy and multiplies in double. The same
rows alone, beside others and on other numbers of threads must come back with the same bits.
"""

import numpy as np
import pytest

from kvclient.errors import InvalidArgument
from kvclient.kernels import awq, contract

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HERE = [name for name in contract.PATHS[1:] if contract.lacks(name) is None]

WHOLE = "avx2", "avx512_vnni", "avx512_fp16", "amx"


def layer(inputs, outputs, group, seed):
    source = np.random.default_rng(seed)
    words = source.integers(-(2**31), 2**31, (inputs, outputs // 8), dtype=np.int64).astype(np.int32)
    zeros = source.integers(-(2**31), 2**31, (inputs // group, outputs // 8), dtype=np.int64).astype(np.int32)
    scales = source.uniform(0.001, 0.02, (inputs // group, outputs)).astype(np.float16)
    bias = source.standard_normal(outputs).astype(np.float32)
    return words, zeros, scales, bias


def codes(words):
    out = np.empty((words.shape[0], words.shape[1], 8), np.int64)
    for place, column in enumerate(ORDER):
        out[:, :, column] = words.view(np.uint32) >> 4 * place & 15
    return out.reshape(words.shape[0], -1)


def weights(words, zeros, scales, group):
    centred = codes(words) - (8 if zeros is None else codes(zeros).repeat(group, 0))
    return centred * scales.astype(np.float64).repeat(group, 0)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("outputs", [8, 56, 64, 72, 264, 576])
def test_rows_times_packed_words(path, group, outputs):
    inputs = 384
    words, zeros, scales, bias = layer(inputs, outputs, group, group + outputs)
    x = np.random.default_rng(1).standard_normal((50, inputs)).astype(np.float32)
    for held, added in ((zeros, bias), (None, None)):
        wanted = x.astype(np.float64) @ weights(words, held, scales, group)
        wanted += 0 if added is None else added
        bound = 4e-7 * np.abs(x).sum(1).max() * float(scales.max()) * 15
        whole = awq.multiply(x, words, held, scales, added, group, path=path)
        assert np.abs(whole - wanted).max() <= bound
        for rows in (0, 1, 2, 3, 4, 5, 7, 8, 11, 48, 49):
            alone = awq.multiply(x[:rows], words, held, scales, added, group, threads=rows % 4, path=path)
            assert np.array_equal(alone, whole[:rows]), rows


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("group, paths", [(64, WHOLE), (2, contract.PATHS[2:])])
def test_paths_that_compute_alike_agree_to_the_bit(group, paths, bf16):
    """In whole numbers, and in fp32 where four does not divide a group's size."""
    here = [path for path in paths if path in HERE]
    if len(here) < 2:
        pytest.skip(f"this processor has of {', '.join(paths)} only {', '.join(here) or 'none'}")
    words, zeros, scales, bias = layer(256, 1000, group, 3)
    x = np.random.default_rng(2).standard_normal((13, 256)).astype(np.float32)
    x = bfloat16(x).astype(np.uint32).__lshift__(16).view(np.float32) if bf16 else x
    found = [awq.multiply(x, words, zeros, scales, bias, group, path=path, bf16=bf16) for path in here]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def in_whole_numbers(x, layer, group, digits):
    """What native/cpu/awq_numbers.h and awq_vnni.h say, operation by operation, with NumPy."""
    words, zeros, scales, bias = layer
    code, zero = codes(words), codes(zeros).astype(np.float64)
    total = np.zeros((len(x), code.shape[1]), np.float32)
    part = min(group, 128)
    for start in range(0, len(code), part):
        here = x[:, start : start + part]
        top = np.maximum(np.abs(here).max(1).view(np.uint32).astype(np.int64) >> 23, 27)
        exponent = (top - 127 + 1 - (8 * digits - 2))[:, None]
        whole = np.rint(here.astype(np.float64) * 2.0**-exponent).astype(np.int64)
        sums = np.zeros(total.shape, np.float32)
        for digit in range(digits):
            higher = (whole + 128) >> 8
            low, whole = whole - (higher << 8), higher
            found = low @ code[start : start + part] - zero[start // group] * low.sum(1)[:, None]
            sums = (found * 256.0**digit + sums).astype(np.float32)
        scale = scales[start // group].astype(np.float64) * 2.0**exponent
        total = (scale * sums + total).astype(np.float32)
    return total + bias


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_whole_numbers_are_multiplied_as_it_is_written(group, bf16):
    """To the bit, on every path that has them: so a processor with AVX2 alone has those of one with VNNI."""
    made = layer(384, 136, group, 8)
    x = np.random.default_rng(9).standard_normal((7, 384)).astype(np.float32)
    x[2] *= np.float32(1e-35)
    x = bfloat16(x).astype(np.uint32).__lshift__(16).view(np.float32) if bf16 else x
    wanted = in_whole_numbers(x, made, group, 2 if bf16 else 3)
    for path in WHOLE:
        if path in HERE:
            assert np.array_equal(awq.multiply(x, *made, group, path=path, bf16=bf16), wanted), path


@pytest.mark.parametrize("bf16", [False, True])
def test_sums_of_sixteen_bits_hold_the_largest_codes(bf16):
    """Every product of a byte of x with a code as large, and of one sign, as there can be."""
    words, zeros, scales, _ = layer(256, 72, 128, 3)
    words[:], zeros[:] = -1, 0
    most = (63 * 256 + 128) / 2**14 if bf16 else (62 * 65536 + 128 * 256 + 128) / 2**22  # its bytes are -128
    for size in (most, -most, 1.0):
        x = np.full((3, 256), size, np.float32)
        wanted = x.astype(np.float64) @ weights(words, zeros, scales, 128)
        for path in HERE:
            found = awq.multiply(x, words, zeros, scales, None, 128, path=path, bf16=bf16)
            assert np.abs(found - wanted).max() <= 2.0**-20 * np.abs(wanted).max(), path


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("group", [2, 32, 64, 128, 384])
def test_no_element_is_further_off_than_is_said(path, group):
    """One element of x is far above the others, in some of the rows, as activations have it."""
    words, zeros, scales, bias = layer(384, 264, group, group)
    x = np.random.default_rng(3).standard_normal((40, 384)).astype(np.float32)
    x[::3, 17] *= 1000
    x[1::3] *= np.float32(1e-30)
    for bf16, step in ((False, 2.0**-22), (True, 2.0**-14)):
        x = bfloat16(x).astype(np.uint32).__lshift__(16).view(np.float32) if bf16 else x
        exact = weights(words, zeros, scales, group)
        wanted = x.astype(np.float64) @ exact + bias
        largest = np.abs(x).reshape(len(x), 3, 128).max(2).repeat(128, 1)
        bound = largest @ np.abs(exact) * step + np.abs(wanted) * 2.0**-22
        found = awq.multiply(x, words, zeros, scales, bias, group, threads=2, path=path, bf16=bf16)
        assert (np.abs(found - wanted) <= bound + 1e-30).all()


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_in_its_row_alone(path, wrong):
    words, zeros, scales, _ = layer(256, 72, 64, 4)
    x = np.random.default_rng(5).standard_normal((6, 256)).astype(np.float32)
    well = awq.multiply(x, words, zeros, scales, None, 64, path=path)
    x[3, 100] = wrong
    found = awq.multiply(x, words, zeros, scales, None, 64, path=path)
    centred = codes(words)[100] - codes(zeros)[100 // 64]
    assert not np.isfinite(found[3][centred != 0]).any()
    assert np.array_equal(np.delete(found, 3, 0), np.delete(well, 3, 0))


def test_what_does_not_fit_is_refused():
    words, zeros, scales, bias = layer(64, 16, 32, 1)
    x = np.zeros((2, 64), np.float32)
    for args, said in (
        ((x, words, zeros, scales, bias, 48), "no groups of 48"),
        ((x, words, zeros[:1], scales, bias, 32), "zeros is int32"),
        ((x, words, zeros, scales.astype(np.float32), bias, 32), "scales is float32"),
        ((x.astype(np.float64), words, zeros, scales, bias, 32), "x is float64"),
        ((x[:, ::-1], words, zeros, scales, bias, 32), "strided"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            awq.multiply(*args)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_tile_of_columns_is_what_the_words_stand_for(path, group):
    """(q - z) * s, rounded once, in every type."""
    words, zeros, scales, _ = layer(256, 72, group, group)
    for held in (zeros, None):
        wanted = weights(words, held, scales, group).astype(np.float32)
        for start, stop in ((0, 72), (8, 64), (64, 72), (16, 16)):
            for dtype in ("float32", "float16", "uint16"):
                out = np.full((256, stop - start), 77, dtype)
                awq.dequantise(out, start, words, held, scales, group, threads=start % 3 + 1, path=path)
                part = wanted[:, start:stop]
                assert np.array_equal(out, bfloat16(part) if dtype == "uint16" else part.astype(dtype))


def in_panels(words):
    """Tiles of 128 inputs by 16 words, those of the first inputs first; the last ones are smaller."""
    tiles = [
        words[k : k + 128, panel : panel + 16].reshape(-1)
        for k in range(0, words.shape[0], 128)
        for panel in range(0, words.shape[1], 16)
    ]
    return np.ascontiguousarray(np.concatenate(tiles).reshape(words.shape))


@pytest.mark.parametrize("path", ["reference", *HERE])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("outputs", [56, 128, 392])
def test_words_in_panels_give_the_same_bits(path, group, outputs):
    inputs = 256 if group == 128 else 320  # 64 of the last tile
    words, zeros, scales, bias = layer(inputs, outputs, group, group + outputs)
    x = np.random.default_rng(6).standard_normal((48, inputs)).astype(np.float32)
    for held, bf16 in ((zeros, False), (None, True)):
        x = bfloat16(x).astype(np.uint32).__lshift__(16).view(np.float32) if bf16 else x
        for rows in (1, 2, 3, 4, 5, 8, 16, 48):
            args = held, scales, bias, group, rows % 4, path, bf16
            wanted = awq.multiply(x[:rows], words, *args)
            assert np.array_equal(awq.multiply(x[:rows], in_panels(words), *args, panels=True), wanted)
        for start, stop in ((0, outputs), (8, 48), (16, outputs - 8)):
            found, wanted = np.full((2, inputs, stop - start), 77, np.float16)
            awq.dequantise(wanted, start, words, held, scales, group, path=path)
            awq.dequantise(found, start, in_panels(words), held, scales, group, path=path, panels=True)
            assert np.array_equal(found, wanted)


def test_groups_that_leave_a_tile_have_no_panels():
    words, zeros, scales, bias = layer(384, 64, 384, 1)
    with pytest.raises(InvalidArgument, match="group=384; in panels it must divide 128"):
        awq.multiply(np.zeros((1, 384), np.float32), words, zeros, scales, bias, 384, panels=True)


def bfloat16(values):
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def test_tiles_that_do_not_fit_are_refused():
    words, zeros, scales, _ = layer(64, 64, 32, 1)
    for start, width in ((4, 8), (0, 12), (-8, 8), (0, 72), (64, 8)):
        with pytest.raises(InvalidArgument, match=r"columns .* multiples of 8"):
            awq.dequantise(np.empty((64, width), np.float32), start, words, zeros, scales, 32)
    with pytest.raises(InvalidArgument, match="out is float64"):
        awq.dequantise(np.empty((64, 8)), 0, words, zeros, scales, 32)
    with pytest.raises(InvalidArgument, match="strided"):
        awq.dequantise(np.empty((64, 16), np.float32)[:, ::2], 0, words, zeros, scales, 32)
