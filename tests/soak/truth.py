"""What every byte must be, and what must not be found: the knowledge of the soak that no kill can take away.

Owns the universe of keys, the bytes that follow from each, and memory shared by all processes of a soak: the
counters, and for each key whether it may be found. Invariant: a key says "gone" only after the store
answered that it is, and says it no longer before anybody tries to put it again.
"""

from __future__ import annotations

import enum
import hashlib
import mmap
import struct
import time
from collections.abc import Sequence

import numpy as np

from kvclient.blocks.layout import Geometry
from kvclient.testing.conformance.case import geometry

MODELS = [
    geometry(layers=4, heads=2, dim=8, tokens=16),  # 8 KiB of pool a block
    geometry(layers=12, heads=2, dim=32, tokens=32),  # 96 KiB
    geometry(layers=8, heads=8, dim=64, tokens=32),  # 512 KiB
]
SHARED, PRIVATE, SHORT = range(
    3
)  # whose a key is: everybody's, one client's, one client's and with a time to live
TTL_S = 2
STEP = np.uint64(0x9E3779B97F4A7C15)


class Count(enum.IntEnum):
    operations = 0
    put_blocks = 1
    put_bytes = 2
    hits = 3
    hit_bytes = 4
    misses = 5
    layers_followed = 6
    writers_lost = 7
    unavailable = 8
    no_space = 9
    deleted = 10
    wrong = 11
    came_back = 12
    unexpected = 13


class Universe:
    """All keys there can be: (model, kind, client, number) <-> key."""

    def __init__(self, seed: int, clients: int, per_kind: Sequence[int]) -> None:
        self.seed = seed
        self.keys: list[bytes] = []
        self.model: list[int] = []
        self.kind: list[int] = []
        self.owner: list[int] = []
        for model in range(len(MODELS)):
            for kind, count in enumerate(per_kind):
                for owner in range(1 if kind == SHARED else clients):
                    for number in range(count):
                        name = f"{seed}/{model}/{kind}/{owner}/{number}"
                        self.keys.append(hashlib.sha256(name.encode()).digest())
                        self.model.append(model)
                        self.kind.append(kind)
                        self.owner.append(owner)
        self.number = {key: number for number, key in enumerate(self.keys)}

    def numbers(self, model: int, client: int) -> dict[int, list[int]]:
        """By kind, the keys of a model that a client may put and delete."""
        of: dict[int, list[int]] = {SHARED: [], PRIVATE: [], SHORT: []}
        for number, kind in enumerate(self.kind):
            if self.model[number] == model and (kind == SHARED or self.owner[number] == client):
                of[kind].append(number)
        return of


def words(key: bytes, layer: int, count: int) -> np.ndarray:
    """The 64-bit words of a layer. Any two keys, layers and places differ."""
    start = struct.unpack_from("<Q", hashlib.blake2b(key + bytes([layer]), digest_size=8).digest())[0]
    with np.errstate(over="ignore"):
        return np.uint64(start) + np.arange(count, dtype=np.uint64) * STEP


def block_bytes(model: Geometry) -> int:
    return sum(model.layer_bytes_per_token) * model.block_tokens


def as_words(layer: np.ndarray) -> np.ndarray:
    return layer.reshape(-1).view(np.uint64)


def is_right(key: bytes, layer: int, found: np.ndarray) -> bool:
    there = as_words(found)
    return bool(np.array_equal(there, words(key, layer, len(there))))


class Ledger:
    """Shared memory: counters per client, and until when each key may be found (0: it may not)."""

    MAY = float("inf")

    def __init__(self, clients: int, keys: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (clients * len(Count) + keys + 1))
        all_words = np.frombuffer(self._memory, np.uint64)
        self._counts = all_words[: clients * len(Count)].view(np.int64).reshape(clients, len(Count))
        self._until = all_words[clients * len(Count) : -1].view(np.float64)
        self._lives = all_words[-1:]  # of the memory

    def add(self, client: int, count: Count, by: int = 1) -> None:
        self._counts[client, count] += by

    def total(self, count: Count) -> int:
        return int(self._counts[:, count].sum())

    def may_be_found(self, number: int, until_s: float = MAY) -> None:
        self._until[number] = until_s

    def is_gone(self, number: int) -> None:
        self._until[number] = 0

    def lives(self) -> int:
        return int(self._lives[0])

    def forget_deletions(self) -> None:
        """The memory is lost: files that the daemon had not removed yet may be found again."""
        self._lives[0] += 1
        self._until[self._until == 0] = self.MAY

    def should_be_gone(self, number: int) -> bool:
        return time.time() > self._until[number]
