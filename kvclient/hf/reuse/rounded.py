"""The rest of a prompt that was computed as a whole, in products of bf16: nobody's prefix, but as good as one
where no less than LEFT_ROUNDED is promised.

Owns under which keys it is kept, and what of it is found again. Never computes any. Invariant: its root binds
the identity and every token before its first, so whatever is found was computed behind exactly these.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.match import Library, Piece


@dataclass(frozen=True)
class RoundedRest:
    """All of a prompt from token `start` on; whole blocks before it are exact."""

    start: int
    root: bytes  # what stands before its first block

    @classmethod
    def of(cls, identity: bytes, ids: Any, start: int) -> RoundedRest:
        """ids: the prompt's tokens."""
        before = np.ascontiguousarray(ids[:start], dtype=np.int32)
        return cls(start, hashlib.sha256(b"kvstored rounded\0" + identity + before.tobytes()).digest())

    def chain(self, chunker: Chunker, identity: bytes, ids: Any) -> Any:
        """Of its whole blocks. ids: the prompt's tokens."""
        return chunker.chain(identity, ids[self.start :], start=self.start, root=self.root)

    def stored(self, library: Library, chunker: Chunker, ids: Any) -> list[Piece]:
        """The leading blocks of it that are in the store. Pinned until the library is released."""
        at, pieces = self.start, list[Piece]()
        for known in library.get_all(self.chain(chunker, library.identity, ids).keys):
            stop = at if known is None else at + len(known.ids)
            if known is None or known.base != at or not np.array_equal(known.ids, ids[at:stop]):
                break
            pieces.append(Piece(known.view, 0, len(known.ids), known.key))
            at = stop
        return pieces
