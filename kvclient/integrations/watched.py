"""Blocks that a router was told of as stored: which have gone from the store since.

Owns the names that were told, by key; never asks by itself and tells nobody. Invariants: what was added is
looked for again and again, LOOKED_FOR at a time, until gone() has said that it went; no more than `most` are
watched: the one that was looked for longest ago is said to be gone then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

MAX_WATCHED = 262_144
LOOKED_FOR = 256  # at a time: a few microseconds
Name = TypeVar("Name")


class Watched(Generic[Name]):
    """Not thread-safe."""

    def __init__(self, most: int = MAX_WATCHED) -> None:
        self._most = most
        self._names: OrderedDict[bytes, Name] = OrderedDict()  # the one looked for longest ago first

    def add(self, key: bytes, name: Name) -> None:
        """From now on the key's block is watched under this name."""
        self._names[key] = name
        self._names.move_to_end(key)

    def gone(self, there: Callable[[Sequence[bytes]], Sequence[bool]]) -> list[Name]:
        """Those that have gone. `there` says of keys whether they are in the store; it is asked at most once,
        for LOOKED_FOR keys at most."""
        went = [self._names.popitem(last=False)[1] for _ in range(len(self._names) - self._most)]
        looked_for = list(islice(self._names, LOOKED_FOR))
        for key, found in zip(looked_for, there(looked_for) if looked_for else (), strict=True):
            if found:
                self._names.move_to_end(key)
            else:
                went.append(self._names.pop(key))
        return went
