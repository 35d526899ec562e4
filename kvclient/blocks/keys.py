"""The text side of a prompt: its chunks' keys.

Owns the public `chain()`; the hashing itself is native (native/core/format/keys.h defines every byte of it,
and
tests/golden/reference_keys.py says the same in Python). Invariant: equal arguments give equal keys in every
process and on every machine, and any difference in identity, tokens or extra ids changes the key of that
chunk and, for prefix keys, of all chunks behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient._core import Chain, extra_ids_from_digests, root_key, window_fingerprints
from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS

__all__ = ["Chain", "chain", "extra_ids_from_digests", "root_key", "window_fingerprints"]


def chain(
    identity: bytes,
    token_ids: Sequence[int] | Any,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    extra_ids: Sequence[int] | Any | None = None,
    partial: bool = False,
    counts: Sequence[int] | None = None,
    start: int = 0,
    root: bytes | None = None,
    window: int = 0,
) -> Chain:
    """The keys, fingerprints and tokens of a prompt's chunks of `block_tokens` tokens.

    identity      32 bytes: all that must be equal for KV to be reusable (kvclient.blocks.identity).
    token_ids     a list of ints, or a contiguous CPU buffer (NumPy, torch) of int32 (no conversion) or int64.
    extra_ids     one unsigned 64-bit id per token for what the token ids alone do not say, such as the image
                  or the soft prompt behind a placeholder; 0 for ordinary tokens. Ids must be unique. For
                  digests, four words a token: extra_ids_from_digests().
    partial       whether the last chunk may be shorter. Otherwise the tokens behind the last full chunk are
                  left out, and `num_tokens` is smaller than len(token_ids).
    counts        tokens of each chunk, at most block_tokens, where they are cut by content
                  (kvclient.blocks.chunker); what is behind the last is left out.
    start         position of the first token.
    root          32 bytes that stand before the first chunk in the place of the identity's root key: such
                  chunks are found by their content only, never as a prefix.
    window        tokens of a chunk that its fingerprint is taken over, at most; 0: all.

    Raises InvalidArgument (a ValueError) that names the value and the limit.
    """
    return Chain(identity, token_ids, block_tokens, extra_ids, partial, counts, start, root, window)
