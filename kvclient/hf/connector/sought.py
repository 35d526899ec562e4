"""What blocks are looked for by: as much of a model, as the store sees it, as a prefix needs.

Owns nothing. kvclient.hf.request.served_model has all of it.
"""

from __future__ import annotations

from typing import Protocol

from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.layer_groups import StoredGroup
from kvclient.hf.connector.snapshots import StoredStates


class Blocks(Protocol):
    """Of one form."""

    @property
    def identity(self) -> bytes:
        """32 bytes that their keys are made from."""

    @property
    def form(self) -> BlockFormat:
        """How K and V lie in them."""


class Sought(Blocks, Protocol):
    """Of a ServedModel: those of all tokens, and what lies beside them."""

    @property
    def parts(self) -> Blocks | None:
        """Of a text's end, where that is in another form."""

    @property
    def groups(self) -> tuple[StoredGroup, ...]:
        """Of layers that do not need all tokens."""

    @property
    def states(self) -> StoredStates | None:
        """Of recurrent layers."""
