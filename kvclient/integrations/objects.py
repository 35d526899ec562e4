"""Objects of any length in the store: one piece of bytes each, with a tag that says of what kind they are.

Owns how a length that is no multiple of anything becomes a block: units as its tokens, the true length and
the tag behind them. Never makes a key. Invariant: an object is loaded only into memory of just its length and
under its own tag.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvclient.blocks.layout import MAX_BLOCK_TOKENS, Layout
from kvclient.errors import InvalidArgument
from kvclient.integrations.health import FAILURES
from kvclient.integrations.pages import Pages
from kvclient.integrations.self_test import Tried

UNITS = (4096, 1 << 16, 1 << 20)  # bytes; the smallest of which 65,535 hold the object
TAG_BYTES = 16
TAIL = struct.Struct(f"<Q{TAG_BYTES}s")  # the object's length and tag


class Object(NamedTuple):
    """Memory of the caller's, and what must be equal for the bytes to mean the same."""

    memory: np.ndarray | memoryview  # bytes, contiguous
    tag: bytes


class Objects(Pages):
    """As Pages, for one Object a key."""

    def put_objects(self, keys: Sequence[bytes], objects: Sequence[Object]) -> list[bool]:
        """Stores each that is not there yet. True: it is in the store, whoever wrote it."""
        stored = [False] * len(keys)
        for unit in sorted({unit_of(entry.memory.nbytes) for entry in objects}):
            mine = [i for i, entry in enumerate(objects) if unit_of(entry.memory.nbytes) == unit]
            counts = [-(-objects[i].memory.nbytes // unit) for i in mine]
            done = self.put(
                [keys[i] for i in mine], self._unit_layout(unit), [objects[i] for i in mine], counts
            )
            for i, success in zip(mine, done, strict=True):
                stored[i] = success
        return stored

    def length_of(self, key: bytes) -> int | None:
        """Bytes of that object, if it is in memory or comes from disk in time."""
        try:
            with self._client.get([key], wait_s=self._wait_s) as blocks:
                return None if blocks[0] is None else TAIL.unpack(bytes(blocks[0].meta))[0]
        except FAILURES as error:
            self._health.failed("a load", error)
            return None

    def try_an_object(self, who: str) -> None:
        """The self-test. Raises InvalidArgument, NotPermitted."""
        length, tag = 10_000, b"self-test".ljust(TAG_BYTES, b"\0")

        def attempt() -> Tried:
            key, there, back = os.urandom(32), os.urandom(length), np.zeros(length, np.uint8)
            stored = self.put_objects([key], [Object(np.frombuffer(there, np.uint8), tag)])[0]
            loaded = self.get([key], [Object(back, tag)])[0]
            self.delete([key])
            return Tried(stored=stored, loaded=loaded, same=back.tobytes() == there)

        unit = unit_of(length)
        self.try_one(attempt, (self._unit_layout(unit), length), [-(-length // unit)], who)

    def _unlike(self, source: Object) -> Object:
        return Object(~np.frombuffer(source.memory, np.uint8), source.tag)

    def _same(self, source: Object, back: Object) -> bool:
        return bytes(source.memory) == bytes(back.memory)

    def _unit_layout(self, unit: int) -> int:
        with self._lock:
            if (unit,) not in self._layouts:
                layout = Layout(
                    num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", kv_per_layer=1,
                    block_tokens=MAX_BLOCK_TOKENS, meta_fixed=TAIL.size, meta_per_token=0,
                    layer_bytes_per_token=(unit,), name="objects",
                )  # fmt: skip
                self._layouts[unit,] = self._client.register_layout(layout)
            return self._layouts[unit,]

    def _copy_all_in(self, writer: Any, mine: list[int], sources: Sequence[Object]) -> None:
        for i in mine:
            writer[i].meta[:] = _tail(sources[i])
        writer.copy_in(0, [sources[i].memory for i in mine], mine, whole=False)

    def _is_of(self, block: Any, target: Object) -> bool:
        return block.meta == _tail(target)

    def _copy_out(self, blocks: Any, there: list[int], targets: Sequence[Object]) -> set[int]:
        memory = [target.memory for target in targets]
        return {there[place] for place in blocks.copy_out(0, memory, there, whole=False)}


def _tail(entry: Object) -> bytes:
    return TAIL.pack(entry.memory.nbytes, entry.tag)


def unit_of(length: int) -> int:
    """Raises InvalidArgument for an object that no block can hold."""
    if length < 1:
        raise InvalidArgument(f"an object of {length} bytes")
    for unit in UNITS:
        if length <= unit * MAX_BLOCK_TOKENS:
            return unit
    raise InvalidArgument(f"an object of {length} bytes; at most {UNITS[-1] * MAX_BLOCK_TOKENS}")
