"""Proves that a call is read the same way whole, in pieces, and in every spelling that models have.

Method: calls as models write them, and forced ones cut at random (Hypothesis) and cut short.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.serve.engine.sampling import Sampling
from kvclient.serve.http.answers.chat import offered
from kvclient.serve.http.asking import Ask
from kvclient.serve.http.messages import MessagesRequest, as_chat
from kvclient.serve.http.schema import ChatRequest
from kvclient.serve.http.spellings import Parameters
from kvclient.serve.http.tools import ForcedCall, SpokenCalls, calls_in, forced_call

CALL = '{"name": "look", "arguments": {"k": "a"}}'
QWENS = "<function=look>\n<parameter=k>\na\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", ""),  # hermes, qwen
        (f"I look.\n<tool_call>{CALL}</tool_call>", "I look."),
        (f"<tool_call>{CALL}", ""),  # its end mark was the end of the text
        (f"[TOOL_CALLS] [{CALL}]", ""),  # mistral
        ('<|python_tag|>{"name": "look", "parameters": {"k": "a"}}', ""),  # llama
        (CALL, ""),
        (f"[{CALL}]", ""),
        ('<tool_call>{"arguments": {"k": "a"}, "name": "look"}</tool_call>', ""),  # in another order
        (f"<tool_call>{CALL}</tool_call>\nDone.", "Done."),
        ('{"type": "function", "name": "look", "parameters": {"k": "a"}}', ""),  # llama
        ('[TOOL_CALLS]look[ARGS]{"k": "a"}', ""),  # mistral's since its eleventh tokenizer
        ('[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{"k": "a"}', ""),
        ('I look.[TOOL_CALLS]look{"k": "a"}', "I look."),
        ('<function=look>{"k": "a"}</function>', ""),  # llama's for tools of one's own
        ("[look(k='a')]", ""),  # llama's small ones
        (f"<tool_call>\n{QWENS}\n</tool_call>", ""),
        (f"Well.\n{QWENS}", "Well."),
    ],
)
def test_every_spelling_is_read(text, beside):
    told, (call,) = calls_in(text, {"look"})
    assert told == beside and call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"k": "a"}
    kept = calls_in(text, {"look"}, strict={"look"})  # where a grammar forces the order, no other is read
    other = any(mark in text for mark in ('{"arg', "LS]look", "<function", "look("))
    assert kept[0] == (text if other else beside) and len(kept[1]) == (not other)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '{"name": "other", "arguments": {}}',
        "<tool_call>{</tool_call>",
        "{}",
        "a <tool_call> b",
        "[TOOL_CALLS]",
        " <tool_",
        "[1, 2]",
        '{"names": "look"}',
        "[TOOL_CALLS] [3]",
        "x [ {",
        '[TOOL_CALLS]other[ARGS]{"k": "a"}',
        "[TOOL_CALLS]look",
        "[TOOL_CALLS]look[ARGS]",
        "[TOOL_CALLS]look around you: {",
        '<function=other>{"k": "a"}</function>',
        "<function=look",
        "<function=look>and</function>",
        "<function=look>\n<parameter=k>\na",
        "<function=look>\n<parameter=k>\na </function> b",
        "<function=look>\n<parameter=k>\na\n</parameter>\n<parameter=of>// </function>",
        "<function=look><parameter=k>a\n<parameter=of>b</parameter></function>",
        "<function=look><parameter=k>a</parameter> and <parameter=of>b</parameter></function>",
        "<function=look><parameter=k>a</parameter> and </function>",
        f"<function=look><parameter=k>as in {QWENS}",
        f"<function=look><parameter=k>as in <tool_call>{CALL}</tool_call>",
        "<tool_call><function",
        "[look('a')]",
        "[look(k=look)]",
        "[look(k='a'",
        "[look] and [see]",
        "[other(k='a')]",
        "[look(k=float('nan'))]",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert calls_in(text, {"look"}) == (text, [])


@pytest.mark.parametrize(
    "value",
    [
        "// closes </function> here",
        "</parameter> closes, and then\n</parameter>\n  more",
        "</parameter></parameter",
        "<function=look> <tool_call> <parameter= <parameter=\n> </function>",
        f"<tool_call>{CALL}</tool_call>",
        "",
    ],
)
def test_what_marks_an_end_may_stand_in_a_value(value):
    """A call was told as whole with what stood before its value's first mark."""
    said = {"path": "a.js", "k": value, "of": "b"}
    text = "".join(f"<parameter={name}>\n{each}\n</parameter>\n" for name, each in said.items())
    text = f"<tool_call>\n<function=look>\n{text}</function>\n</tool_call>"
    told, (call,) = calls_in(text, {"look"})
    assert told == "" and json.loads(call["function"]["arguments"]) == said
    for cut in range(text.index("</function>\n</tool_call>") + 10):
        assert calls_in(text[:cut], {"look"})[1] == []


def test_a_text_of_parameters_is_read_once(monkeypatch):
    """Two thousand tags without an end took 5.5 s, and each piece of a long value all before it."""
    looks, usual = [], Parameters.look

    def look(self, text):
        looks.append((self.at, text))
        return usual(self, text)

    monkeypatch.setattr(Parameters, "look", look)
    text = "<function=look>" + "<parameter=a>" * 2000 + "</function>"
    assert calls_in(text, {"look"}) == (text, []) and len(looks) == 1
    looks.clear()
    spoken = SpokenCalls({"look"})
    for piece in ["<function=look><parameter=a>", *["word " * 20] * 100]:
        spoken.add(piece)
    assert len(looks) == 101 and max(len(text) - at for at, text in looks) < 500


TYPES = {
    "n": ("integer", "3", 3),
    "on": ("boolean", "True", True),
    "of": ("array", '["a"]', ["a"]),
    "text": ("string", "3", "3"),
    "odd": ("integer", "three", "three"),
    "no_number": ("number", "NaN", "NaN"),
    "below": ("number", "-Infinity", "-Infinity"),
    "large": ("number", "1e999", "1e999"),
    "within": ("array", "[1, NaN]", "[1, NaN]"),
    "small": ("number", "1.5e3", 1500.0),
    "either": (["string", "null"], "12", "12"),
    "none": (["string", "null"], "null", None),
    "said": ("string", "null", "null"),
    "number": (["integer", "null"], "12", 12),
}


def test_a_parameter_is_of_its_schemas_type():
    properties = {name: {"type": kind} for name, (kind, _, _) in TYPES.items()}
    said = {name: value for name, (_, value, _) in TYPES.items()}
    wanted = {name: value for name, (*_, value) in TYPES.items()}
    maybe = [{"type": "integer"}, {"type": "null"}]
    properties |= {"any": {"anyOf": maybe}, "one": {"oneOf": maybe, "default": None}}
    properties |= {"texts": {"anyOf": [*maybe, {"type": "string"}]}, "seen": {"anyOf": [{}, *maybe]}}
    properties |= {"untold": {"enum": ["4"]}}
    said |= {"any": "5", "one": "null", "untold": "4", "texts": "5", "seen": "5", "other": "4"}
    wanted |= {"any": 5, "one": None, "untold": "4", "texts": "5", "seen": "5", "other": "4"}
    text = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in said.items())
    text = f"<tool_call>\n<function=look>\n{text}</function>\n</tool_call>"
    _, (call,) = calls_in(text, {"look": {"type": "object", "properties": properties}})

    def refused(constant):
        raise AssertionError(constant)

    assert json.loads(call["function"]["arguments"], parse_constant=refused) == wanted


def test_a_named_calls_arguments_are_told_while_they_are_said():
    told_of = '{"k": "a long one"}'
    for text in (f"[TOOL_CALLS]look[ARGS]{told_of}", f"<function=look>{told_of}</function>"):
        spoken, told = SpokenCalls({"look"}), []
        for letter in f"I do.\n{text}\n{text}":
            told += spoken.add(letter)
        assert together(told) == ("I do.", [["look", told_of]] * 2)
        assert len(told) > 20, "told at the end"


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
        call, at, told = ForcedCall(), 0, []
        for cut in cuts:
            told += call.add(text[at : at + cut])
            at += cut
        told += call.add(text[at:], ended=True)
        calls = forced_call(text)
        beside, spoken = together(told)
        assert (bool(spoken), beside) == (bool(calls), "" if calls else text)
        if calls:
            ((called, spelled),) = spoken
            assert called == calls[0]["function"]["name"] == "look"
            assert spelled == calls[0]["function"]["arguments"]
            assert text != whole or json.loads(spelled) == arguments


def together(deltas):
    text, calls = "", []
    for delta in deltas:
        text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert call["index"] == len(calls) - 1
                calls[-1][1] += call["function"]["arguments"]
    return text, calls


SAID = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CALL, "[", "]", "{", "}", "\n", " ",
         "Look: ", "look", "[ARGS]", '{"k": 1}', "<function=", ">", "</function>", "(k=", ")", "[CALL_ID]",
         "<parameter=k>", "</parameter>", "<function=look>", "<parameter=k>a</parameter>", "// </function> ",
         '{"name": "other", "arguments": {}}', ",", '"', "\\",
         '{"name": "look", "arguments": {"k": "}']
    ),
    max_size=7,
)  # fmt: skip


@given(SAID, st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_what_is_said_in_pieces_is_the_whole(said, cuts):
    text, spoken, at, told = "".join(said), SpokenCalls({"look"}), 0, []
    for cut in cuts:
        told += spoken.add(text[at : at + cut])
        at += cut
    told += spoken.add(text[at:], ended=True)
    beside, calls = calls_in(text, {"look"})
    assert together(told) == (beside, [[c["function"]["name"], c["function"]["arguments"]] for c in calls])
    for name, _ in together(told)[1]:
        assert name == "look"
    if not calls:
        assert beside == text


@given(SAID, st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_of_several_calls_the_first_is_told_where_one_is_wanted(said, cuts):
    text, one_call, at, told = "".join(said), SpokenCalls({"look"}, 1), 0, []
    for cut in cuts:
        told += one_call.add(text[at : at + cut])
        at += cut
    told += one_call.add(text[at:], ended=True)
    beside, calls = calls_in(text, {"look"})
    first = [[c["function"]["name"], c["function"]["arguments"]] for c in calls[:1]]
    assert together(told) == (beside, first)
    told_beside, told_calls = calls_in(text, {"look"}, 1)
    assert told_beside == beside
    assert [[c["function"]["name"], c["function"]["arguments"]] for c in told_calls] == first


def test_a_request_for_one_call_is_one():
    tools = [{"type": "function", "function": {"name": "look"}}]
    plain = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    for wanted, most in ((None, None), (True, None), (False, 1)):
        request = ChatRequest(**plain, parallel_tool_calls=wanted)
        assert offered(Ask([1], 1, Sampling(), request)) == ({"look": None}, most, set())
    turn = [{"role": "user", "content": "x"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = {"messages": turn, "max_tokens": 1, "tools": [{"name": "look", "input_schema": {}}]}
    assert as_chat(MessagesRequest(**asked, tool_choice=choice), False).parallel_tool_calls is False
    assert as_chat(MessagesRequest(**asked), False).parallel_tool_calls is None


def test_two_calls_are_told_while_they_are_said():
    spoken, told = SpokenCalls({"look"}), []
    for letter in f"I do.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}":
        told += spoken.add(letter)
    assert together(told) == ("I do.", [["look", '{"k": "a"}']] * 2)
    assert len(told) > 20, "told at the end"


def test_beside_a_strict_tool_the_others_are_read_in_every_order():
    """But for what follows them in their list: a grammar took that for text."""
    text = '{"arguments": {"k": "a"}, "name": "other"}'
    for said, names in ((text, ["other"]), (f"[{text}, {CALL}]", ["other"]), (f"[{CALL}]", ["look"])):
        calls = calls_in(said, {"look", "other"}, strict={"look"})[1]
        assert [call["function"]["name"] for call in calls] == names
