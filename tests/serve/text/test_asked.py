"""Proves that a request as clients write it is taken, and that what is wrong with one is said where it is:
null is what was not said, a message says something, the field that is named is one of the request.

Method: the application itself over a loop that has no room, so that what is taken is a 429 and costs nothing.
"""

import asyncio
from types import SimpleNamespace

import httpx2
import pytest

from kvclient.serve.http.app import create_app
from kvclient.serve.http.asking import Asking
from kvclient.serve.http.schema import ChatRequest, CompletionRequest
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
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_where_it_is(path, asked, param, word):
    answer = answered(path, json=asked)
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, param) and word in told["message"], told


def test_what_the_model_takes_and_the_memory_does_not_is_413():
    answer = answered(COMPLETION, json={"prompt": "x" * 90, "max_tokens": 20})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "prompt")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_of_another_type_is_told_so(kind):
    """As `curl -d` sends it, where nobody says -H."""
    headers = {} if kind is None else {"content-type": kind}
    answer = answered(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}]}', headers=headers)
    assert answer.status_code in (400, 429)
    if answer.status_code == 400:
        assert "application/json" in answer.json()["error"]["message"]
