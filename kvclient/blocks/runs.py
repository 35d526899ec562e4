"""Runs: stretches of a prompt that equal a stretch of a text stored as blocks one behind the other.

Owns the verification of blocks and the extension of a match into its neighbours, so that parts of blocks are
used too. Never decides which runs are taken. Invariant: each block in a run holds the token ids it is matched
by, and its content key is that of these ids under the caller's identity; two neighbouring pieces are a block
and its child, at positions that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvclient.blocks import meta
from kvclient.blocks.keys import chain
from kvclient.errors import PinsExhausted


@dataclass(frozen=True, eq=False)
class Known:
    """A verified, pinned block."""

    key: bytes
    parent_key: bytes
    ids: np.ndarray
    view: Any

    @property
    def base(self) -> int:
        return self.view.base_position


class Piece(NamedTuple):
    """Tokens offset..offset+count of one block."""

    view: Any
    offset: int
    count: int


@dataclass
class Run:
    """Tokens start..stop of the prompt and where they are stored."""

    start: int
    stop: int
    blocks: list[tuple[Known, int, int]] = field(default_factory=list)  # block, first token used, how many

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(known.view, offset, count) for known, offset, count in self.blocks]

    @property
    def position(self) -> int:
        known, offset, _ = self.blocks[0]
        return known.base + offset

    def append(self, known: Known, offset: int, count: int) -> None:
        self.blocks.append((known, offset, count))
        self.stop += count

    def prepend(self, known: Known, offset: int, count: int) -> None:
        self.blocks.insert(0, (known, offset, count))
        self.start -= count

    def part(self, start: int, stop: int) -> Run | None:
        """What of it lies in start..stop of the prompt."""
        cut = Run(max(start, self.start), max(start, self.start))
        at = self.start
        for known, offset, count in self.blocks:
            low, high = max(at, start), min(at + count, stop)
            if low < high:
                cut.append(known, offset + low - at, high - low)
            at += count
        return cut if cut.blocks else None


class Library:
    """The blocks one search has come upon, verified once each, pinned until release()."""

    def __init__(self, client: Any, identity: bytes) -> None:
        self.client, self.identity = client, identity
        self._known: dict[bytes, Known | None] = {}
        self._handles: list[Any] = []

    def get_all(self, keys: Iterable[bytes]) -> list[Known | None]:
        """Per key the block, or None if it is not there, holds no token ids, or is of another identity."""
        keys = list(keys)
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            blocks = self.client.get(missing)
            self._handles.append(blocks)
            for index, key in enumerate(missing):
                self._known[key] = self._verify(key, blocks, index)
        return [self._known[key] for key in keys]

    def get(self, key: bytes) -> Known | None:
        return self.get_all([key])[0]

    def extend_back(self, run: Run, ids: np.ndarray, low: int) -> None:
        """Takes along what agrees of the blocks before the run, not beyond token `low` of the prompt."""
        while run.start > low:
            first, offset, _ = run.blocks[0]
            if offset or first.parent_key == meta.NO_PARENT:
                return
            parent = self.get(first.parent_key)
            if parent is None or parent.base + len(parent.ids) != first.base:
                return
            count = common_length(parent.ids[::-1], ids[low : run.start][::-1])
            if count == 0:
                return
            run.prepend(parent, len(parent.ids) - count, count)

    def extend_forward(self, run: Run, ids: np.ndarray) -> None:
        """Takes along what agrees of the blocks behind the run."""
        while run.stop < len(ids):
            last, offset, count = run.blocks[-1]
            if offset + count < len(last.ids):
                return
            best, agreed = None, 0
            for child in self.get_all(self.client.children(last.key)):
                if child is None or child.parent_key != last.key or child.base != last.base + len(last.ids):
                    continue
                common = common_length(child.ids, ids[run.stop :])
                if common > agreed:
                    best, agreed = child, common
            if best is None:
                return
            run.append(best, 0, agreed)

    def release(self) -> None:
        self._known.clear()
        for handle in self._handles:
            handle.release()
        self._handles.clear()

    def _verify(self, key: bytes, blocks: Any, index: int) -> Known | None:
        try:
            view = blocks[index]
        except PinsExhausted:
            return None
        known = meta.unpack(view.meta, view.tokens) if view is not None else None
        if known is None:
            return None
        ids = np.frombuffer(known.token_ids, np.int32)
        if chain(self.identity, ids, len(ids)).content_keys[0] != known.content_key:
            return None
        return Known(key, known.parent_key, ids, view)


def find_runs(library: Library, ids: np.ndarray, start: int, block_tokens: int) -> list[Run]:
    """Every stretch behind token `start` that holds at least one whole block, each extended as far as it
    goes.
    """
    sightings = library.client.find(library.identity, ids[start:], block_tokens)
    if not sightings:
        return []
    library.get_all(key for _, key in sightings)
    places: dict[tuple[int, bytes], Known] = {}
    for offset, key in sightings:
        known = library.get(key)
        at = start + offset
        if known is not None and np.array_equal(known.ids, ids[at : at + len(known.ids)]):
            places[at, key] = known
    followers: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}
    for (at, key), known in places.items():
        followers.setdefault((at, known.parent_key), []).append((at, key))
    runs: list[Run] = []
    used: set[tuple[int, bytes]] = set()
    for place in sorted(places):
        if place in used:
            continue
        run = Run(place[0], place[0])
        at: tuple[int, bytes] | None = place
        while at is not None:
            used.add(at)
            known = places[at]
            run.append(known, 0, len(known.ids))
            behind = followers.get((run.stop, known.key), ())
            at = next(
                (p for p in behind if p not in used and places[p].base == known.base + len(known.ids)), None
            )
        library.extend_back(run, ids, start)
        library.extend_forward(run, ids)
        runs.append(run)
    return runs


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading items are equal."""
    count = min(len(one), len(other))
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count
