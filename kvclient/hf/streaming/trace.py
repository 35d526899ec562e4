"""What was read, waited for and computed when, as Perfetto and chrome://tracing show it.

Owns the spans of one model, the latest SPANS of them. Never slows who is not traced. Invariants: times are of
one clock (time.monotonic), in microseconds from the trace's start; no two spans of one line overlap, because
Perfetto leaves out one of two that do.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path

SPANS = 1 << 18  # at most that are kept


class Trace:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=SPANS)
        self._lock = threading.Lock()

    def span(self, track: str, layer: int | str, started_s: float, ended_s: float) -> None:
        """track: a line of the picture, as "read 0", "wait", "compute"."""
        name = f"layer {layer}" if isinstance(layer, int) else layer
        with self._lock:
            self._spans.append((track, name, started_s, ended_s))

    def events(self) -> list[dict[str, object]]:
        """Chrome's trace events: a line (thread) for each track, and further ones for what overlaps there."""
        with self._lock:
            spans = [(track, *self._since_began(times), name) for track, name, *times in self._spans]
        lines: dict[str, list[int]] = {}  # by track, where the last span of each of its lines ends
        placed = []
        for track, start, end, name in sorted(spans, key=lambda span: (span[1], -span[2])):
            ends = lines.setdefault(track, [])
            number = next((i for i, last in enumerate(ends) if last <= start), len(ends))
            ends[number : number + 1] = [end]
            placed.append((track, number, start, end, name))
        every = [(track, number) for track in sorted(lines) for number in range(len(lines[track]))]
        known = {line: tid for tid, line in enumerate(every, 1)}
        pid = os.getpid()
        found: list[dict[str, object]] = []
        for (track, number), tid in known.items():
            called = f"{track}, {number + 1}" if number else track
            named = {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid}
            found.append({**named, "args": {"name": called}})
        for track, number, start, end, name in placed:
            at = {"ts": start / 1000, "dur": (end - start) / 1000, "tid": known[track, number]}
            found.append({"name": name, "ph": "X", "pid": pid, "cat": "streaming", **at})
        return found

    def _since_began(self, times: list[float]) -> list[int]:
        """In whole nanoseconds, as Perfetto counts: spans that touch do not overlap by a rounding."""
        return [round((at - self._began) * 1e9) for at in times]

    def write(self, path: str | Path) -> None:
        """One JSON object, as Perfetto's "Open trace file" takes it. Raises OSError."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
