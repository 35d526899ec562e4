"""Who is computed next: a piece of a prompt, or one token of every running request.

Owns the queue and the order. Knows no model, no clock of its own and no thread: a caller asks what to do and
says when it was done. Invariants: a request is waiting, filling, running or gone; filling and running
requests together never hold more tokens than the memory plan gives, unless one is alone; while some run, no
two pieces of prompts follow each other without a token for all of them in between.

Memory is counted as it is held, not as it might be: where the next tokens would have no room, the youngest
gives its back and waits again, first in the queue. The oldest never does, so it ends, and so do all.
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
    step_tokens: that one step adds to a request, at most. alone_whole: a prompt is computed at one time where
    nobody else is there.
    """

    max_batch: int = 16
    max_queue: int = 128
    piece_tokens: int = 512
    memory_tokens: int = 1 << 17
    timeout_s: float = 600.0
    step_tokens: int = 1
    alone_whole: bool = False

    @property
    def most(self) -> int:
        """Tokens of prompts in one pass: a piece, or an eighth more."""
        return self.piece_tokens * 9 // 8

    def piece(self, left: int) -> int:
        """Of so many tokens of a prompt, those that are computed next. Pieces of a prompt are of one length:
        a short last one would read all weights for little.
        """
        return -(-left // -(-left // self.most))


ROOM_STEPS = 32  # a request comes in only where all have room for so many steps more


@dataclass(eq=False)
class Entry:
    """A request as the scheduler sees it. filled: tokens of the prompt that are computed. After it gave its
    memory back its prompt is all that was said so far.
    """

    job: Any
    prompt_tokens: int
    new_tokens: int  # that may still be generated behind the prompt
    deadline: float
    bound: int | None = None  # tokens that it holds from its first to its last; None: what it has so far
    generated: int = 0  # behind the prompt
    preempted: int = 0  # times
    arrived: int = 0
    filled: int = 0
    whole: bool = False  # its prompt is not cut into pieces

    @property
    def left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return self.prompt_tokens - self.filled

    @property
    def held(self) -> int:
        """Tokens of KV, those of its whole prompt from the first piece on."""
        return self.prompt_tokens + self.generated if self.bound is None else self.bound

    def after(self, tokens: int) -> int:
        """held, so many tokens later."""
        return self.held + (min(tokens, self.new_tokens - self.generated) if self.bound is None else 0)


@dataclass(frozen=True)
class Prefill:
    entry: Entry
    upto: int  # of the prompt's tokens
    kept: bool = False  # its cache stays for the next piece; without, pieces meet in the store


@dataclass(frozen=True)
class Decode:
    """pieces: of prompts whose rest is short enough to be computed in the same pass."""

    entries: list[Entry]
    pieces: tuple[Prefill, ...] = ()


@dataclass(frozen=True)
class Look:
    """What computing a prompt comes to: how many of its tokens are there already, and the name of what is to
    be computed first, which others may be about to compute too. held: somebody computes that now, so it waits
    while there is another to compute.
    """

    stored: int
    missing: bytes | None = None
    held: bool = False


Looking = Callable[[Entry], "Look | None"]


@dataclass(frozen=True)
class Preempt:
    """It waits again; its caller gives its memory back now."""

    entry: Entry


class Scheduler:
    """Not thread-safe: its owner is. look: None for a prompt that is computed by itself, whatever its length
    is.
    """

    def __init__(self, limits: Limits, now: Callable[[], float], look: Looking = lambda entry: None) -> None:
        self.limits, self._now, self._look = limits, now, look
        self._waiting: deque[Entry] = deque()
        self._filling: list[Entry] = []
        self._running: list[Entry] = []
        self._arrivals = self._pieces = 0
        self._decode_due = False

    @property
    def waiting(self) -> int:
        """How many requests have no place yet."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """How many requests have a place."""
        return len(self._filling) + len(self._running)

    @property
    def entries(self) -> list[Entry]:
        """All requests, those without a place first."""
        return [*self._waiting, *self._filling, *self._running]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._filling or self._running)

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV the requests hold."""
        return sum(entry.held for entry in (*self._filling, *self._running))

    def submit(self, job: Any, prompt_tokens: int, new_tokens: int, most_tokens: int | None = None) -> Entry:
        """most_tokens: that it holds at a time, where that has a bound of its own. Raises QueueFull."""
        if (count := sum(not entry.preempted for entry in self._waiting)) >= self.limits.max_queue:
            raise QueueFull(f"{count} requests wait already, {self.limits.max_queue} may")
        self._arrivals += 1
        deadline = self._now() + self.limits.timeout_s
        entry = Entry(job, prompt_tokens, new_tokens, deadline, most_tokens, arrived=self._arrivals)
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

    def next(self) -> Prefill | Decode | Preempt | None:
        """What to compute; None: nothing is there. The caller tells filled() of a Prefill, and generated() of
        what a Decode gave.
        """
        self._admit()
        if (victim := self._over()) is not None:
            return Preempt(victim)
        if self._running and (self._decode_due or not self._filling):
            self._decode_due = False
            return Decode(list(self._running), self._short(self._looks(), False))
        if not self._filling:
            return None
        self._pieces += 1
        # Short prompts first, so that they need not wait for a long one's end; every fourth piece the oldest.
        oldest = self._pieces % 4 == 0
        looks = self._looks()
        if pieces := self._short(looks, oldest):
            return Decode(list(self._running), pieces)
        self._decode_due = bool(self._running)
        able = [entry for entry, look in looks if look is None or not look.held] or self._filling
        entry = min(able, key=lambda e: e.arrived if oldest else (e.left, e.arrived))
        return self._prefill(entry, dict(looks)[entry])

    def _prefill(self, entry: Entry, look: Look | None) -> Prefill:
        alone = self.active == 1 and not self._waiting
        if look is not None and not (alone and self.limits.alone_whole and not entry.filled):
            there = max(entry.filled, look.stored)
            more = self.limits.piece(max(1, entry.prompt_tokens - there))
            return Prefill(entry, min(entry.prompt_tokens, there + more), True)
        upto = entry.prompt_tokens
        if not (entry.whole or alone):  # its pieces would meet in the store: in its codec, on its disk
            upto = min(upto, entry.filled + self.limits.piece_tokens)
        return Prefill(entry, upto)

    def _looks(self) -> list[tuple[Entry, Look | None]]:
        return [(entry, self._look(entry)) for entry in self._filling]

    def _short(self, looks: list[tuple[Entry, Look | None]], oldest: bool) -> tuple[Prefill, ...]:
        """The prompts whose rests together are one piece, or an eighth more: those that share what is missing
        one by one, so that it is computed once. None where it is the oldest one's turn, and that is long.
        """
        room, names, out = self.limits.most, set[bytes](), list[Prefill]()
        rests = [(entry.prompt_tokens - look.stored, entry.arrived, look.missing, entry)
                 for entry, look in looks if look is not None and not look.held]  # fmt: skip
        for rest, _, missing, entry in sorted(rests, key=lambda at: at[:2]):
            if rest <= room and missing not in names:
                room -= rest
                out.append(Prefill(entry, entry.prompt_tokens))
                names |= {missing} if missing is not None else set()
        first = min(self._filling, key=lambda entry: entry.arrived, default=None)
        return () if oldest and all(piece.entry is not first for piece in out) else tuple(out)

    def filled(self, entry: Entry, upto: int) -> None:
        """So many tokens of its prompt are computed; behind the last it runs."""
        entry.filled = upto
        if upto >= entry.prompt_tokens and entry in self._filling:
            self._filling.remove(entry)
            self._running.append(entry)

    def generated(self, entry: Entry, tokens: int) -> None:
        """So many were generated behind its prompt."""
        entry.generated = tokens

    def _after(self, tokens: int) -> int:
        return sum(entry.after(tokens) for entry in (*self._filling, *self._running))

    def _admit(self) -> None:
        while self._waiting and self.active < self.limits.max_batch:
            room = ROOM_STEPS * self.limits.step_tokens
            if self.active and self._after(room) + self._waiting[0].after(room) > self.limits.memory_tokens:
                return
            self._filling.append(self._waiting.popleft())

    def _over(self) -> Entry | None:
        """The youngest that can give memory back, where one step more would have no room."""
        if self.active < 2 or self._after(self.limits.step_tokens) <= self.limits.memory_tokens:
            return None
        movable = [entry for entry in (*self._filling, *self._running) if entry.bound is None]
        if not movable:
            return None
        victim = max(movable, key=lambda entry: entry.arrived)
        self.remove(victim)
        victim.prompt_tokens, victim.filled = victim.prompt_tokens + victim.generated, 0
        victim.new_tokens, victim.generated = victim.new_tokens - victim.generated, 0
        victim.preempted += 1
        self._waiting.appendleft(victim)
        return victim
