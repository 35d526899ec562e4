"""How long the device copied, waited and computed, by layer: out of pairs of events that it passes.

Owns the pairs that have not been passed, the sums, and where a trace has each span. Never waits for the
device. Invariant: no more than MOST pairs are kept; of more the oldest are not counted, and `lost` says how
many.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

from kvclient.hf.streaming.trace import Trace

MOST = 1 << 14
FAR_S = 10.0  # from an origin on: CUDA says milliseconds as a float, which then has microseconds no more


class Spans:
    """trace: gets each span; origin: an event that was passed, and when, by time.monotonic()."""

    def __init__(self, trace: Trace | None = None, origin: tuple[Any, float] | None = None) -> None:
        assert trace is None or origin is not None
        self._trace, self._origin = trace, origin
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
            if self._trace is not None and self._origin is not None:
                event, at_s = self._origin
                began_s = at_s + event.elapsed_time(begun) / 1e3
                self._trace.span(kind, layer, began_s, began_s + seconds)
                if began_s - at_s > FAR_S:
                    self._origin = begun, began_s
