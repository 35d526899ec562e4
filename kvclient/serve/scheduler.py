"""Who is computed next: a piece of a prompt, or one token of every running request.

Owns the queue and the order. Knows no model, no clock of its own and no thread: a caller asks what to do and
says when it was done. Invariants: a request is waiting, filling, running or gone; filling and running
requests
together never hold more tokens than the memory plan gives, counted to their last token; while some run, no
two pieces of prompts follow each other without a token for all of them in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class QueueFull(Exception):
    """As many wait as may."""


@dataclass(frozen=True)
class Limits:
    """max_batch: requests computed side by side. max_queue: waiting behind them. piece_tokens: of a prompt at
    one time beside others. memory_tokens: KV of all of them together. timeout_s: for a whole request.
    """

    max_batch: int = 16
    max_queue: int = 128
    piece_tokens: int = 512
    memory_tokens: int = 1 << 17
    timeout_s: float = 600.0


@dataclass(eq=False)
class Entry:
    """A request as the scheduler sees it. filled: tokens of the prompt that are computed."""

    job: Any
    prompt_tokens: int
    total_tokens: int  # held at most, with all that may be generated
    deadline: float
    arrived: int = 0
    filled: int = 0
    whole: bool = False  # its prompt is not cut into pieces

    @property
    def left(self) -> int:
        return self.prompt_tokens - self.filled


@dataclass(frozen=True)
class Prefill:
    entry: Entry
    upto: int  # of the prompt's tokens


@dataclass(frozen=True)
class Decode:
    entries: list[Entry]


class Scheduler:
    """Not thread-safe: its owner is."""

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self.limits, self._now = limits, now
        self._waiting: deque[Entry] = deque()
        self._filling: list[Entry] = []
        self._running: list[Entry] = []
        self._arrivals = self._pieces = 0
        self._decode_due = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._filling) + len(self._running)

    @property
    def entries(self) -> list[Entry]:
        return [*self._waiting, *self._filling, *self._running]

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._filling or self._running)

    @property
    def held_tokens(self) -> int:
        return sum(entry.total_tokens for entry in (*self._filling, *self._running))

    def submit(
        self, job: Any, prompt_tokens: int, new_tokens: int, most_tokens: int | None = None
    ) -> Entry:
        """most_tokens: that it holds at a time, where that has a bound of its own. Raises QueueFull."""
        if len(self._waiting) >= self.limits.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait already, {self.limits.max_queue} may")
        self._arrivals += 1
        deadline = self._now() + self.limits.timeout_s
        held = prompt_tokens + new_tokens if most_tokens is None else most_tokens
        entry = Entry(job, prompt_tokens, held, deadline, self._arrivals)
        self._waiting.append(entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """It has ended, or was cancelled. Idempotent."""
        for place in (self._waiting, self._filling, self._running):
            if entry in place:
                place.remove(entry)

    def expired(self) -> list[Entry]:
        """Requests over their time, which the caller removes."""
        now = self._now()
        return [entry for entry in self.entries if entry.deadline <= now]

    def next(self) -> Prefill | Decode | None:
        """What to compute; None: nothing is there. The caller tells filled() of a Prefill."""
        self._admit()
        if self._running and (self._decode_due or not self._filling):
            self._decode_due = False
            return Decode(list(self._running))
        if not self._filling:
            return None
        self._decode_due = bool(self._running)
        self._pieces += 1
        # Short prompts first, so that they need not wait for a long one's end; every fourth piece the oldest.
        oldest = self._pieces % 4 == 0
        entry = min(self._filling, key=lambda e: e.arrived if oldest else (e.left, e.arrived))
        alone = self.active == 1 and not self._waiting
        upto = entry.prompt_tokens
        if not (entry.whole or alone):
            upto = min(upto, entry.filled + self.limits.piece_tokens)
        return Prefill(entry, upto)

    def filled(self, entry: Entry, upto: int) -> None:
        """So many tokens of its prompt are computed; behind the last it runs."""
        entry.filled = upto
        if upto >= entry.prompt_tokens and entry in self._filling:
            self._filling.remove(entry)
            self._running.append(entry)

    def _admit(self) -> None:
        while self._waiting and self.active < self.limits.max_batch:
            held = self.held_tokens + self._waiting[0].total_tokens
            if self.active and held > self.limits.memory_tokens:
                return
            self._filling.append(self._waiting.popleft())
