"""Stretches inside of a prompt that are stored, but were computed behind other tokens.

Owns the question whether they are worth their mask, and their pins until release(). Invariant: every piece
that is given fits the form of the blocks it is taken for; with layers of windows, what stands behind a
stretch finds in every layer what it sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.reuse_plan import APPROXIMATE, Plan, Segment, plan
from kvclient.hf.call import Report
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.reuse.blend import MOST_MASK_BYTES, NonPrefixReuse, mask_bytes
from kvclient.hf.reuse.windows import GroupPieces, Windows


@dataclass
class Inside:
    """Of one text, behind the prefix that was found of it."""

    segments: list[Segment] = field(default_factory=list)
    windows: Windows | None = None  # of layers that do not need all tokens
    _plans: list[Plan] = field(default_factory=list)

    @property
    def from_disk(self) -> int:
        """Tokens that lie in blocks that were loaded for it."""
        return self._plans[0].from_disk if self._plans else 0

    def release(self) -> None:
        """Gives the pins back. Idempotent."""
        plans, self._plans = self._plans, []
        for found in plans:
            found.release()


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
    except BaseException:
        found.release()
        raise
    if inside and not non_prefix.repair.worth_trying(inside):
        report.inside_bypassed, inside = "reordered", []
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
