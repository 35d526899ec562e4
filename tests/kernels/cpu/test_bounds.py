"""Proves that no kernel reads or writes beyond what its caller described.

Method: arrays that are too small, of another type or strided, tables of unlike sizes and negative counts,
which C takes as huge ones; each must be refused with a sentence. Where a check were missing the call would
leave the memory of its arguments, mostly into a page that is not there. And calls that are right, over
arrays that end where such a page begins.
"""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kvclient import kernels
from kvclient.errors import InvalidArgument
from kvclient.kernels import contract
from tests.kernels.cpu_paths import PATHS, provide
from tests.kernels.cuda.emulated import fence
from tests.kernels.oracle import Case
from tests.kernels.test_attention import agree


def test_tables_of_turn_are_never_read_behind_their_end():
    """Where a segment was moved, its table says how many elements turn: all tables the same, and the call."""
    k = np.ones((2, 8, 64), np.float32)
    q, at = np.ones((1, 2, 1, 64), np.float32), np.array([[40]])

    def moved(elements):
        table = kernels.turn(np.ones(elements // 2, np.float32), 5)
        return kernels.segment(k, k, 0, 5, table)

    kernels.attend(q, at, [[moved(32)]], 1.0, rotary_dim=32)
    for rows, rotary_dim in (([moved(32)], 64), ([moved(64), moved(32)], 0), ([moved(64), moved(32)], 64)):
        with pytest.raises(InvalidArgument, match="tables of turn"):
            kernels.attend(q, at, [rows], 1.0, rotary_dim=rotary_dim)
    with pytest.raises(InvalidArgument, match=r"turned is float32\[3, 8\]"):
        kernels.segment(k, k, 0, 5, np.ones((3, 8), np.float32))


@pytest.mark.parametrize("field", ["codes", "scale", "zero"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_segment_reads_nothing_but_its_arrays(side, field):
    """What quantise() did not make may be too small, of another type, or strided."""
    x = np.ones((2, 40, 64), np.float32)
    sides = [kernels.quantise(x, 8, 32), kernels.quantise(x, 8, 0)]
    whole = getattr(sides[side], field)
    for wrong in (whole[:1], whole[:, :-1], whole.astype(np.float32), whole[..., ::2]):
        broken = list(sides)
        broken[side] = replace(sides[side], **{field: wrong})
        with pytest.raises(InvalidArgument, match=r"do not (hold|match)"):
            kernels.segment(*broken, 0)


def test_counts_below_nothing_are_refused_before_memory_is_touched():
    """C and ctypes take -1 as 2^32 - 1: no pointer here could be read that far."""
    case = Case(1, 2, 64)
    case.row().segment(40, 0, "int8").queries()
    call = kernels.prepare(case.q, case.positions, case.rows, 1.0, out=np.empty_like(case.q))
    heads = call.args.query_heads, call.args.kv_heads
    for name in ("batch", "query_heads", "query_tokens"):
        before = getattr(call.args, name)
        setattr(call.args, name, -1)
        if name == "query_heads":  # as many as heads of K and V, which is allowed
            call.args.kv_heads = -1
        with pytest.raises(InvalidArgument, match=f"{name}=4294967295; at most 2147483647"):
            call.run()
        setattr(call.args, name, before)
        call.args.query_heads, call.args.kv_heads = heads
    for first, tokens in ((0, -1), (-1, 1), (1 << 30, 1 << 30)):
        struct = case.rows[0][0].struct
        struct.first, struct.tokens = first, tokens
        with pytest.raises(InvalidArgument, match="together at most 2147483647"):
            kernels.attend(case.q, case.positions, case.rows, 1.0)


@pytest.mark.parametrize("function", ["kvk_quantise", "kvk_dequantise", "kvk_rotate"])
@pytest.mark.parametrize("count", ["heads", "tokens"])
def test_negative_counts_of_the_codec_are_refused(function, count):
    """C and ctypes take -1 as 2^32 - 1: no pointer here could be read that far."""
    library, struct = contract.cpu(), contract.CPU_FUNCTIONS[function]
    args = struct(ctypes.sizeof(struct), contract.ABI, heads=1, tokens=1, head_dim=16, dtype=contract.F32)
    if function == "kvk_rotate":
        args.rotary_dim = 16
    else:
        args.codec = contract.INT8
    setattr(args, count, -1)
    assert getattr(library, function)(ctypes.byref(args)) == contract.INVALID
    assert library.kvk_last_error() == f"{count}=4294967295; at most 2147483647, and not negative".encode()


@pytest.mark.parametrize("position", [1 << 62, -(1 << 62), 1 << 70, (1 << 63) - 1])
def test_positions_whose_differences_would_wrap_are_refused(position):
    """A query at 2^63 - 1 saw no key at all: last - first + 1 is negative there."""
    k = np.ones((2, 8, 64), np.float32)
    q = np.ones((1, 2, 1, 64), np.float32)
    for positions in ((position, None), (0, position)):
        with pytest.raises(InvalidArgument, match="position"):
            kernels.segment(k, k, *positions)
    if position < 1 << 63:
        with pytest.raises(InvalidArgument, match="q_position beyond"):
            kernels.attend(q, np.array([[position]]), [[kernels.segment(k, k, 0)]], 1.0)
    edge = (1 << 62) - 1
    segment = kernels.segment(k, k, edge - 7)
    assert np.allclose(kernels.attend(q, np.array([[edge]]), [[segment]], 1.0), 1)
    assert np.allclose(kernels.attend(q, np.array([[-edge]]), [[segment]], 1.0), 0)


@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16)])
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 0)])
def test_nothing_is_quantised_to_nothing(shape, bits, group):
    x = np.empty(shape, np.float32)
    assert kernels.dequantise(kernels.quantise(x, bits, group), np.empty_like(x)).shape == shape


@pytest.mark.parametrize("shape", [(0, 2, 1, 16), (1, 2, 0, 16)])
def test_no_query_has_no_answer(shape):
    k = np.ones((2, 5, 16), np.float32)
    at = np.empty((shape[0], shape[2]), np.int64)
    rows = [[kernels.segment(k, k, 0)]] * shape[0]
    assert kernels.attend(np.empty(shape, np.float32), at, rows, 1.0).shape == shape


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", ["int8", "int4", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (3, 3), (2, 40)])
def test_nothing_behind_a_segment_is_read(path, codec, group, tokens, monkeypatch):
    """Ends at each place of a tile and of a register, over each form of few and of many rows."""
    path = provide(path, monkeypatch)
    for head_dim in (18, 64, 80, 128, 192, 320):
        case = Case(1, group, head_dim, tokens, "bfloat16", seed=head_dim).row()
        for i, keys in enumerate((1, 7, 33, 64, 95, 130)):
            scales = (32, 64, 128)[i % 3]
            case.segment(keys, 200 * i, codec, delta=5 * (i % 2), first=45 * (i % 3), group=scales)
        case.segment(tokens, 1200, tail=True).queries()
        alive = fence(case)
        agree(case, path, (codec, ""))
        del alive


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (5, 16), (5, 128), (40, 64)])
@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_what_is_no_number_stays_where_it_is_seen(path, dtype, tokens, head_dim, strange, monkeypatch):
    """K of the newest key reaches its own query alone; what lies before and behind the tail, as padding and
    the rest of a buffer do, nobody. V of that key would reach others: 0 times it (native/kernels.h).
    """
    provide(path, monkeypatch)
    generator = np.random.default_rng(1)
    q = generator.standard_normal((1, 4, tokens, head_dim)).astype(dtype)
    k, v = generator.standard_normal((2, 2, 90, head_dim)).astype(dtype)
    at = np.arange(70 - tokens, 70)[None]

    def attended():
        tail = kernels.segment(k[:, 20:70], v[:, 20:70], 20)
        return kernels.attend(q, at, [[]], 0.1, tails=[tail], path=path)

    clean = attended()
    for part in (k, v):
        part[:, :20] = part[:, 70:] = strange
    assert np.array_equal(attended(), clean)
    k[:, 69] = strange
    # Another tile computes it where sums in fp16 are lost: near, not equal.
    assert np.allclose(attended()[:, :, :-1], clean[:, :, :-1], rtol=0, atol=2e-3)
