"""One layer of a transformers cache whose first tokens come from the store and whose new ones go to it.

Owns the memory a layer's keys and values lie in, and what is kept of it for the next request: one tensor
[2, rows, heads, capacity, head_dim], filled in place, so that a token is copied once and not again with every
step; [1, …] where K and V are of different widths (latent attention) and lie side by side. Never talks to the
store: where the first tokens come from is a Source, and who is told of new ones is a callback. Invariant:
`keys` and `values` always show exactly `get_seq_length()` tokens, and equal what DynamicLayer would hold
after the same calls.

The overridden methods are the few whose meaning is the same in transformers 5.0 to 5.23.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvclient.errors import InvalidArgument
from kvclient.hf.release import DUMMIES, INDEXED, STATES, compresses

ALIGN = 64  # bytes, as torch's own allocator does: kernels read it in such pieces
GROWS_BY, GROWTH = 128, 8  # tokens at least, or a part of what there is: where it outgrows what was foreseen
SPARE_BYTES = 256 << 20  # what an attached model keeps at most between requests
LOOSE = 2  # memory is not used for less than 1 / LOOSE of its size


class Source(Protocol):
    """Where the first tokens of a layer come from."""

    columns: int

    def load(self, layer: int, storage: torch.Tensor) -> None:
        """Writes columns 0..columns of `storage` [2, rows, heads, capacity, head_dim]."""


@dataclass(frozen=True)
class Shape:
    """What one layer of a request looks like."""

    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    capacity: int  # tokens; more are possible, at the price of a copy
    key_dim: int = 0  # 0: K and V apart, each head_dim wide; else K's part of one array of that width
    most_tokens: int = 0  # of a model whose own cache drops those behind, unseen by its mask; 0: any

    @property
    def arrays(self) -> int:
        """The first dimension of a layer's memory: 2 for K and V apart, 1 for K and V side by side."""
        return 1 if self.key_dim else 2

    def check(self, tokens: int) -> None:
        """Raises InvalidArgument where a layer is to hold more tokens than it may."""
        if self.most_tokens and tokens > self.most_tokens:
            what = f"{tokens} tokens in a cache of {self.most_tokens}"
            raise InvalidArgument(f"{what}: there its own drops the first, which its mask does not")

    def sides(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of [arrays, rows, heads, tokens, head_dim], as views."""
        if not self.key_dim:
            return storage[0], storage[1]
        return storage[0, ..., : self.key_dim], storage[0, ..., self.key_dim :]


def outside_graphs(method: Any) -> Any:
    """The method, which torch.compile calls instead of looking into it. Its own torch.compiler.disable costs
    each call of who compiles nothing as much as the work of a layer's step.
    """
    outside = torch.compiler.disable(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else method)(self, *args, **kwargs)

    return call


class StoreLayer(DynamicLayer):
    """A DynamicLayer with room to grow. Opened, and its first tokens loaded, when the model first asks for
    it.
    """

    def __init__(
        self,
        index: int,
        shape: Shape,
        source: Source | None = None,
        written: Callable[[int, int, int, torch.Tensor, int], None] | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.shape = shape
        self.origin = 0  # the column that the first token of `storage` stands in
        self._source = source
        self.written = (
            written  # called with (layer, first new column, end, storage, origin) after each update
        )
        self._memory = memory  # [2, rows, heads, capacity, head_dim] to begin with, if there is any
        self._storage: torch.Tensor | None = None
        self._length = source.columns if source is not None else 0
        self._plain = False  # grown by concatenation, as DynamicLayer does: only where gradients flow
        self.dtype, self.device = shape.dtype, shape.device

    # ---------------------------------------------------------------- what the model calls

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if self._plain or wants_gradient:
            return self._concatenate(key_states, value_states)
        start = self._length
        stop = start + key_states.shape[-2]
        self.shape.check(stop)
        storage = self._room(stop, key_states)
        keys, values = self.shape.sides(storage[:, :, :, start:stop])
        keys[:], values[:] = key_states, value_states
        self._show(stop)
        if self.written is not None:
            self.written(self.index, start, stop, storage, self.origin)
        return self.keys, self.values

    def load(self) -> None:
        """Its first tokens, now and not when the model asks."""
        if self._length:
            self._open()

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._plain else self._length

    def crop(self, count: int) -> None:
        self._open()
        super().crop(
            count
        )  # its meaning of `count` changed between releases; the result is read off the keys
        if self.keys is not None:
            self._length = self.keys.shape[-2]

    def reset(self) -> None:
        self.keys = self.values = self._storage = self._source = self._memory = None
        self._length, self._plain, self.is_initialized = 0, False, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._rows(
            lambda storage: storage.index_select(1, beam_idx.to(storage.device)),
            super().reorder_cache,
            beam_idx,
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(
            lambda storage: storage.repeat_interleave(repeats, dim=1),
            super().batch_repeat_interleave,
            repeats,
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._rows(lambda storage: storage[:, indices], super().batch_select_indices, indices)

    # ---------------------------------------------------------------- memory

    @property
    def storage(self) -> torch.Tensor | None:
        """[2, rows, heads, capacity, head_dim], columns `origin` to get_seq_length(); None before."""
        return self._storage

    def detach_store(self) -> None:
        """Forgets the store: from here on a layer like any other, empty if its first tokens were never
        loaded.
        """
        self._source = self.written = self._memory = None
        if self._storage is None and not self._plain:
            self._length = 0

    def _room(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        if self._storage is None:
            self._open(like, tokens)
        assert self._storage is not None
        width = self.shape.key_dim or self.shape.head_dim
        if (like.shape[-1], like.shape[1], like.dtype) != (width, self.shape.heads, self.dtype):
            wanted = f"[{self.shape.heads} heads, {width}] of {self.dtype}"
            raise RuntimeError(
                f"layer {self.index} computes {list(like.shape)} of {like.dtype}; the store has {wanted}"
            )
        self._storage = writable(self._storage)
        if tokens > self._storage.shape[3]:
            grown = self._allocate(self._storage.shape[1], room_for(tokens, self._storage.shape[3]))
            grown[:, :, :, : self._length] = self._storage[:, :, :, : self._length]
            self._storage = grown
        return self._storage

    def _open(self, like: torch.Tensor | None = None, tokens: int = 0) -> None:
        if self._storage is not None or self._plain:
            return
        if like is not None:
            self.device = like.device
        rows = self.shape.rows if like is None else like.shape[0]
        capacity = max(self.shape.capacity, self._length, tokens)
        spare, self._memory = self._memory, None
        fits = spare is not None and spare.shape[1] == rows and spare.shape[3] >= capacity
        self._storage = spare if fits else self._allocate(rows, capacity)
        source, self._source = self._source, None
        if source is not None:
            source.load(self.index, self._storage)
        self._show(self._length)

    def _allocate(self, rows: int, capacity: int) -> torch.Tensor:
        size = (self.shape.arrays, rows, self.shape.heads, capacity, self.shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _show(self, length: int) -> None:
        assert self._storage is not None
        self._length = length
        self.keys, self.values = self.shape.sides(self._storage[:, :, :, :length])
        self.is_initialized = True

    def _rows(
        self, change: Callable[[torch.Tensor], torch.Tensor], plain: Callable[[Any], None], argument: Any
    ) -> None:
        if self._plain:
            plain(argument)
        elif self._length:
            self._open()
            assert self._storage is not None
            self._storage = change(self._storage)
            self._show(self._length)

    def _concatenate(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._plain:
            if self._length:
                self._open()
                self.keys, self.values = self.keys.clone(), self.values.clone()
            self._storage = self._memory = self._source = self.written = None
            self._plain = True
        return super().update(key_states, value_states)


def room_for(tokens: int, capacity: int) -> int:
    """The next capacity of what has outgrown this one with so many tokens."""
    return max(tokens, capacity + max(GROWS_BY, capacity // GROWTH))


def writable(memory: torch.Tensor) -> torch.Tensor:
    """The same, of any shape, or a copy if it was made in torch.inference_mode(), outside which it cannot be
    written.
    """
    return memory if torch.is_inference_mode_enabled() or not memory.is_inference() else memory.clone()


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype:
    """The type of its memory as an array: bfloat16 as its bits (uint16)."""
    return as_array(torch.empty(0, dtype=dtype)).dtype


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory, of its shape, typed as the bits() of a block's `.layer(i)` are. NumPy copies a
    slice in half the time torch needs to set out.
    """
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


@dataclass
class _Spare:
    memory: memoryview  # of an array: a view of a view would keep that one alive, and not what was handed out
    handed: weakref.ref[np.ndarray]


class Memory:
    """Memory for the KV of one request after another, without faulting it in each time: up to SPARE_BYTES
    that earlier requests used. It counts no references: an array that is handed out is an object of its own,
    every tensor and view made from it keeps that object alive, and only when it is gone is the memory handed
    out again, so two living caches never share any. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[_Spare] = []

    def take(self, size: int) -> np.ndarray:
        """An array [bytes] of at least `size` bytes, their contents undefined."""
        if size > SPARE_BYTES:
            return np.empty(size, dtype=np.uint8)
        with self._lock:
            for spare in self._spare:
                if size <= spare.memory.nbytes <= size * LOOSE and spare.handed() is None:
                    array = np.frombuffer(spare.memory, np.uint8)
                    spare.handed = weakref.ref(array)
                    return array
            # Of prompts that grow, one after the other, what each outgrew would stay beside the next's.
            self._keep(lambda spare: not size <= spare.memory.nbytes * LOOSE < size * LOOSE)
            memory = memoryview(np.empty(size, dtype=np.uint8))
            array = np.frombuffer(memory, np.uint8)
            self._spare.append(_Spare(memory, weakref.ref(array)))
            self._shrink()
            return array

    def give_back(self) -> None:
        """Keeps none that nobody uses. The next request faults its memory in again."""
        with self._lock:
            self._keep(lambda _: False)

    def _keep(self, wanted: Callable[[_Spare], bool]) -> None:
        """Of what nobody uses only the wanted."""
        self._spare = [spare for spare in self._spare if spare.handed() is not None or wanted(spare)]

    def _shrink(self) -> None:
        """Forgets the oldest memory beyond the bound. Who still uses some keeps it alive."""
        kept = sum(spare.memory.nbytes for spare in self._spare)
        while kept > SPARE_BYTES:
            kept -= self._spare.pop(0).memory.nbytes


def recycled(memory: Memory, shape: Shape, layers: int) -> list[torch.Tensor | None]:
    """Memory for each layer to begin with, [arrays, rows, heads, capacity, head_dim]. On a GPU, None: torch's
    own allocator recycles.
    """
    if shape.device.type != "cpu":
        return [None] * layers
    size = (layers, shape.arrays, shape.rows, shape.heads, shape.capacity, shape.head_dim)
    count = math.prod(size) * shape.dtype.itemsize
    array = memory.take(count + ALIGN)
    start = -array.ctypes.data % ALIGN
    return list(torch.from_numpy(array[start : start + count]).view(shape.dtype).reshape(size).unbind(0))


def replace_layers(cache: Cache, layers: list[StoreLayer]) -> None:
    """Puts `layers` in the place of a cache's own, which are empty or those of a try that was given up. Those
    that keep nothing, or a state only, stay.
    """
    if any(isinstance(layer, (*STATES, *DUMMIES)) for layer in cache.layers):
        for layer in layers:
            cache.layers[layer.index] = layer
        return
    foreign = [
        type(layer).__name__
        for layer in cache.layers
        if not isinstance(layer, StoreLayer)
        and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, *INDEXED)
        and not compresses(layer)
    ]
    assert not foreign, f"attach() should have refused a cache with {foreign}"
    cache.layers[:] = layers
