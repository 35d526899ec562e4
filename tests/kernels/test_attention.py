"""Proves that every path of this CPU computes attention over segments as the contract says.

Method: against the oracle in double (tests/kernels/oracle.py), over the grid of group sizes, head dimensions,
lengths, block sizes, codecs, windows and positions, and the corners by name. Bounds, of the largest value:
fp32 products 2e-6 and the rounding of large scores; integer products of int8 and int4 5e-4, whatever the
scales; results and weights in fp16 and bf16 to their rounding. AVX512-FP16 and AMX run by emulation where the
CPU lacks them (tests/kernels/cpu_paths.py); any other path that it lacks is skipped with what is lacking.
"""

import os

import numpy as np
import pytest

from kvclient import kernels
from kvclient.errors import InvalidArgument
from tests.kernels.compare import assert_bitwise_equal, calc_diff
from tests.kernels.cpu_paths import PATHS, provide
from tests.kernels.every import every
from tests.kernels.oracle import Case

DTYPES = ["float32", "float16", "bfloat16"]
CODECS = ["", "int8", "int4", "bfloat16", "float16", "float32"]
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of the largest value


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    return provide(request.param, monkeypatch)


def multiplied_as_integers(case: Case, held: set[str]) -> bool:
    """Whether paths without VNNI take codes as integers (cpu/decode_int_avx2.h, cpu/prefill_int_avx2.h):
    whole lines of 32 bytes."""
    return case.head_dim % (32 if "int8" in held else 64) == 0 and case.head_dim <= 256


def agree(case: Case, path: str, codecs: tuple[str, ...] = ()) -> None:
    out, lse = case.run(path)
    want, want_lse = case.oracle()
    seen = np.isfinite(want_lse)
    largest = np.abs(want_lse[seen]).max(initial=1)  # of the scores, or nearly: their rounding is relative
    bound = ROUNDING[case.dtype] + 4e-7 * largest
    held = {codec or case.dtype for codec in codecs}
    if path in ("avx2", "avx512") and multiplied_as_integers(case, held):  # 16 bits of each query and weight
        bound += 3e-4 if {"int8", "int4"} & held else 0
    if path in ("avx512_vnni", "avx512_fp16", "amx"):
        bound += 5e-4 if {"int8", "int4"} & held else 0
    if path in ("avx512_vnni", "avx512_fp16", "amx"):
        bound += 8e-3 if "bfloat16" in held else 0
    if path in ("avx512_fp16", "amx"):
        bound += 2e-3 if "float16" in held else 0
    scale = max(1e-30, np.abs(want).max())
    assert np.abs(out - want).max() <= bound * scale + 1e-30
    assert calc_diff(out, want) <= max(1e-12, bound**2)
    assert (np.isneginf(lse) == ~seen).all()
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 3e-4 * largest


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@every(
    ("kv_heads", "group", "head_dim"),
    [
        (1, 1, 64),
        (2, 4, 128),
        (3, 3, 64),
        (1, 8, 96),
        (2, 1, 80),
        (1, 5, 256),
        (1, 2, 18),
        (1, 16, 512),
        (1, 128, 16),
    ],
)
def test_shapes(path, codec, dtype, kv_heads, group, head_dim):
    case = Case(kv_heads, group, head_dim, dtype=dtype, seed=head_dim + group)
    case.row().segment(70, 0, codec).segment(33, 70, codec).segment(5, 103, tail=True)
    agree(case.queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", ["", "int8", "int4"])
@every("tokens", [1, 2, 3, 7, 16, 17, 70, 300])
@every("keys", [1, 63, 64, 65, 200])
def test_lengths(path, codec, tokens, keys):
    case = Case(2, 2, 32, tokens, "bfloat16", seed=tokens)
    case.row().segment(keys, 0, codec).segment(tokens, keys, tail=True)
    agree(case.queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
@every("group", [32, 64, 128])
@every("first", [0, 1, 5, 31, 32, 45, 64, 100])
def test_parts_of_blocks(path, codec, group, first):
    """A block used from a token in the middle keeps the groups of the whole block."""
    case = Case(2, 3, 64, 2)
    case.row().segment(77, 10, codec, first=first, group=group, after=9).segment(1, 87, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@every("tokens", [17, 23, 64, 70])
@every(("group", "first", "keys"), [(32, 5, 77), (64, 45, 150), (128, 0, 129), (32, 64, 1)])
def test_codes_under_many_rows(path, codec, head_dim, tokens, group, first, keys):
    """Rows beyond whole panels, tiles that end between two keys, groups that begin within a tile."""
    case = Case(2, 1, head_dim, tokens, seed=tokens)
    case.row().segment(keys, 3, codec, first=first, group=group, after=3).segment(tokens, keys + 3, tail=True)
    agree(case.queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [4, 40])
def test_sums_of_the_largest_integers(path, codec, tokens):
    """256 products of the largest query with the largest code, the same for every channel."""
    case = Case(1, 1, 256, tokens)
    keys = np.where(np.arange(64)[None, :, None] % 2, 8.0, -8.0) * np.ones((1, 64, 256))
    case.row().segment(64, 0, codec, keys=keys, values=keys).segment(tokens, 64, tail=True)
    case.queries()
    case.q[...] = 0.05
    agree(case, path, (codec, ""))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 24])
def test_moved_segments(path, codec, rope, rotary_dim):
    """The query is turned back instead of the keys forward: at any distance, in each convention."""
    case = Case(2, 3, 64, 3, rope=rope, rotary_dim=rotary_dim)
    case.row().segment(40, 0, codec).segment(50, 40, codec, delta=-900).segment(50, 90, codec, delta=17)
    case.segment(20, 140, codec, delta=-900).segment(30, 160, codec).segment(3, 190, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_window(path, codec, window):
    case = Case(1, 4, 64, 33, options={"window": window})
    case.row().segment(128, 0, codec).segment(100, 128, codec).segment(33, 228, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 20.0},
        {"softcap": 0.5},
        {"causal": False},
        {"causal": False, "window": 30},
        {"sinks": np.linspace(-3, 9, 8).astype(np.float32)},
        {"sinks": np.linspace(-3, 9, 8).astype(np.float32), "softcap": 5.0, "window": 40},
    ],
)
@pytest.mark.parametrize("codec", ["", "int8", "int4"])
def test_softcap_sinks_and_no_mask(path, codec, options):
    case = Case(2, 4, 48, 5, options=options)
    case.row().segment(90, 0, codec).segment(12, 90, tail=True)
    agree(case.queries(), path, (codec,))


def test_explicit_positions(path):
    """Queries between the keys, out of order, twice the same, and behind all."""
    case = Case(1, 2, 64, 7)
    case.row().segment(100, 0, "int8").segment(30, 100, "float32")
    agree(case.queries(np.array([[5, 129, 0, 64, 64, 63, 10_000]])), path, ("int8",))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 300}])
def test_rows_far_apart(path, codec, options):
    """Rows taken together of which some, or with a window all, see nothing of a tile."""
    case = Case(1, 3, 64, 47, options=options)
    case.row().segment(300, 0, codec).segment(340, 300, codec, tail=True)
    agree(case.queries(np.r_[3:23, 600:627][None]), path, (codec,))


def test_keys_out_of_order(path):
    """Segments need not lie in the order of their positions, and may leave gaps."""
    case = Case(1, 2, 64, 4)
    case.row().segment(40, 500).segment(64, 0, "int8").segment(30, 90, "int4").segment(2, 560, tail=True)
    agree(case.queries(np.array([[20, 100, 520, 561]])), path, ("int8", "int4"))


def test_a_query_that_sees_nothing_gives_zeros(path):
    case = Case(1, 2, 64, 3)
    case.row().segment(40, 100, "int8")
    case.queries(np.array([[5, 99, 100]]))
    out, lse = case.run(path)
    assert (out[:, :, :2] == 0).all() and np.isneginf(lse[:, :, :2]).all()
    agree(case, path, ("int8",))


def test_no_keys_at_all(path):
    case = Case(1, 2, 64, 2).row()
    out, lse = case.queries(np.zeros((1, 2))).run(path)
    assert (out == 0).all() and np.isneginf(lse).all()


def test_only_a_sink(path):
    case = Case(1, 2, 64, 2, options={"sinks": np.float32([1.5, -2])}).row()
    out, lse = case.queries(np.zeros((1, 2))).run(path)
    assert (out == 0).all()
    assert np.allclose(lse, np.array([1.5, -2])[None, :, None])


@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (5, 1), (1, 3)])
def test_a_sink_of_minus_infinity_is_none(path, codec, tokens, threads):
    """Also for queries that see no key, where nothing else has a weight."""
    case = Case(1, 2, 64, tokens, options={"sinks": np.float32([-np.inf, 1.5])})
    case.row().segment(1500, 100, codec).queries(np.zeros((1, tokens)))
    out, lse = case.run(path, threads)
    assert (out == 0).all()
    assert np.isneginf(lse[:, 0]).all() and np.allclose(lse[:, 1], 1.5)
    agree(case.queries(), path, (codec,))


def test_rows_of_a_batch_are_their_own(path):
    """Each row has its own segments, lengths and positions."""
    case = Case(2, 3, 64, 2)
    case.row().segment(100, 0, "int8").segment(3, 100, tail=True)
    case.row().segment(1, 0, "int4")
    case.row().segment(7, 0, "bfloat16").segment(200, 7, "int8", delta=3).segment(2, 207, tail=True)
    agree(case.queries(), path, ("int8", "int4", "bfloat16"))


@pytest.mark.parametrize("codec", ["", "int8", "int4"])
def test_one_token_segments(path, codec):
    case = Case(2, 4, 64)
    case.row()
    for i in range(70):
        case.segment(1, i, codec)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 3.0, -60000.0])
def test_zero_scales(path, codec, value):
    """Constant keys and values have no scale; what they stand for is their zero point."""
    case = Case(1, 4, 64)
    case.row().segment(50, 0, codec, keys=np.full((1, 50, 64), value), values=np.full((1, 50, 64), value))
    case.segment(30, 50, codec, values=np.full((1, 30, 64), value))
    agree(case.queries(scale=1e-4), path, (codec,))


@pytest.mark.parametrize("codec", ["", "int8", "int4"])
@pytest.mark.parametrize(("keys", "values"), [(1e4, 1.0), (1e-6, 1e-6), (1.0, 6e4), (50.0, 1e-7)])
def test_extreme_sizes(path, codec, keys, values):
    """Scores of thousands, values at the ends of fp16: nothing overflows in a folded scale."""
    case = Case(1, 4, 64, 2)
    spread = {
        "keys": case.noise(70, keys / 16).clip(-6e4, 6e4),
        "values": case.noise(70, values / 16).clip(-6e4, 6e4),
    }
    case.row().segment(70, 0, codec, **spread).segment(2, 70, tail=True)
    case.queries(scale=1.0 if keys < 1e3 else 1e-2)
    agree(case, path, (codec,))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
def test_a_nan_in_a_query_is_seen_in_its_row_only(path, codec):
    case = Case(1, 2, 64, 2)
    case.row().segment(70, 0, codec)
    case.queries()
    clean, _ = case.run(path)
    case.q[0, 1, 0, 5] = np.nan
    out, _ = case.run(path)
    assert np.isnan(out[0, 1, 0]).all()
    assert np.array_equal(out[0, 0], clean[0, 0]) and np.array_equal(out[0, 1, 1], clean[0, 1, 1])


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [3, 11, 40])
def test_integer_sums_are_the_same_on_both_units(codec, tokens, monkeypatch):
    """Codes in tile registers and in vectors: one scheme, the same bytes. Few rows, and tiles half full."""
    case = Case(2, 3, 80, tokens, seed=tokens)
    case.row().segment(64, 0, codec, group=128).segment(90, 64, codec, delta=7).queries(
        np.arange(150, 150 + tokens)[None]
    )
    provide("avx512_vnni", monkeypatch)
    vectors = case.run("avx512_vnni")
    tiles = case.run(provide("amx", monkeypatch))
    for vector, tile in zip(vectors, tiles, strict=True):
        assert_bitwise_equal(vector, tile)


@pytest.mark.parametrize("size", [100.0, 6e4])
@pytest.mark.parametrize("tokens", [1, 5])
def test_fp16_sums_that_overflow_are_found(path, size, tokens):
    """Values at the end of fp16: sums of a few of them are none, and are computed in fp32."""
    case = Case(1, 3, 96, tokens, "float16")
    values = case.noise(70, size / 16).clip(-size, size)
    values[:, 9:30, 40:] = size
    case.row().segment(70, 0, values=values).segment(tokens, 70, tail=True)
    agree(case.queries(), path, ("float16",))


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 5000), (3, 2100), (200, 300)])
def test_threads(path, threads, tokens, keys):
    """Work cut along the keys and merged: within rounding of one thread, and bitwise the same every time."""
    case = Case(1, 4, 64, tokens)
    case.row().segment(keys, 0, "int8").segment(tokens, keys, tail=True)
    case.queries()
    single, one_lse = case.run(path)
    many, many_lse = case.run(path, threads)
    assert np.abs(single - many).max() <= 2e-4
    assert np.abs(one_lse - many_lse).max() <= 1e-4
    for _ in range(3):
        assert_bitwise_equal(case.run(path, threads)[0], many)


def test_a_forked_child_has_threads_of_its_own():
    case = Case(1, 4, 64)
    case.row().segment(3000, 0, "int8")
    case.queries()
    want, _ = case.run("auto", 2)
    pid = os.fork()
    if pid == 0:
        same = np.array_equal(case.run("auto", 2)[0], want)
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_prepared_call_reads_what_is_there_now(path):
    """run() again after the tail was written: nothing is copied at preparation."""
    case = Case(1, 2, 64)
    keys = case.noise(8).astype(np.float32)
    case.row().segment(30, 0, "int8").queries(np.array([[40]]))
    out = np.empty_like(case.q)
    call = kernels.prepare(
        case.q, case.positions, case.rows, 0.1, tails=[kernels.segment(keys, keys, 30)], out=out, path=path
    )
    call.run()
    before = out.copy()
    keys += 1
    call.run()
    fresh = kernels.attend(
        case.q, case.positions, case.rows, 0.1, tails=[kernels.segment(keys, keys, 30)], path=path
    )
    assert not np.array_equal(before, out)
    assert_bitwise_equal(out, fresh)


def frozen(array):
    out = array.copy()
    out.flags.writeable = False
    return out


def refused(case: Case, **options):
    return kernels.attend(case.q, case.positions, case.rows, 1.0, **options)


def test_what_is_wrong_is_said():
    case = Case(2, 2, 64)
    case.row().segment(40, 0, "int8").queries()
    for options, words in (
        ({"path": "neon"}, "path='neon'"),
        ({"softcap": -1.0}, "softcap=-1"),
        ({"lse": np.empty(3, np.float32)}, "lse"),
        ({"sinks": np.empty(3, np.float32)}, "sinks"),
        ({"tails": []}, "0 tails"),
        ({"out": np.empty((1, 4, 1, 64))}, "out is float64"),
        ({"window": -1}, "window=-1"),
        ({"threads": 0}, "threads=0"),
        ({"rope": "spiral"}, "rope='spiral'"),
        ({"lse": np.empty((1, 4, 1, 2), np.float32)[..., 0]}, "lse is strided"),
        ({"sinks": np.empty(8, np.float32)[::2]}, "sinks is strided"),
        ({"out": frozen(case.q)}, "read-only"),
        ({"out": case.q[:, ::-1]}, "out overlaps"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            refused(case, **options)
    case.rows[0][0].struct.k_group = 48
    with pytest.raises(InvalidArgument, match="k_group=48"):
        refused(case)
    case.rows[0][0].struct.codec = 9
    with pytest.raises(InvalidArgument, match="codec=9"):
        refused(case)


def test_a_small_workspace_is_refused(path):
    case = Case(1, 2, 64)
    case.row().segment(40, 0, "int8").queries()
    call = kernels.prepare(case.q, case.positions, case.rows, 1.0, out=np.empty_like(case.q), path=path)
    call.args.workspace_bytes -= 1
    with pytest.raises(InvalidArgument, match="workspace"):
        call.run()
