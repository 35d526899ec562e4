"""Memory for the KV of one request after another, without faulting it in each time.

Owns up to SPARE_BYTES of memory that earlier requests used. Never takes memory from anybody, and counts no
references: an array that is handed out is an object of its own, every tensor and view made
from it keeps that object alive, and only when it is gone is the memory handed out again. Invariant: two
living caches never share memory.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import numpy as np

SPARE_BYTES = 256 << 20  # what an attached model keeps at most between requests
LOOSE = 2  # memory is not used for less than 1 / LOOSE of its size


@dataclass
class _Spare:
    memory: memoryview  # of an array: a view of a view would keep that one alive, and not what was handed out
    handed: weakref.ref[np.ndarray]


class Memory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[_Spare] = []

    def take(self, size: int) -> np.ndarray:
        """An array [bytes] of at least `size` bytes, their contents undefined."""
        if size > SPARE_BYTES:
            return np.empty(size, dtype=np.uint8)
        with self._lock:
            for spare in self._spare:
                if size <= spare.memory.nbytes <= size * LOOSE and spare.handed() is None:
                    array = np.frombuffer(spare.memory, np.uint8)
                    spare.handed = weakref.ref(array)
                    return array
            memory = memoryview(np.empty(size, dtype=np.uint8))
            array = np.frombuffer(memory, np.uint8)
            self._spare.append(_Spare(memory, weakref.ref(array)))
            self._shrink()
            return array

    def _shrink(self) -> None:
        """Forgets the oldest memory beyond the bound. Who still uses some keeps it alive."""
        kept = sum(spare.memory.nbytes for spare in self._spare)
        while kept > SPARE_BYTES:
            kept -= self._spare.pop(0).memory.nbytes
