"""What a writer of the in-memory fake holds: Writer and GrantedBlock.

Owns which layers of a block it gave out; the records and their states are in_memory_store's. Never evicts.
Invariant: a block with a layer whose memory nobody asked for is sealed only with zero_rest.
"""

from __future__ import annotations

import ctypes
import operator
import time
from typing import Any, Protocol

import numpy as np

from kvclient.blocks import meta
from kvclient.checks import check_bounds
from kvclient.errors import BlockLost, Closed, InvalidArgument, NoSpace
from kvclient.testing.in_memory_blocks import Span, check_part, row_of
from kvclient.testing.in_memory_store import CREATED, ZOMBIE, InMemoryStore, Record, Session


class Creator(Protocol):
    """The client a writer belongs to."""

    store: InMemoryStore
    session: Session
    attached: Any

    def deadline(self, timeout_s: float | None) -> float:
        """When a wait that begins now ends, by the monotonic clock."""


class GrantedBlock:
    """A block being written by this writer."""

    def __init__(self, writer: Writer, record: Record) -> None:
        self._writer, self._record = writer, record
        self.not_given = set(range(record.geometry.num_layers))
        self._span = Span(writer.client.store.writable, record, None)
        self.key, self.tokens = record.key, record.tokens

    def __repr__(self) -> str:
        return f"<GrantedBlock for {self.tokens} tokens>"

    @property
    def view(self) -> memoryview:
        """The layers as one memoryview of bytes, each starting on a multiple of 512."""
        span = self._open()
        self.not_given.clear()
        return span.layers(writable=True)

    @property
    def meta(self) -> memoryview:
        """The client's meta area."""
        return self._open().meta(writable=True)

    def layer(self, layer: int) -> np.ndarray:
        """An array [2, kv_heads, tokens, head_dim], bfloat16 of ml_dtypes; bytes under a codec."""
        array = self._open().layer(layer, writable=True)
        self.not_given.discard(layer)
        return array

    def tensor(self, layer: int) -> Any:
        """The torch view of it."""
        tensor = self._open().tensor(layer)
        self.not_given.discard(layer)
        return tensor

    def copy_layer(self, layer: int, source: Any) -> None:
        """Copies one layer in."""
        target = self._open().layer(layer, writable=True)
        target.reshape(-1).view(np.uint8)[:] = _exactly(source, target.nbytes)
        self.not_given.discard(layer)

    def copy_from(self, source: Any) -> None:
        """Copies all layers in, from bytes that follow each other without padding."""
        span, count = self._open(), self._record.geometry.num_layers
        layers = [span.layer(index, writable=True) for index in range(count)]
        data = _exactly(source, sum(layer.nbytes for layer in layers))
        for layer in layers:
            layer.reshape(-1).view(np.uint8)[:] = data[: layer.nbytes]
            data = data[layer.nbytes :]
        self.not_given.clear()

    def mark_layer(self, layer: int) -> None:
        """Publishes that layer to followers; layers are published in order. Raises InvalidArgument for one
        that was not written.
        """
        self._open()
        with self._writer.client.store.changed:
            if layer in self.not_given and layer == self._record.layers_ready:
                raise InvalidArgument(f"layer {layer} was not written: its memory was never asked for")
            self._writer.client.store.mark_layer(self._record, layer)

    def _open(self) -> Span:
        if self._record.owner is not self._writer.client.session:
            raise Closed("this block was sealed or aborted")
        return self._span


def _exactly(source: Any, length: int) -> np.ndarray:
    """The bytes of a contiguous buffer or tensor. Raises InvalidArgument unless there are just that many."""
    if hasattr(source, "data_ptr") and source.device.type == "cpu" and source.is_contiguous():
        size = source.numel() * source.element_size()
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source.data_ptr()))
    else:
        try:
            flat = np.frombuffer(source, np.uint8)
        except (TypeError, ValueError) as error:  # as the native client says it
            what = f"source of type {type(source).__name__}"
            raise InvalidArgument(f"{what} is not a contiguous buffer in CPU memory") from error
    if flat.size != length:
        raise InvalidArgument(f"the source has {flat.size} bytes, the layers have {length}")
    return flat


class Writer:
    """What create answers. `results` has one word per key; `granted` the indices this writer fills."""

    def __init__(self, client: Creator, items: list[tuple[tuple, Record | str]], chain: Any) -> None:
        self.client, self._chain = client, chain
        self._wanted = [wanted for wanted, _ in items]
        self.results = [""] * len(items)
        self._granted: dict[int, GrantedBlock] = {}
        for index, (_, item) in enumerate(items):
            self._take(index, item)

    def __repr__(self) -> str:
        return f"<Writer: {len(self._granted)} of {len(self)} granted>"

    def _take(self, index: int, item: Record | str) -> None:
        self.results[index] = "granted" if isinstance(item, Record) else item
        if isinstance(item, Record):
            self._granted[index] = block = GrantedBlock(self, item)
            if self._chain is not None:
                meta.put(block.meta, meta.of_chunk(self._chain, index))

    @property
    def granted(self) -> list[int]:
        """Indices of the chain's blocks that this writer fills, ascending."""
        return sorted(self._granted)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> GrantedBlock:
        return self._granted[self._place(index)]

    def _place(self, index: int) -> int:
        asked = index = operator.index(index)
        index += len(self.results) if index < 0 else 0
        if index in self._granted:
            return index
        if not 0 <= index < len(self.results):
            raise IndexError(f"index {asked} of {len(self.results)} keys")
        if self.results[index] == "no_space":
            raise NoSpace(
                f"no unpinned run for this block in a pool of {self.client.store.capacity_bytes} bytes"
            )
        raise InvalidArgument(f"key {index} was not granted to this writer: {self.results[index]}")

    def copy_layer(self, layer: int, source: Any, indices: Any, offsets: Any) -> None:
        """Copies that layer of those granted blocks out of a buffer, each from its offset in bytes."""
        memory = memoryview(source).cast("B")
        for index, offset in zip(indices, offsets, strict=True):
            block = self[index]
            check_bounds("layer", layer, 0, block._record.geometry.num_layers - 1)
            length = block._record.geometry.layer_length(layer, block._record.tokens)
            block.copy_layer(layer, row_of(memory, int(offset), length))

    def copy_in(self, layer: int, sources: Any, indices: Any, whole: bool = True) -> None:
        """Copies that layer of those granted blocks out of a buffer each, which without `whole` may have
        fewer bytes: zeros follow. Raises InvalidArgument for another size."""
        if len(sources) != len(indices):
            raise InvalidArgument(f"{len(indices)} indices and {len(sources)} sources")
        for index, source in zip(indices, sources, strict=True):
            block, content = self[index], memoryview(source).cast("B")
            check_bounds("layer", layer, 0, block._record.geometry.num_layers - 1)
            length = block._record.geometry.layer_length(layer, block._record.tokens)
            check_part("sources", len(content), length, whole)
            block.copy_layer(layer, bytes(content).ljust(length, b"\0"))

    def seal(self, index: int | None = None, zero_rest: bool = False) -> None:
        """Publishes one granted block, or all. With zero_rest, layers nobody asked for are zeros. Raises
        InvalidArgument for them without it, BlockLost if a lease had ended. Closed after the client."""
        if not self.client.attached:
            raise Closed("the client was closed, and its unsealed blocks given up")
        self.check_given(list(self._granted) if index is None else [self._place(index)], zero_rest)
        self._finish(index, self.client.store.seal, lost_is_error=True)

    def check_given(self, places: list[int], zero_rest: bool = False) -> None:
        """Raises InvalidArgument if one of these open blocks has layers whose memory was never asked for."""
        for place in places:
            block = self._granted[place]
            if block._record.state != CREATED or not block.not_given:
                continue
            if not zero_rest:  # (the fake's memory is zeros from the start)
                layers = f"of its {block._record.geometry.num_layers} layers nobody wrote"
                way = "write them, abort the block, or seal with zero_rest=True"
                missing = sorted(block.not_given)
                raise InvalidArgument(f"block {place} of {len(self)}: {layers} {missing}; {way}")
            block.not_given.clear()

    def abort(self, index: int | None = None) -> None:
        """Gives up one granted block, or all. Idempotent."""
        self._finish(index, self.client.store.remove, lost_is_error=False)

    def wait_pending(self, timeout_s: float | None = None) -> bool:
        """Waits for the blocks others write: each becomes "exists" or "granted". False if not all."""
        deadline = self.client.deadline(timeout_s)
        changed = self.client.store.changed
        with changed:
            while True:
                for index in [i for i, result in enumerate(self.results) if result == "pending"]:
                    item = self.client.store.create(self.client.session, *self._wanted[index])
                    self._take(index, item)
                if "pending" not in self.results:
                    return True
                if not changed.wait(max(0.0, deadline - time.monotonic())):
                    return False

    def _finish(self, index: int | None, act: Any, lost_is_error: bool) -> None:
        blocks = list(self._granted.values()) if index is None else [self[index]]
        lost = 0
        with self.client.store.changed:
            for block in blocks:
                record = block._record
                if record.owner is self.client.session and record.state == CREATED:
                    act(record)
                elif not record.sealed:
                    lost += 1
        if lost and lost_is_error:
            raise BlockLost(
                f"{lost} of {len(blocks)} blocks were aborted or lost their writer before the seal"
            )

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, exc_type: object, *_exc: object) -> None:
        if exc_type is not None:
            self.abort()
            return
        try:
            self.check_given(list(self._granted))
        except InvalidArgument:  # an exception that leaves the context, as any other
            self.abort()
            raise
        aborted = [i for i, b in self._granted.items() if b._record.state == ZOMBIE]
        for index in (i for i in self._granted if i not in aborted):
            self.seal(index)
