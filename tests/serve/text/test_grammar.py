"""Proves that structured output is prepared beside the streams and not between them: neither the tokenizer's
tables nor a schema is compiled on the event loop's thread, one schema once however many answers keep to it;
that masking a step's scores compiles nothing, so a machine without a compiler has structured output too; and
that a strict tool's schema is kept where a model may call or not.

Method: the application itself with a grammar that notes on which thread it was made; a matcher's mask against
one that asks of every token whether it may come, where torch.compile() raises; texts put together at random
(Hypothesis), of which the grammar takes what it will: the calls that are read in that are the schema's.
"""

import asyncio
import json
import sys
import threading
from types import SimpleNamespace

import httpx2
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.errors import InvalidArgument
from kvclient.serve.errors import ApiError
from kvclient.serve.http.app import create_app
from kvclient.serve.http.asking import Asking, tool_schema
from kvclient.serve.http.grammar import Grammars, Matcher
from kvclient.serve.http.messages import MessagesRequest
from kvclient.serve.http.reasoning import parted
from kvclient.serve.http.responses import ResponsesRequest
from kvclient.serve.http.schema import ChatRequest, Tool
from kvclient.serve.http.tools import calls_in
from kvclient.serve.scheduler import Limits, QueueFull

pytest.importorskip("llguidance", reason="llguidance is not installed")

SCHEMA = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
          "additionalProperties": False}  # fmt: skip
SHAPE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0}


NESTED = {  # as pydantic writes a model in a model; `enum` is a field's name, what `const` holds no schema
    "$defs": {"Item": {"type": "object", "properties": {"k": {"enum": ["a"]}}, "required": ["k"],
                       "additionalProperties": False}},
    "type": "object", "required": ["enum", "again", "plain"], "additionalProperties": False,
    "properties": {"enum": {"$ref": "#/$defs/Item"}, "again": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
                   "plain": {"const": {"$ref": "#/x"}}},
}  # fmt: skip


@pytest.mark.parametrize("others", [0, 1])
def test_a_tools_schema_may_name_its_own_parts(home, others):
    functions = [*[{"name": "other"}] * others, {"name": "look", "parameters": NESTED}]
    tools = [Tool(type="function", function=function) for function in functions]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    grammars = Grammars(tokenizer, 300)
    inner = {"enum": {"k": "a"}, "again": None, "plain": {"$ref": "#/x"}}
    call = {"name": "look", "arguments": {**inner, "again": inner}}

    def taken(call):
        matcher = grammars.json(tool_schema(tools, "required"))._matcher
        ids = tokenizer(json.dumps(call))["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert taken(call)
    assert not taken({**call, "arguments": {**inner, "enum": {"k": "b"}}})


@pytest.mark.parametrize(
    ("where", "levels", "below"),
    [("tools", 450, 0), ("tools", 450, 150), ("tools", 450, 300), ("response_format", 450, 0),
     ("response_format", 900, 0)],
)  # fmt: skip
def test_a_schema_nested_too_deep_is_refused_by_name(home, where, levels, below):
    """below: calls that the stack has already."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    loop = SimpleNamespace(identity=b"", limits=Limits(), submit=full, cancel=lambda job: None)
    app = create_app(Asking(tokenizer, "tiny", loop, 100_000, 300), "1")
    deep = '{"items": ' * levels + "{}" + "}" * levels
    tools = f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
    shape = f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
    asked = shape if where == "response_format" else tools + ', "tool_choice": "required"'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {asked}}}'

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://tiny") as client:
            told = {"content": body, "headers": {"content-type": "application/json"}}
            return await client.post("/v1/chat/completions", **told)

    def run(calls):
        return run(calls - 1) if calls else asyncio.run(scenario())

    answer = run(below)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, where), answer.text


def full(job):
    raise QueueFull("no job of this test is computed")


def test_what_a_schema_needs_is_made_on_another_thread_and_once(home, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    loop = SimpleNamespace(identity=b"", limits=Limits(), submit=full, cancel=lambda job: None)
    app = create_app(Asking(tokenizer, "tiny", loop, 1000, 300), "1")
    made, make = [], Grammars.json

    def noted(self, *schema):
        made.append(threading.get_ident())
        return make(self, *schema)

    monkeypatch.setattr(Grammars, "json", noted)

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://tiny") as client:
            body = {**CHAT, "n": 4, "response_format": SHAPE}
            answer = await client.post("/v1/chat/completions", json=body)
            wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}
            refused = await client.post("/v1/chat/completions", json={**CHAT, "response_format": wrong})
            return answer.status_code, refused.status_code, threading.get_ident()

    answered, refused, loops = asyncio.run(scenario())
    assert (answered, refused) == (429, 400)
    assert len(made) == 2 and loops not in made


def test_a_mask_is_what_the_grammar_says_of_each_token_and_compiles_nothing(home, monkeypatch):
    def compiles(*_, **__):
        raise AssertionError("torch.compile() takes seconds of a step, and a compiler")

    monkeypatch.delitem(sys.modules, "llguidance.torch", raising=False)
    monkeypatch.setattr(torch, "compile", compiles)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    matcher = Grammars(tokenizer, 300).json(SCHEMA)
    scores, text = torch.randn(310), '{"k": "a"}'  # some models tell scores of more than they have words
    for letter in text:
        allowed = {token for token in range(259) if matcher._matcher.validate_tokens([token])}
        masked = matcher.mask(scores)
        assert set(torch.nonzero(masked > float("-inf"))[:, 0].tolist()) == allowed
        assert torch.equal(masked[sorted(allowed)], scores[sorted(allowed)])
        (token,) = tokenizer(letter)["input_ids"]
        assert token in allowed
        matcher.take(token)


def test_a_schema_that_cannot_be_followed_to_its_end_is_an_error_and_no_end(home):
    import llguidance

    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    few = llguidance.LLParserLimits(max_lexer_states=20)
    made = Grammars(tokenizer, 300)._compiled()
    matcher = Matcher(llguidance.LLMatcher(made, grammar, limits=few, log_level=0))
    with pytest.raises(InvalidArgument, match="too many states"):
        for token in tokenizer('{"k": "a"}')["input_ids"]:
            matcher.mask(torch.zeros(300))
            matcher.take(token)
    assert not matcher.over


def test_a_limit_that_is_met_by_a_token_is_told_as_one_and_a_forbidden_token_is_none(home):
    import llguidance

    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    few = llguidance.LLParserLimits(max_items_in_row=60)
    made = Grammars(tokenizer, 300)._compiled()
    first = llguidance.LLMatcher(made, 'start: s\ns: "a" | s s | s s s', limits=few, log_level=0)
    matcher, again = Matcher(first), Matcher(first).fresh()
    (letter,), (other,) = (tokenizer(text)["input_ids"] for text in "ax")
    with pytest.raises(InvalidArgument, match=r"followed any further: .*max is 60"):
        for _ in range(400):
            matcher.take(letter)
    with pytest.raises(RuntimeError, match="although the grammar forbids it"):
        again.take(other)


CALL = '{"name": "look", "arguments": {"k": "a"}}'
PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "\u00a0",
         '{"name": "look", "arguments": ', '{"name": "look","parameters":', '{"k": "a"}', '{"k": "c"}', CALL,
         "[", "]", '{"arguments": {"k": "c"}, "name": "look"}', '{"name": "other", "arguments": {"q": 1}}',
         ' {"name" :\t"look" ,\r"arguments" :  ', "{", "}", ",", "\n", " ", "\x1d", '"', "So: ", "3", "é",
         '{"name": "lo', '{"arguments": {}, "name": "other"}',
         '{"type": "function", "name": "look", "parameters":']
    ),
    max_size=9,
)  # fmt: skip


@settings(deadline=None)  # the first compiles a grammar
@given(PIECES, st.sampled_from([None, False, True]))
def test_calls_in_a_text_that_a_strict_tools_grammar_lets_through_are_the_schemas(kept, said, thinks):
    matcher = kept(thinks).fresh()._matcher
    taken = ""
    for piece in said:  # what is refused is left out
        ids = kept.tokenizer(piece)["input_ids"]
        if matcher.validate_tokens(ids) == len(ids):
            assert matcher.consume_tokens(ids)
            taken += piece
        elif not any(mark in taken + piece for mark in ("<", "[", "{")):
            raise AssertionError(f"{taken!r} may not go on with {piece!r}")
    text = taken if thinks is None else parted(taken, thinks)[1]
    beside, calls = calls_in(text, {"look", "other"}, strict={"look"})
    for call in calls:
        function = call["function"]
        if matcher.is_accepting():
            told = json.loads(function["arguments"])
            assert function["name"] == "other" or told in ({"k": "a"}, {"k": "b"})
        assert function["name"] == "other" or '"c"' not in function["arguments"]
    if not calls:
        assert beside == text


@pytest.fixture(scope="module")
def kept(home):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    grammars, made = Grammars(tokenizer, 300), {}

    def grammar(thinks):
        if thinks not in made:
            made[thinks] = grammars.calls([("look", SCHEMA), ("other", None)], thinks)
        return made[thinks]

    grammar.tokenizer = tokenizer
    return grammar


@pytest.mark.parametrize(
    "text",
    ["Words.", CALL, f" [{CALL}, {CALL}]", f"So: <tool_call>\n{CALL}\n</tool_call>", '{"name": "Alice"}',
     "[1]", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>.", f"<|python_tag|>{CALL}",
     f"[TOOL_CALLS] [{CALL},{CALL}] x", f"[TOOL_CALLS]{CALL}"],
)  # fmt: skip
def test_what_is_no_call_or_a_right_one_may_be_said_beside_a_strict_tool(kept, text):
    matcher = kept(None).fresh()._matcher
    ids = kept.tokenizer(text)["input_ids"]
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


WRONG = CALL.replace('"a"', '"c"')


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "before",
    ["", "\n[", "\x1c ", "\u00a0", "[", " [ ", f"[{CALL}, ", f"{CALL}<tool_call>", "<tool_call>",
     "x [TOOL_CALLS]", "[TOOL_CALLS] [", "<|python_tag|>\n", "<think>\n</think>\n"],
)  # fmt: skip
def test_a_call_that_breaks_its_schema_is_refused_whichever_tokens_spell_its_mark(home, special, before):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"]
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
    matcher = Grammars(tokenizer, 300).calls([("look", SCHEMA)], False)
    closing = "</tool_call>" if before.endswith("<tool_call>") else ""
    typed = WRONG.replace("{", '{"type": "function", ', 1)
    for call, whole in ((CALL, True), (WRONG, False), (typed.replace('"c"', '"b"'), True), (typed, False)):
        ids = tokenizer(before + call + closing)["input_ids"]
        assert not special or not any(mark in before for mark in marks) or len(ids) < len(before + call)
        taken = matcher.fresh()._matcher.try_consume_tokens(ids)
        assert (taken == len(ids)) == whole, (tokenizer.decode(ids[:taken]), call)


TOLD = {"name": "look", "strict": True}
ASKED = {
    "chat": lambda asking, schema, strict: asking.chat(ChatRequest(
        messages=[{"role": "user", "content": "x"}], max_tokens=99, temperature=0,
        tools=[{"type": "function", "function": {"name": "look", "strict": strict, "parameters": schema}}])),
    "responses": lambda asking, schema, strict: asking.responses(ResponsesRequest(
        input="x", max_output_tokens=99, temperature=0,
        tools=[{"type": "function", "name": "look", "strict": strict, "parameters": schema}])),
    "messages": lambda asking, schema, strict: asking.messages(MessagesRequest(
        messages=[{"role": "user", "content": "x"}], max_tokens=99, temperature=0,
        tools=[{"name": "look", "strict": strict, "input_schema": schema}])),
}  # fmt: skip


@pytest.mark.parametrize("asks", ASKED)
@pytest.mark.parametrize("before", ["I look.<tool_call>", ""])
def test_a_strict_tools_schema_is_kept_where_the_model_may_call_it_or_not(home, asks, before):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    asking = Asking(tokenizer, "tiny", SimpleNamespace(identity=b"", limits=Limits()), 1000, 300, ends={0})

    def said(strict):
        (ask,) = asking.enforced(ASKED[asks](asking, SCHEMA, strict))
        (job,) = asking.jobs(ask, b"", None)
        wished = f'{before}{{"name": "look", "arguments": {{"k": "c"}}}}' + "</tool_call>" * bool(before)
        tokens = []
        for wish in [*tokenizer(wished)["input_ids"], 0]:
            scores = torch.zeros(300)
            scores[tokenizer("a")["input_ids"]] = 1
            scores[wish] = 2
            tokens.append(job.sampler.pick(scores).token)
        assert tokens.pop() == 0, "the model's own end, which is not the tokenizer's"
        beside, calls = calls_in(tokenizer.decode(tokens), {"look"}, strict={"look"} if strict else ())
        return beside, [json.loads(call["function"]["arguments"]) for call in calls]

    words = before.removesuffix("<tool_call>")
    assert said(True) == (words, [{"k": "a"}])
    assert said(None) == (words, [{"k": "c"}])


def test_what_cannot_be_kept_of_a_strict_tool_is_refused_by_name(home):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    asking = Asking(tokenizer, "tiny", SimpleNamespace(identity=b"", limits=Limits()), 1000, 300)
    for asks in ASKED.values():
        for wrong in ({"type": "array"}, {"type": "object", "properties": {"k": {"type": "no type"}}}):
            with pytest.raises(ApiError) as met:
                asking.enforced(asks(asking, wrong, True))
            assert (met.value.status, met.value.body["error"]["param"]) == (400, "tools")
            assert asking.enforced(asks(asking, wrong, None))
    function = {"type": "function", "function": {**TOLD, "parameters": SCHEMA}}
    endless = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=[function], ignore_eos=True)
    with pytest.raises(ApiError) as met:
        asking.chat(endless)
    assert met.value.body["error"]["param"] == "ignore_eos"
