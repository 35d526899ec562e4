"""Proves that a call is read the same way whole, in pieces, and in every spelling that models have.

Method: calls as models write them, and forced ones cut at random (Hypothesis) and cut short.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.serve.http.tools import ForcedCall, calls_in, forced_call

CALL = '{"name": "look", "arguments": {"k": "a"}}'


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", ""),  # hermes, qwen
        (f"I look.\n<tool_call>{CALL}</tool_call>", "I look."),
        (f"<tool_call>{CALL}", ""),  # its end mark was the end of the text
        (f"[TOOL_CALLS] [{CALL}]", ""),  # mistral
        ('<|python_tag|>{"name": "look", "parameters": {"k": "a"}}', ""),  # llama
        (CALL, ""),
    ],
)
def test_every_spelling_is_read(text, beside):
    told, (call,) = calls_in(text, {"look"})
    assert told == beside and call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"k": "a"}


@pytest.mark.parametrize(
    "text", ["no call", '{"name": "other", "arguments": {}}', "<tool_call>{</tool_call>", "{}"]
)
def test_what_is_no_call_stays_text(text):
    assert calls_in(text, {"look"}) == (text, [])


VALUES = st.recursive(
    st.one_of(st.integers(), st.text('ab}{"\\ é', max_size=6), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text("ab}", max_size=3), inner)),
    max_leaves=6,
)


@given(st.dictionaries(st.text("ab", max_size=3), VALUES, max_size=3), st.sampled_from([None, 1]),
       st.lists(st.integers(1, 6), min_size=80, max_size=80), st.integers(0, 400))  # fmt: skip
def test_a_forced_call_in_pieces_is_the_whole(arguments, indent, cuts, length):
    whole = json.dumps({"name": "look", "arguments": arguments}, indent=indent)
    for text in (whole, whole[:length]):
        own, at, told = ForcedCall(), 0, []
        for cut in cuts:
            told += own.add(text[at : at + cut])
            at += cut
        told += own.add(text[at:], ended=True)
        calls = forced_call(text)
        assert bool(told) == bool(calls)
        if calls:
            assert told[0]["function"]["name"] == calls[0]["function"]["name"] == "look"
            spelled = "".join(one["function"].get("arguments", "") for one in told)
            assert spelled == calls[0]["function"]["arguments"]
            assert text != whole or json.loads(spelled) == arguments
