"""Memory for the KV of one request after another, without faulting it in each time.

Owns up to SPARE_BYTES of arrays that earlier requests used. Never takes memory from anybody: an array is
handed out again only when nothing refers to it any more, and every tensor and view made from it does refer to
it. Invariant: two living caches never share memory.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

SPARE_BYTES = 256 << 20  # what an attached model keeps at most between requests
LOOSE = 2  # an array is not used for less than 1 / LOOSE of its size
_UNUSED = 3  # references to an array that only _spare has: the list's, the loop's, and getrefcount's own


class Memory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """An array of at least `size` bytes, their contents undefined."""
        if size > SPARE_BYTES:
            return np.empty(size, dtype=np.uint8)
        with self._lock:
            for array in self._spare:
                if size <= array.nbytes <= size * LOOSE and sys.getrefcount(array) == _UNUSED:
                    return array
            fresh = np.empty(size, dtype=np.uint8)
            self._spare.append(fresh)
            self._shrink()
            return fresh

    def _shrink(self) -> None:
        """Forgets the oldest arrays beyond the bound. Who still uses one keeps it alive."""
        kept = sum(array.nbytes for array in self._spare)
        while kept > SPARE_BYTES:
            kept -= self._spare.pop(0).nbytes
