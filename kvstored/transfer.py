"""The Transfer service: a block's layers handed on while its writer still computes them.

Owns nothing. The record, which only the daemon writes, decides whether what was read is still the block that
was asked for; the number of layers ready only says when to look. Never hands out a layer before it is
published, nor one after a hole.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvstored.calls import CallCounts, Threads, streamed
from kvstored.v1 import transfer_pb2_grpc

_LAYOUT_HEAD = struct.Struct(
    "<4s9I"
)  # magic, num_layers, ..., meta_per_token; then layer_bytes_per_token[num_layers]
_LAYER_ALIGN = 512


def layer_ranges(blob: bytes, tokens: int) -> list[tuple[int, int]]:
    """Offset and length of each layer of a block of so many tokens (docs/formats.md)."""
    num_layers = _LAYOUT_HEAD.unpack_from(blob)[1]
    ranges = []
    offset = 0
    for per_token in struct.unpack_from(f"<{num_layers}I", blob, _LAYOUT_HEAD.size):
        ranges.append((offset, per_token * tokens))
        offset += -(-per_token * tokens // _LAYER_ALIGN) * _LAYER_ALIGN
    return ranges


class TransferService(transfer_pb2_grpc.TransferServicer):
    def __init__(
        self, stores: dict[str, Any], max_wait_s: float, threads: Threads, counts: CallCounts
    ) -> None:
        self.counts = counts
        self._stores = stores
        self._max_wait_s = max_wait_s
        self._threads = threads

    @streamed
    async def Follow(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield
