"""Evictions: tells a process which of the blocks it cares for have left memory.

    evictions = kvclient.blocks.Evictions(client, lambda key, where: ...)
    evictions.add(engine.keys(document))
    evictions.look()                  # calls back for each that has gone since; where: "disk" or "nowhere"

Owns the keys that are watched. The daemon does not know of it: look() asks the index in shared memory, 65,536
keys at most, in the thread that calls it and only then; there is no thread and no queue to fill. So a block
that went and came back between two looks was there both times. Invariant: a departure is told once, and none
is told while the store cannot be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

KEY_BYTES = 32
MISSING, PENDING, RESIDENT, ON_DISK = range(4)  # as lookup() says it
MOST_KEYS = 65_536
AT_ONCE = 4_096  # keys of one lookup


class Evictions:
    """Thread-safe. evicted: called with a key and where its block is now."""

    def __init__(self, client: Any, evicted: Callable[[bytes, str], object]) -> None:
        self._client, self._evicted = client, evicted
        self._keys: dict[bytes, None] = {}  # in the order they were added
        self._lock = threading.Lock()
        self.forgotten = 0  # keys let go because more than MOST_KEYS were added: the oldest

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Any) -> int:
        """Watches those of the blocks that are in memory now, or being written; says how many. keys: as
        lookup() takes them.
        """
        found = [key for key, state in self._states(_split(keys)) if state in (PENDING, RESIDENT)]
        with self._lock:
            for key in found:
                self._keys.pop(key, None)
                self._keys[key] = None
            while len(self._keys) > MOST_KEYS:
                del self._keys[next(iter(self._keys))]
                self.forgotten += 1
        return len(found)

    def look(self) -> int:
        """Calls back for what has gone since, and watches it no longer; says how many. What the callback
        raises ends the look: the rest is told by the next.
        """
        with self._lock:
            keys = list(self._keys)
        gone = [(key, state) for key, state in self._states(keys) if state in (MISSING, ON_DISK)]
        if self._client.degraded:
            return 0  # a store that cannot be reached counts as empty; its blocks may be there
        told = 0
        for key, state in gone:
            with self._lock:
                if key not in self._keys:
                    continue  # another thread was first
                del self._keys[key]
            told += 1
            self._evicted(key, "disk" if state == ON_DISK else "nowhere")
        return told

    def _states(self, keys: list[bytes]) -> list[tuple[bytes, int]]:
        out: list[tuple[bytes, int]] = []
        for at in range(0, len(keys), AT_ONCE):
            part = keys[at : at + AT_ONCE]
            out += zip(part, self._client.lookup(part).states, strict=True)
        return out


def _split(keys: Any) -> list[bytes]:
    if isinstance(keys, (bytes, bytearray, memoryview)):
        return [bytes(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
    return list(keys.keys if hasattr(keys, "keys") else keys)
