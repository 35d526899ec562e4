"""What a reader of the in-memory fake holds: Lookup, BlockView and Blocks.

Owns nothing but references: every export (memoryview, array, tensor) holds the pin of its block through Span.
Never changes a record except by dropping a pin. Invariant: a pin goes with the last export, also after
release() and close().
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvclient.blocks import bfloat16, meta
from kvclient.checks import check_bounds
from kvclient.errors import BlockLost, Closed, DeadlineExceeded, InvalidArgument, PinsExhausted
from kvclient.testing.in_memory_store import DISK, PENDING, RESIDENT, ZOMBIE, InMemoryStore, Pin, Record

KEY_BYTES = 32
_NUMPY = {
    "uint8": np.uint8,
    "float16": np.float16,
    "bfloat16": bfloat16.ELEMENT,
    "float32": np.float32,
    "int8": np.int8,
}
_MISS = "miss"


def split_keys(keys: Any) -> list[bytes]:
    """The keys of a Chain, a list of 32-byte keys or a packed buffer. Raises InvalidArgument otherwise."""
    packed = getattr(keys, "packed_keys", keys)
    if isinstance(packed, (list, tuple)):
        for index, key in enumerate(packed):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                found = f"{len(key)} bytes" if isinstance(key, bytes) else f"of type {type(key).__name__}"
                raise InvalidArgument(f"a key is {KEY_BYTES} bytes; key {index} is {found}")
        return list(packed)
    try:
        packed = bytes(memoryview(packed))
    except TypeError:
        wanted = f"keys are a chain, a list of {KEY_BYTES}-byte keys or a packed buffer"
        raise InvalidArgument(f"{wanted}; got {type(keys).__name__}") from None
    if len(packed) % KEY_BYTES:
        raise InvalidArgument(f"packed keys of {len(packed)} bytes; it must be a multiple of {KEY_BYTES}")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


class Holder(Protocol):
    """The client a handle belongs to."""

    store: InMemoryStore
    max_pins: int

    def deadline(self, timeout_s: float | None) -> float:
        """When a wait that begins now ends, by the monotonic clock."""


class Lookup:
    """How far a list of keys is present."""

    def __init__(self, states: bytes) -> None:
        self.states = states
        self.resident = _leading(states, 0, RESIDENT)
        self.pending = _leading(states, self.resident, PENDING)
        self.on_disk = _leading(states, self.resident, DISK)
        self.on_peers = 0

    def __repr__(self) -> str:
        counts = f"{self.resident} resident, {self.pending} pending, {self.on_disk} on disk"
        return f"<Lookup of {len(self.states)} blocks: {counts}>"


def _leading(states: bytes, start: int, wanted: int) -> int:
    count = 0
    while start + count < len(states) and states[start + count] == wanted:
        count += 1
    return count


class Span:
    """A block's memory as exported to users. Each export owns a reference to `owner`, so to the pin."""

    def __init__(self, memory: np.ndarray, record: Record, owner: Any) -> None:
        self._base = memory.ctypes.data
        self._memory, self._record, self._owner = memory, record, owner

    def part(self, offset: int, length: int, writable: bool) -> memoryview:
        """`length` bytes from byte `offset` of the block on."""
        array = (ctypes.c_uint8 * length).from_address(self._base + self._record.offset + offset)
        array.owner = (self._owner, self._memory)
        view = memoryview(array).cast("B")
        return view if writable else view.toreadonly()

    def layers(self, writable: bool) -> memoryview:
        """The bytes of all layers."""
        r = self._record
        return self.part(0, r.geometry.layers_length(r.tokens), writable)

    def meta(self, writable: bool) -> memoryview:
        """The bytes of the meta area."""
        r = self._record
        return self.part(r.geometry.meta_offset(r.tokens), r.geometry.meta_length(r.tokens), writable)

    def layer(self, layer: int, writable: bool) -> np.ndarray:
        """One layer [kv, heads, tokens, head_dim], or [bytes] where the layout gives no shape. Raises
        InvalidArgument for a layer it has not.
        """
        r = self._record
        check_bounds("layer", layer, 0, r.geometry.num_layers - 1)
        length = r.geometry.layer_length(layer, r.tokens)
        view = self.part(r.geometry.layer_offset(layer, r.tokens), length, writable)
        kind = _NUMPY[r.geometry.dtype] if r.geometry.shaped(layer) else np.uint8
        array = np.frombuffer(view, kind).reshape(r.geometry.layer_shape(layer, r.tokens))
        return array.view(bfloat16.Layer) if writable and array.dtype == bfloat16.ELEMENT else array

    def tensor(self, layer: int) -> Any:
        """The same as a torch tensor over the same memory."""
        import torch  # only who asks for tensors pays for torch

        # torch knows no read-only tensors: what protects a reader's block is that its mapping is read-only.
        array = self.layer(layer, writable=True)
        tensor = torch.from_numpy(bfloat16.bits(array))
        return tensor.view(torch.bfloat16) if array.dtype == bfloat16.ELEMENT else tensor


class BlockView:
    """One block, pinned. `.view`, `.layer(i)`, `.tensor(i)` and `.meta` are zero-copy and own the pin."""

    def __init__(self, client: Holder, pin: Pin) -> None:
        record = pin.record
        self._client, self._record = client, record
        self._span: Span | None = Span(client.store.readable, record, pin)
        self.tokens = record.tokens
        self.layout_id, self.base_position = record.layout_id, record.base_position

    def __repr__(self) -> str:
        layers = f"{self.layers_ready} of {self._record.geometry.num_layers} layers"
        return f"<BlockView of {self.tokens} tokens, {layers} there>"

    @property
    def key(self) -> bytes:
        """The block's key. Raises Closed after release()."""
        self._held()
        return self._record.key

    @property
    def sealed(self) -> bool:
        """Whether its writer has sealed it."""
        return self._record.sealed

    @property
    def layers_ready(self) -> int:
        """How many leading layers may be read."""
        return self._record.layers_ready

    @property
    def view(self) -> memoryview:
        """The bytes of all layers, read-only; waits for them."""
        return self._ready(self._record.geometry.num_layers - 1).layers(writable=False)

    @property
    def meta(self) -> memoryview:
        """The bytes of the meta area, read-only."""
        return self._ready(self._record.geometry.num_layers - 1).meta(writable=False)

    def holds(self, token_ids: Any) -> bool:
        """Whether the meta area, as the library writes it, has these tokens: int32, of any shape, as bytes or
        another contiguous buffer. A key is a hash; this confirms a hit. Waits as `meta` does.
        """
        known = meta.unpack(self.meta, self.tokens)
        return known is not None and known.token_ids == bytes(memoryview(token_ids).cast("B"))

    def layer(self, layer: int) -> np.ndarray:
        """An array [2, kv_heads, tokens, head_dim], bfloat16 of ml_dtypes; bytes under a codec."""
        return self._ready(layer).layer(layer, writable=False)

    def tensor(self, layer: int) -> Any:
        """The torch view of it. Writing to it ends the process: the mapping is read-only."""
        return self._ready(layer).tensor(layer)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Waits until that layer is there. Raises BlockLost or DeadlineExceeded."""
        check_bounds("layer", layer, 0, self._record.geometry.num_layers - 1)
        deadline = self._client.deadline(timeout_s)
        changed = self._client.store.changed
        with changed:
            while self._record.layers_ready <= layer:
                if self._record.state == ZOMBIE:
                    there = self._record.layers_ready
                    raise BlockLost(f"the writer ended after {there} layers; layer {layer} will not come")
                if not changed.wait(max(0.0, deadline - time.monotonic())):
                    there = self._record.layers_ready
                    raise DeadlineExceeded(f"layer {layer} did not come in time; {there} are there")

    def verify(self) -> bool:
        """Whether the bytes still have the checksum they were sealed with."""
        self._ready(self._record.geometry.num_layers - 1)
        return self._client.store.crc_of(self._record) == self._record.checksum

    def _ready(self, layer: int) -> Span:
        check_bounds("layer", layer, 0, self._record.geometry.num_layers - 1)
        there = self._record.layers_ready
        if self._record.state == ZOMBIE and there < self._record.geometry.num_layers:
            raise BlockLost("the block's writer ended before it was whole")
        if layer >= there:
            raise InvalidArgument(
                f"layer {layer} of a followed block with {there} layers; wait_layer waits for it"
            )
        return self._held()

    def _held(self) -> Span:
        if self._span is None:
            raise Closed("the blocks this view belongs to were released")
        return self._span

    def _release(self) -> None:
        self._span = None


def row_of(memory: memoryview, offset: int, length: int) -> memoryview:
    """Raises InvalidArgument for a row outside."""
    if offset < 0 or offset + length > len(memory):
        raise InvalidArgument(f"a row of {length} bytes at {offset} in memory of {len(memory)}")
    return memory[offset : offset + length]


def check_part(name: str, size: int, length: int, whole: bool) -> None:
    """Raises InvalidArgument for memory of another size than the layer it is a part of allows."""
    if size > length or (whole and size < length):
        raise InvalidArgument(f"one of {name} has {size} bytes, the layer has {length}")


class Blocks(Sequence):
    """What get answers, one item per key: a BlockView, or None for a miss. Leaving releases all."""

    def __init__(self, client: Holder, items: list[BlockView | str]) -> None:
        self._client, self._items = client, items
        self.hits = sum(isinstance(item, BlockView) for item in items)

    def __repr__(self) -> str:
        return f"<Blocks: {self.hits} of {len(self)} found>"

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} blocks")
        item = self._items[index]
        if item == "exhausted":
            raise PinsExhausted(f"the session holds its {self._client.max_pins} pins; release some blocks")
        return None if item == _MISS else item

    def __iter__(self) -> Iterator[BlockView | None]:
        return (self[i] for i in range(len(self)))

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Waits for that layer of all blocks that were found."""
        deadline = self._client.deadline(timeout_s)
        for block in self._items:
            if isinstance(block, BlockView):
                block.wait_layer(layer, max(0.0, deadline - time.monotonic()))

    def layers(self, layer: int, timeout_s: float | None = None) -> list[Any]:
        """Waits as wait_layer does; then that layer of every block, None for a miss."""
        self.wait_layer(layer, timeout_s)
        return [block.layer(layer) if isinstance(block, BlockView) else None for block in self._items]

    def copy_layer(
        self, layer: int, target: Any, indices: Any, offsets: Any, verify: bool = False
    ) -> list[int]:
        """Copies that layer of those blocks into a buffer, each to its offset in bytes. No byte here is ever
        other than its writer left it: none is wrong. Raises InvalidArgument for a block that was not found.
        """
        memory = memoryview(target).cast("B")
        for index, offset in zip(indices, offsets, strict=True):
            if not 0 <= index < len(self) or not isinstance(block := self._items[index], BlockView):
                raise InvalidArgument(f"block {index} is not one that was found")
            content = bytes(block.layer(layer).tobytes())
            row_of(memory, int(offset), len(content))[:] = content
        return []

    def copy_out(self, layer: int, targets: Any, indices: Any, whole: bool = True) -> list[int]:
        """Copies that layer of those blocks into a buffer each, which without `whole` may have fewer bytes.
        None is wrong. Raises InvalidArgument for a block that was not found, and for another size."""
        if len(targets) != len(indices):
            raise InvalidArgument(f"{len(indices)} indices and {len(targets)} targets")
        for index, target in zip(indices, targets, strict=True):
            if not 0 <= index < len(self) or not isinstance(block := self._items[index], BlockView):
                raise InvalidArgument(f"block {index} is not one that was found")
            content, memory = block.layer(layer).tobytes(), memoryview(target).cast("B")
            check_part("targets", len(memory), len(content), whole)
            memory[:] = content[: len(memory)]
        return []

    def release(self) -> None:
        """Gives back what no export holds. Idempotent."""
        for item in self._items:
            if isinstance(item, BlockView):
                item._release()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
