"""What the library writes into a block's meta area, so that a reader can verify and extend a match by itself.

Owns the format; never decides what to do with a block. Invariant: unpack answers None for every byte string
that pack did not make, however it is damaged.

    u32 magic | u32 tokens | u32 extra_words (0, 1 or 4) | u32 has_identity (0 or 1) | parent's prefix key or
    zeros | content key | tokens x int32 id | tokens x extra_words x u64 extra id | identity, if it has one

The reuse identity is for whoever looks at a block's file: it stands where the area has room left for it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

MAGIC = int.from_bytes(b"KVM1", "little")
KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)
_HEADER = struct.Struct("<4I32s32s")


class Meta(NamedTuple):
    parent_key: bytes  # NO_PARENT for a prompt's first block
    content_key: bytes
    token_ids: bytes  # int32, little-endian
    extra_ids: bytes  # u64, little-endian, one or four per token; empty if there are none
    identity: bytes = b""  # the reuse identity, empty if it is not said


def pack(meta: Meta) -> bytes:
    """The bytes of a block's meta area, as docs/formats.md has them."""
    tokens = len(meta.token_ids) // 4
    extra_words = len(meta.extra_ids) // (8 * tokens) if tokens else 0
    header = _HEADER.pack(MAGIC, tokens, extra_words, bool(meta.identity), meta.parent_key, meta.content_key)
    return header + meta.token_ids + meta.extra_ids + meta.identity


def put(area: memoryview, meta: Meta) -> None:
    """Packs it into the area, without the identity where that has no room left; nothing where it has none for
    the rest: blocks of such a layout are found as prefixes only.
    """
    for variant in (meta, meta._replace(identity=b"")):
        packed = pack(variant)
        if len(packed) <= len(area):
            area[: len(packed)] = packed
            return


def of_chunk(chain: Any, index: int) -> Meta:
    """What the native writer says of that chunk of a chain (native/core/client/block_writer.cc)."""
    count = chain.token_counts[index]
    start = chain.start_tokens[index] - chain.start_token
    ids = bytes(memoryview(chain.token_ids).cast("B")[4 * start : 4 * (start + count)])
    extra = b""
    if chain.extra_ids is not None:
        words = memoryview(chain.extra_ids).cast("B")
        each = len(words) // chain.num_tokens
        extra = bytes(words[each * start : each * (start + count)])
    parent, content = chain.parent_keys[index], chain.content_keys[index]
    return Meta(parent, content, ids, extra if any(extra) else b"", chain.identity)


def unpack(area: memoryview | bytes, tokens: int) -> Meta | None:
    """The meta of a block of `tokens` tokens, or None if the area does not hold one."""
    if len(area) < _HEADER.size + 4 * tokens:
        return None
    magic, count, extra_words, has_identity, parent, content = _HEADER.unpack_from(area)
    if magic != MAGIC or count != tokens or extra_words not in (0, 1, 4) or has_identity not in (0, 1):
        return None
    ids_end = _HEADER.size + 4 * tokens
    extra_end = ids_end + 8 * tokens * extra_words
    end = extra_end + KEY_BYTES * has_identity
    if len(area) < end:
        return None
    token_ids, extra_ids = bytes(area[_HEADER.size : ids_end]), bytes(area[ids_end:extra_end])
    return Meta(parent, content, token_ids, extra_ids, bytes(area[extra_end:end]))
