"""Stretches inside of a prompt that are stored, but were computed behind other tokens.

Owns the question whether they are worth their mask, and their pins until release(). Invariant: every piece
that is given fits the form of the blocks it is taken for; with layers of windows, what stands behind a
stretch finds in every layer what it sees.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.match import Library, Piece
from kvclient.blocks.reuse_plan import APPROXIMATE, Plan, Segment, plan
from kvclient.hf.call import Report
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.reuse.blend import MOST_MASK_BYTES, NonPrefixReuse, mask_bytes
from kvclient.hf.reuse.estimate import LEFT_ROUNDED
from kvclient.hf.reuse.products import rounds
from kvclient.hf.reuse.rounded import RoundedRest
from kvclient.hf.reuse.windows import GroupPieces, Windows


@dataclass
class Inside:
    """Of one text, behind the prefix that was found of it."""

    segments: list[Segment] = field(default_factory=list)
    windows: Windows | None = None  # of layers that do not need all tokens
    rounded: RoundedRest | None = None  # behind it all is computed so; the only segment is of it, or empty
    _plans: list[Plan] = field(default_factory=list)
    _library: Library | None = None  # of what was computed so

    @property
    def from_disk(self) -> int:
        """Tokens that lie in blocks that were loaded for it."""
        return self._plans[0].from_disk if self._plans else 0

    @property
    def keys(self) -> bytes:
        """Of the blocks that the segments are of, in every kind of layers, 32 bytes each. Without: b""."""
        parts = self.windows.parts if self.windows is not None and self.segments else ()
        segments = [*self.segments, *(segment for part in parts for segment in part.segments)]
        return b"".join(dict.fromkeys(piece.key for segment in segments for piece in segment.pieces))

    def take_rounded(
        self, client: Any, served: ServedModel, non_prefix: NonPrefixReuse, chunker: Chunker,
        prefix: PrefixMatch, exact: int, others: list[Segment], worth: bool,
    ) -> bool:  # fmt: skip
        """Takes what was computed rounded, where it is half as much as the others that were found. Where
        these are not worth trying, all is computed so, over whatever there is. False: neither."""
        form, ids, starts = served.form, prefix.group.tokens[:-1], prefix.starts
        rest = RoundedRest.of(served.identity, ids, starts[bisect_right(starts, others[0].start) - 1])
        self._library = Library(client, served.identity)
        found = rest.stored(self._library, chunker, ids)
        held = list(takewhile(lambda piece: form.fits(piece.view, piece.count, form.layers - 1), found))
        start = max(rest.start, exact)
        pieces = _behind(held, start - rest.start)
        stop = start + sum(piece.count for piece in pieces)
        enough = max(non_prefix.repair.min_tokens, sum(map(len, others)) // 2)
        if stop - start < enough and (worth or not rounds(non_prefix.decoder)):
            return False
        self.segments, self.rounded = [Segment(start, stop, APPROXIMATE, tuple(pieces), start)], rest
        return True

    def exact_until(self, served: ServedModel, prefix: PrefixMatch, most: int | None) -> int:
        """How many tokens before the segments others may find as a prefix, if this call computes them: those
        have torch's bits. most: of the text, so many are published; None: all."""
        stop = min(self.segments[0].start, len(prefix.group.tokens) if most is None else most)
        if served.grouped or served.sinks is not None:
            return stop
        return int(prefix.starts[bisect_right(prefix.starts, stop) - 1])

    def release(self) -> None:
        """Gives the pins back. Idempotent."""
        plans, self._plans = self._plans, []
        for found in plans:
            found.release()
        if self._library is not None:
            self._library.release()


def _behind(pieces: list[Piece], tokens: int) -> list[Piece]:
    """Without the first tokens, so many: a prefix goes on into these blocks."""
    out = []
    for piece in pieces:
        skipped = min(tokens, piece.count)
        tokens -= skipped
        if skipped < piece.count:
            out.append(Piece(piece.view, piece.offset + skipped, piece.count - skipped, piece.key))
    return out


def _may_round(served: ServedModel, non_prefix: NonPrefixReuse, rows: int) -> bool:
    """Whether what is computed in products of bf16 is near enough, one kind of blocks is all of it, and it is
    of one row: products of several are torch's."""
    repair = non_prefix.repair
    if not repair.promises or repair.computes_all or rows > 1:
        return False
    near = repair.promised / (repair.caution or 1.0) >= LEFT_ROUNDED
    return near and non_prefix.shows and not served.grouped and served.form.codec is None


def search(
    client: Any, served: ServedModel, non_prefix: NonPrefixReuse, report: Report, chunker: Chunker,
    prefix: PrefixMatch, exact: int, patience: Callable[[int, int], float],
) -> Inside:  # fmt: skip
    """exact: tokens of the prefix that are reused exactly. The report says if what is found is left alone."""
    last = len(prefix.group.tokens) - 1
    exact, found = min(exact, last), Inside()

    def stored(identity: bytes, form: BlockFormat, min_tokens: int) -> list[Segment]:
        segments = plan(
            client, identity, prefix.group.tokens[:last], exact_tokens=exact, min_tokens=min_tokens,
            chunker=chunker, patience=patience,
        )  # fmt: skip
        found._plans.append(segments)
        return [
            segment
            for segment in segments
            if segment.kind == APPROXIMATE
            and all(form.fits(piece.view, piece.view.tokens, form.layers - 1) for piece in segment.pieces)
        ]

    least = non_prefix.repair.min_tokens
    try:
        inside = stored(served.identity, served.form, least)
        if inside and served.groups:
            parts = [
                GroupPieces(group.group, group.form, tuple(stored(group.identity, group.form, 1)))
                for group in served.groups
            ]
            found.windows = Windows(parts, last + 1)
            inside = found.windows.fitted(inside, least)
        halves = prefix.form.dtype.itemsize == 2
        unworthy = non_prefix.repair.not_worth_trying(inside, halves) if inside else None
        worth = unworthy is None
        if (
            inside
            and _may_round(served, non_prefix, len(prefix.group.rows))
            and found.take_rounded(client, served, non_prefix, chunker, prefix, exact, inside, worth)
        ):
            inside = found.segments
        elif not worth:
            inside = []
    except BaseException:
        found.release()
        raise
    if not worth and not any(inside):
        report.inside_bypassed = unworthy
    size = mask_bytes(non_prefix, inside, exact, last + 1, prefix.form.dtype.itemsize) if inside else 0
    if size > MOST_MASK_BYTES:
        needed = f"a mask of {size} bytes for {non_prefix.config._attn_implementation}"
        warnings.warn(
            f"reuse inside {last + 1} tokens needs {needed}, at most {MOST_MASK_BYTES} are given: only "
            "the prefix is reused; the kernels of kvclient.hf.attention need none",
            stacklevel=2,
        )
        inside = []
    found.segments = inside
    return found
