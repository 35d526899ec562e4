"""Answers of /v1/responses: items of thoughts, words and calls of functions.

Owns the shapes. Never computes. Invariant: the items of a stream, put together, are those of the whole
answer; one item is open at a time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, cast

from kvclient.serve.engine.job import Done, Token
from kvclient.serve.http.answers.chat import chat_message, deltas, listeners, whole_deltas
from kvclient.serve.http.answers.run import Choice, Run, new_id
from kvclient.serve.http.schema import ChatRequest

Item = dict[str, Any]


def response_whole(run: Run) -> dict[str, Any]:
    """The answer of /v1/responses in one piece."""
    items, choice = Items(), run.choices[0]
    for delta in whole_deltas(choice):
        items.of(delta)
    status = _status(choice)
    items.end(status)
    return _body(run, new_id("resp"), status, items.done)


async def response_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    """The events of /v1/responses as they come, numbered."""
    ident, items, choice = new_id("resp"), Items(), run.choices[0]
    thinking, calling = listeners(choice.ask)
    number = -1

    def numbered(event: Item) -> Item:
        nonlocal number
        number += 1
        return {**event, "sequence_number": number}

    for kind in ("created", "in_progress"):
        yield numbered({"type": f"response.{kind}", "response": _body(run, ident, "in_progress", [])})
    async for _, event in run.events():
        if isinstance(event, Token | Done):
            for delta in deltas(event.text, thinking, calling, False, isinstance(event, Done)):
                for told in items.of(delta):
                    yield numbered(told)
    status = _status(choice)
    for told in items.end(status):
        yield numbered(told)
    yield numbered({"type": f"response.{status}", "response": _body(run, ident, status, items.done)})


def _status(choice: Choice) -> str:
    return "incomplete" if chat_message(choice)[1] == "length" else "completed"


class Items:
    """Which item is open, and the events that a delta of a chat is."""

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._open: Item | None = None
        self._text = ""

    def of(self, delta: Item) -> list[Item]:
        """The events that tell a delta: the item before it ends where it is of another kind."""
        out: list[Item] = []
        if thought := delta.get("reasoning_content"):
            out += self._opened("reasoning", _thought)
            out.append(self._delta("response.reasoning_text.delta", thought, content_index=0))
        if text := delta.get("content"):
            out += self._opened("message", _message)
            out.append(self._delta("response.output_text.delta", text, content_index=0, logprobs=[]))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                out += self._opened("", lambda call=call: _call(call))
            if arguments := call["function"]["arguments"]:
                out.append(self._delta("response.function_call_arguments.delta", arguments))
        return out

    def end(self, status: str) -> list[Item]:
        """Nothing follows; an answer of nothing is a message of nothing."""
        out = self._opened("message", _message) if self._open is None and not self.done else []
        return [*out, *self._closed(status)]

    @property
    def _place(self) -> Item:
        return {"item_id": (self._open or {})["id"], "output_index": len(self.done)}

    def _opened(self, kind: str, make: Any) -> list[Item]:
        if self._open is not None and self._open["type"] == kind:
            return []
        out = self._closed("completed")
        self._open, self._text = make(), ""
        out.append({"type": "response.output_item.added", "output_index": len(self.done), "item": self._open})
        if (part := _part(self._open, "")) is not None:
            added = {"type": "response.content_part.added", "content_index": 0, "part": part}
            out.append({**added, **self._place})
        return out

    def _delta(self, kind: str, text: str, **more: Any) -> Item:
        self._text += text
        return {"type": kind, "delta": text, **more, **self._place}

    def _closed(self, status: str) -> list[Item]:
        if self._open is None:
            return []
        item, text, place = self._open, self._text, self._place
        out: list[Item] = []
        if item["type"] == "function_call":
            told = {"arguments": text, "name": item["name"]}
            out.append({"type": "response.function_call_arguments.done", **told, **place})
        else:
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            logprobs = {"logprobs": []} if kind == "output_text" else {}
            out.append(
                {"type": f"response.{kind}.done", "text": text, "content_index": 0, **logprobs, **place}
            )
            part = {"content_index": 0, "part": _part(item, text)}
            out.append({"type": "response.content_part.done", **part, **place})
        item = {**_ended(item, text), "status": status}
        out.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._open = None
        return out


def _thought() -> Item:
    return {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _message() -> Item:
    said = {"role": "assistant", "status": "in_progress", "content": []}
    return {"id": new_id("msg"), "type": "message", **said}


def _call(call: Item) -> Item:
    name = call["function"]["name"]
    told = {"call_id": call["id"], "name": name, "arguments": "", "status": "in_progress"}
    return {"id": new_id("fc"), "type": "function_call", **told}


def _part(item: Item, text: str) -> Item | None:
    """The one part of its content; None: it has none."""
    if item["type"] == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text} if item["type"] == "reasoning" else None


def _ended(item: Item, text: str) -> Item:
    part = _part(item, text)
    filled = {"arguments": text} if part is None else {"content": [part]}
    return {**item, **filled, "status": "completed"}


def _body(run: Run, ident: str, status: str, items: list[Item]) -> Item:
    usage, asked = run.usage(), cast(ChatRequest, run.choices[0].ask.request)
    thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "id": ident, "object": "response", "created_at": int(time.time()), "status": status,
        "model": run.asking.model_name, "output": items, "error": None,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": _named(asked.tool_choice),
        "tools": [_tool(tool.function) for tool in asked.tools],
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
        },
        **({"kv_reuse": run.reuse()} if run.over else {}),
    }  # fmt: skip


def _named(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.function.name}


def _tool(function: Any) -> Item:
    return {
        "type": "function", "name": function.name, "description": function.description,
        "parameters": function.parameters or {}, "strict": bool(function.strict),
    }  # fmt: skip
