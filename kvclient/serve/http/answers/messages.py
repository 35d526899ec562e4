"""Answers in the shapes of Anthropic's messages API, whole or as a stream of blocks.

Owns the shapes. Never computes. Invariant: the blocks of a stream, put together, are those of the whole
answer; one block is open at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json

from kvclient.serve.engine.job import Done, Prompt, Token
from kvclient.serve.http.answers.chat import chat_message, deltas, listeners, whole_deltas
from kvclient.serve.http.answers.run import Choice, Run, new_id

REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def message_whole(run: Run) -> dict[str, Any]:
    """The answer of /v1/messages in one piece."""
    choice, blocks = run.choices[0], Blocks()
    for delta in whole_deltas(choice):
        blocks.of(delta)
    told = {"content": blocks.whole(), **_stopped(choice, chat_message(choice)[1]), "usage": _usage(run)}
    return {**_head(run, new_id("msg")), **told, "kv_reuse": run.reuse()}


async def message_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    """The events of /v1/messages as they come."""
    blocks, choice = Blocks(), run.choices[0]
    thinking, calling = listeners(choice.ask)
    async for _, event in run.events():
        if isinstance(event, Prompt):
            begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(run)}
            yield {"type": "message_start", "message": {**_head(run, new_id("msg")), **begun}}
        if isinstance(event, Token | Done):
            for delta in deltas(event.text, thinking, calling, False, isinstance(event, Done)):
                for told in blocks.of(delta):
                    yield told
    for told in blocks.closed():
        yield told
    ended = {"delta": _stopped(choice, chat_message(choice)[1]), "usage": _usage(run)}
    yield {"type": "message_delta", **ended, "kv_reuse": run.reuse()}
    yield {"type": "message_stop"}


class Blocks:
    """Which block is open, and the events that a delta of a chat is."""

    def __init__(self) -> None:
        self._open, self._index = "", -1
        self._all: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of each

    def of(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """The events that tell a delta: the block before it ends where it is of another kind."""
        out: list[dict[str, Any]] = []
        if thought := delta.get("reasoning_content"):
            out += self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._delta("thinking_delta", "thinking", thought))
        if text := delta.get("content"):
            out += self._opened("text", {"type": "text", "text": ""})
            out.append(self._delta("text_delta", "text", text))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                out += self._opened(call["id"], _called(call, {}))
            if arguments := call["function"]["arguments"]:
                out.append(self._delta("input_json_delta", "partial_json", arguments))
        return out

    def closed(self) -> list[dict[str, Any]]:
        """The event that ends the open block, if one is."""
        opened, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._index}] if opened else []

    def whole(self) -> list[dict[str, Any]]:
        """The blocks so far, each with all that its deltas said."""
        kinds = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        told = zip(self._all, self._texts, strict=True)
        return [
            {**block, kinds[block["type"]]: _arguments(text) if block["type"] == "tool_use" else text}
            for block, text in told
        ]

    def _opened(self, name: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if name == self._open:
            return []
        out = self.closed()
        self._open, self._index = name, self._index + 1
        self._all.append(block)
        self._texts.append("")
        return [*out, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        self._texts[-1] += text
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: text}}


def _head(run: Run, ident: str) -> dict[str, Any]:
    return {"id": ident, "type": "message", "role": "assistant", "model": run.asking.model_name}


def _called(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    ident = call["id"].replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": ident, "name": call["function"]["name"], "input": arguments}


def _arguments(text: str) -> dict[str, Any]:
    """What there is of them where max_tokens cut them, as its clients read a stream that is."""
    try:
        told = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _stopped(choice: Choice, finish: str | None) -> dict[str, Any]:
    if finish == "stop" and choice.stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped}
    return {"stop_reason": REASONS[finish or "stop"], "stop_sequence": None}


def _usage(run: Run) -> dict[str, int]:
    """There, what was read from the cache is not among the input tokens."""
    told = run.usage()
    cached = told["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": told["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "output_tokens": told["completion_tokens"],
    }  # fmt: skip
