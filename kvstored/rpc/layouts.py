"""How long a block's layers are and where each begins, from its layout's blob (docs/formats.md).

Owns a cache of one namespace's layouts, which never change once registered. The store judges blobs; what is
read here has been accepted by it.
"""

from __future__ import annotations

import struct
from typing import Any

from kvstored.errors import NotFound

LAYER_ALIGN = 512
_HEAD = struct.Struct(
    "<4s9I"
)  # "KVL1", num_layers, ..., meta_per_token; then layer_bytes_per_token[num_layers]


def layer_ranges(blob: bytes, tokens: int) -> list[tuple[int, int]]:
    """Offset and length of each layer of a block of so many tokens."""
    num_layers = _HEAD.unpack_from(blob)[1]
    ranges = []
    offset = 0
    for per_token in struct.unpack_from(f"<{num_layers}I", blob, _HEAD.size):
        ranges.append((offset, per_token * tokens))
        offset += -(-per_token * tokens // LAYER_ALIGN) * LAYER_ALIGN
    return ranges


def layers_bytes(blob: bytes, tokens: int) -> int:
    """What Get returns: all layers, each padded."""
    offset, length = layer_ranges(blob, tokens)[-1]
    return offset + -(-length // LAYER_ALIGN) * LAYER_ALIGN


class Layouts:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: dict[int, dict[str, Any]] = {}

    def find(self, layout_id: int) -> dict[str, Any]:
        """id, num_layers, block_tokens, blob. Raises NotFound."""
        if layout_id not in self._known:
            self._known = {layout["id"]: layout for layout in self._store.layouts()}
        if layout_id not in self._known:
            raise NotFound(f"layout {layout_id} is not registered")
        return self._known[layout_id]
