"""Proves that quantising, dequantising and rotating do what native/kernels.h says, on every path of this CPU.

Method: NumPy in double is the oracle, written from the header's sentences; the paths must agree bit for bit
with each other; the extremes that break careless quantisers (constant groups, one token, a last short
group, fp16's limits, subnormal ranges) are tried by name. A path that this CPU lacks is
emulated (tests/kernels/cpu_paths.py) or skipped with what is lacking.
"""

import numpy as np
import pytest

from kvclient import kernels
from kvclient.errors import InvalidArgument
from tests.kernels.compare import assert_bitwise_equal, calc_diff, narrow, widen
from tests.kernels.cpu_paths import PATHS, provide
from tests.kernels.every import every

DTYPES = ["float32", "float16", "bfloat16"]
SHAPES = [(1, 1, 2), (2, 31, 64), (3, 128, 64), (1, 130, 96), (2, 33, 128), (1, 40, 18)]


@pytest.fixture
def path(request, monkeypatch):
    return provide(request.param, monkeypatch)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """KV-like: a few channels are much larger than the others."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * scale
    x[..., :: max(1, shape[-1] // 4)] *= 8
    return x


def oracle(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes, scale, zero of [heads, tokens, head_dim] in double, from the sentences of native/kernels.h."""
    levels = 2**bits - 1
    parts = [x[:, i : i + group] for i in range(0, x.shape[1], group)] if group else [x]
    axis = 1 if group else 2
    codes, scales, zeros = [], [], []
    for part in parts:
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        zero = low.astype(np.float16)
        zero = np.where(zero > low, np.nextafter(zero, np.float16(-np.inf)), zero)
        span = ((high.astype(np.float32) - zero.astype(np.float32)) / np.float32(levels)).astype(np.float64)
        scale = span.astype(np.float16)
        scale = np.where(scale < span, np.nextafter(scale, np.float16(np.inf)), scale)
        wide = scale.astype(np.float32)
        steps = (part.astype(np.float32) - zero.astype(np.float32)) / np.where(wide == 0, np.inf, wide)
        codes.append(np.minimum(np.rint(steps), levels).astype(np.uint8))
        scales.append(scale.squeeze(axis))
        zeros.append(zero.squeeze(axis))
    join = (lambda all: np.stack(all, 1)) if group else (lambda all: all[0])
    return np.concatenate(codes, 1), join(scales), join(zeros)


def unpack(q: kernels.Quantised) -> np.ndarray:
    if q.bits == 8:
        return q.codes
    return np.stack([q.codes & 15, q.codes >> 4], axis=-1).reshape(*q.codes.shape[:2], -1)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_equals_the_oracle(path, bits, group, dtype):
    for heads, tokens, head_dim in SHAPES:
        x = narrow(noise(heads, tokens, head_dim, seed=tokens), dtype)
        q = kernels.quantise(x, bits, group, path=path)
        codes, scale, zero = oracle(widen(x), bits, group)
        assert_bitwise_equal(unpack(q), codes)
        assert_bitwise_equal(q.scale, scale)
        assert_bitwise_equal(q.zero, zero)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_what_comes_back_is_within_half_a_step(path, bits, group):
    x = noise(2, 100, 64).astype(np.float32)
    q = kernels.quantise(x, bits, group, path=path)
    back = kernels.dequantise(q, np.empty_like(x), path=path)
    wide = q.scale.astype(np.float64)
    step = wide[:, np.arange(100) // group] if group else wide[:, :, None]
    assert (np.abs(back - x) <= step / 2 * (1 + 1e-5) + 1e-6).all()
    assert calc_diff(back, x) < (1e-4 if bits == 8 else 3e-2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_paths_write_the_same_bytes(bits, group, dtype):
    x = narrow(noise(2, 70, 80), dtype)
    codes = kernels.quantise(x, bits, group, path="reference")
    plain = kernels.dequantise(codes, np.empty_like(x), path="reference")
    for path in PATHS[1:]:
        if kernels.lacks(path) is None:
            other = kernels.quantise(x, bits, group, path=path)
            for name in ("codes", "scale", "zero"):
                assert_bitwise_equal(getattr(codes, name), getattr(other, name))
            assert_bitwise_equal(kernels.dequantise(codes, np.empty_like(x), path=path), plain)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("group", [0, 32])
def test_constant_values_have_no_scale(path, group):
    for value in (0.0, -0.0, 1.5, -65504.0, 65504.0, 6e-8):
        x = np.full((1, 40, 16), value, np.float32)
        q = kernels.quantise(x, 8, group, path=path)
        back = kernels.dequantise(q, np.empty_like(x), path=path)
        assert np.isfinite(back).all()
        assert np.abs(back - x).max() <= 6e-8


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fp16s_largest_value_comes_back(path, group, dtype):
    """Its code stands for a little more, which fp16 rounds to infinity."""
    random = np.random.default_rng(1)
    x = np.where(random.random((1, 64, 20)) < 0.1, 65504, random.standard_normal((1, 64, 20))).astype(dtype)
    for bits in (8, 4):
        back = kernels.dequantise(kernels.quantise(x, bits, group, path=path), np.empty_like(x), path=path)
        assert back.max() == 65504 and np.abs(back.astype(np.float64) - x).max() <= 65504 / (2**bits - 1)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("span", [131008.0, 1e-3, 1e-6, 1e-9])
def test_extreme_ranges(path, group, span):
    x = np.linspace(-span / 2, span / 2, 40 * 16, dtype=np.float32).reshape(1, 40, 16)
    for bits in (8, 4):
        q = kernels.quantise(x, bits, group, path=path)
        back = kernels.dequantise(q, np.empty_like(x), path=path)
        wide = q.scale.astype(np.float64)
        step = wide[:, np.arange(40) // group] if group else wide[:, :, None]
        assert (np.abs(back - x) <= step / 2 * (1 + 1e-4) + 1e-7 * span).all()


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65600.0, -65600.0])
def test_what_fp16_cannot_hold_is_refused(path, group, bad):
    x = noise(2, 40, 64).astype(np.float32)
    x[1, 39, 63] = bad
    with pytest.raises(kernels.NotQuantisable, match="65504"):
        kernels.quantise(x, 8, group, path=path)


@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_strided_arrays_are_read_and_written_in_place(path):
    """A layer's memory [2, heads, capacity, head_dim] and a block's bytes, neither of them copied."""
    layer = noise(2, 3, 50, 64).astype(np.float32)
    packed = np.full((3, 40, 3, 64), 7, np.uint8)
    q = kernels.empty(3, 40, 64, 8, 32)
    q = kernels.Quantised(packed[:, :, 1], q.scale, q.zero, 8, 32)
    kernels.quantise(layer[0, :, 5:45], 8, 32, q, path=path)
    assert_bitwise_equal(q.codes.copy(), kernels.quantise(layer[0, :, 5:45].copy(), 8, 32, path=path).codes)
    assert (packed[:, :, [0, 2]] == 7).all()
    kernels.dequantise(q, layer[1, :, 5:45], path=path)
    assert np.abs(layer[1, :, 5:45] - layer[0, :, 5:45]).max() < 0.2


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@every("rope", ["half", "interleaved"])
@every("rotary_dim", [2, 20, 64])
@every("delta", [0, 1, -77, 31_000])
def test_rotate_equals_the_oracle(path, rope, rotary_dim, dtype, delta):
    inv_freq = (1 / 10_000 ** (np.arange(rotary_dim // 2) / (rotary_dim // 2))).astype(np.float32)
    x = narrow(noise(2, 9, 64), dtype)
    got = kernels.rotate(x.copy(), kernels.turn(inv_freq, delta), rope, path=path)
    wide, angle = widen(x), delta * inv_freq.astype(np.float64)
    half = rotary_dim // 2
    low = np.arange(half) if rope == "half" else 2 * np.arange(half)
    high = low + half if rope == "half" else low + 1
    want = wide.copy()
    want[..., low] = wide[..., low] * np.cos(angle) - wide[..., high] * np.sin(angle)
    want[..., high] = wide[..., high] * np.cos(angle) + wide[..., low] * np.sin(angle)
    bound = {"float32": 2e-6, "float16": 8e-3, "bfloat16": 7e-2}[dtype]
    assert np.abs(widen(got) - want).max() <= bound
    assert calc_diff(widen(got), want) < {"float32": 1e-13, "float16": 1e-7, "bfloat16": 5e-6}[dtype]
    naive = kernels.rotate(x, kernels.turn(inv_freq, delta), rope, np.empty_like(x), "reference")
    assert_bitwise_equal(got, naive)


def test_rows_between_those_that_are_read_may_be_written():
    """Tokens of the same heads' memory, K beside V: nothing of one is of the other."""
    layer, table = noise(2, 3, 40, 16).astype(np.float32), kernels.turn(np.ones(8, np.float32), 5)
    keys, wanted = layer[0, :, :20], kernels.rotate(layer[0, :, :20].copy(), table)
    for out in (layer[0, :, 20:], layer[1, :, 5:25], layer[0, :, :20]):
        assert_bitwise_equal(kernels.rotate(keys, table, out=out).copy(), wanted)


def test_turning_there_and_back():
    inv_freq = np.float32([1.0, 0.1, 0.01])
    x = noise(2, 5, 6).astype(np.float32)
    there = kernels.rotate(x.copy(), kernels.turn(inv_freq, 1234))
    assert np.abs(kernels.rotate(there, kernels.turn(inv_freq, -1234)) - x).max() < 1e-5


def read_only(out):
    out.scale.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: kernels.quantise(x, 5, 32), "bits=5"),
        (lambda x: kernels.quantise(x, 8, 16), "group=16"),
        (lambda x: kernels.quantise(x.astype(np.float64), 8, 32), "float64"),
        (lambda x: kernels.quantise(x[:, :, ::2], 8, 32), "8 bytes apart"),
        (lambda x: kernels.quantise(x[:, :, :7], 4, 32), "head_dim=7"),
        (lambda x: kernels.quantise(np.zeros((1, 1, 513), np.float32), 8, 32), "head_dim=513"),
        (lambda x: kernels.quantise(x, 8, 32, kernels.empty(2, 39, 16, 8, 32)), "do not hold"),
        (lambda x: kernels.quantise(x, 8, 32, kernels.empty(2, 40, 16, 4, 32)), "out is for 4 bits"),
        (lambda x: kernels.rotate(x, np.zeros((2, 9), np.float32)), "rotary_dim=18"),
        (lambda x: kernels.rotate(x, np.zeros((2, 8), np.float32), "spiral"), "rope='spiral'"),
        (lambda x: kernels.quantise(x, 8, 32, path="sse9"), "path='sse9'"),
        (lambda x: kernels.quantise(x, 8, 32, read_only(kernels.empty(2, 40, 16, 8, 32))), "read-only"),
        (lambda x: kernels.turn(np.ones(4, np.float32), 1 << 63), "delta="),
        (lambda x: kernels.quantise(x.astype(">f4"), 8, 32), ">f4.* native byte order"),
        (lambda x: kernels.quantise(x.tolist(), 8, 32), "a list; expected a NumPy array"),
        (lambda x: kernels.rotate(x[:, 1:], np.zeros((2, 8), np.float32), out=x[:, :-1]), "out overlaps"),
        (lambda x: kernels.rotate(x.astype(">f2"), np.zeros((2, 8), np.float32)), ">f2.* native byte order"),
        (
            lambda x: kernels.dequantise(kernels.quantise(x, 8, 32), np.empty(x.shape, ">u2")),
            ">u2.* native byte order",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(call, words):
    with pytest.raises(InvalidArgument, match=words):
        call(np.zeros((2, 40, 16), np.float32))
