"""How long the device copied, waited and computed, by layer: out of pairs of events that it passes.

Owns the pairs that have not been passed, and the sums. Never waits for the device. Invariant: no more than
MOST pairs are kept; of more the oldest are not counted, and `lost` says how many.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

MOST = 1 << 14


class Spans:
    def __init__(self) -> None:
        self._open: deque[tuple[str, int, Any, Any]] = deque()
        self._lock = threading.Lock()
        self._sums: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._last: dict[str, float] = {}
        self.lost = 0

    def add(self, kind: str, layer: int, begun: Any, ended: Any) -> None:
        """kind: "copy", "wait" or "compute"."""
        with self._lock:
            self._open.append((kind, layer, begun, ended))
            if len(self._open) > MOST:
                self._open.popleft()
                self.lost += 1
            self._count()

    def by_layer(self, kind: str) -> dict[int, float]:
        """Seconds, of what the device has passed so far."""
        with self._lock:
            self._count()
            return dict(self._sums[kind])

    def last_s(self, kind: str) -> float:
        """Of the pair that was passed last."""
        with self._lock:
            self._count()
            return self._last[kind]

    def _count(self) -> None:
        """In their order within a kind; a pair that is not passed keeps later ones, which is no harm."""
        while self._open and self._open[0][3].query():
            kind, layer, begun, ended = self._open.popleft()
            seconds = begun.elapsed_time(ended) / 1e3
            self._sums[kind][layer] += seconds
            self._last[kind] = seconds
