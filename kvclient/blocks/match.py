"""Runs: stretches of a prompt that equal a stretch of a text stored as blocks one behind the other.

Owns the verification of blocks and the extension of a match into its neighbours, so that parts of blocks are
used too. Never decides which runs are taken. Invariant: each block in a run holds the token ids it is matched
by, and its content key is that of these ids under the caller's identity; two neighbouring pieces are a block
and its child, at positions that follow each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvclient.blocks import meta
from kvclient.blocks.keys import chain
from kvclient.errors import PinsExhausted

if TYPE_CHECKING:
    from kvclient._core import FoundBlock

MAX_LOADED_CHILDREN = 2  # of one block, to see whether they continue a run
# A search follows each run to its ends until it has come by so many blocks. Where tokens repeat, every place
# of a text goes on to the text's ends: from then on a run is followed only near the ends of what an earlier
# one has. REACH, in windows, is more than a block: a neighbour all of which agrees is sighted itself, unless
# there are very many like it, so what is sighted goes on for less.
FREE_BLOCKS, REACH = 4096, 2


@dataclass(frozen=True, eq=False)
class Known:
    """A verified, pinned block."""

    key: bytes
    parent_key: bytes
    ids: np.ndarray
    view: Any

    @property
    def base(self) -> int:
        """The position of its first token in the prompt it was computed in."""
        return self.view.base_position


class Piece(NamedTuple):
    """Tokens offset..offset+count of one block."""

    view: Any
    offset: int
    count: int
    key: bytes = b""


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
        """What of each block is used, in the order of the prompt."""
        return [Piece(known.view, offset, count, known.key) for known, offset, count in self.blocks]

    @property
    def position(self) -> int:
        """At which position the run's first token was computed."""
        known, offset, _ = self.blocks[0]
        return known.base + offset

    def append(self, known: Known, offset: int, count: int) -> None:
        """The run goes on with `count` tokens of a block from token `offset` on."""
        self.blocks.append((known, offset, count))
        self.stop += count

    def prepend(self, known: Known, offset: int, count: int) -> None:
        """Before the run stand `count` tokens of a block from token `offset` on."""
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


# Asked with a number of tokens and of blocks that hold them: the seconds they are worth waiting for on disk.
Patience = Callable[[int, int], float]


class Library:
    """The blocks one search has come upon, verified once each, pinned until release(). With patience also
    such as lie on disk.
    """

    def __init__(self, client: Any, identity: bytes, patience: Patience | None = None) -> None:
        self.client, self.identity, self.patience = client, identity, patience
        self.loaded: set[bytes] = set()  # what came from disk
        self._known: dict[bytes, Known | None] = {}
        self._handles: list[Any] = []

    def get_all(self, keys: Iterable[bytes]) -> list[Known | None]:
        """Per key the block, or None if it is not there, holds no token ids, or is of another identity."""
        keys = list(keys)
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            self._take(missing, 0.0)
        return [self._known[key] for key in keys]

    def get(self, key: bytes) -> Known | None:
        """The block of this key, read and held; None if the store has it not."""
        return self.get_all([key])[0]

    def load(self, keys: list[bytes], tokens: int) -> None:
        """Has those that are not in memory loaded, if that is worth the wait for so many tokens."""
        absent = [key for key in keys if self.get(key) is None]
        wait_s = self.patience(tokens, len(absent)) if absent and self.patience is not None else 0.0
        if wait_s:
            self._take(absent, wait_s)
            self.loaded.update(key for key in absent if self._known[key] is not None)

    def _take(self, keys: list[bytes], wait_s: float) -> None:
        blocks = self.client.get(keys, wait_s=wait_s) if wait_s else self.client.get(keys)
        self._handles.append(blocks)
        for index, key in enumerate(keys):
            self._known[key] = self._verify(key, blocks, index)

    def extend_back(self, run: Run, ids: np.ndarray, low: int) -> None:
        """Takes along what agrees of the blocks before the run with the prompt `ids` [tokens], not beyond its
        token `low`.
        """
        while run.start > low:
            first, offset, _ = run.blocks[0]
            if offset or first.parent_key == meta.NO_PARENT:
                return
            self.load([first.parent_key], len(first.ids))
            parent = self.get(first.parent_key)
            if parent is None or parent.base + len(parent.ids) != first.base:
                return
            count = common_length(parent.ids[::-1], ids[low : run.start][::-1])
            if count == 0:
                return
            run.prepend(parent, len(parent.ids) - count, count)

    def extend_forward(self, run: Run, ids: np.ndarray) -> None:
        """Takes along what agrees of the blocks behind the run with the prompt `ids` [tokens]."""
        while run.stop < len(ids):
            last, offset, count = run.blocks[-1]
            if offset + count < len(last.ids):
                return
            best, agreed = None, 0
            keys = self.client.children(last.key, self.patience is not None)
            if self.patience is not None:
                self.load([key for key in keys if self.get(key) is None][:MAX_LOADED_CHILDREN], len(last.ids))
            for child in self.get_all(keys):
                if child is None or child.parent_key != last.key or child.base != last.base + len(last.ids):
                    continue
                common = common_length(child.ids, ids[run.stop :])
                if common > agreed:
                    best, agreed = child, common
            if best is None:
                return
            run.append(best, 0, agreed)

    def release(self) -> None:
        """Gives the pins of everything that was read back."""
        self._known.clear()
        for handle in self._handles:
            handle.release()
        self._handles.clear()

    def _verify(self, key: bytes, blocks: Any, index: int) -> Known | None:
        try:
            view = blocks[index]
        except PinsExhausted:
            return None
        return verified(self.identity, key, view)


def verified(identity: bytes, key: bytes, view: Any) -> Known | None:
    """None unless its token ids alone, without extra ids and under this identity, are what it was computed
    from.
    """
    known = meta.unpack(view.meta, view.tokens) if view is not None else None
    if known is None:
        return None
    ids = np.frombuffer(known.token_ids, np.int32)
    if chain(identity, ids, len(ids)).content_keys[0] != known.content_key:
        return None
    return Known(key, known.parent_key, ids, view)


def find_runs(library: Library, ids: np.ndarray, start: int, window: int) -> list[Run]:
    """Every stretch of the prompt `ids` [tokens] behind token `start` that holds the first `window` tokens of
    a block at least, each extended as far as it goes.
    """
    sightings = library.client.find(library.identity, ids[start:], window, library.patience is not None)
    if not sightings:
        return []
    library.get_all(key for _, key in sightings)
    if library.patience is not None:
        wanted = _only_on_disk(library, sightings, window)
        library.load(wanted, len(wanted) * window)
    places: dict[tuple[int, bytes], tuple[Known, int]] = {}  # and how many of its tokens agree
    for offset, key in sightings:
        known = library.get(key)
        if known is None:
            continue
        at = start + offset
        count = common_length(known.ids, ids[at : at + len(known.ids)])
        if count >= min(window, len(known.ids)):
            places[at, key] = known, count
    return _joined(library, ids, start, places, REACH * window)


def _only_on_disk(library: Library, sightings: list[FoundBlock], window: int) -> list[bytes]:
    """What is worth loading of what was sighted: one block for each place that none in memory covers."""
    taken = [offset for offset, key in sightings if library.get(key) is not None]
    out: list[bytes] = []
    free, upcoming = 0, 0  # first token not covered; next of `taken`
    for offset, key in sightings:
        while upcoming < len(taken) and taken[upcoming] <= offset:
            free = max(free, taken[upcoming] + window)
            upcoming += 1
        ahead = taken[upcoming] if upcoming < len(taken) else offset + window
        if library.get(key) is None and offset >= free and offset + window <= ahead:
            out.append(key)
            free = offset + window
    return list(dict.fromkeys(out))


def _joined(
    library: Library, ids: np.ndarray, start: int, places: dict[tuple[int, bytes], tuple[Known, int]],
    reach: int,
) -> list[Run]:  # fmt: skip
    """Blocks that follow each other in the store and in the prompt make one run."""
    followers: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}
    for (at, key), (known, _) in places.items():
        followers.setdefault((at, known.parent_key), []).append((at, key))
    runs, widest = [], Widest()
    used: set[tuple[int, bytes]] = set()
    # Of several at one place the one first that has most of its text behind it.
    for place in sorted(places, key=lambda place: (place[0], places[place][0].base, place[1])):
        if place in used:
            continue
        run = Run(place[0], place[0])
        at: tuple[int, bytes] | None = place
        while at is not None:
            used.add(at)
            known, count = places[at]
            run.append(known, 0, count)
            behind = followers.get((run.stop, known.key), ()) if count == len(known.ids) else ()
            base = known.base + count
            at = next((p for p in behind if p not in used and places[p][0].base == base), None)
        if _extended(library, ids, start, run, widest, reach):
            widest.add(run.start, run.stop)
            runs.append(run)
    return runs


def _extended(library: Library, ids: np.ndarray, low: int, run: Run, widest: Widest, reach: int) -> bool:
    """Takes along what agrees before and behind a run. False if an earlier one has all of it."""

    def inside(before: int, behind: int) -> bool:
        return widest.holds(max(low, run.start - before), min(len(ids), run.stop + behind))

    walked = len(run.blocks)
    if widest.walked < FREE_BLOCKS:
        reach = len(ids)  # whatever it takes
    if inside(reach, reach):
        return False
    if inside(reach, 0):
        library.extend_forward(run, ids)
        if not inside(reach, 0):
            library.extend_back(run, ids, low)
    else:
        library.extend_back(run, ids, low)
        if not inside(0, reach):
            library.extend_forward(run, ids)
    widest.walked += len(run.blocks) - walked
    return not inside(0, 0)


class Widest:
    """Stretches, none inside another."""

    def __init__(self) -> None:
        self.walked = 0  # blocks that they were extended by
        self._starts: list[int] = []  # ascending, and so
        self._stops: list[int] = []

    def holds(self, start: int, stop: int) -> bool:
        """Whether one of them has all of start..stop."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._stops[index] >= stop

    def add(self, start: int, stop: int) -> None:
        """One that none has all of."""
        low, high = bisect_left(self._starts, start), bisect_right(self._stops, stop)
        self._starts[low:high], self._stops[low:high] = [start], [stop]


def common_length(ids: np.ndarray, other: np.ndarray) -> int:
    """How many leading items of two arrays [tokens] are equal."""
    count = min(len(ids), len(other))
    different = np.flatnonzero(ids[:count] != other[:count])
    return int(different[0]) if len(different) else count
