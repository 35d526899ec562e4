"""Where the buffers of a region's blocks lie, as arguments.

Owns what an argument may look like, and whether a block's buffers lie as the store has them; never reads a
region's memory. Invariant: what leaves here is int64 [blocks, layer, kv, part, (offset, size)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvclient.blocks.layout import LAYER_ALIGN, PAGE_BYTES, Geometry, round_up
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

AXES = ("layer", "kv", "part")
ALIGNMENT = 64  # bytes; of offsets in a region
MAX_PARTS = 1 << 16
MAX_PIECES = 1024  # of a block that is sealed in pieces; pieces that touch are one
NOT_HERE = (  # why the daemon did not seal a block in place
    "its memory or its key is sealed already, the daemon began anew since or is older, "
    "or has no record or room for its pieces"
)


def elsewhere(place: np.ndarray, geometry: Geometry, tokens: int, length: int) -> str:
    """Why a block's buffers, [layer, kv, part, 2], do not lie as the layout says in a region of `length`
    bytes; "" if they do."""
    base = int(place[0, 0, 0, 0])
    if base % PAGE_BYTES:
        return f"it begins at {base}, no multiple of {PAGE_BYTES}"
    if base + geometry.length(tokens) > round_up(length, PAGE_BYTES):
        return f"its {geometry.length(tokens)} bytes at {base} reach behind the region"
    at = base
    for layer, buffers in enumerate(place):
        for offset, size in buffers.reshape(-1, 2).tolist():
            if offset != at:
                return f"a buffer of layer {layer} lies at {offset}; in place it would lie at {at}"
            at += size
        at = base + round_up(at - base, LAYER_ALIGN)
    return ""


def where_it_lies(place: np.ndarray, geometry: Geometry, tokens: int, length: int) -> str | list[int]:
    """Why a block with these buffers, [layer, kv, part, 2], cannot be sealed in place in a region of `length`
    bytes; or offset and size of each of its pieces, none if it lies as its layout says."""
    why = elsewhere(place, geometry, tokens, length)
    if not why:
        return []
    return in_pieces(place, geometry, tokens) or (
        f"{why}; apart, its buffers and layers must be whole pages, in at most {MAX_PIECES} pieces"
    )


def in_pieces(place: np.ndarray, geometry: Geometry, tokens: int) -> list[int]:
    """Offset and size of each piece that a block with these buffers, [layer, kv, part, 2], can be sealed in;
    [] if it cannot."""
    flat = place.reshape(-1, 2)
    first = np.flatnonzero(np.append(True, flat[1:, 0] != flat[:-1].sum(1)))
    pieces = np.stack([flat[first, 0], np.add.reduceat(flat[:, 1], first)], 1)
    layers = [geometry.layer_length(layer, tokens) for layer in range(geometry.num_layers)]
    if len(pieces) > MAX_PIECES or (pieces % PAGE_BYTES).any() or any(n % PAGE_BYTES for n in layers):
        return []
    return pieces.ravel().tolist()


def in_order(buffers: Any, axes: Sequence[str], count: int) -> np.ndarray:
    """[keys, layer, kv, part, 2] as int64. Raises InvalidArgument."""
    if sorted(axes) != sorted(AXES):
        raise InvalidArgument(f"axes={tuple(axes)!r}; it must be an order of {', '.join(AXES)}")
    try:
        places = np.asarray(buffers)
    except ValueError as error:
        raise InvalidArgument(f"buffers are of no one shape: {error}") from None
    if places.ndim != 5 or places.shape[0] != count or places.shape[-1] != 2 or 0 in places.shape[1:]:
        raise InvalidArgument(f"buffers of shape {places.shape}; it must be [{count} keys, …, …, …, 2]")
    if places.dtype.kind not in "iu":
        raise InvalidArgument(f"buffers of {places.dtype}; they must be integers")
    if places.dtype == np.uint64:
        places = np.minimum(places, np.uint64(np.iinfo(np.int64).max))  # out of every region either way
    return places.astype(np.int64).transpose(0, *(1 + list(axes).index(axis) for axis in AXES), 4)


def counts_of(token_counts: Sequence[int] | None, geometry: Geometry, count: int) -> list[int]:
    """Of each block; None: the layout's. Raises InvalidArgument."""
    if token_counts is None:
        return [geometry.block_tokens] * count
    if len(token_counts) != count:
        raise InvalidArgument(f"{len(token_counts)} token counts for {count} keys")
    for tokens in token_counts:
        check_bounds("token_counts", tokens, 1, geometry.block_tokens)
    return list(token_counts)
