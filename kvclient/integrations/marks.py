"""What processes of engines tell each other by the store: blocks of one byte that are never sealed.

Owns that block, and the words of an engine's workers to its scheduler. Never looks into one. Invariants: a
mark goes with the process that set it; where what is found must be loaded, nothing is promised before each
worker has given its word that its self-test passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvclient.blocks.layout import Layout
from kvclient.integrations.health import FAILURES
from kvclient.integrations.pages import PENDING

MARK = Layout(  # a block of one byte, which is never read
    num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", kv_per_layer=1, block_tokens=1, meta_fixed=0,
    meta_per_token=0, layer_bytes_per_token=(1,), name="mark",
)  # fmt: skip


class Word:
    """A worker's, to the scheduler of its engine in another process: blocks may be promised that it is to
    load. It is a block that is never sealed, and so goes with the worker."""

    def __init__(self, client: Any, name: bytes) -> None:
        self._client, self._name, self._writer = client, name, None

    def give(self) -> None:
        """Unless it stands. Where the store takes nothing just now it is to be given again."""
        try:
            if self._client.lookup([self._name]).states[0] != PENDING:
                writer = self._client.create([self._name], self._client.register_layout(MARK))
                if writer.granted:  # else another thread gave it meanwhile, and its writer is the one to keep
                    self._writer = writer
        except FAILURES:  # nothing is promised then, which is a miss
            pass


def all_gave_their_word(client: Any, names: Sequence[bytes]) -> bool:
    """Reads shared memory."""
    try:
        return set(client.lookup(list(names)).states) == {PENDING}
    except FAILURES:
        return False


def word_name(engine: str, rank: int) -> bytes:
    """`engine`: what no other has."""
    return hashlib.sha256(f"kvstored: the self-test passed\0{engine}\0{rank}".encode()).digest()
