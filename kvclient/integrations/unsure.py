"""What an engine has written into the store and must not seal yet: it stands on loads of which nobody knows
whether they came on every rank.

Owns, in the scheduler's half, which steps stand on which loads (`Doubts`), and in a worker's the grants
meanwhile (`Unsealed`); never touches a byte. Invariants: nothing is sealed that stands on a load that failed,
or of which nobody told; each grant is given back: by the scheduler's word, behind MAX_IN_FLIGHT steps, or
once the engine has made no step for `idle_s`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvclient.integrations.health import FAILURES

MAX_IN_FLIGHT = 64  # steps; an engine has a few


@dataclass
class _Written:
    stands_on: set[int]  # steps with loads, not yet ended
    first: dict[str, int]  # of each request: the first block that the step wrote


class Doubts:
    """Of one scheduler, which numbers its steps. Not thread-safe."""

    def __init__(self) -> None:
        self._loading: set[int] = set()
        self._written: dict[int, _Written] = {}
        self._right: list[int] = []
        self._wrong: list[int] = []

    def __bool__(self) -> bool:
        """Whether what is written now stands on loads that have not ended."""
        return bool(self._loading)

    def loads(self, step: int) -> None:
        """That step loads; nobody knows yet how it ends."""
        self._loading.add(step)

    def writes(self, step: int, first: dict[str, int]) -> None:
        """That step stands on all loads so far that have not ended. `first`: of each request the first block
        that it writes."""
        self._written[step] = _Written(set(self._loading), first)

    def ended(self, steps: set[int], failed: set[int]) -> list[dict[str, int]]:
        """The loads of those steps have ended, of some not well. What was in vain: `first` of each step."""
        self._loading -= steps
        in_vain = []
        for step, written in list(self._written.items()):
            if written.stands_on & failed:
                self._wrong.append(step)
                in_vain.append(self._written.pop(step).first)
                continue
            written.stands_on -= steps
            if not written.stands_on:
                self._right.append(step)
                del self._written[step]
        return in_vain

    @property
    def waits(self) -> bool:
        """Whether a word is out: what was written waits for loads, or for the next step."""
        return bool(self._written or self._right or self._wrong)

    def untold(self, now: int) -> set[int]:
        """Steps with loads whose end is not told any more."""
        return {step for step in self._loading if now - step >= MAX_IN_FLIGHT}

    def take(self) -> tuple[list[int], list[int]]:
        """Steps whose blocks are right since the last call, and those whose blocks are not."""
        right, wrong = self._right, self._wrong
        self._right, self._wrong = [], []
        return right, wrong


class Unsealed:
    """Of one worker. A timer runs only between two of its steps, while something is held."""

    def __init__(self, idle_s: float, failed: Callable[[Exception], None]) -> None:
        """failed: is called with what a seal raised."""
        self._idle_s, self._failed = idle_s, failed
        self._lock = threading.Lock()
        self._held: dict[int, list[Any]] = {}  # by step, oldest first
        self._timer: threading.Timer | None = None

    @property
    def count(self) -> int:
        """Steps whose blocks are held at the moment, unsealed."""
        with self._lock:
            return len(self._held)

    def begin(self, right: Sequence[int], wrong: Sequence[int]) -> None:
        """A step begins. The blocks of these steps are sealed, of those given up; unknown ones are gone."""
        if not self._held:  # nor does a timer run
            return
        with self._lock:
            self._stop_timer()
            for step in right:
                for writer in self._held.pop(step, ()):
                    try:
                        writer.seal()
                    except FAILURES as error:
                        self._failed(error)
                        writer.abort()
            for step in wrong:
                self._give_up(step)

    def end(self, step: int, writers: Sequence[Any]) -> None:
        """A step has ended: takes over what it wrote and did not seal."""
        if not (writers or self._held):
            return
        with self._lock:
            if writers:
                self._held[step] = list(writers)
            while len(self._held) > MAX_IN_FLIGHT:
                self._give_up(next(iter(self._held)))
            if self._held:
                self._timer = threading.Timer(self._idle_s, self._expire)
                self._timer.daemon = True
                self._timer.start()

    def _give_up(self, step: int) -> None:
        for writer in self._held.pop(step, ()):
            writer.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():  # else a step began meanwhile
                self._timer = None
                self._give_up_all()

    def _give_up_all(self) -> None:
        for step in list(self._held):
            self._give_up(step)

    def close(self) -> None:
        """Gives back what is still held."""
        with self._lock:
            self._stop_timer()
            self._give_up_all()
