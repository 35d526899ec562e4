"""One HTTP request's answers as they grow, from what the loop tells of their jobs.

Owns the waiting for its jobs, and gives them up when its client is gone. Never computes, and knows no API's
shapes. Invariant: a job is cancelled or has ended when its Run is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

from kvclient.serve.engine.job import Done, Event, Job, Prompt, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.errors import ANTHROPIC, RESPONSES, ApiError
from kvclient.serve.http.asking import Ask, Asking
from kvclient.serve.http.reasoning import Reasoning
from kvclient.serve.scheduler import QueueFull

RETRY_AFTER_S = 2
log = logging.getLogger(__name__)


@dataclass
class Choice:
    """What one answer is so far."""

    ask: Ask
    text: str = ""
    tokens: list[Chosen] = field(default_factory=list)
    prompt: Prompt | None = None
    finish: str | None = None
    stopped: str | None = None  # the stop string that ended it
    window: dict[str, int] | None = None
    accepted: int = 0  # tokens that were guessed, and right
    rejected: int = 0
    _thoughts: Reasoning | None = None
    _before: int = 0  # tokens until the answer began

    def add(self, token: Token) -> None:
        """It was generated."""
        self.text += token.text
        self.tokens.append(token.chosen)
        if self.ask.reasoning is not None:
            self._thoughts = self._thoughts or Reasoning(self.ask.reasoning)
            self._before += not self._thoughts.over
            self._thoughts.add(token.text)

    @property
    def reasoning_tokens(self) -> int:
        """Those of its thoughts, and of the marks around them."""
        return self._before if self._thoughts is not None and self._thoughts.met else 0


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
        """Cancels what has not ended."""
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
                choice.add(event)
            elif isinstance(event, Done):
                choice.text += event.text
                choice.finish, choice.stopped, choice.window = event.reason, event.stopped, event.window
                choice.accepted, choice.rejected = event.accepted, event.rejected
                left -= 1
            else:
                choice.finish = "error"
                kind = "server_error" if event.status >= 500 else "invalid_request_error"
                again_s = RETRY_AFTER_S if event.status == 503 else None
                raise ApiError(event.status, event.message, kind, retry_after_s=again_s)
            yield index, event

    async def whole(self, gone: Awaitable[Any]) -> None:
        """Waits for all answers. gone: ends once the client is; one that fails says nothing of it. Raises
        ApiError, 499 where that is first: what there is of the answers is nobody's, and no whole one can be
        made of it.
        """
        done, left = asyncio.ensure_future(self._all()), asyncio.ensure_future(gone)
        try:
            await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done() and not left.cancelled() and (error := left.exception()) is not None:
                log.warning("whether a client is there is not known: %s: %s", type(error).__name__, error)
                await asyncio.wait({done})
            if not done.done():
                raise ApiError(499, "the client is gone")
            await done
        finally:
            done.cancel()
            left.cancel()
            self.close()

    async def _all(self) -> None:
        async for _ in self.events():
            pass

    @property
    def over(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish is not None for choice in self.choices)

    # ---------------------------------------------------------------- figures

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, as OpenAI's API has them; a prompt counts once, however many answers it has."""
        prompts = {id(choice.ask): choice.ask for choice in self.choices}.values()
        first = {id(c.ask): c.prompt for c in reversed(self.choices) if c.prompt is not None}
        cached = sum(prompt.cached_tokens for prompt in first.values())
        asked, said = sum(len(a.prompt) for a in prompts), sum(len(c.tokens) for c in self.choices)
        return {
            "prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.reasoning_tokens for c in self.choices),
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
        told = {
            "prompt_tokens": asked, "reused_tokens": prompt.cached_tokens,
            "memory_tokens": prompt.cached_tokens - disk - peer, "disk_tokens": disk, "peer_tokens": peer,
            "approximate_tokens": prompt.approximate_tokens,
            "ttft_s": round(self.first_at - self.began, 4) if self.first_at else None,
            # At the rate prompts were computed lately: an estimate, and called one.
            "cold_ttft_estimate_s": None if prompt.cold_s is None else round(prompt.cold_s, 4),
            **({"window": held} if (held := self.choices[0].window) is not None else {}),
        }  # fmt: skip
        return {**told, "tier": farthest_tier(told)}


def last_words(run: Run) -> dict[str, Any]:
    """What the last chunk of a stream says that tells no usage."""
    return {"kv_reuse": run.reuse()} if run.over and not wants_usage(run) else {}


def wants_usage(run: Run) -> bool:
    """Whether the stream ends with the counts of tokens."""
    options = run.choices[0].ask.request.stream_options
    return options is not None and options.include_usage


def farthest_tier(reuse: dict[str, Any]) -> str:
    """Where the reused tokens of `Run.reuse()` came from: of several places the farthest."""
    for tier in ("peer", "disk", "memory"):
        if reuse.get(f"{tier}_tokens"):
            return tier
    return "none"


def new_id(kind: str) -> str:
    """An id of its own, with the kind in front."""
    return f"{kind}-{uuid.uuid4().hex}"


def head(run: Run, kind: str, shown: str, made: int, ident: str) -> dict[str, Any]:
    """What every object of an answer begins with. made: seconds since 1970. Of a stream that ends with the
    counts of tokens each chunk has them, null until then.
    """
    name = run.asking.model_name
    return {
        "id": ident, "object": shown, "created": made, "model": name,
        "system_fingerprint": run.asking.fingerprint, **({"usage": None} if wants_usage(run) else {}),
    }  # fmt: skip


async def as_events(chunks: AsyncIterator[dict[str, Any]], run: Run, path: str) -> AsyncIterator[str]:
    """Server-sent events, as the API of this path has them. A failure in the middle is told as one, for the
    status is sent already. What comes behind the last token is one piece: nothing of it is waited for.
    """
    named, held = path in (ANTHROPIC, RESPONSES), ""
    try:
        async for chunk in chunks:
            name = f"event: {chunk['type']}\n" if named else ""
            held += f"{name}data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            if not run.over:
                yield held
                held = ""
    except ApiError as error:
        held += error.event_at(path)
    finally:
        run.close()
    yield held if named else f"{held}data: [DONE]\n\n"
