"""Proves that a request as clients write it is taken, and that what is wrong with one is said where it is:
null is what was not said, a message says something, the field that is named is one of the request; and that
no field takes a value of another kind for its own, as a number that is a text or true.

Method: the application itself over a loop that has no room, so that what is taken is a 429 and costs nothing.
The wrong values are made from the schema of each request: in the place of each of its values, however deep,
one of each kind that it does not have.
"""

import asyncio
from types import SimpleNamespace

import httpx2
import pytest
from pydantic import TypeAdapter, ValidationError

from kvclient.serve.http.app import create_app
from kvclient.serve.http.asking import Asking
from kvclient.serve.http.decisions import DecisionRequest
from kvclient.serve.http.messages import Counted, MessagesRequest
from kvclient.serve.http.responses import ResponsesRequest
from kvclient.serve.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    WarmRequest,
)
from kvclient.serve.scheduler import Limits, QueueFull

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = [{"role": "user", "content": "x"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


class Letters:
    """A token a character."""

    chat_template = "{{ messages }}"
    eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * len(text)}

    def apply_chat_template(self, messages, **_):
        return "".join(message["content"] for message in messages)

    def decode(self, ids, skip_special_tokens=True):
        return "x" * len(ids)


def answered(path, **how):
    def full(job):
        raise QueueFull("no job of this test is computed")

    limits = Limits(memory_tokens=100)
    loop = SimpleNamespace(identity=b"", limits=limits, submit=full, cancel=lambda job: None)
    app = create_app(Asking(Letters(), "letters", loop, 500, 16), "1")

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as client:
            return await client.post(path, **how)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": SAID, **dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"})}),
        (COMPLETION, {"prompt": "x", **dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})}),
        (CHAT, {"messages": SAID, "cache": {"salt": None, "read": None, "ttl_s": None}}),
        (CHAT, {"messages": SAID, "safety_identifier": "u", "prompt_cache_key": "k", "modalities": ["text"]}),
        (RESPONSES, {"input": "x", "temperature": None, "top_p": None, "tools": None, "tool_choice": None}),
        (RESPONSES, {"input": "x", "safety_identifier": "u", "prompt_cache_key": "k"}),
        (CHAT, {"messages": [{"role": "assistant", "content": None}, *SAID]}),
    ],
)
def test_what_is_null_is_not_said_and_what_changes_nothing_is_taken(path, asked):
    answer = answered(path, json=asked)
    assert answer.status_code == 429, answer.text


@pytest.mark.parametrize(
    ("path", "asked", "param", "word"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.content.type", "'text'"),
        (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "messages", "wants content"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages", "wants content"),
        (CHAT, {"messages": SAID, "stop": 5}, "stop", "string"),
        (CHAT, {"messages": SAID, "stop": ["a", ""]}, "stop", "no characters"),
        ("/tokenize", {"prompt": "x", "messages": SAID}, "prompt", "2 are there"),
        ("/tokenize", {"prompt": "x", "content": "y"}, "prompt", "2 are there"),
        (CHAT, {"messages": SAID, "logit_bias": {"abc": 1}}, "logit_bias.abc", "integer"),
        (CHAT, {"messages": SAID, "tool_choice": "any"}, "tool_choice", "'required'"),
        (CHAT, {"messages": SAID, "modalities": ["audio"]}, "modalities", "'text'"),
        (COMPLETION, {"prompt": [1, 2, "a"]}, "prompt", "integer"),
        (COMPLETION, {"prompt": None}, "prompt", "required"),
        (RESPONSES, {"input": []}, "input", "no item"),
        (RESPONSES, {"input": [{"role": "user", "content": [{**PICTURE, "type": "input_image"}]}]},
         "input.content.type", "'input_text'"),
        (CHAT, {"messages": SAID, "max_tokens": 10**9}, "messages", "computes 500 at most"),
        (COMPLETION, {"prompt": "x" * 501}, "prompt", "computes 500 at most"),
        (COMPLETION, {"prompt": "x" * 501, "max_tokens": 0, "echo": True}, "prompt", "computes 500 at most"),
        (CHAT, {"messages": SAID, "stream_options": {}}, "stream_options", "stream: true"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_where_it_is(path, asked, param, word):
    answer = answered(path, json=asked)
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, param) and word in told["message"], told


def test_a_text_under_the_names_of_two_servers_is_one():
    """vLLM has `prompt`, llama.cpp `content`; who asks either sends both."""
    answer = answered("/tokenize", json={"prompt": "xyz", "content": "xyz"})
    assert answer.status_code == 200 and answer.json()["count"] == 3, answer.text


def test_what_the_model_takes_and_the_memory_does_not_is_413():
    for tokens, new in ((90, 20), (101, 0)):
        answer = answered(COMPLETION, json={"prompt": "x" * tokens, "max_tokens": new, "echo": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "prompt")
    answer = answered(COMPLETION, json={"prompt": "x" * 100, "max_tokens": 0, "echo": True})
    assert answer.status_code == 429, answer.text


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_of_another_type_is_told_so(kind):
    """As `curl -d` sends it, where nobody says -H."""
    headers = {} if kind is None else {"content-type": kind}
    answer = answered(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}]}', headers=headers)
    assert answer.status_code in (400, 429)
    if answer.status_code == 400:
        assert "application/json" in answer.json()["error"]["message"]


WRONG = {"integer": 1, "number": 1.0, "boolean": True, "string": "5", "array": [], "object": {}}
REQUESTS = [
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, Counted, DecisionRequest,
    TokenizeRequest, DetokenizeRequest, WarmRequest,
]  # fmt: skip


class Schema:
    """A JSON schema as pydantic writes it; of: the whole, which references name parts of."""

    def __init__(self, of, part):
        while "$ref" in part:
            part = of["$defs"][part["$ref"].rpartition("/")[2]]
        self._of, self._part = of, part

    @property
    def ways(self):
        found = self._part.get("anyOf") or self._part.get("oneOf")
        return [self] if found is None else [way for part in found for way in Schema(self._of, part).ways]

    @property
    def kind(self):
        return self._part.get("type", "string" if {"const", "enum"} & self._part.keys() else None)

    def right(self):
        """A value that is taken."""
        part, way = self._part, self.ways[0]
        if way is not self:
            return way.right()
        if "const" in part or "enum" in part:
            return part.get("const", part.get("enum", [None])[0])
        if self.kind == "object":
            inner = {name: Schema(self._of, part["properties"][name]) for name in part.get("required", ())}
            named = {name: schema.right() for name, schema in inner.items()}
            if part.get("minProperties"):
                named["x"] = self._inner.right()
            return named | ({"content": "x"} if "role" in named else {})
        least = part.get("minimum", 1)
        some = [self._inner.right()] if self.kind == "array" and part.get("minItems") else []
        values = {"array": some, "boolean": True, "integer": least, "number": least, "string": "x"}
        return values.get(self.kind)

    @property
    def _inner(self):
        return Schema(self._of, self._part.get("items") or self._part.get("additionalProperties") or {})

    def wrong(self):
        """Values that are of another kind, or hold one."""
        kinds = {way.kind for way in self.ways}
        if None in kinds:
            return
        known = kinds | ({"integer"} if "number" in kinds else set())
        yield from (value for kind, value in WRONG.items() if kind not in known)
        for way in self.ways:
            holds = way._part.get("items") or way._part.get("additionalProperties")
            if isinstance(holds, dict) and len(self.ways) == 1:
                for value in way._inner.wrong():
                    yield [value] if way.kind == "array" else {"5": value}
            for name in way._part.get("properties", ()):
                for value in Schema(self._of, way._part["properties"][name]).wrong():
                    yield {**way.right(), name: value}


@pytest.mark.parametrize("request_of", REQUESTS)
def test_no_field_takes_a_value_of_another_kind(request_of):
    kinds, taken, count = TypeAdapter(request_of), [], 0
    whole = Schema(schema := kinds.json_schema(), schema)
    right = whole.right() | ({"prompt": "x"} if request_of is WarmRequest else {})
    kinds.validate_python(right)
    for name, part in schema["properties"].items():
        for value in Schema(schema, part).wrong():
            count += 1
            try:
                kinds.validate_python({**right, name: value})
                taken.append((name, value))
            except ValidationError as error:
                deepest = max(error.errors(), key=lambda met: len(met["loc"]))
                assert deepest["loc"][:1] == (name,), "another field is named"
    assert not taken
    assert count > 10
