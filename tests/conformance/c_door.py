"""The C interface as a client of the conformance suite: libkvstored_client.so by ctypes, with the face of
KVClient.

Owns the handles; adds nothing to what the library does. Invariant: arrays over pinned memory keep their
batch, so that a test that holds one holds the pin.
"""

from __future__ import annotations

import ctypes as c
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from kvclient import errors
from kvclient.blocks.layout import DTYPES, Geometry
from kvclient.checks import whole_seconds
from kvclient.errors import InvalidArgument
from kvclient.testing.in_memory_blocks import Lookup, split_keys

BUILT = Path(__file__).resolve().parents[2] / "build/dev/capi/libkvstored_client.so"
LIBRARY = Path(os.environ.get("KV_C_LIBRARY", BUILT))  # or one under a sanitizer: docs/c-api.md
RAISED = {
    1: errors.InvalidArgument, 2: errors.NoSpace, 3: errors.NotPermitted, 4: errors.PinsExhausted,
    5: errors.DeadlineExceeded, 6: errors.BlockLost, 7: errors.Closed, 8: errors.IncompatibleVersion,
    9: errors.Unavailable,
}  # fmt: skip
WORDS = ["granted", "exists", "pending", "no_space"]
ALL = c.c_size_t(-1).value
FOLLOW, VERIFY = 1, 2


class Options(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_uint32), ("max_pins", c.c_uint32), ("timeout_s", c.c_double),
        ("directory", c.c_char_p), ("namespace_name", c.c_char_p), ("read_only", c.c_int32),
    ]  # fmt: skip


class LayoutStruct(c.Structure):
    _fields_ = [
        (name, c.c_uint32)
        for name in (
            "num_layers", "kv_per_layer", "num_kv_heads", "head_dim", "dtype", "block_tokens", "meta_fixed",
            "meta_per_token",
        )
    ] + [("layer_bytes_per_token", c.POINTER(c.c_uint32))]  # fmt: skip


class Span(c.Structure):
    _fields_ = [("data", c.c_void_p), ("length", c.c_uint64)]


def load() -> Any:
    library = c.CDLL(str(LIBRARY))
    library.kvs_last_error.restype = c.c_char_p
    library.kvs_status_name.restype = c.c_char_p
    for name in ("kvs_blocks_count", "kvs_writer_count"):
        getattr(library, name).restype = c.c_size_t
    for name in ("kvs_blocks_tokens", "kvs_blocks_layers_ready"):
        getattr(library, name).restype = c.c_uint32
    return library


LIB = load() if LIBRARY.exists() else None


def checked(status: int) -> None:
    if status:
        raise RAISED.get(status, AssertionError)(LIB.kvs_last_error().decode())


def array_of(span: Span, owner: Any, writable: bool) -> np.ndarray:
    if not span.length:
        return np.zeros(0, np.uint8)
    memory = (c.c_uint8 * span.length).from_address(span.data)
    memory.owner = owner
    array = np.frombuffer(memory, np.uint8)
    array.flags.writeable = writable
    return array


def shaped(geometry: Geometry, layer: int, tokens: int, raw: np.ndarray) -> np.ndarray:
    kind = np.float16 if geometry.shaped(layer) else np.uint8
    return raw.view(kind).reshape(geometry.layer_shape(layer, tokens))


def number(layer: int) -> c.c_uint32:
    """What ctypes would wrap around is none of C's numbers."""
    if not 0 <= layer < 1 << 32:
        raise InvalidArgument(f"layer {layer}")
    return c.c_uint32(layer)


class Handle:
    """A C object that is freed once."""

    def __init__(self, pointer: c.c_void_p, free: Any) -> None:
        self.pointer, self._free = pointer, free

    def free(self) -> None:
        if self.pointer:
            self._free(self.pointer)
            self.pointer = None

    __del__ = free


class Block:
    def __init__(self, handle: Handle, index: int, key: bytes, client: CClient) -> None:
        self._handle, self._index, self.key, self._client = handle, c.c_size_t(index), key, client
        self.layout_id, self._geometry = WRITTEN[key]

    def _ask(self, function: Any) -> int:
        return function(self._handle.pointer, self._index)

    tokens = property(lambda self: self._ask(LIB.kvs_blocks_tokens))
    layers_ready = property(lambda self: self._ask(LIB.kvs_blocks_layers_ready))
    sealed = property(lambda self: bool(self._ask(LIB.kvs_blocks_sealed)))

    def layer(self, layer: int) -> np.ndarray:
        if not self._handle.pointer:
            raise errors.Closed("the blocks were freed")
        span = Span()
        checked(LIB.kvs_blocks_layer(self._handle.pointer, self._index, number(layer), c.byref(span)))
        return shaped(self._geometry, layer, self.tokens, array_of(span, self._handle, False))

    @property
    def view(self) -> memoryview:
        """The layers with the pads between them, as they lie in the pool."""
        first = self.layer(0)
        self.layer(self._geometry.num_layers - 1)
        span = Span(first.ctypes.data, self._geometry.layers_length(self.tokens))
        return memoryview(array_of(span, self._handle, False))

    @property
    def meta(self) -> memoryview:
        span = Span()
        checked(LIB.kvs_blocks_meta(self._handle.pointer, self._index, c.byref(span)))
        return memoryview(array_of(span, self._handle, False))

    def wait_layer(self, layer: int, timeout_s: float = 5.0) -> None:
        pointer, patience = self._handle.pointer, c.c_double(timeout_s)
        checked(LIB.kvs_blocks_wait_layer(pointer, self._index, number(layer), patience))

    def verify(self) -> bool:
        """C compares checksums at the get."""
        with self._client.get([self.key], verify=True) as again:
            return again.hits == 1


class Blocks:
    def __init__(self, pointer: c.c_void_p, keys: list[bytes], client: CClient) -> None:
        self._handle, self._keys, self._client = Handle(pointer, LIB.kvs_blocks_free), keys, client

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index += len(self) if index < 0 else 0
        hit = LIB.kvs_blocks_hit(self._handle.pointer, c.c_size_t(index))
        if hit < 0:
            if index >= len(self._keys):
                raise IndexError(index)
            raise errors.PinsExhausted("no pin is left")
        return Block(self._handle, index, self._keys[index], self._client) if hit else None

    @property
    def hits(self) -> int:
        return sum(LIB.kvs_blocks_hit(self._handle.pointer, c.c_size_t(i)) == 1 for i in range(len(self)))

    def wait_layer(self, layer: int, timeout_s: float = 5.0) -> None:
        for block in self:
            if block is not None:
                block.wait_layer(layer, timeout_s)

    def release(self) -> None:
        self._handle.free()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


class Granted:
    def __init__(self, writer: Writer, index: int) -> None:
        self._writer, self._index = writer, c.c_size_t(index)
        self.key, self.tokens, self._geometry = writer.keys[index], writer.tokens[index], writer.geometry

    @property
    def view(self) -> memoryview:
        """The layers with the pads between them."""
        layers = [self.layer(i) for i in range(self._geometry.num_layers)]  # asked for: they count as written
        span = Span(layers[0].ctypes.data, self._geometry.layers_length(self.tokens))
        return memoryview(array_of(span, self._writer, True))

    def copy_from(self, source: Any) -> None:
        raw, at = np.frombuffer(source, np.uint8), 0
        lengths = [self._geometry.layer_length(i, self.tokens) for i in range(self._geometry.num_layers)]
        if raw.nbytes != sum(lengths):
            raise InvalidArgument(f"{raw.nbytes} bytes for {sum(lengths)}")
        for layer, length in enumerate(lengths):
            self.copy_layer(layer, raw[at : at + length])
            at += length

    def _span(self, function: Any, *more: Any) -> np.ndarray:
        span = Span()
        checked(function(self._writer.handle.pointer, self._index, *more, c.byref(span)))
        return array_of(span, self._writer, True)

    def layer(self, layer: int) -> np.ndarray:
        raw = self._span(LIB.kvs_writer_layer, number(layer))
        return shaped(self._geometry, layer, self.tokens, raw)

    @property
    def meta(self) -> memoryview:
        return memoryview(self._span(LIB.kvs_writer_meta))

    def copy_layer(self, layer: int, source: Any) -> None:
        array = np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source
        if not array.flags.c_contiguous:
            raise InvalidArgument("the source does not lie in one piece")
        raw, pointer = array.view(np.uint8).reshape(-1), self._writer.handle.pointer
        at, length = raw.ctypes.data_as(c.c_void_p), c.c_uint64(raw.nbytes)
        checked(LIB.kvs_writer_copy_layer(pointer, self._index, number(layer), at, length))

    def mark_layer(self, layer: int) -> None:
        checked(LIB.kvs_writer_mark_layer(self._writer.handle.pointer, self._index, number(layer)))


class Writer:
    def __init__(self, pointer: c.c_void_p, keys: list[bytes], tokens: list[int], geometry: Geometry) -> None:
        self.handle = Handle(pointer, LIB.kvs_writer_free)
        self.keys, self.tokens, self.geometry = keys, tokens, geometry

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def results(self) -> list[str]:
        grants = (LIB.kvs_writer_grant(self.handle.pointer, c.c_size_t(i)) for i in range(len(self)))
        return [WORDS[grant] for grant in grants]

    @property
    def granted(self) -> list[int]:
        return [i for i, word in enumerate(self.results) if word == "granted"]

    def __getitem__(self, index: int) -> Granted:
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        if (word := self.results[index]) != "granted":
            raise (errors.NoSpace if word == "no_space" else InvalidArgument)(word)
        return Granted(self, index)

    def seal(self, index: int | None = None, zero_rest: bool = False) -> None:
        which = c.c_size_t(ALL if index is None else index)
        checked(LIB.kvs_writer_seal(self.handle.pointer, which, int(zero_rest)))

    def abort(self, index: int | None = None) -> None:
        checked(LIB.kvs_writer_abort(self.handle.pointer, c.c_size_t(ALL if index is None else index)))

    def wait_pending(self, timeout_s: float = 5.0) -> bool:
        try:
            checked(LIB.kvs_writer_wait_pending(self.handle.pointer, c.c_double(timeout_s)))
        except errors.DeadlineExceeded:
            return False
        return True

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.seal()
        except InvalidArgument:
            self.abort()
            raise


class CClient:
    """One kvs_client."""

    def __init__(self, directory: str, namespace: str = "default", max_pins: int = 65536, timeout_s=5.0):
        options = Options()
        LIB.kvs_default_options(c.byref(options))
        options.directory, options.namespace_name = directory.encode(), namespace.encode()
        options.max_pins, options.timeout_s = max_pins, timeout_s
        pointer = c.c_void_p()
        checked(LIB.kvs_connect(c.byref(options), c.byref(pointer)))
        self._handle = Handle(pointer, LIB.kvs_close)

    @property
    def _pointer(self) -> c.c_void_p:
        if not self._handle.pointer:
            raise errors.Closed("the client was closed")
        return self._handle.pointer

    def register_layout(self, blob: Any) -> int:
        geometry = Geometry.from_blob(bytes(blob))
        sizes = (c.c_uint32 * geometry.num_layers)(*geometry.layer_bytes_per_token)
        layout = LayoutStruct(
            geometry.num_layers, geometry.kv_per_layer, geometry.num_kv_heads, geometry.head_dim,
            DTYPES[geometry.dtype][0], geometry.block_tokens, geometry.meta_fixed, geometry.meta_per_token,
            sizes,
        )  # fmt: skip
        number = c.c_uint32()
        checked(LIB.kvs_register_layout(self._pointer, c.byref(layout), c.byref(number)))
        KNOWN[number.value] = geometry
        return number.value

    def lookup(self, keys: Any) -> Lookup:
        names = split_keys(keys)
        states = (c.c_uint8 * max(1, len(names)))()
        checked(LIB.kvs_lookup(self._pointer, _packed(names), c.c_size_t(len(names)), states))
        return Lookup(bytes(states)[: len(names)])

    def get(self, keys: Any, follow: bool = False, wait_s: float = 0.0, verify: bool = False) -> Blocks:
        names, pointer = split_keys(keys), c.c_void_p()
        flags = FOLLOW * follow | VERIFY * verify
        checked(
            LIB.kvs_get(
                self._pointer, _packed(names), c.c_size_t(len(names)), c.c_uint32(flags), c.c_double(wait_s),
                c.byref(pointer),
            )
        )  # fmt: skip
        return Blocks(pointer, names, self)

    def create(
        self,
        keys: Any,
        layout_id: int,
        priority: int = 35,
        ttl_s: float | None = None,
        token_counts: Any = None,
    ) -> Writer:
        names, pointer = split_keys(keys), c.c_void_p()
        if token_counts is not None and len(token_counts) != len(names):
            raise InvalidArgument(f"{len(token_counts)} token counts for {len(names)} keys")
        counts = (
            None
            if token_counts is None
            else (c.c_uint32 * len(names))(*(n & 0xFFFFFFFF for n in token_counts))
        )
        checked(
            LIB.kvs_create(
                self._pointer, _packed(names), c.c_size_t(len(names)), c.c_uint32(layout_id & 0xFFFFFFFF),
                counts, c.c_uint32(priority & 0xFFFFFFFF), c.c_uint32(whole_seconds(ttl_s)), c.byref(pointer),
            )
        )  # fmt: skip
        geometry = KNOWN[layout_id]
        WRITTEN.update(dict.fromkeys(names, (layout_id, geometry)))
        return Writer(pointer, names, list(token_counts or [geometry.block_tokens] * len(names)), geometry)

    def _count(self, function: Any, keys: Any) -> int:
        names, count = split_keys(keys), c.c_size_t()
        checked(function(self._pointer, _packed(names), c.c_size_t(len(names)), c.byref(count)))
        return count.value

    def delete(self, keys: Any) -> int:
        return self._count(LIB.kvs_delete, keys)

    def touch(self, keys: Any) -> int:
        return self._count(LIB.kvs_touch, keys)

    def stats(self) -> dict[str, int]:
        text = c.c_void_p()
        checked(LIB.kvs_stats(self._pointer, c.byref(text)))
        try:
            return json.loads(c.string_at(text.value))
        finally:
            LIB.kvs_free_text(text)

    def close(self) -> None:
        self._handle.free()

    def __enter__(self) -> CClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


KNOWN: dict[int, Geometry] = {}  # C has no shapes: what the suite registered, by id, and wrote, by key
WRITTEN: dict[bytes, tuple[int, Geometry]] = {}


def _packed(names: list[bytes]) -> Any:
    words = np.frombuffer(b"".join(names), np.uint64).copy()  # on a multiple of 8
    return words.ctypes.data_as(c.c_void_p) if len(words) else None
