"""What a measurement has found so far, so that one that was interrupted goes on.

Owns the file, one per model and set of questions, in calibration's directory, and what is shown of the way
there. Never measures. Invariant: a file that is damaged, of another version or of other questions counts as
none; it is gone once the measurement has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VERSION = 1
MAX_BYTES = 64 << 20

Progress = Callable[[int, int], None]  # steps done, of so many


class Partial:
    """Of one measurement. path: None keeps nothing."""

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self._found: dict[str, Any] = {}
        try:
            if path is not None and path.stat().st_size <= MAX_BYTES:
                kept = json.loads(path.read_text(encoding="utf-8"))
                if kept["version"] == VERSION and kept["key"] == key and isinstance(kept["found"], dict):
                    self._found = kept["found"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass

    def get(self, question: int, way: str) -> dict[str, Any] | None:
        """What was found of that question by that way, if it was."""
        found = self._found.get(f"{question} {way}")
        return found if isinstance(found, dict) else None

    def put(self, question: int, way: str, found: dict[str, Any]) -> None:
        """Kept at once, complete or not at all; where it cannot be, an interruption costs it."""
        self._found[f"{question} {way}"] = found
        if self._path is None:
            return
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": VERSION, "key": self._key, "found": self._found}))
            os.replace(temporary, self._path)
        except OSError:
            return

    def end(self) -> None:
        """What was found has been told."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def partial_of(directory: Path, identity: bytes, facts: Sequence[Any]) -> Partial:
    """Of a calibration of that model, with these questions and ways."""
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Partial(directory / f"{identity.hex()}.partial", key)


def shown(done: int, total: int) -> None:
    """On a terminal, one line that counts."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rcalibrating: {done} of {total}", end=end, file=sys.stderr, flush=True)
