"""Stretches inside of a prompt that are stored, but were computed behind other tokens.

Owns the question whether they are worth their mask. Never pins anything by itself: the plan does, until it is
released. Invariant: every piece that is given fits the form of the prompt's own blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.reuse_plan import APPROXIMATE, Plan, Segment, plan
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.reuse.blend import MOST_MASK_BYTES, NonPrefixReuse, mask_bytes


def search(
    client: Any, identity: bytes, non_prefix: NonPrefixReuse, chunker: Chunker, prefix: PrefixMatch,
    patience: Callable[[int, int], float],
) -> tuple[Plan, list[Segment]]:  # fmt: skip
    """(what to release, what is behind the prefix that was found of this text)."""
    last = len(prefix.group.tokens) - 1
    exact = min(prefix.tokens, last)
    found = plan(
        client,
        identity,
        prefix.group.tokens[:last],
        exact_tokens=exact,
        min_tokens=non_prefix.repair.min_tokens,
        chunker=chunker,
        patience=patience,
    )
    inside = [
        segment
        for segment in found
        if segment.kind == APPROXIMATE
        and all(prefix.form.fits(p.view, p.view.tokens, prefix.layers - 1) for p in segment.pieces)
    ]
    size = mask_bytes(non_prefix, inside, exact, last + 1, prefix.form.dtype.itemsize) if inside else 0
    if size > MOST_MASK_BYTES:
        needed = f"a mask of {size} bytes for {non_prefix.config._attn_implementation}"
        warnings.warn(
            f"reuse inside {last + 1} tokens needs {needed}, at most {MOST_MASK_BYTES} are given: only "
            "the prefix is reused; the kernels of kvclient.hf.attention need none",
            stacklevel=2,
        )
        return found, []
    return found, inside
