"""What a block is in the pool: one object of its layout, head and checksums, and behind them its extent as it
lies in a daemon's memory, so that it can be brought to its place by one transfer.

Owns the format. Reads and writes no pool. Invariants: what describe() gives has the checksum that it says,
and fits its layout; frames() gives nothing that differs from the checksums of its own description.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from kvstored import _core
from kvstored.cluster.frames import BLOCK_HEAD, LAYER, LAYOUT, META, OFFER, WHOLE, Broken, Frame, parse
from kvstored.errors import StoreError

MAGIC, FORMAT = b"KVF2", 2
HEAD = struct.Struct("<4sIQ")  # magic, bytes of the frames behind it, bytes of the extent behind those
ALIGN = 64  # of the extent in the object
FIRST_BYTES = 4096  # which hold any usual description
HEAD_BYTES, TOKENS_AT = 96, 72  # of a BlockHead, and in it (native/core/peer/wire.h)


@dataclass(frozen=True)
class Described:
    """A block but for its bytes."""

    layout: Frame
    head: Frame
    sums: Frame  # an Offer: CRC32C of the meta area, then of each layer
    at: int  # where the extent begins in the object
    places: Any  # of its parts in the extent

    @property
    def extent_bytes(self) -> int:
        return int(self.places.extent_bytes)

    def frames(self, extent: memoryview) -> list[Frame]:
        """The rest of it as a peer would send it. Raises Broken."""
        meta_sum, *sums = struct.unpack(f"<{1 + len(self.places.layers)}I", self.sums.payload)
        at = self.places.meta_offset
        found = [Frame(META, 0, 0, 0, _summed(extent, at, self.places.meta_bytes, meta_sum))]
        for layer, (offset, count) in enumerate(self.places.layers):
            found.append(Frame(LAYER, 0, 0, layer, _summed(extent, offset, count, sums[layer])))
        return [*found, Frame(WHOLE, 0, 0, 0, b"")]


def _summed(extent: memoryview, offset: int, count: int, wanted: int) -> bytes:
    found = bytes(extent[offset : offset + count])
    if len(found) != count or _core.crc32c(found) != wanted:
        raise Broken("bytes that their checksum does not match")
    return found


def _places(layout: Frame, head: Frame) -> Any:
    if layout.kind != LAYOUT or head.kind != BLOCK_HEAD or len(head.payload) != HEAD_BYTES:
        raise Broken("frames in another order")
    try:
        return _core.places(layout.payload, *struct.unpack_from("<I", head.payload, TOKENS_AT))
    except StoreError as error:
        raise Broken(str(error)) from None


def pack(block: list[Frame]) -> bytes:
    """The object of a block's frames: Layout, Head, Meta (the last one counts), layers, Whole. Raises
    Broken."""
    layout, head, *rest = block
    places = _places(layout, head)
    extent = bytearray(places.extent_bytes)
    metas = [frame.payload for frame in rest if frame.kind == META]
    layers = [frame.payload for frame in rest if frame.kind == LAYER]
    lengths = [places.meta_bytes, *(count for _, count in places.layers)]
    if not metas or [len(part) for part in (metas[-1], *layers)] != lengths:
        raise Broken("a block that its layout does not allow")
    offsets = [places.meta_offset, *(offset for offset, _ in places.layers)]
    for offset, part in zip(offsets, (metas[-1], *layers), strict=True):
        extent[offset : offset + len(part)] = part
    sums = struct.pack(f"<{1 + len(layers)}I", *(_core.crc32c(part) for part in (metas[-1], *layers)))
    said = b"".join(frame.encoded() for frame in (layout, head, Frame(OFFER, 0, 0, 0, sums)))
    start = HEAD.pack(MAGIC, len(said), len(extent)) + said
    return start + bytes(-len(start) % ALIGN) + bytes(extent)


def described_bytes(first: bytes) -> int:
    """How many bytes describe() wants of an object that begins so. Raises Broken."""
    if len(first) < HEAD.size or first[:4] != MAGIC:
        raise Broken("no block")
    _, said_bytes, _ = HEAD.unpack_from(first)
    return HEAD.size + int(said_bytes)


def describe(data: bytes, key: bytes, length: int) -> Described:
    """Of an object of so many bytes that begins so. Raises Broken."""
    end = described_bytes(data)
    _, _, extent_bytes = HEAD.unpack_from(data)
    frames = list(parse(data[HEAD.size : end]))
    if len(frames) != 3 or frames[2].kind != OFFER or frames[1].payload[:32] != key:
        raise Broken("another block")
    at = end + -end % ALIGN
    found = Described(*frames, at, _places(frames[0], frames[1]))
    wanted = 4 * (1 + len(found.places.layers))
    if (found.extent_bytes, at + extent_bytes, wanted) != (extent_bytes, length, len(frames[2].payload)):
        raise Broken("a block that its layout does not allow")
    return found
