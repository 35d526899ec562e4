"""Proves that an answer of words, thoughts and calls has the same parts in the same order whole and streamed,
in each of the three APIs that tell such answers, and that it comes back as one turn.

Method: a Run over the events of a text that a test cuts in pieces, as models write calls between words, cut
short and whole; what its stream says, put together as clients do, beside the whole answer.
"""

import asyncio
from types import SimpleNamespace

import pytest
from pydantic_core import from_json

from kvclient.serve.engine.job import Done, Prompt, Token
from kvclient.serve.engine.sampling import Chosen, Sampling
from kvclient.serve.http.answers.chat import chat_stream, chat_whole
from kvclient.serve.http.answers.messages import message_stream, message_whole
from kvclient.serve.http.answers.responses import response_stream, response_whole
from kvclient.serve.http.answers.run import Choice, Run
from kvclient.serve.http.asking import Ask
from kvclient.serve.http.responses import ResponsesRequest, as_chat
from kvclient.serve.http.schema import ChatRequest

FIELDS = {"thinking": "thinking", "text": "text", "tool_use": "input"}  # of the blocks of messages
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"k": "a"}}</tool_call>'
FORCED = '{"name": "look", "arguments": {"k": "a"}}'


class Said(Run):
    """The answer of a text, told in pieces of so many characters."""

    def __init__(self, text, size, reason, **ask):
        request = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS)
        self.asking = SimpleNamespace(model_name="tiny", fingerprint="x")
        self.began = self.first_at = 0.0
        self._events = asyncio.Queue()
        self.choices = [Choice(Ask([0], 99, Sampling(), request, tools=True, **ask))]
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for event in (Prompt(0, 0, 0, 0, None), *(Token(piece, Chosen(0)) for piece in pieces)):
            self._events.put_nowait((0, event))
        self._events.put_nowait((0, Done(reason, "")))

    async def told(self, made):
        if made in (chat_whole, message_whole, response_whole):
            await self._all()
            return made(self)
        return [chunk async for chunk in made(self)]


def told(made, *said, **ask):
    async def run():
        return await Said(*said, **ask).told(made)

    return asyncio.run(run())


def without_ids(found):
    if isinstance(found, list):
        return [without_ids(part) for part in found]
    if isinstance(found, dict):
        return {name: without_ids(v) for name, v in found.items() if name not in ("id", "call_id")}
    return found


CASES = {
    "a call between words": (f"I look. {CALL} And so on.", {}),
    "calls and words by turns": (f"a {CALL}b{CALL} c", {}),
    "two calls": (CALL + "\n" + CALL, {}),
    "words": ("Nothing.", {}),
    "nothing": ("", {}),
    "thoughts before a call": (f"<think>hm</think>{CALL}then", {"reasoning": False}),
    "thoughts that were cut": ("<think>hm", {"reasoning": False}),
    "thoughts alone": ("<think>hm</think>", {"reasoning": False}),
    "a forced call": (FORCED, {"forced_tool": True}),
    "a forced call, cut in its arguments": (FORCED[:-4], {"forced_tool": True}),
    "a forced call, cut before its name": (FORCED[:8], {"forced_tool": True}),
}
each = pytest.mark.parametrize("case", list(CASES))


@each
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("size", [1, 1000])
def test_the_items_of_a_response_are_those_of_its_stream(case, reason, size):
    text, ask = CASES[case]
    whole = told(response_whole, text, size, reason, **ask)
    events = told(response_stream, text, size, reason, **ask)
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == events[-1]["response"]["output"]
    assert without_ids(whole["output"]) == without_ids(ended)
    assert whole["status"] == events[-1]["response"]["status"]
    kinds = [item["type"] for item in whole["output"]]
    if case == "a call between words":
        assert kinds == ["message", "function_call", "message"]
        assert [item["content"][0]["text"] for item in whole["output"][::2]] == ["I look.", "And so on."]
    if case == "nothing":
        assert kinds == ["message"]


@each
@pytest.mark.parametrize("size", [1, 1000])
def test_the_blocks_of_a_message_are_those_of_its_stream(case, size):
    (text, ask), reason = CASES[case], "stop"
    whole = told(message_whole, text, size, reason, **ask)
    blocks = []
    for event in told(message_stream, text, size, reason, **ask):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            _, piece = event["delta"].values()
            blocks[-1]["said"] += piece
    for block in blocks:
        said = block.pop("said")
        block[FIELDS[block["type"]]] = from_json(said, allow_partial=True) if "input" in block else said
    assert without_ids(whole["content"]) == without_ids(blocks)


@each
def test_a_chat_is_the_sum_of_its_stream(case):
    (text, ask), size, reason = CASES[case], 1, "stop"
    message = told(chat_whole, text, size, reason, **ask)["choices"][0]["message"]
    content, calls = "", []
    for chunk in told(chat_stream, text, size, reason, **ask):
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append("")
            calls[-1] += call["function"]["arguments"]
    assert content == (message["content"] or "")
    assert calls == [call["function"]["arguments"] for call in message.get("tool_calls", ())]


def test_an_answer_around_a_call_comes_back_as_one_turn_with_its_result_behind_it():
    output = told(response_whole, CASES["a call between words"][0], 1000, "stop")["output"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "three"}
    asked = ResponsesRequest(input=[{"role": "user", "content": "x"}, *output, result])
    said = [message.plain() for message in as_chat(asked).messages]
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert said[1]["content"] == "I look.\nAnd so on." and len(said[1]["tool_calls"]) == 1
