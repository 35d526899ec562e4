"""plan(): which stretches of a prompt are stored, wherever they lie in it and whatever stood before them.

Owns the cover: exact prefix first, then the longest stretches anywhere, then what is left. Never trusts a key
or a fingerprint: a stretch is verified by the token ids and the content keys of its blocks
(kvclient.blocks.match). Invariant: the segments tile the prompt, in order; every token of one that is not
live
equals the token its block was computed from, under the same reuse identity, and its blocks stay pinned until
release().

    with plan(client, identity, token_ids) as segments:
        for segment in segments:
            segment.start, segment.stop, segment.kind, segment.shift
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS
from kvclient.blocks.match import Library, Patience, Piece, Run, find_runs
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

MOST_TOKENS = (1 << 31) - 1
EXACT, APPROXIMATE, LIVE = "exact", "approximate", "live"


@dataclass(frozen=True)
class Segment:
    """Tokens start..stop of the prompt. `exact`: KV as a full prefill would compute it. `approximate`: of the
    same tokens behind other ones. `live`: not stored.
    """

    start: int
    stop: int
    kind: str
    pieces: tuple[Piece, ...] = ()
    position: int = 0  # of its first token, when its KV was computed

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def shift(self) -> int:
        """How far it moved: the rotation its keys need."""
        return self.start - self.position


class Plan(Sequence):
    """The segments of one prompt, in order. Leaving the context releases their blocks."""

    def __init__(self, segments: list[Segment], library: Library) -> None:
        self._segments, self._library = segments, library

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: Any) -> Any:
        return self._segments[index]

    def tokens(self, kind: str) -> int:
        """How many tokens of the prompt are of that kind."""
        return sum(len(segment) for segment in self._segments if segment.kind == kind)

    @property
    def from_disk(self) -> int:
        """How many of its tokens lie in blocks that were loaded from disk for it."""
        pieces = (piece for segment in self._segments for piece in segment.pieces)
        return sum(piece.count for piece in pieces if piece.key in self._library.loaded)

    def release(self) -> None:
        """Gives the pins back. Idempotent."""
        self._library.release()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def plan(
    client: Any,
    identity: bytes,
    token_ids: Sequence[int] | Any,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    *,
    exact_tokens: int | None = None,
    min_tokens: int = 1,
    chunker: Chunker | None = None,
    patience: Patience | None = None,
) -> Plan:
    """Covers the prompt with stored blocks. Linear in its length, and nothing but one native call if nothing
    is found.

    exact_tokens  what the caller has found as a prefix already; that part becomes one segment without pieces.
    min_tokens    shorter stretches of approximate tokens are left live: each costs a seam.
    chunker       the rule that the stored texts were cut by; without one, every block_tokens.
    patience      asked with a number of tokens and blocks, says for how many seconds they are worth waiting
                  for on disk. Without it, what lies only there is not found.
    Raises InvalidArgument for a chunker that is none.
    """
    ids = _ids(token_ids)
    check_bounds("min_tokens", min_tokens, 1, MOST_TOKENS)
    if exact_tokens is not None:
        check_bounds("exact_tokens", exact_tokens, 0, len(ids))
    if not isinstance(chunker, Chunker | None):
        raise InvalidArgument(f"chunker={chunker!r}; it must be a Chunker, or None")
    chunker = chunker or Chunker("fixed", block_tokens)
    library = Library(client, identity, patience)
    try:
        segments: list[Segment] = []
        if exact_tokens is None:
            run = _prefix(library, ids, chunker)
            exact_tokens = run.stop if run else 0
            if run:
                segments.append(Segment(0, run.stop, EXACT, tuple(run.pieces), 0))
        elif exact_tokens:
            segments.append(Segment(0, exact_tokens, EXACT))
        runs = find_runs(library, ids, exact_tokens, chunker.window)
        for run in _cover(runs, min_tokens):
            segments.append(Segment(run.start, run.stop, APPROXIMATE, tuple(run.pieces), run.position))
    except BaseException:
        library.release()
        raise
    return Plan(list(_with_gaps(segments, len(ids))), library)


def _ids(token_ids: Sequence[int] | Any) -> np.ndarray:
    """As blocks have them. A token that is no such number would stand for another."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        shown = f"{array.dtype}{list(array.shape)}"
        raise InvalidArgument(f"token_ids of {shown}; it must be whole numbers in a row")
    ids = np.ascontiguousarray(array, dtype=np.int32)
    if array.dtype != np.int32 and (wrong := array[ids != array][:1].tolist()):
        raise InvalidArgument(f"token {wrong[0]}; it must fit 32 bits")
    return ids


def _prefix(library: Library, ids: np.ndarray, chunker: Chunker) -> Run | None:
    """The leading blocks, and as much of the one behind them as agrees."""
    keys = chunker.chain(library.identity, ids).keys
    run = Run(0, 0)
    for known in library.get_all(keys):
        if known is None or not np.array_equal(known.ids, ids[run.stop : run.stop + len(known.ids)]):
            break
        run.append(known, 0, len(known.ids))
    if not run.pieces:
        return None
    library.extend_forward(run, ids)
    return run


def _cover(runs: list[Run], min_tokens: int) -> list[Run]:
    """Runs that do not overlap: the longest first, others as far as they are not covered yet."""
    heap = [(-len(run), number, run) for number, run in enumerate(runs) if len(run) >= min_tokens]
    heapq.heapify(heap)
    taken: list[Run] = []  # in order
    number = len(runs)
    while heap:
        _, _, run = heapq.heappop(heap)
        after = bisect_left(taken, run.stop, key=_start)
        other = taken[after - 1] if after and taken[after - 1].stop > run.start else None
        if other is None:
            taken.insert(after, run)
            continue
        for part in (run.part(run.start, other.start), run.part(other.stop, run.stop)):
            if part is not None and len(part) >= min_tokens:
                number += 1
                heapq.heappush(heap, (-len(part), number, part))
    return taken


def _start(run: Run) -> int:
    return run.start


def _with_gaps(segments: list[Segment], length: int) -> Iterator[Segment]:
    at = 0
    for segment in segments:
        if segment.start > at:
            yield Segment(at, segment.start, LIVE)
        yield segment
        at = segment.stop
    if at < length:
        yield Segment(at, length, LIVE)
