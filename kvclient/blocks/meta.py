"""What the library writes into a block's meta area, so that a reader can verify and extend a match by itself.

Owns the format; never decides what to do with a block. Invariant: unpack answers None for every byte string
that pack did not make, however it is damaged.

    u32 magic | u32 tokens | u32 has_extra | u32 0 | parent's prefix key or zeros | content key
    tokens x int32 id | tokens x u64 extra id, if has_extra
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = int.from_bytes(b"KVM1", "little")
KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)
_HEADER = struct.Struct("<4I32s32s")


class Meta(NamedTuple):
    parent_key: bytes  # NO_PARENT for a prompt's first block
    content_key: bytes
    token_ids: bytes  # int32, little-endian
    extra_ids: bytes  # u64, little-endian; empty if there are none


def pack(meta: Meta) -> bytes:
    tokens = len(meta.token_ids) // 4
    header = _HEADER.pack(MAGIC, tokens, bool(meta.extra_ids), 0, meta.parent_key, meta.content_key)
    return header + meta.token_ids + meta.extra_ids


def unpack(area: memoryview | bytes, tokens: int) -> Meta | None:
    """The meta of a block of `tokens` tokens, or None if the area does not hold one."""
    if len(area) < _HEADER.size + 4 * tokens:
        return None
    magic, count, has_extra, zero, parent, content = _HEADER.unpack_from(area)
    if magic != MAGIC or count != tokens or has_extra > 1 or zero:
        return None
    ids_end = _HEADER.size + 4 * tokens
    extra_end = ids_end + (8 * tokens if has_extra else 0)
    if len(area) < extra_end:
        return None
    return Meta(parent, content, bytes(area[_HEADER.size : ids_end]), bytes(area[ids_end:extra_end]))
