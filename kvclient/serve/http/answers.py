"""Answers in OpenAI's shapes, whole or as a stream, from what the loop tells of their jobs.

Owns the waiting of one HTTP request for its jobs, and gives them up when its client is gone. Never computes.
Invariant: the pieces of a stream, put together, are the whole answer; a job is cancelled or has ended when
its Run is closed.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kvclient.serve.engine.job import Done, Event, Job, Prompt, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.errors import ApiError
from kvclient.serve.http.asking import Ask, Asking
from kvclient.serve.http.reasoning import Reasoning, parted
from kvclient.serve.http.tools import ForcedCall, SpokenCalls, calls_in, forced_call
from kvclient.serve.scheduler import QueueFull

RETRY_AFTER_S = 2


@dataclass
class Choice:
    """What one answer is so far."""

    ask: Ask
    text: str = ""
    tokens: list[Chosen] = field(default_factory=list)
    prompt: Prompt | None = None
    finish: str | None = None
    window: dict[str, int] | None = None
    accepted: int = 0  # tokens that were guessed, and right
    rejected: int = 0


class Run:
    """The jobs of one HTTP request. Raises ApiError."""

    def __init__(self, asking: Asking, asks: list[Ask], salt: bytes) -> None:
        self.began, self.first_at = time.perf_counter(), 0.0
        self.asking = asking
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.choices: list[Choice] = []
        self._jobs: list[Job] = []
        for ask in asks:
            base = len(self.choices)

            def tell(index: int, event: Event, base: int = base) -> None:
                loop.call_soon_threadsafe(self._events.put_nowait, (base + index, event))

            jobs = asking.jobs(ask, salt, tell)
            self._jobs += jobs
            self.choices += [Choice(ask) for _ in jobs]
        try:
            for job in self._jobs:
                asking.loop.submit(job)
        except QueueFull as full:
            self.close()
            raise ApiError(429, str(full), "rate_limit_error", "queue_full", None, RETRY_AFTER_S) from full

    def close(self) -> None:
        for job, choice in zip(self._jobs, self.choices, strict=False):
            if choice.finish is None:
                self.asking.loop.cancel(job)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Until every answer has ended. Raises ApiError for one that failed."""
        left = len(self.choices)
        while left:
            index, event = await self._events.get()
            choice = self.choices[index]
            if isinstance(event, Prompt):
                choice.prompt = event
            elif isinstance(event, Token):
                self.first_at = self.first_at or time.perf_counter()
                choice.text += event.text
                choice.tokens.append(event.chosen)
            elif isinstance(event, Done):
                choice.text += event.text
                choice.finish, choice.window = event.reason, event.window
                choice.accepted, choice.rejected = event.accepted, event.rejected
                left -= 1
            else:
                choice.finish = "error"
                kind = "server_error" if event.status >= 500 else "invalid_request_error"
                raise ApiError(event.status, event.message, kind)
            yield index, event

    async def whole(self, gone: Any) -> None:
        """Waits for all answers. gone: says whether the client is; asked while waiting."""
        done = asyncio.ensure_future(self._all())
        try:
            while not (await asyncio.wait({done}, timeout=0.25))[0]:
                if await gone():
                    return
            await done
        finally:
            done.cancel()
            self.close()

    async def _all(self) -> None:
        async for _ in self.events():
            pass

    # ---------------------------------------------------------------- figures

    def usage(self) -> dict[str, Any]:
        prompts = {id(choice.ask): choice.ask for choice in self.choices}.values()
        first = {id(c.ask): c.prompt for c in reversed(self.choices) if c.prompt is not None}
        cached = sum(prompt.cached_tokens for prompt in first.values())
        asked, said = sum(len(a.prompt) for a in prompts), sum(len(c.tokens) for c in self.choices)
        return {
            "prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(c.accepted for c in self.choices),
                "rejected_prediction_tokens": sum(c.rejected for c in self.choices),
            },
        }  # fmt: skip

    def reuse(self) -> dict[str, Any]:
        """Of the first answer: for the page and for headers."""
        prompt = next((c.prompt for c in self.choices if c.prompt is not None), None)
        if prompt is None:
            return {}
        disk, peer, asked = prompt.from_disk, prompt.from_peer, len(self.choices[0].ask.prompt)
        return {
            "prompt_tokens": asked, "reused_tokens": prompt.cached_tokens,
            "memory_tokens": prompt.cached_tokens - disk - peer, "disk_tokens": disk, "peer_tokens": peer,
            "approximate_tokens": prompt.approximate_tokens,
            "ttft_s": round(self.first_at - self.began, 4) if self.first_at else None,
            # At the rate prompts were computed lately: an estimate, and called one.
            "cold_ttft_estimate_s": None if prompt.cold_s is None else round(prompt.cold_s, 4),
            **({"window": held} if (held := self.choices[0].window) is not None else {}),
        }  # fmt: skip


def farthest_tier(reuse: dict[str, Any]) -> str:
    """Where the reused tokens of `Run.reuse()` came from: of several places the farthest."""
    for tier in ("peer", "disk", "memory"):
        if reuse.get(f"{tier}_tokens"):
            return tier
    return "none"


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def head(run: Run, kind: str, shown: str, made: int, ident: str) -> dict[str, Any]:
    name = run.asking.model_name
    return {
        "id": ident, "object": shown, "created": made, "model": name,
        "system_fingerprint": run.asking.fingerprint,
    }  # fmt: skip


# ---------------------------------------------------------------- chat


def chat_whole(run: Run) -> dict[str, Any]:
    out = head(run, "chatcmpl", "chat.completion", int(time.time()), new_id("chatcmpl"))
    choices = []
    for index, choice in enumerate(run.choices):
        message, finish = chat_message(choice)
        said = {"content": [spelled(run, chosen) for chosen in choice.tokens]}
        logprobs = said if choice.ask.sampling.logprobs is not None else None
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    return {**out, "choices": choices, "usage": run.usage(), "kv_reuse": run.reuse()}


def chat_message(choice: Choice) -> tuple[dict[str, Any], str | None]:
    (thought, text), calls = (None, choice.text), []
    if choice.ask.reasoning is not None:
        thought, text = parted(text, choice.ask.reasoning)
    if choice.ask.forced_tool:
        calls = forced_call(text)
        text = "" if calls else text
    elif choice.ask.tools:
        text, calls = calls_in(text, offered(choice.ask))
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
        return message, "tool_calls" if choice.finish == "stop" else choice.finish
    return message, choice.finish


async def chat_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    base = head(run, "chatcmpl", "chat.completion.chunk", int(time.time()), new_id("chatcmpl"))

    def chunk(
        index: int, delta: dict[str, Any], finish: str | None = None, said: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": said, "finish_reason": finish}
        return {**base, "choices": [choice]}

    thinking, calling = {}, dict[int, ForcedCall | SpokenCalls]()
    for index, choice in enumerate(run.choices):
        yield chunk(index, {"role": "assistant", "content": ""})
        if choice.ask.reasoning is not None:
            thinking[index] = Reasoning(choice.ask.reasoning)
        if choice.ask.forced_tool:
            calling[index] = ForcedCall()
        elif choice.ask.tools:
            calling[index] = SpokenCalls(offered(choice.ask))
    async for index, event in run.events():
        choice, ended = run.choices[index], isinstance(event, Done)
        if not isinstance(event, Token | Done):
            continue
        said = None
        if isinstance(event, Token) and choice.ask.sampling.logprobs is not None:
            said = {"content": [spelled(run, event.chosen)]}
        for delta in deltas(event.text, thinking.get(index), calling.get(index), bool(said), ended):
            yield chunk(index, delta, None, said)
            said = None
        if ended:
            yield chunk(index, {}, chat_message(choice)[1])
    last = {**base, "choices": [], "usage": run.usage(), "kv_reuse": run.reuse()}
    if wants_usage(run):
        yield last


def deltas(
    text: str, thinking: Reasoning | None, calling: ForcedCall | SpokenCalls | None, always: bool, ended: bool
) -> list[dict[str, Any]]:
    """Of one piece. always: also an empty one, for what stands beside it."""
    thought = ""
    if thinking is not None:
        thought, text = thinking.add(text)
        rest = thinking.end() if ended else ("", "")
        thought, text = thought + rest[0], text + rest[1]
    out: list[dict[str, Any]] = [{"reasoning_content": thought}] if thought else []
    if calling is not None:
        out += calling.add(text, ended)
    elif text:
        out.append({"content": text})
    return out or ([{"content": ""}] if always else [])


def offered(ask: Ask) -> set[str]:
    """The names of its tools."""
    return {tool.function.name for tool in ask.request.tools}  # type: ignore[attr-defined]


def wants_usage(run: Run) -> bool:
    options = run.choices[0].ask.request.stream_options
    return options is not None and options.include_usage


def spelled(run: Run, chosen: Chosen) -> dict[str, Any]:
    def word(token: int, logprob: float | None) -> dict[str, Any]:
        text = run.asking.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {**word(chosen.token, chosen.logprob), "top_logprobs": [word(*pair) for pair in chosen.top]}


# ---------------------------------------------------------------- completions


def completion_whole(run: Run) -> dict[str, Any]:
    out = head(run, "cmpl", "text_completion", int(time.time()), new_id("cmpl"))
    choices = []
    for index, choice in enumerate(run.choices):
        text, logprobs = choice.text, None
        decode = run.asking.tokenizer.decode
        if choice.ask.echo:
            text = decode(choice.ask.prompt, skip_special_tokens=True) + text
        if choice.ask.sampling.logprobs is not None:
            logprobs = listed(run, choice)
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish})
    return {**out, "choices": choices, "usage": run.usage(), "kv_reuse": run.reuse()}


def listed(run: Run, choice: Choice) -> dict[str, Any]:
    """logprobs as /v1/completions has them, of the prompt's tokens too where it is echoed."""
    decode = run.asking.tokenizer.decode
    rows: list[tuple[int, Chosen | None]] = []
    if choice.ask.echo and choice.prompt is not None:
        rows += list(zip(choice.ask.prompt, choice.prompt.logprobs, strict=True))
    rows += [(chosen.token, chosen) for chosen in choice.tokens]
    words = [decode([token]) for token, _ in rows]
    offsets, at = [], 0
    for word in words:
        offsets.append(at)
        at += len(word)
    tops = [{decode([token]): p for token, p in chosen.top} if chosen else None for _, chosen in rows]
    logprobs = [chosen.logprob if chosen else None for _, chosen in rows]
    return {"tokens": words, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


async def completion_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    base = head(run, "cmpl", "text_completion", int(time.time()), new_id("cmpl"))

    def chunk(index: int, text: str, finish: str | None = None, said: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": said, "finish_reason": finish}
        return {**base, "choices": [choice]}

    for index, choice in enumerate(run.choices):
        if choice.ask.echo:
            yield chunk(index, run.asking.tokenizer.decode(choice.ask.prompt, skip_special_tokens=True))
    async for index, event in run.events():
        choice = run.choices[index]
        if isinstance(event, Token):
            said = None
            if choice.ask.sampling.logprobs is not None:
                said = listed(run, Choice(choice.ask, tokens=[event.chosen]))
            if event.text or said:
                yield chunk(index, event.text, None, said)
        elif isinstance(event, Done):
            yield chunk(index, event.text, event.reason)
    if wants_usage(run):
        yield {**base, "choices": [], "usage": run.usage(), "kv_reuse": run.reuse()}


# ---------------------------------------------------------------- responses


def response_body(run: Run, ident: str, status: str) -> dict[str, Any]:
    choice, usage = run.choices[0], run.usage()
    part = {"type": "output_text", "text": choice.text, "annotations": []}
    message = {
        "id": ident.replace("resp", "msg"), "type": "message", "role": "assistant", "status": status,
        "content": [part],
    }  # fmt: skip
    incomplete = {"reason": "max_output_tokens"} if choice.finish == "length" else None
    return {
        "id": ident, "object": "response", "created_at": int(time.time()), "status": status,
        "model": run.asking.model_name, "output": [message] if status != "in_progress" else [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None,
        "incomplete_details": incomplete,
        "usage": {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


async def response_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    ident, number = new_id("resp"), 0
    item = {"item_id": ident.replace("resp", "msg"), "output_index": 0, "content_index": 0}
    begun = response_body(run, ident, "in_progress")
    yield {"type": "response.created", "sequence_number": 0, "response": begun}
    async for _, event in run.events():
        text = event.text if isinstance(event, Token | Done) else ""
        if text:
            number += 1
            yield {"type": "response.output_text.delta", "sequence_number": number, "delta": text, **item}
    text = run.choices[0].text
    yield {"type": "response.output_text.done", "sequence_number": number + 1, "text": text, **item}
    whole = response_body(run, ident, "completed")
    yield {"type": "response.completed", "sequence_number": number + 2, "response": whole}


async def as_events(
    chunks: AsyncIterator[dict[str, Any]], run: Run, named: bool = False
) -> AsyncIterator[str]:
    """Server-sent events. A failure in the middle is told as one, for the status is sent already."""
    try:
        async for chunk in chunks:
            name = f"event: {chunk['type']}\n" if named else ""
            yield f"{name}data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    finally:
        run.close()
    if not named:
        yield "data: [DONE]\n\n"
