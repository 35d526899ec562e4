"""Proves that the CUDA attention kernels compute what the contract says, without a GPU.

Method: their own source, compiled by g++ against an emulation of a thread block (mma, ldmatrix and
shuffles lane by lane from the PTX manual, asynchronous copies that land at the wait, not before; threads in
changing order), against the oracle in double over (batch, groups, head dimension, lengths, codec, window,
positions, empty tail, one-token segments, zero scales, extreme values). Bounds, of the largest value: results
and weights rounded to fp16 or bf16, and 1.5e-3 for queries with K's scales in fp16 (prefill) or 16-bit whole
numbers.
"""

from ctypes import byref

import numpy as np
import pytest

from kvclient.kernels import contract
from tests.kernels.compare import assert_bitwise_equal, calc_diff
from tests.kernels.cuda import emulated
from tests.kernels.every import every
from tests.kernels.oracle import Case

CODECS = ["", "int8", "int4"]
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}

pytestmark = pytest.mark.skipif(
    not emulated.LIBRARY.exists(), reason="the emulation is not built (`make native-tests`)"
)


@pytest.fixture(params=["decode", "prefill"])
def path(request):
    return request.param


@pytest.fixture(params=["reference", "decode", "prefill"])
def any_path(request):
    return request.param


def agree(case: Case, path: str, codecs: tuple[str, ...] = (), splits: int = 0) -> None:
    out, lse = emulated.run(case, path, splits)
    want, want_lse = case.oracle()
    seen = np.isfinite(want_lse)
    largest = np.abs(want_lse[seen]).max(initial=1)
    bound, lse_bound = ROUNDING[case.dtype] + 2e-6 * largest, 1e-5 * largest
    if path != "reference":
        quantised = {"int8", "int4", "float32"} & set(codecs)  # or rounded to the model's type
        narrow = "bfloat16" in codecs or (case.dtype == "bfloat16" and "" in codecs)
        bound += (1.5e-3 + 5e-5 * largest if quantised else 0) + (8e-3 if narrow else 0)
        exact = not quantised and not narrow and set(codecs) <= {"", case.dtype}
        lse_bound += (5e-4 if exact else 2e-3) * largest  # queries that were turned are rounded again
    scale = max(1e-30, np.abs(want).max())
    assert np.abs(out - want).max() <= bound * scale + 1e-30
    assert calc_diff(out, want) <= max(1e-12, bound**2)
    assert (np.isneginf(lse) == ~seen).all()
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= lse_bound


@pytest.mark.parametrize("codec", ["", "int8", "int4", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every(
    ("kv_heads", "group", "head_dim"),
    [(1, 1, 64), (2, 4, 128), (3, 3, 64), (1, 8, 96), (2, 1, 80), (1, 5, 256), (1, 2, 18), (1, 40, 16)],
)
def test_shapes(any_path, codec, dtype, kv_heads, group, head_dim):
    case = Case(kv_heads, group, head_dim, dtype=dtype, seed=head_dim + group)
    case.row().segment(70, 0, codec).segment(33, 70, codec).segment(5, 103, tail=True)
    agree(case.queries(), any_path, (codec, ""))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float32"), (512, "bfloat16"), (300, "float16")])
def test_what_the_fast_kernels_have_not_goes_to_the_naive_one(head_dim, dtype):
    case = Case(1, 2, head_dim, dtype=dtype)
    case.row().segment(40, 0, "int8").segment(2, 40, tail=True)
    agree(case.queries(), "auto", ("int8",))
    args, *_, alive = emulated.arguments(case, "decode")
    assert emulated.library().kvk_attention_workspace(byref(args)) == 0
    assert f"head_dim={head_dim}".encode() in emulated.library().kvk_last_error()
    del alive


@pytest.mark.parametrize("codec", CODECS)
@every("tokens", [1, 16, 17])
@every("keys", [1, 33, 200])
def test_lengths(path, codec, tokens, keys):
    case = Case(1, 2, 64, tokens, "bfloat16", seed=tokens)
    case.row().segment(keys, 0, codec).segment(tokens, keys, tail=True)
    agree(case.queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_long_contexts(path, codec):
    """One stretch, in which what a tensor core cuts off adds up; a result is small beside its values."""
    case = Case(1, 4, 64, 1, "bfloat16")
    case.row().segment(6000, 0, codec).segment(1, 6000, tail=True)
    agree(case.queries(), path, (codec, ""), 1)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("group", [32, 64, 128])
@every("first", [1, 45, 64])
def test_parts_of_blocks(path, codec, group, first):
    case = Case(2, 3, 64, 2, "float16")
    case.row().segment(77, 10, codec, first=first, group=group, after=9).segment(2, 87, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 24])
def test_moved_segments(any_path, codec, rope, rotary_dim):
    case = Case(2, 3, 64, 3, "float16", rope=rope, rotary_dim=rotary_dim)
    case.row().segment(40, 0, codec).segment(50, 40, codec, delta=-900).segment(50, 90, codec, delta=17)
    case.segment(20, 140, codec, delta=-900).segment(30, 160, codec).segment(3, 190, tail=True)
    agree(case.queries(), any_path, (codec,))


def test_one_block_under_two_turns(path):
    """The same scales for other queries: they must be there again when the queries are made anew."""
    case = Case(1, 2, 64, 1, "float16")
    case.row().segment(32, 0, "int8").segment(32, 32, "int8", delta=5).queries(np.array([[63]]))
    other = case.rows[0][1].struct
    turn, base = other.turn, other.base_position
    type(other).__init__(other)
    for name, _ in other._fields_:
        setattr(other, name, getattr(case.rows[0][0].struct, name))
    other.turn, other.base_position, other.new_position = turn, base, 32
    naive, _ = emulated.run(case, "reference")
    out, _ = emulated.run(case, path)
    assert np.abs(out - naive).max() < 3e-3 * np.abs(naive).max()


@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize("window", [1, 64, 1000])
@pytest.mark.parametrize("splits", [1, 3])
def test_window(path, codec, window, splits):
    case = Case(1, 4, 64, 13, "float16", options={"window": window})
    case.row().segment(128, 0, codec).segment(100, 128, codec).segment(13, 228, tail=True)
    agree(case.queries(), path, (codec,), splits)


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
@pytest.mark.parametrize(("codec", "splits"), [("", 1), ("int8", 4), ("int4", 2)])
def test_softcap_sinks_and_no_mask(any_path, codec, options, splits):
    case = Case(2, 4, 48, 5, "float16", options=options)
    case.row().segment(300, 0, codec).segment(12, 300, tail=True)
    agree(case.queries(), any_path, (codec,), splits)


def test_explicit_positions(path):
    case = Case(1, 2, 64, 7, "float16")
    case.row().segment(100, 0, "int8").segment(30, 100)
    agree(case.queries(np.array([[5, 129, 0, 64, 64, 63, 10_000]])), path, ("int8",))


def test_keys_out_of_order(any_path):
    case = Case(1, 2, 64, 4, "float16")
    case.row().segment(40, 500).segment(64, 0, "int8").segment(30, 90, "int4").segment(2, 560, tail=True)
    agree(case.queries(np.array([[20, 100, 520, 561]])), any_path, ("int8", "int4"))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_query_that_sees_nothing_gives_zeros(path, splits):
    case = Case(1, 2, 64, 3, "float16")
    case.row().segment(340, 100, "int8")
    case.queries(np.array([[5, 99, 100]]))
    out, lse = emulated.run(case, path, splits)
    assert (out[:, :, :2] == 0).all() and np.isneginf(lse[:, :, :2]).all()
    agree(case, path, ("int8",), splits)


@pytest.mark.parametrize("sinks", [None, np.float32([1.5, -2])])
def test_no_keys_at_all(any_path, sinks):
    case = Case(1, 2, 64, 2, "float16", options={} if sinks is None else {"sinks": sinks}).row()
    out, lse = emulated.run(case.queries(np.zeros((1, 2))), any_path)
    assert (out == 0).all()
    assert np.isneginf(lse).all() if sinks is None else np.allclose(lse, sinks[None, :, None])


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sink_of_minus_infinity_is_none(any_path, splits):
    case = Case(1, 2, 64, 2, "float16", options={"sinks": np.float32([-np.inf, 1.5])}).row()
    case.segment(900, 100, "int8").queries(np.zeros((1, 2)))
    out, lse = emulated.run(case, any_path, splits)
    assert (out == 0).all()
    assert np.isneginf(lse[:, 0]).all() and np.allclose(lse[:, 1], 1.5)
    agree(case.queries(), any_path, ("int8",), splits)


def test_rows_of_a_batch_are_their_own(any_path):
    case = Case(2, 3, 64, 2, "float16")
    case.row().segment(100, 0, "int8").segment(3, 100, tail=True)
    case.row().segment(1, 0, "int4")
    case.row().segment(7, 0, "bfloat16").segment(200, 7, "int8", delta=3).segment(2, 207, tail=True)
    case.row().segment(900, 0, "int8")
    agree(case.queries(), any_path, ("int8", "int4", "bfloat16"), 3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [31, 32, 70])
def test_one_token_segments(path, codec, count):
    case = Case(2, 4, 64, 1, "float16")
    case.row()
    for i in range(count):
        case.segment(1, i, codec)
    agree(case.queries(), path, (codec,), 2)


def test_many_segments_some_of_them_empty(path):
    case = Case(1, 2, 64, 1, "float16")
    case.row()
    position = 0
    for i in range(90):
        tokens = [0, 40, 0, 0, 7][i % 5]
        case.segment(max(tokens, 1), position, ["int8", "", "int4"][i % 3])
        case.rows[0][-1].struct.tokens = tokens
        case.known[0][-1] = tuple(x[:, :tokens] if x.ndim == 3 else x[:tokens] for x in case.known[0][-1])
        position += tokens
    agree(case.queries(np.array([[position]])), path, ("int8", "int4"), 7)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 3.0, -60000.0])
def test_zero_scales(any_path, codec, value):
    case = Case(1, 4, 64, 1, "float16")
    case.row().segment(50, 0, codec, keys=np.full((1, 50, 64), value), values=np.full((1, 50, 64), value))
    case.segment(30, 50, codec, values=np.full((1, 30, 64), value))
    agree(case.queries(scale=1e-4), any_path, (codec,))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("keys", "values"), [(1e4, 1.0), (1e-6, 1e-6), (1.0, 6e4), (50.0, 1e-7)])
def test_extreme_sizes(path, codec, keys, values):
    case = Case(1, 4, 64, 2, "bfloat16")
    spread = {
        "keys": case.noise(70, keys / 16).clip(-6e4, 6e4),
        "values": case.noise(70, values / 16).clip(-6e4, 6e4),
    }
    case.row().segment(70, 0, codec, **spread).segment(2, 70, tail=True)
    case.queries(scale=1.0 if keys < 1e3 else 1e-2)
    agree(case, path, (codec, ""))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_values_of_very_different_sizes(path, codec):
    """Every token with a scale of its own, over 30 powers of two: none of the weights leaves fp16."""
    case = Case(1, 4, 64, 1, "float16")
    sizes = 2.0 ** np.random.default_rng(3).permutation(np.linspace(-20, 10, 70))
    case.row().segment(70, 0, codec, values=case.noise(70) * sizes[None, :, None])
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", CODECS)
def test_a_nan_in_a_query_is_seen_in_its_row_only(any_path, codec):
    case = Case(1, 2, 64, 2, "float16")
    case.row().segment(70, 0, codec)
    case.queries()
    clean, _ = emulated.run(case, any_path)
    case.q[0, 1, 0, 5] = np.nan
    out, _ = emulated.run(case, any_path)
    assert np.isnan(out[0, 1, 0]).all()
    assert np.array_equal(out[0, 0], clean[0, 0]) and np.array_equal(out[0, 1, 1], clean[0, 1, 1])


@pytest.mark.parametrize("splits", [2, 5, 100])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 2500), (3, 2100)])
def test_splits(path, splits, tokens, keys):
    """Keys cut and merged by whichever block comes last: the same bytes every time."""
    case = Case(1, 4, 64, tokens, "float16")
    case.row().segment(keys, 0, "int8").segment(tokens, keys, tail=True)
    agree(case.queries(), path, ("int8",), splits)
    once, one_lse = emulated.run(case, path, splits)
    again, again_lse = emulated.run(case, path, splits)
    assert_bitwise_equal(once, again)
    assert_bitwise_equal(one_lse, again_lse)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("offset", [1, 8])
def test_memory_of_any_alignment(path, codec, offset):
    """What cannot be copied 16 bytes at a time is copied element by element."""
    case = Case(1, 2, 64, 2, "float16")
    case.row().segment(40, 0, codec)
    case.segment(3, 40, tail=True).queries()
    part = case.rows[0][0]
    moved = []
    for name in ("k", "v"):
        held = part.alive[0 if name == "k" else 1]
        array = held.codes if codec else held
        step = offset * array.itemsize
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 16 + step
        room[start : start + array.nbytes] = array.view(np.uint8).ravel()
        setattr(part.struct, name, room.ctypes.data + start)
        moved.append(room)
    agree(case, path, (codec,))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("head_dim", [18, 96, 128])
@pytest.mark.parametrize("tokens", [1, 70])
def test_nothing_is_read_behind_the_end(any_path, codec, head_dim, tokens):
    """Every array ends where a page ends that no other follows."""
    case = Case(1, 2, head_dim, 2, "float16")
    case.row().segment(tokens, 0, codec, delta=3).segment(2, tokens, tail=True).queries()
    moved = emulated.fence(case)
    agree(case, any_path, (codec,))
    del moved


def test_a_table_stands_for_the_sequences_and_its_tail_grows(path):
    """kvk_cuda_table: one piece of memory; the call reads tail.tokens and q_position when it runs."""
    lib = emulated.library()
    case = Case(1, 2, 64, 1, "float16")
    for _ in range(2):
        case.row().segment(40, 0, "int8").segment(30, 40).segment(8, 70, tail=True)
    case.queries()
    want, _ = emulated.run(case, path)
    args, out, _, alive = emulated.arguments(case, path)
    size = lib.kvk_cuda_table(byref(args), None, 0, 0)
    table = np.zeros(size, np.uint8)
    assert lib.kvk_cuda_table(byref(args), table.ctypes.data, size - 1, 0) == 0
    assert lib.kvk_cuda_table(byref(args), table.ctypes.data, size, table.ctypes.data) == size
    rows = (contract.Sequence * 2).from_buffer(table)
    args.sequences = table.ctypes.data
    emulated.attend(args)
    assert_bitwise_equal(emulated.widen(out), want)
    for row in rows:
        row.tail.tokens = 5
    case.positions[:] = 74
    emulated.attend(args)
    for part in case.tails:
        part.struct.tokens = 5
    assert_bitwise_equal(emulated.widen(out), emulated.run(case, path)[0])
    del alive


def test_what_is_wrong_is_said(path):
    lib = emulated.library()
    case = Case(1, 2, 64, 1, "float16")
    case.row().segment(40, 0, "int8").queries()
    args, *_, alive = emulated.arguments(case, path)
    parts = (contract.Segment * 1).from_address(
        (contract.Sequence * 1).from_address(args.sequences)[0].segments
    )
    parts[0].k_group = 48
    assert lib.kvk_cuda_table(byref(args), None, 0, 0) == 0 and b"k_group=48" in lib.kvk_last_error()
    parts[0].k_group = 32
    size = lib.kvk_attention_workspace(byref(args))
    room = np.zeros(size, np.uint8)
    args.workspace, args.workspace_bytes = room.ctypes.data, size - 1
    assert lib.kvk_attend(byref(args)) == contract.WORKSPACE
    assert f"{size - 1} bytes; {size} are needed".encode() in lib.kvk_last_error()
    args.path = 9
    assert lib.kvk_attend(byref(args)) == contract.UNSUPPORTED and b"path=9" in lib.kvk_last_error()
    args.abi += 1
    assert lib.kvk_attend(byref(args)) == contract.INVALID and b"ABI" in lib.kvk_last_error()
    del alive
