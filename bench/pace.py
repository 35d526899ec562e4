"""How fast the processors are just now. A virtual processor whose other hyperthread is somebody else's runs
the same code in 1.0 or 2.0 of its time, changing within seconds; a measurement should say which it saw.

Owns the fixed loop and the line between quiet and not. Never looks at what is measured: calls are told apart
by the loop beside them, all contenders' alike. Standard library only: every contender's process imports it.
"""

import ctypes
import os
import time

LOOP = 2000  # about 75 µs of interpreter on a quiet processor of 2021: most turns meet no interrupt
TURNS = 3  # the best counts: the first meets cold caches
MOST_PROCESSORS = 4  # above, a call and its server are not likely to be where another processor is slow
QUIET = 1.35  # of the best pace seen: both cores busy it is up to 1.25, beside a stranger 1.6 to 2.0
SETTLE_S = 5.0


_processor = ctypes.CDLL(None).sched_getcpu


def here_ns() -> int:
    """Nanoseconds that the loop takes now where this thread runs. Beside calls it is this one: taken on the
    server's processor, it would put the server aside."""
    best = 1 << 62
    for _ in range(TURNS):
        start, total = time.perf_counter_ns(), 0
        for i in range(LOOP):
            total += i & 7
        best = min(best, time.perf_counter_ns() - start)
    return best


def pace_ns() -> int:
    """Nanoseconds that the loop takes now, on the slowest of this thread's processors if they are few."""
    here, allowed = _processor(), os.sched_getaffinity(0)
    if not 1 < len(allowed) <= MOST_PROCESSORS:
        return here_ns()
    try:  # home last, or a client would stay where its server runs
        return max([_on(processor) for processor in [*(allowed - {here}), here]])
    finally:
        os.sched_setaffinity(0, allowed)


def _on(processor: int) -> int:
    os.sched_setaffinity(0, {processor})
    return here_ns()


class Yardstick:
    """The best pace of a run. A pace is quiet if it is near it."""

    def __init__(self, best_ns: int):
        self.best_ns = best_ns

    @classmethod
    def now(cls, seconds: float = SETTLE_S) -> "Yardstick":
        end, best = time.monotonic() + seconds, pace_ns()
        while time.monotonic() < end:
            best = min(best, pace_ns())
        return cls(best)

    def seen(self, paces: list[int]) -> None:
        self.best_ns = min([self.best_ns, *paces])

    def quiet(self, pace: int) -> bool:
        return pace <= QUIET * self.best_ns
