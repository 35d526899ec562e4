"""The gRPC door as a client of the conformance suite: the generated stubs with the face of KVClient.

Owns the channel; never maps memory. Bytes written into a granted block stay
here until they are marked or sealed, then they are sent. Invariant: what it answers comes from the daemon
alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc

from kvclient.blocks.layout import Geometry
from kvclient.checks import whole_seconds
from kvclient.errors import (
    BlockLost,
    Closed,
    InvalidArgument,
    NoSpace,
)
from kvclient.testing.in_memory_blocks import Lookup, split_keys
from kvstored.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from tests.conformance.grpc_blocks import CALL_S, Blocks, FollowedBlock, Granted, ReadBlock, typed

MAX_KEYS = 1024
RESULTS = {1: "granted", 2: "exists", 3: "pending", 4: "no_space"}


def pieces(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[at : at + MAX_KEYS] for at in range(0, len(keys), MAX_KEYS))


class Writer:
    """What create answers."""

    def __init__(self, client: GrpcClient, wanted: list[tuple[bytes, int]], options: dict[str, Any]) -> None:
        self.client, self._wanted, self._options = client, wanted, options
        self.results = ["pending"] * len(wanted)
        self._granted: dict[int, Granted] = {}
        for at in range(0, len(wanted), MAX_KEYS):
            self._claim(list(range(at, min(at + MAX_KEYS, len(wanted)))))

    def _claim(self, indices: list[int]) -> None:
        request = store_pb2.CreateRequest(
            namespace=self.client.namespace,
            keys=[self._wanted[i][0] for i in indices],
            token_counts=[self._wanted[i][1] for i in indices],
            **self._options,
        )
        with typed():
            answer = self.client.store.Create(request, timeout=CALL_S)
        geometry = self.client.geometry(self._options["layout_id"])
        for index, result in zip(indices, answer.results, strict=True):
            self.results[index] = RESULTS[result.status]
            if result.status == 1:
                key, tokens = self._wanted[index]
                assert result.length_bytes >= geometry.layers_length(tokens)
                self._granted[index] = Granted(self, key, tokens, geometry, answer.lease.id)

    @property
    def granted(self) -> list[int]:
        return sorted(self._granted)

    def __getitem__(self, index: int) -> Granted:
        index += len(self.results) if index < 0 else 0
        if index in self._granted:
            return self._granted[index]
        if not 0 <= index < len(self.results):
            raise IndexError(index)
        raise (
            NoSpace("no_space") if self.results[index] == "no_space" else InvalidArgument(self.results[index])
        )

    def seal(self, index: int | None = None, zero_rest: bool = False) -> None:
        self.send({block: block.geometry.layers_length(block.tokens) for block in self._open(index)})
        self._end(index, self.client.store.Seal, store_pb2.SealRequest, lost_is_error=True)

    def abort(self, index: int | None = None) -> None:
        self._end(index, self.client.store.Abort, store_pb2.AbortRequest, lost_is_error=False)

    def send(self, ends: dict[Granted, int]) -> None:
        """The bytes of blocks up to these offsets, all in one stream."""
        messages = [piece for block, end in ends.items() for piece in block.pieces(end)]
        if messages:
            with typed():
                written = self.client.store.Write(iter(messages), timeout=CALL_S).written_bytes
            assert written == sum(len(message.data) for message in messages)

    def _open(self, index: int | None) -> list[Granted]:
        chosen = list(self._granted.values()) if index is None else [self[index]]
        return [block for block in chosen if block.open]

    def _end(self, index: int | None, call: Any, request: Any, lost_is_error: bool) -> None:
        leases: dict[int, list[Granted]] = {}
        for block in self._open(index):
            leases.setdefault(block.lease, []).append(block)
            block.open = False
        for lease, blocks in leases.items():
            message = request(
                namespace=self.client.namespace, lease_id=lease, keys=[block.key for block in blocks]
            )
            try:
                with typed():
                    results = call(message, timeout=CALL_S).results
            except InvalidArgument:
                if lost_is_error:
                    raise
                continue
            if lost_is_error and any(result.status != 1 for result in results):
                raise BlockLost("a block was lost before its seal")

    def wait_pending(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while "pending" in self.results and (left_s := deadline - time.monotonic()) > 0:
            index = self.results.index("pending")
            request = transfer_pb2.FollowRequest(
                namespace=self.client.namespace,
                key=self._wanted[index][0],
                timeout_ms=max(1, int(left_s * 1000)),
            )
            try:
                for _ in self.client.transfer.Follow(request, timeout=left_s):
                    pass
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue
            self._claim([index])

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        self.abort() if kind is not None else self.seal()


class GrpcClient:
    """One channel to the daemon's gRPC socket."""

    def __init__(self, socket_path: str, namespace: str = "default", **_options: Any) -> None:
        self.namespace = namespace
        # A channel of its own, as another process would have.
        self._channel = grpc.insecure_channel(f"unix:{socket_path}", [("grpc.use_local_subchannel_pool", 1)])
        self._store = store_pb2_grpc.StoreStub(self._channel)
        self.transfer = transfer_pb2_grpc.TransferStub(self._channel)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)
        self._geometries: dict[int, Geometry] = {}
        self._writers: list[Writer] = []
        self._closed = False

    @property
    def store(self) -> Any:
        if self._closed:
            raise Closed("the client was closed")
        return self._store

    def geometry(self, layout_id: int) -> Geometry | None:
        """Asked for once: an id means the same for as long as its daemon runs."""
        if layout_id not in self._geometries:
            with typed():
                answer = self.store.ListLayouts(
                    store_pb2.ListLayoutsRequest(namespace=self.namespace), timeout=CALL_S
                )
            self._geometries = {layout.id: Geometry.from_blob(layout.blob) for layout in answer.layouts}
        return self._geometries.get(layout_id)

    def register_layout(self, layout: Any) -> int:
        request = store_pb2.RegisterLayoutRequest(namespace=self.namespace, blob=bytes(layout))
        with typed():
            return self.store.RegisterLayout(request, timeout=CALL_S).layout_id

    def lookup(self, keys: Any) -> Lookup:
        states = b""
        for part in pieces(keys_of(keys)):
            with typed():
                answer = self.store.Lookup(
                    store_pb2.LookupRequest(namespace=self.namespace, keys=part), timeout=CALL_S
                )
            found = Lookup(bytes(answer.states))
            assert (answer.resident, answer.pending, answer.on_disk) == (
                found.resident, found.pending, found.on_disk,
            )  # fmt: skip
            states += found.states
        return Lookup(states)

    def get(self, keys: Any, follow: bool = False, wait_s: float = 0.0) -> Blocks:
        return self._follow(keys_of(keys)) if follow else self._read(keys_of(keys), int(1000 * wait_s))

    def _read(self, keys: list[bytes], wait_ms: int) -> Blocks:
        blocks = Blocks()
        for part in pieces(keys):
            found: list[Any] = [None] * len(part)
            data: dict[int, bytearray] = {}
            records: dict[int, Any] = {}
            request = store_pb2.GetRequest(namespace=self.namespace, keys=part, wait_ms=wait_ms)
            with typed():
                for message in self.store.Get(request, timeout=CALL_S):
                    if message.found and message.HasField("block"):
                        records[message.index], data[message.index] = message.block, bytearray()
                    if message.lost:
                        records.pop(message.index, None)
                    elif message.found:
                        assert message.offset_bytes == len(data[message.index])
                        data[message.index] += message.data
            for index, record in records.items():
                geometry = self.geometry(record.layout_id)
                found[index] = ReadBlock(record, geometry, bytes(data[index]))
            blocks.extend(found)
        return blocks

    def _follow(self, keys: list[bytes]) -> Blocks:
        blocks = Blocks()
        for key in keys:
            try:
                blocks.append(FollowedBlock(self, key))
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED), error
                blocks.append(None)
        return blocks

    def create(
        self,
        keys: Any,
        layout_id: int,
        priority: int = 35,
        ttl_s: float | None = None,
        token_counts: Any = None,
    ) -> Writer:
        names = keys_of(keys)
        geometry = self.geometry(layout_id)
        counts = (
            token_counts
            if token_counts is not None
            else [geometry.block_tokens if geometry else 1] * len(names)
        )
        if len(counts) != len(names) or min(priority, layout_id, *counts, 0) < 0:
            raise InvalidArgument(f"{counts} tokens of {len(names)} keys, {priority=}, {layout_id=}")
        options = {"layout_id": layout_id, "priority": priority, "ttl_ms": 1000 * whole_seconds(ttl_s)}
        writer = Writer(self, list(zip(names, counts, strict=True)), options)
        self._writers.append(writer)
        return writer

    def delete(self, keys: Any) -> int:
        return self._count(self.store.Delete, store_pb2.DeleteRequest, keys)

    def touch(self, keys: Any) -> int:
        return self._count(self.store.Touch, store_pb2.TouchRequest, keys)

    def _count(self, call: Any, request: Any, keys: Any) -> int:
        with typed():
            return sum(
                call(request(namespace=self.namespace, keys=part), timeout=CALL_S).count
                for part in pieces(keys_of(keys))
            )

    def stats(self) -> dict[str, int]:
        if self._closed:
            raise Closed("the client was closed")
        with typed():
            answer = self.admin.Stats(admin_pb2.StatsRequest(namespace=self.namespace), timeout=CALL_S)
        return dict(answer.namespaces[0].counters)

    def close(self) -> None:
        if not self._closed:
            for writer in self._writers:
                writer.abort()
            self._closed = True
            self._channel.close()

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class GuestClient(GrpcClient):
    """The same through guests.sock. Only the figures come from the owner's socket: guests see none."""

    def __init__(self, daemon: Any, namespace: str = "default", **_options: Any) -> None:
        super().__init__(str(daemon.dir / "guests.sock"), namespace)
        self._session = daemon.connect(namespace=namespace)
        shown = grpc.intercept_channel(self._channel, _Shown(self._session.grpc_token()))
        self._store = store_pb2_grpc.StoreStub(shown)
        self.transfer = transfer_pb2_grpc.TransferStub(shown)
        self._owners = grpc.insecure_channel(f"unix:{daemon.dir / 'grpc.sock'}")
        self.admin = admin_pb2_grpc.AdminStub(self._owners)

    def close(self) -> None:
        super().close()
        self._owners.close()
        self._session.close()


class _Shown(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor
):  # fmt: skip
    """Puts the token on every call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_stream_unary = intercept_unary_unary


def keys_of(keys: Any) -> list[bytes]:
    """Without the check of lengths that the daemon has to make."""
    return list(keys) if isinstance(keys, (list, tuple)) else split_keys(keys)
