"""The Store service: decode, call, encode. No policy.

Owns the bound on calls that wait; stores, leases and threads are given. A handler checks the message's shape,
calls the store, and names the result. Never logs a key. Short native calls (microseconds, however many keys)
run on the event loop; bytes move on the I/O threads.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvstored.access.authorization import Door
from kvstored.access.quota import Bound
from kvstored.errors import FailedPrecondition, InvalidArgument, NotFound
from kvstored.rpc.calls import (
    CHUNK_BYTES,
    KEY_BYTES,
    MAX_WAITS,
    WAIT_SLICE_MS,
    CallCounts,
    Threads,
    answered,
    one_key,
    packed,
    streamed,
)
from kvstored.rpc.layouts import Layouts, layer_ranges, layers_bytes
from kvstored.rpc.leases import Held, Lease, Leases, sealing
from kvstored.rpc.written import Written
from kvstored.v1 import block_pb2, store_pb2, store_pb2_grpc

MISSING, PENDING, RESIDENT, DISK = range(4)  # the store's answers to a look-up, equal to Presence
CREATED, SEALED = block_pb2.BLOCK_STATE_CREATED, block_pb2.BLOCK_STATE_SEALED
MAX_WAIT_MS = 60_000
WANTED_MS = WAIT_SLICE_MS + 1000  # what a call waits for, until it asks again
DEFAULT_PRIORITY, MAX_PRIORITY = 35, 100
MAX_TTL_MS = 10 * 365 * 86_400_000
# The store's answer to create -> the message's.
CREATE_STATUS = (
    store_pb2.CreateResult.STATUS_GRANTED,
    store_pb2.CreateResult.STATUS_EXISTS,
    store_pb2.CreateResult.STATUS_PENDING,
    store_pb2.CreateResult.STATUS_NO_SPACE,
)
End = store_pb2.EndResult
STATES = {
    name.removeprefix("BLOCK_STATE_"): number for name, number in block_pb2.BlockState.items()
}  # the store's words -> the message's


def state_of(found: dict[str, Any]) -> int:
    return STATES[found["state"]]


def block_message(key: bytes, found: dict[str, Any]) -> block_pb2.Block:
    """A block's record, from the store's description of it."""
    return block_pb2.Block(
        key=key,
        state=state_of(found),
        token_count=found["tokens"],
        layout_id=found["layout_id"],
        base_position=found["base_position"],
        priority=found["priority"],
        generation=found["generation"],
        length_bytes=found["length"],
        ttl_ms=found["ttl_ms"],
        created_ms=found["created_ms"],
        uses=found["uses"],
    )


def _check_priority(priority: int) -> None:
    if priority > MAX_PRIORITY:
        raise InvalidArgument(f"priority is {priority}, the limit is {MAX_PRIORITY}")


def leading(states: bytes, wanted: int, start: int = 0) -> int:
    end = start
    while end < len(states) and states[end] == wanted:
        end += 1
    return end - start


class StoreService(store_pb2_grpc.StoreServicer):
    def __init__(
        self, door: Door, stores: dict[str, Any], leases: Leases, threads: Threads, counts: CallCounts
    ) -> None:
        self.counts = counts
        self._door = door
        self._layouts = {name: Layouts(store) for name, store in stores.items()}
        self._leases = leases
        self._threads = threads
        self._waits = Bound(MAX_WAITS, "{total} calls of Get wait, the limit is {most}")

    # ---- layouts

    @answered
    async def RegisterLayout(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace, write=True)
        return store_pb2.RegisterLayoutResponse(layout_id=store.register_layout(request.blob))

    @answered
    async def ListLayouts(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace)
        return store_pb2.ListLayoutsResponse(
            layouts=[
                block_pb2.Layout(
                    id=layout["id"],
                    num_layers=layout["num_layers"],
                    block_tokens=layout["block_tokens"],
                    blob=layout["blob"],
                    blocks=layout["blocks"],
                    on_disk=layout["on_disk"],
                    sessions=layout["sessions"],
                    digest=layout["digest"],
                )
                for layout in store.layouts()
            ]
        )

    # ---- keys

    @answered
    async def Lookup(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace)
        states = store.lookup(packed(request.keys))
        resident = leading(states, RESIDENT)
        return store_pb2.LookupResponse(
            states=list(states),
            resident=resident,
            pending=leading(states, PENDING, resident),
            on_disk=leading(states, DISK, resident),
        )

    @answered
    async def Delete(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace, write=True)
        deleted = [bool(gone) for gone in store.delete(packed(request.keys))]
        return store_pb2.DeleteResponse(deleted=deleted, count=sum(deleted))

    @answered
    async def Touch(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace)
        return store_pb2.TouchResponse(count=store.touch(packed(request.keys)))

    @answered
    async def Prefetch(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace)
        keys = packed(request.keys)
        _check_priority(request.priority)
        states = await self._threads.run(store.await_blocks, keys, request.priority, 0)
        return store_pb2.PrefetchResponse(coming=len(states) - states.count(0))

    @answered
    async def Push(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        _, store = self._door.admit(context, request.namespace, write=True)
        return store_pb2.PushResponse(told=store.push(packed(request.keys), request.to))

    # ---- writing

    @answered
    async def Create(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        namespace, store = self._door.admit(context, request.namespace, write=True)
        keys = packed(request.keys)
        counts = list(request.token_counts)
        if counts and len(counts) != len(request.keys):
            raise InvalidArgument(
                f"{len(counts)} token_counts for {len(request.keys)} keys: one per key, or none"
            )
        priority = request.priority if request.HasField("priority") else DEFAULT_PRIORITY
        _check_priority(priority)
        if request.ttl_ms > MAX_TTL_MS:
            raise InvalidArgument(f"ttl_ms is {request.ttl_ms}, the limit is {MAX_TTL_MS} (ten years)")
        layout = self._layouts[namespace].find(request.layout_id)
        lease = self._leases.open(namespace, store, request.lease_ttl_ms, self._door.user(context))
        try:
            answers = store.create(
                lease.owner, keys, request.layout_id, counts or None, priority, request.ttl_ms
            )
        except BaseException:
            self._leases.end(lease)
            raise
        results = []
        for index, (key, block) in enumerate(zip(request.keys, answers, strict=True)):
            result = store_pb2.CreateResult(status=CREATE_STATUS[block.status])
            if block.status == 0:
                tokens = counts[index] if counts else layout["block_tokens"]
                length = block.length_bytes
                written = Written(length, layer_ranges(layout["blob"], tokens))
                lease.blocks[key] = Held(key, block.handle, length, written)
                result.length_bytes = layers_bytes(layout["blob"], tokens)
                result.writable_bytes = length
            results.append(result)
        self._leases.drop_if_empty(lease)
        return store_pb2.CreateResponse(lease=self._lease_message(lease), results=results)

    @answered
    async def Write(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        lease: Lease | None = None
        held: Held | None = None
        written = 0
        async for piece in requests:
            # With every piece: a token may end while its stream goes on.
            namespace, _ = self._door.admit(
                context, piece.namespace if piece.key or lease is None else lease.namespace, write=True
            )
            if piece.key:
                lease = self._leases.find(namespace, piece.lease_id)
                held = lease.held(one_key(piece.key))
            if lease is None or held is None:
                raise InvalidArgument("the first message of a Write names no key")
            if len(piece.data) > CHUNK_BYTES:
                raise InvalidArgument(f"a piece of {len(piece.data)} bytes, the limit is {CHUNK_BYTES}")
            if piece.offset_bytes + len(piece.data) > held.length_bytes:
                raise InvalidArgument(
                    f"{len(piece.data)} bytes at {piece.offset_bytes} end behind the block, "
                    f"which has {held.length_bytes} bytes"
                )
            # Between two pieces the lease may have ended or the block been sealed: look again, every time.
            if lease.ended or lease.blocks.get(held.key) is not held:
                raise NotFound("the lease no longer holds this block")
            if held.sealing:
                raise FailedPrecondition("a Seal of this block is under way")
            self._leases.renew(lease)
            start = functools.partial(
                self._threads.run,
                lease.store.write,
                held.handle,
                piece.offset_bytes,
                piece.data,
            )
            await self._leases.write(lease, held, start)
            held.written.add(piece.offset_bytes, len(piece.data))
            written += len(piece.data)
        return store_pb2.WriteResponse(written_bytes=written)

    @answered
    async def MarkLayer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        lease = self._lease(context, request)
        held = lease.held(one_key(request.key))
        known = request.layers <= len(held.written.layers)
        if known and (missing := held.written.missing(request.layers)):
            raise InvalidArgument(f"layers {missing} were not written whole")
        lease.store.mark_layer(held.handle, request.layers)
        self._leases.renew(lease)
        return store_pb2.MarkLayerResponse()

    @answered
    async def Seal(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        lease = self._lease(context, request)
        ready = self._ready(lease, request.keys)
        for number, held in enumerate(ready):
            if not request.zero_rest and (missing := held.written.missing()):
                raise InvalidArgument(
                    f"block {number} of {len(ready)}: layers {missing} were not written whole: "
                    "write them, abort the block, or seal with zero_rest"
                )
        with sealing(ready):
            for held in ready:
                await self._zero_rest(lease, held)
        if lease.ended:  # what was not written shows what lay there before, and the owner may still be open
            raise NotFound("the lease ended while the rest of its blocks was zeroed")
        results = self._end_blocks(lease, request.keys, ready, lease.store.seal)
        return store_pb2.SealResponse(results=results)

    async def _zero_rest(self, lease: Lease, held: Held) -> None:
        """What was not written shows nothing of the block before."""
        for begin, end in held.written.gaps():
            for offset in range(begin, end, CHUNK_BYTES):
                if lease.ended:
                    return  # it is given up meanwhile
                zeros = bytes(min(CHUNK_BYTES, end - offset))
                start = functools.partial(self._threads.run, lease.store.write, held.handle, offset, zeros)
                await self._leases.write(lease, held, start)

    @answered
    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        lease = self._lease(context, request)
        ready = self._ready(lease, request.keys)
        results = self._end_blocks(lease, request.keys, ready, lease.store.abort)
        return store_pb2.AbortResponse(results=results)

    @answered
    async def KeepAlive(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        lease = self._lease(context, request)
        self._leases.renew(lease)
        return store_pb2.KeepAliveResponse(lease=self._lease_message(lease))

    def _lease(self, context: grpc.aio.ServicerContext, request: Any) -> Lease:
        """The lease that a request names. Only writers have one."""
        namespace, _ = self._door.admit(context, request.namespace, write=True)
        return self._leases.find(namespace, request.lease_id)

    def _lease_message(self, lease: Lease) -> block_pb2.Lease:
        if lease.ended:
            return block_pb2.Lease()
        return block_pb2.Lease(id=lease.id, remaining_ms=self._leases.remaining_ms(lease))

    def _ready(self, lease: Lease, keys: Any) -> list[Held]:
        """The blocks of these keys, or all, that can be ended: one being written at this moment is refused,
        not waited for."""
        packed(keys)
        asked = dict.fromkeys(keys) if keys else list(lease.blocks)
        return [held for key in asked if (held := lease.blocks.get(key)) is not None and not held.busy]

    def _end_blocks(
        self, lease: Lease, keys: Any, ready: list[Held], end: Callable[[int, list[Any]], Any]
    ) -> list[Any]:
        """Seals or aborts those that were found ready, and says of all keys what became of them."""
        asked = list(dict.fromkeys(keys)) if keys else list(lease.blocks)
        answers = dict(
            zip(
                (held.key for held in ready),
                end(lease.owner, [held.handle for held in ready]),
                strict=True,
            )
        )
        results = {}
        for key in asked:
            if key in answers:
                results[key] = End(key=key, status=End.STATUS_STALE if answers[key] else End.STATUS_OK)
                del lease.blocks[key]
            else:
                results[key] = End(
                    key=key, status=End.STATUS_BUSY if key in lease.blocks else End.STATUS_NOT_HELD
                )
        self._leases.renew(lease)
        self._leases.drop_if_empty(lease)
        return [results[key] for key in (keys or asked)]

    # ---- reading

    @streamed
    async def Get(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        self._door.admit(context, request.namespace)
        packed(request.keys)
        chunk = request.chunk_bytes or CHUNK_BYTES
        if not 4096 <= chunk <= CHUNK_BYTES:
            raise InvalidArgument(f"chunk_bytes is {chunk}, the limits are 4096 and {CHUNK_BYTES}")
        if request.wait_ms > MAX_WAIT_MS:
            raise InvalidArgument(f"wait_ms is {request.wait_ms}, the limit is {MAX_WAIT_MS}")
        if request.wait_ms:
            _, store = self._door.admit(context, request.namespace)
            keys = packed(request.keys)
            user = self._door.user(context)
            self._waits.take(user)
            try:
                await self._wait(store, keys, request.wait_ms)
            finally:
                self._waits.give(user)
        for index, key in enumerate(request.keys):
            _, store = self._door.admit(context, request.namespace)
            async for message in self._read(store, index, key, chunk):
                yield message

    async def _wait(self, store: Any, keys: bytes, wait_ms: int) -> None:
        """Until no block is on its way any more, or the time is over. In slices: a thread cannot be
        interrupted, and must neither outlive its call by much nor hold up the daemon's end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while keys:
            left_ms = max(0, int((deadline - loop.time()) * 1000))
            states = await self._threads.wait(
                store.await_blocks, keys, DEFAULT_PRIORITY, min(WAIT_SLICE_MS, left_ms), WANTED_MS
            )
            if not left_ms:
                return
            # What has come is not waited for again: it may have had to go for the next one.
            settled = len(states) - len(states.lstrip(bytes((MISSING, RESIDENT))))
            keys = keys[settled * KEY_BYTES :]

    async def _read(self, store: Any, index: int, key: bytes, chunk: int) -> AsyncIterator[Any]:
        """One block in pieces, all of the record and generation that were found."""
        # Nothing is copied by this look; it counts the hit or miss once, however many pieces follow.
        known = store.read(key, 0, 0) is not None
        found = store.describe(key) if known else None
        if found is None or state_of(found) != SEALED:
            yield store_pb2.GetResponse(index=index, last=True)
            return
        offset, length = 0, found["length"]
        while True:
            size = min(chunk, length - offset)
            data = await self._threads.run(store.read_at, found["handle"], offset, size)
            if data is None:
                yield store_pb2.GetResponse(index=index, found=True, last=True, lost=True)
                return
            last = offset + size == length
            block = block_message(key, found) if offset == 0 else None
            yield store_pb2.GetResponse(
                index=index, found=True, last=last, block=block, offset_bytes=offset, data=data
            )
            if last:
                return
            offset += size
