"""Proves the forms that multiply four rows at once: on AVX-512 VNNI int8, int4 and short elements, on AVX2
and AVX-512 without VNNI every codec but fp32, where fp32 beside them must stay what it was.

Against the oracle in double as in test_attention.py, over what these forms distinguish: rows of four and of
three, one to four fours, whole and half lines of a head, tiles of 128 that are cut by blocks, groups and
windows. AVX2 takes any number of rows up to 16 and any head dimension of whole eights. A CPU without a path
skips its tests with what it lacks.
"""

import numpy as np
import pytest

from tests.kernels.cpu_paths import PATHS, provide
from tests.kernels.every import every
from tests.kernels.oracle import Case
from tests.kernels.test_attention import agree

CODECS = ["int8", "int4"]
ELEMENTS = ["bfloat16", "float16", "float32"]


@pytest.fixture(params=[path for path in PATHS if path != "reference"])
def path(request, monkeypatch):
    return provide(request.param, monkeypatch)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@every(("group", "tokens"), [(3, 1), (4, 1), (7, 1), (8, 1), (4, 3), (16, 1)])
def test_rows_and_heads(path, codec, head_dim, group, tokens):
    case = Case(2, group, head_dim, tokens, "bfloat16", seed=head_dim + group)
    case.row().segment(128, 0, codec).segment(200, 128, codec, group=128)
    case.segment(9, 328, codec)
    agree(case.segment(tokens, 337, tail=True).queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", CODECS)
@every("group", [32, 64, 128])
@every("first", [0, 1, 5, 31, 32, 45, 64, 100, 131])
@every("tokens", [1, 7, 150])
def test_parts_of_blocks(path, codec, group, first, tokens):
    case = Case(2, 4, 64)
    case.row().segment(tokens, 10, codec, first=first, group=group, after=9)
    case.segment(1, 10 + tokens, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [0, 24])
def test_moved_segments_of_both_codecs(path, codec, rope, rotary_dim):
    """The queries are laid out anew for each turn and each codec, and for neither more often."""
    other = "int4" if codec == "int8" else "int8"
    case = Case(2, 4, 128, 2, rope=rope, rotary_dim=rotary_dim)
    case.row().segment(40, 0, codec).segment(150, 40, codec, delta=-900).segment(50, 190, other, delta=-900)
    case.segment(20, 240, codec, delta=17).segment(30, 260, other).segment(33, 290, "bfloat16")
    agree(case.segment(10, 323, codec).segment(2, 333, tail=True).queries(), path, (codec, "bfloat16"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 70},
        {"window": 200, "softcap": 5.0},
        {"softcap": 0.5},
        {"causal": False},
        {"sinks": np.linspace(-3, 9, 8).astype(np.float32)},
    ],
)
def test_windows_caps_and_sinks(path, codec, options):
    case = Case(2, 4, 64, 4, options=options)
    case.row().segment(256, 0, codec).segment(100, 256, codec).segment(4, 356, tail=True)
    agree(case.queries(), path, (codec,))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_see_different_keys(path, codec):
    """Queries before all keys, inside a tile, at its ends and behind all, in one block of four rows."""
    case = Case(1, 1, 64, 8)
    case.row().segment(200, 100, codec).segment(60, 300, codec)
    positions = np.array([[5, 99, 100, 227, 228, 301, 359, 10_000]])
    out, lse = case.queries(positions).run(path)
    assert (out[:, :, :2] == 0).all() and np.isneginf(lse[:, :, :2]).all()
    agree(case, path, (codec,))


@pytest.mark.parametrize("codec", CODECS + ELEMENTS)
@pytest.mark.parametrize("head_dim", [8, 24, 32, 80, 96, 128, 192, 256, 320, 512])
@every(("group", "tokens"), [(1, 1), (2, 1), (1, 3), (5, 1), (3, 3), (16, 1)])
def test_any_rows_and_heads(path, codec, head_dim, group, tokens):
    """Where the shape is not one of four rows, or not of whole lines, too."""
    case = Case(2, group, head_dim, tokens, "float32", seed=head_dim + group)
    case.row().segment(64, 0, codec).segment(131, 64, codec, group=64).segment(1, 195, codec)
    agree(case.segment(tokens, 196, tail=True).queries(), path, (codec, ""))


@pytest.mark.parametrize("codec", ELEMENTS)
@pytest.mark.parametrize("options", [{"window": 70}, {"softcap": 0.5, "window": 200}, {"causal": False}])
def test_elements_under_windows_and_caps(path, codec, options):
    case = Case(2, 4, 64, 4, options=options)
    case.row().segment(256, 0, codec, delta=-30).segment(100, 256, codec).segment(4, 356, tail=True)
    agree(case.queries(), path, (codec, ""))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("delta", [0, 9])
def test_elements_beside_each_other(path, group, delta):
    """Each has the queries in a form of its own, or the same."""
    case = Case(2, group, 64, dtype="float32")
    case.row().segment(70, 0, "float16").segment(65, 70, "bfloat16").segment(40, 135, "float16", delta=delta)
    case.segment(40, 175, "bfloat16", delta=delta).segment(40, 215, "int8").segment(30, 255, "bfloat16")
    agree(case.segment(1, 285, tail=True).queries(), path, ("float16", "bfloat16", "int8", ""))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_row_in_fp32_has_the_same_bits_among_few_and_among_many(path, head_dim):
    """A suffix behind reused KV is promised the bits of a full prefill."""
    case = Case(2, 4, head_dim, 40, "float32")
    case.row().segment(128, 0, "float32").segment(77, 128, "float32", delta=9).queries()
    many, _ = case.run(path)
    queries, positions = case.q, case.positions
    for few in (1, 2, 4, 5):
        case.q = np.ascontiguousarray(queries[:, :, -few:])
        case.positions = np.ascontiguousarray(positions[:, -few:])
        assert np.array_equal(case.run(path)[0], many[:, :, -few:]), few
