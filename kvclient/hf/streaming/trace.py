"""What was read, waited for and computed when, as Perfetto and chrome://tracing show it.

Owns the spans of one model, the latest SPANS of them. Never slows who is not traced. Invariant: times are of
one clock (time.monotonic), in microseconds from the trace's start.
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
        """Chrome's trace events: a line (thread) for each track."""
        with self._lock:
            spans = list(self._spans)
        lines = {track: i for i, track in enumerate(sorted({track for track, *_ in spans}), 1)}
        each: dict[str, object] = {"pid": os.getpid(), "cat": "streaming"}
        found = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": i, "args": {"name": track}}
            for track, i in lines.items()
        ]
        for track, name, started, ended in sorted(spans, key=lambda span: span[2]):
            at = {"ts": (started - self._began) * 1e6, "dur": (ended - started) * 1e6, "tid": lines[track]}
            found.append({"name": name, "ph": "X", **each, **at})
        return found

    def write(self, path: str | Path) -> None:
        """One JSON object, as Perfetto's "Open trace file" takes it. Raises OSError."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
