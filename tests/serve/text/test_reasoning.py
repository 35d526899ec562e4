"""Proves that reasoning and answer are cut apart the same way, whole or in any pieces, and that
their tokens are counted.

Method: texts with marks, cut at random (Hypothesis), against a regular expression on the whole.
"""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.serve.engine.job import Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.http.answers.run import Choice
from kvclient.serve.http.reasoning import Reasoning, parted

THOUGHT = re.compile(r"\s*<think>\s*(.*?)\s*(?:</think>\s*(.*)|)$", re.S)


def wanted(text, opened):
    text = "<think>" + text if opened else text
    met = THOUGHT.match(text)
    if met is None:
        return None, text
    return (met[1] or None, met[2] or "")


@pytest.mark.parametrize(
    ("text", "opened", "told"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, ("hm", "Yes.")),
        ("hm</think>Yes.", True, ("hm", "Yes.")),
        ("Yes, a <think> tag.", False, (None, "Yes, a <think> tag.")),
        ("<think>never ends", False, ("never ends", "")),
        ("<thi", False, (None, "<thi")),
        ("<think></think>Yes", False, (None, "Yes")),
        ("a < b", False, (None, "a < b")),
    ],
)
def test_the_parts(text, opened, told):
    assert parted(text, opened) == told


@pytest.mark.parametrize(
    ("pieces", "opened", "counted"),
    [
        (["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes", "."], False, 5),
        (["hm", "", "</thi", "nk>Yes", "."], True, 4),
        ([" ", "<thi", "nk>hm</think>Yes", "."], False, 3),
        (["<think>", "never", " ends"], False, 3),
        (["<thi", "s> is no thought"], False, 0),
        (["\n"], False, 0),
        (["Yes", " <think>no</think>"], False, 0),
        (["<think>no</think>"], None, 0),
    ],
)
def test_the_tokens_of_thoughts_are_counted_with_their_marks(pieces, opened, counted):
    choice = Choice(SimpleNamespace(reasoning=opened))
    for number, piece in enumerate(pieces):
        choice.add(Token(piece, Chosen(number)))
    assert (choice.text, choice.reasoning_tokens) == ("".join(pieces), counted)


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "b c", "</thi"]), max_size=8)


@given(PARTS, st.booleans(), st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_any_pieces_are_the_whole(parts, opened, cuts):
    text, reasoning, at = "".join(parts), Reasoning(opened), 0
    told = ["", ""]
    for cut in cuts:
        for index, piece in enumerate(reasoning.add(text[at : at + cut])):
            told[index] += piece
        at += cut
    for index, piece in enumerate(reasoning.end()):
        told[index] += piece
    whole = parted(text, opened)
    assert (told[0], told[1]) == (whole[0] or "", whole[1])
    first, then = wanted(text, opened)
    assert (whole[0] or "").strip() == (first or "").strip() and whole[1].strip() == then.strip()
