"""Goal: a byte counts as written once it was, in whatever order and overlap the pieces came. Method: random
pieces against a byte map; the bound on pieces that lie apart.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.errors import InvalidArgument
from kvstored.rpc.written import MAX_STRETCHES, Written

LENGTH = 200
LAYERS = [(0, 50), (64, 50), (128, 1), (129, 40)]


@given(st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, 60)), max_size=30))
def test_pieces_add_up(pieces):
    written, there = Written(LENGTH, LAYERS), bytearray(LENGTH)
    for offset, length in pieces:
        length = min(length, LENGTH - offset)
        written.add(offset, length)
        there[offset : offset + length] = b"\1" * length
    wanted = [n for n, (offset, length) in enumerate(LAYERS) if not all(there[offset : offset + length])]
    assert written.missing() == wanted and written.missing(2) == [n for n in wanted if n < 2]
    for begin, end in written.gaps():
        assert begin < end and not any(there[begin:end])
        there[begin:end] = b"\1" * (end - begin)
    assert all(there)


def test_pieces_that_lie_apart_are_bounded():
    written = Written(10 * MAX_STRETCHES, [(0, 10)])
    for number in range(MAX_STRETCHES):
        written.add(4 * number, 1)
    with pytest.raises(InvalidArgument, match=str(MAX_STRETCHES)):
        written.add(4 * MAX_STRETCHES, 1)
    written.add(0, 10 * MAX_STRETCHES)
    assert written.missing() == [] and written.gaps() == []
