"""The Transfer service: a block's layers handed on while its writer still computes them.

Owns the bound on followers. The store decides, piece by piece, whether this is still the block that was asked
for. Never hands out a layer before it is published, nor one after a hole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvstored.access.authorization import Door
from kvstored.access.quota import Bound
from kvstored.errors import BlockLost, DeadlineExceeded, InvalidArgument, NotFound
from kvstored.rpc.calls import (
    CHUNK_BYTES,
    MAX_FOLLOWERS,
    WAIT_SLICE_MS,
    CallCounts,
    Threads,
    one_key,
    streamed,
)
from kvstored.rpc.layouts import Layouts, layer_ranges
from kvstored.rpc.store import CREATED, SEALED, block_message, state_of
from kvstored.v1 import transfer_pb2, transfer_pb2_grpc


class TransferService(transfer_pb2_grpc.TransferServicer):
    def __init__(
        self,
        door: Door,
        stores: dict[str, Any],
        max_wait_s: float,
        threads: Threads,
        counts: CallCounts,
    ) -> None:
        self.counts = counts
        self._door = door
        self._layouts = {name: Layouts(store) for name, store in stores.items()}
        self._max_wait_s = max_wait_s
        self._threads = threads
        self._followers = Bound(MAX_FOLLOWERS, "{total} blocks are followed, the limit is {most}")

    @streamed
    async def Follow(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        namespace, store = self._door.admit(context, request.namespace)
        found = store.describe(one_key(request.key))
        if found is None or state_of(found) not in (CREATED, SEALED):
            raise NotFound("nothing is known under this key")
        layout = self._layouts[namespace].find(found["layout_id"])
        if request.first_layer > layout["num_layers"]:
            raise InvalidArgument(
                f"first_layer is {request.first_layer}, the block has {layout['num_layers']}"
            )
        user = self._door.user(context)
        self._followers.take(user)
        try:
            yield transfer_pb2.FollowResponse(
                block=block_message(request.key, found),
                num_layers=layout["num_layers"],
                layer=request.first_layer,
            )
            wait_s = min(request.timeout_ms / 1000 or self._max_wait_s, self._max_wait_s)
            ready = 0
            for layer, (begin, length) in enumerate(layer_ranges(layout["blob"], found["tokens"])):
                if layer < request.first_layer:
                    continue
                self._door.admit(context, namespace)
                if ready <= layer:
                    ready = await self._wait(store, found, layer, wait_s)
                async for piece in self._pieces(store, found, layer, begin, length):
                    yield piece
        finally:
            self._followers.give(user)

    async def _wait(self, store: Any, found: dict[str, Any], layer: int, wait_s: float) -> int:
        """How many layers are ready once this one is. Raises DeadlineExceeded, BlockLost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            left_ms = int((deadline - loop.time()) * 1000)
            slice_ms = max(0, min(WAIT_SLICE_MS, left_ms))
            ready = await self._threads.wait(store.wait_layers, found["handle"], layer + 1, slice_ms)
            if ready > layer:
                return ready
            if left_ms <= 0:
                raise DeadlineExceeded(f"layer {layer} did not come within {wait_s:g} s")

    async def _pieces(
        self, store: Any, found: dict[str, Any], layer: int, begin: int, length: int
    ) -> AsyncIterator[Any]:
        for offset in range(0, length, CHUNK_BYTES):
            size = min(CHUNK_BYTES, length - offset)
            data = await self._threads.run(store.read_at, found["handle"], begin + offset, size)
            if data is None:
                raise BlockLost("the block went away")
            yield transfer_pb2.FollowResponse(
                layer=layer, layer_length_bytes=length, offset_bytes=offset, data=data
            )
