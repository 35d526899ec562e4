"""What the gRPC door's client hands out: copies of blocks, received whole or layer by layer, or still to be
sent.

Owns the bytes; never decides anything. Bytes written into a granted block stay here until they are marked
or sealed, then they are sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from kvclient.blocks.layout import Geometry
from kvclient.errors import BlockLost, DeadlineExceeded, InvalidArgument, Unavailable
from kvstored.v1 import store_pb2, transfer_pb2

PIECE_BYTES = 1 << 20
CALL_S = 30.0
ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: BlockLost,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


@contextlib.contextmanager
def typed() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise ERRORS.get(error.code(), AssertionError)(f"{error.code().name}: {error.details()}") from error


class Held:
    """A block's layers in this process."""

    meta = None

    def __init__(self, key: bytes, tokens: int, geometry: Geometry, data: Any) -> None:
        self.key, self.tokens, self.geometry, self.data = key, tokens, geometry, data

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)

    def layer(self, index: int) -> np.ndarray:
        if not 0 <= index < self.geometry.num_layers:
            raise InvalidArgument(f"layer {index} of {self.geometry.num_layers}")
        begin = self.geometry.layer_offset(index, self.tokens)
        part = self.view[begin : begin + self.geometry.layer_length(index, self.tokens)]
        kind = np.float16 if self.geometry.shaped(index) else np.uint8
        return np.frombuffer(part, kind).reshape(self.geometry.layer_shape(index, self.tokens))


class ReadBlock(Held):
    """A sealed block, received whole."""

    sealed = True

    def __init__(self, block: Any, geometry: Geometry, data: bytes) -> None:
        super().__init__(block.key, block.token_count, geometry, data)
        self.layout_id, self.base_position = block.layout_id, block.base_position
        self.layers_ready = geometry.num_layers

    def wait_layer(self, index: int, timeout_s: float | None = None) -> None:
        self.layer(index)


class FollowedBlock(Held):
    """A block received layer by layer by a thread of its own."""

    def __init__(self, client: Any, key: bytes) -> None:
        request = transfer_pb2.FollowRequest(namespace=client.namespace, key=key)
        self._client = client
        self._stream = client.transfer.Follow(request, timeout=CALL_S)
        first = next(self._stream)  # NOT_FOUND is raised here
        geometry = client.geometry(first.block.layout_id)
        tokens = first.block.token_count
        super().__init__(key, tokens, geometry, bytearray(geometry.layers_length(tokens)))
        self.layout_id, self.base_position = first.block.layout_id, first.block.base_position
        self.layers_ready = 0
        self._changed = threading.Condition()
        self._end: BaseException | str | None = None
        self._take(first)
        threading.Thread(target=self._receive, daemon=True).start()

    def _take(self, message: Any) -> None:
        begin = self.geometry.layer_offset(message.layer, self.tokens) + message.offset_bytes
        self.data[begin : begin + len(message.data)] = message.data
        if message.data and message.offset_bytes + len(message.data) == message.layer_length_bytes:
            assert message.layer == self.layers_ready, f"layer {message.layer} came after {self.layers_ready}"
            with self._changed:
                self.layers_ready += 1
                self._changed.notify_all()

    def _receive(self) -> None:
        try:
            for message in self._stream:
                self._take(message)
            end: Any = "complete"
        except grpc.RpcError as error:
            end = BlockLost(f"{error.code().name}: {error.details()}")
        with self._changed:
            self._end = end
            self._changed.notify_all()

    @property
    def sealed(self) -> bool:
        return self._client.lookup([self.key]).states == b"\x02"

    @property
    def view(self) -> memoryview:
        self._must_have(self.geometry.num_layers - 1)
        return memoryview(self.data).toreadonly()

    def layer(self, index: int) -> np.ndarray:
        self._must_have(index)
        begin = self.geometry.layer_offset(index, self.tokens)
        part = memoryview(self.data)[
            begin : begin + self.geometry.layer_length(index, self.tokens)
        ].toreadonly()
        kind = np.float16 if self.geometry.shaped(index) else np.uint8
        return np.frombuffer(part, kind).reshape(self.geometry.layer_shape(index, self.tokens))

    def _must_have(self, index: int) -> None:
        if self.layers_ready <= index:
            if not self.sealed:
                raise InvalidArgument(f"layer {index}; {self.layers_ready} are there")
            self.wait_layer(index, CALL_S)

    def wait_layer(self, index: int, timeout_s: float | None = None) -> None:
        if not 0 <= index < self.geometry.num_layers:
            raise InvalidArgument(f"layer {index} of {self.geometry.num_layers}")
        with self._changed:
            self._changed.wait_for(lambda: self.layers_ready > index or self._end is not None, timeout_s)
            if self.layers_ready > index:
                return
            if isinstance(self._end, BaseException):
                raise self._end
            raise DeadlineExceeded(f"layer {index} did not come in {timeout_s} s")


class Blocks(list):
    """What get answers."""

    @property
    def hits(self) -> int:
        return len(self) - self.count(None)

    def wait_layer(self, index: int, timeout_s: float | None = None) -> None:
        for block in self:
            if block is not None:
                block.wait_layer(index, timeout_s)

    def release(self) -> None:
        self.clear()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass


class Granted(Held):
    """A block being written: the bytes are here until they are marked or sealed."""

    def __init__(self, writer: Any, key: bytes, tokens: int, geometry: Geometry, lease: int) -> None:
        super().__init__(key, tokens, geometry, bytearray(geometry.layers_length(tokens)))
        self.writer, self.lease, self.open = writer, lease, True
        self._sent = 0

    def pieces(self, end: int) -> Iterator[Any]:
        """The messages of a Write of what was not sent yet."""
        for at in range(self._sent, end, PIECE_BYTES):
            data = bytes(self.data[at : min(at + PIECE_BYTES, end)])
            yield store_pb2.WriteRequest(
                namespace=self.writer.client.namespace, lease_id=self.lease, key=self.key, offset_bytes=at,
                data=data,
            )  # fmt: skip
        self._sent = max(self._sent, end)

    def mark_layer(self, index: int) -> None:
        end = self.geometry.layer_offset(index, self.tokens) + self.geometry.layer_length(index, self.tokens)
        self.writer.send({self: end})
        request = store_pb2.MarkLayerRequest(
            namespace=self.writer.client.namespace, lease_id=self.lease, key=self.key, layers=index + 1
        )
        with typed():
            self.writer.client.store.MarkLayer(request, timeout=CALL_S)
