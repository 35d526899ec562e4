"""Goal: an answer that is foreseen is given to the next key of its stretch and to no other, and what was
asked for is counted exactly.

Method: kvclient's own, with a function that notes what it is asked.
"""

import gc
import weakref

import pytest

from kvclient._core import Foreseen
from kvclient.errors import InvalidArgument

KEYS = [b"%d" % number for number in range(6)]


def test_only_the_next_key_by_the_same_asker_is_foreseen():
    asked, mine, other = [], object(), object()

    def otherwise(key, context):
        asked.append((key, context is mine))
        return "other"

    made = Foreseen(otherwise)
    ask = made.ask
    assert ask(KEYS[0], mine) == "other" and made.end() == 0
    made.begin(KEYS, 1, 4, mine, "mine")
    assert ask(KEYS[2], mine) == "mine"
    equal = bytes(bytearray(KEYS[3]))
    for key, context in ((KEYS[2], mine), (KEYS[4], mine), (equal, mine), (KEYS[3], other)):
        assert ask(key, context) == "other"
    assert ask(key=KEYS[3], context=mine) == "other"
    assert ask(KEYS[3], mine) == "mine"
    assert ask(KEYS[4], mine) == "other", "behind its end"
    assert made.end() == 3, "the first, and the two that were foreseen"
    assert made.end() == 0 and ask(KEYS[2], mine) == "other"
    assert asked == [
        (KEYS[0], True), (KEYS[2], True), (KEYS[4], True), (KEYS[3], True), (KEYS[3], False), (KEYS[3], True),
        (KEYS[4], True), (KEYS[2], True),
    ]  # fmt: skip
    with pytest.raises(TypeError):
        ask(KEYS[0])


def test_what_is_no_stretch_is_refused_and_a_list_that_shrinks_is_no_harm():
    made, mine = Foreseen(lambda key, context: "other"), object()
    for start, stop in ((0, 0), (-1, 2), (3, 2), (0, 7)):
        with pytest.raises(InvalidArgument, match="there must be one"):
            made.begin(KEYS, start, stop, mine, "mine")
    keys = list(KEYS)
    made.begin(keys, 0, 6, mine, "mine")
    assert made.ask(KEYS[1], mine) == "mine"
    del keys[2:]
    assert made.ask(KEYS[2], mine) == "other" and made.end() == 2


def test_an_error_of_the_other_function_is_its_callers():
    def otherwise(key, context):
        raise KeyError(key)

    with pytest.raises(KeyError):
        Foreseen(otherwise).ask(KEYS[0], None)


def test_who_has_it_and_is_asked_by_it_goes():
    class Owner:
        def __init__(self):
            self.foreseen = Foreseen(self.otherwise)
            self.ask = self.foreseen.ask
            self.foreseen.begin(KEYS, 0, 6, self, self)

        def otherwise(self, key, context):
            return None

    owner = Owner()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
