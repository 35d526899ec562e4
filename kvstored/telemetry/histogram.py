"""How long something takes: counts in buckets whose bounds double from 1 µs to 1 s, as in the native half
(native/core/base/latency.h).

Owns counts, nothing else. Not thread-safe: one histogram belongs to one thread, here the event loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_BIT = 10
BUCKETS = 22
# What a bucket holds takes at most this long; the last has no bound.
BOUNDS_S = tuple(2**bit / 1e9 for bit in range(FIRST_BIT, FIRST_BIT + BUCKETS - 1))


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    sum_s: float = 0.0

    def add(self, took_ns: int) -> None:
        bit = max(0, took_ns - 1).bit_length() - FIRST_BIT
        self.counts[min(max(bit, 0), BUCKETS - 1)] += 1
        self.sum_s += took_ns / 1e9
