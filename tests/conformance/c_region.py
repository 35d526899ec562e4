"""kvs_region by ctypes, with the face of kvclient's Region.

Owns the handle; adds nothing to what the library does, but that its errors are kvclient's.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvclient.client.region import AXES, Loaded, Registered
from kvclient.errors import InvalidArgument
from kvclient.testing.in_memory_blocks import split_keys
from tests.conformance.c_door import KNOWN, LIB, WRITTEN, CClient, Handle, Span, _packed, array_of, checked

WORDS = ["sealed", "open", "exists", "pending", "no_space", "lost", "refused"]
LOADED = ["loaded", "missing", "pending", "corrupt", "lost", "refused"]


class Shape(c.Structure):
    _fields_ = [("sizes", c.c_uint32 * 3), ("axes", c.c_uint32 * 3)]


class CRegion:
    def __init__(self, client: CClient, length: int) -> None:
        pointer = c.c_void_p()
        if not isinstance(length, int) or length < 0:
            raise InvalidArgument(f"length={length!r}")
        checked(LIB.kvs_register_region(client._pointer, c.c_uint64(length), c.byref(pointer)))
        LIB.kvs_region_refusal.restype = c.c_char_p
        self.length, self._client = length, client
        self._handle = Handle(pointer, LIB.kvs_region_free)

    @property
    def array(self) -> np.ndarray:
        span = Span()
        checked(LIB.kvs_region_memory(self._handle.pointer, c.byref(span)))
        return array_of(span, self._handle, True)

    def register(
        self, keys: Any, layout_id: int, buffers: Any, axes: Sequence[str] = AXES, layer_index: int = 0,
        token_counts: Any = None,
    ) -> list[Registered]:  # fmt: skip
        names, addresses = split_keys(list(keys)), np.ascontiguousarray(buffers, np.uint64)
        order = (c.c_uint32 * 3)(*(AXES.index(a) for a in axes))
        shape = Shape((c.c_uint32 * 3)(*addresses.shape[1:4]), order)
        counts = None if token_counts is None else (c.c_uint32 * len(names))(*token_counts)
        results = (c.c_uint8 * len(names))()
        checked(
            LIB.kvs_region_put(
                self._handle.pointer, _packed(names), c.c_size_t(len(names)), c.c_uint32(layout_id),
                c.byref(shape), addresses.ctypes.data_as(c.c_void_p), c.c_uint32(layer_index & 0xFFFFFFFF),
                counts, c.c_uint32(35), c.c_uint32(0), results,
            )
        )  # fmt: skip
        WRITTEN.update(dict.fromkeys(names, (layout_id, KNOWN[layout_id])))
        reasons = [
            LIB.kvs_region_refusal(self._handle.pointer, c.c_size_t(i)).decode() for i in range(len(names))
        ]
        return [Registered(WORDS[word], reason) for word, reason in zip(results, reasons, strict=True)]

    def load(
        self, blocks: Any, buffers: Any, axes: Sequence[str] = AXES, layer_index: int = 0
    ) -> list[Loaded]:
        addresses = np.ascontiguousarray(buffers, np.uint64)
        order = (c.c_uint32 * 3)(*(AXES.index(a) for a in axes))
        shape = Shape((c.c_uint32 * 3)(*addresses.shape[1:4]), order)
        results = (c.c_uint8 * len(blocks))()
        checked(
            LIB.kvs_region_load(
                self._handle.pointer, blocks._handle.pointer, c.byref(shape),
                addresses.ctypes.data_as(c.c_void_p), c.c_uint32(layer_index), results,
            )
        )  # fmt: skip
        return [
            Loaded(LOADED[word], LIB.kvs_region_refusal(self._handle.pointer, c.c_size_t(i)).decode())
            for i, word in enumerate(results)
        ]

    def seal(self, keys: Any, layout_id: int, offsets: Any, token_counts: Any = None) -> list[str]:
        names = split_keys(list(keys))
        counts = None if token_counts is None else (c.c_uint32 * len(names))(*token_counts)
        results = (c.c_uint8 * len(names))()
        checked(
            LIB.kvs_region_seal(
                self._handle.pointer, _packed(names), c.c_size_t(len(names)), c.c_uint32(layout_id),
                (c.c_uint64 * len(names))(*offsets), counts, c.c_uint32(35), c.c_uint32(0), results,
            )
        )  # fmt: skip
        WRITTEN.update(dict.fromkeys(names, (layout_id, KNOWN[layout_id])))
        return [WORDS[word] for word in results]

    def seal_pieces(
        self, keys: Any, layout_id: int, buffers: Any, axes: Sequence[str] = AXES, token_counts: Any = None
    ) -> list[str]:
        names, addresses = split_keys(list(keys)), np.ascontiguousarray(buffers, np.uint64)
        shape = Shape(
            (c.c_uint32 * 3)(*addresses.shape[1:4]), (c.c_uint32 * 3)(*(AXES.index(a) for a in axes))
        )
        counts = None if token_counts is None else (c.c_uint32 * len(names))(*token_counts)
        results = (c.c_uint8 * len(names))()
        checked(
            LIB.kvs_region_seal_pieces(
                self._handle.pointer, _packed(names), c.c_size_t(len(names)), c.c_uint32(layout_id),
                c.byref(shape), addresses.ctypes.data_as(c.c_void_p), counts, c.c_uint32(35), c.c_uint32(0),
                results,
            )
        )  # fmt: skip
        WRITTEN.update(dict.fromkeys(names, (layout_id, KNOWN[layout_id])))
        return [WORDS[word] for word in results]

    def give_back(self, keys: Any) -> list[str]:
        names, results = split_keys(list(keys)), (c.c_uint8 * len(keys))()
        checked(
            LIB.kvs_region_give_back(self._handle.pointer, _packed(names), c.c_size_t(len(names)), results)
        )
        return [("taken", "held", "gone")[word] for word in results]

    def forget(self, keys: Any) -> None:
        names = split_keys(list(keys))
        checked(LIB.kvs_region_forget(self._handle.pointer, _packed(names), c.c_size_t(len(names))))

    def __enter__(self) -> CRegion:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._handle.free()


class CRegionClient(CClient):
    def register_region(self, length: int) -> CRegion:
        return CRegion(self, length)
