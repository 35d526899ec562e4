"""Proves that structured output is prepared beside the streams and not between them: neither the tokenizer's
tables nor a schema is compiled on the event loop's thread, one schema once however many answers keep to it;
and that masking a step's scores compiles nothing, so a machine without a compiler has structured output too.

Method: the application itself with a grammar that notes on which thread it was made; a matcher's mask against
one that asks of every token whether it may come, where torch.compile() raises.
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

from kvclient.serve.http.app import create_app
from kvclient.serve.http.asking import Asking, tool_schema
from kvclient.serve.http.grammar import Grammars
from kvclient.serve.http.schema import Tool
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
