"""A cache layer whose first tokens are attended to in the daemon's blocks, where they lie.

Owns the arrays that map those blocks (each holds its block's pin for as long as this layer lives) and the
memory of the tail: the tokens computed since, behind a copy of what is had of a block only in part. Never
copies a whole block, unless somebody asks for what only one tensor can give (`keys`, reordering, cropping):
then the layer becomes an ordinary StoreLayer, and that is counted. Invariant: update() hands out a handle,
and the attention that follows must bring it back; whatever lost it on the way (a model that works on its keys
after the cache) raises: it would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, memmove
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from kvclient import kernels
from kvclient.hf.attention import dense
from kvclient.hf.attention.backends import DTYPES
from kvclient.hf.attention.handle import expect_nothing, hand_out, take_back
from kvclient.hf.cache.layer import Shape, StoreLayer, as_array, outside_graphs, room_for, writable
from kvclient.kernels import contract


class Blocks(Protocol):
    """Where the first tokens lie."""

    columns: int

    def arrays(self, layer: int) -> list[tuple[int, int, Any, int, int]]:
        """(row, first column, K and V of a block, how many of its tokens, from which on), in order of
        columns.
        """


FEW_HEADS = 8  # up to so many, a token is written by their addresses: what NumPy needs costs more than that


class InPlaceLayer(StoreLayer):
    """`pads`: per row, the columns of padding at its left. reader: whether the model's attention still reads
    such layers. whole: columns of the source in whole blocks. shape.capacity counts the tail's tokens only.
    """

    device_type = "cpu"  # whose memory it reads
    by_numpy = True  # how a token alone is written: in half the time

    def __init__(
        self, index: int, shape: Shape, source: Blocks | None, written: Callable[..., None] | None,
        memory: torch.Tensor | None, pads: list[int], left: Callable[[str], None], reader: Callable[[], bool],
        whole: int | None = None,
    ) -> None:  # fmt: skip
        self._prefix: list[tuple[int, int, Any, int, int]] | None = [] if source is None else None
        self._call: tuple[Any, ...] | None = None
        self._args: tuple[Any, Any] | None = None  # of the last call, and what it is right for
        self._told: Any = None  # what that call said, if it said no more than again() reads
        self._place: tuple[Any, ...] | None = None  # where a token is written, as long as there is a _call
        self._dense, self._in_call, self.cut_to = False, True, float("inf")
        self._given: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        super().__init__(index, shape, source, written, memory)
        self.origin = self._length if whole is None else whole
        self._pads, self._left, self._reader = pads, left, reader

    # ---------------------------------------------------------------- what the model calls

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes K and V [batch, heads, tokens, head_dim]. Raises RuntimeError for another shape or dtype than
        is stored, and where the attention was switched inside of generate(); what Shape.check() does."""
        wants_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if not self._dense and (wants_gradient or key_states.device.type != self.device_type):
            self.become_dense("training" if wants_gradient else "device")
        if not self._dense and not self._reader():
            if self._in_call:  # whose masks are for the kernels
                raise RuntimeError("the model's attention was switched, or detach() called, in generate()")
            self.become_dense("switched")  # after detach() the cache lives on under another attention
        if self._dense:
            return super().update(key_states, value_states, *args, **kwargs)
        expect_nothing()
        if self._put(key_states, value_states):
            return hand_out(key_states, self), value_states
        self._open_blocks()
        wanted, (_, heads, tokens, head_dim) = self.shape, key_states.shape
        if heads != wanted.heads or head_dim != wanted.head_dim or key_states.dtype != self.dtype:
            raise RuntimeError(
                f"layer {self.index} computes {list(key_states.shape)} of {key_states.dtype}; "
                f"stored: {(wanted.heads, wanted.head_dim, self.dtype)}"
            )
        start = self._length
        stop = start + tokens
        wanted.check(stop)
        handle, values = self._keep(start, stop, key_states, value_states)
        self._length, self.is_initialized = stop, True
        if self.written is not None:
            self.written(self.index, start, stop, self.storage, self.origin)
        return hand_out(handle, self), values

    def _put(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Writes one token [1, heads, 1, head_dim], as most updates are, in the fewest steps: between two
        layers their weights go through the caches, and each step finds its own code cold. False: not done.
        """
        if self._call is None or (place := self._place) is None:
            return False
        shape, (to_keys, to_values), between, size, room = place
        at, dtype = self._length - self.origin, self.dtype
        if keys.shape != shape or values.shape != shape or at >= room:
            return False
        from_keys, from_values = keys.stride(), values.stride()
        if keys.dtype is not dtype or values.dtype is not dtype or from_keys[3] != 1 or from_values[3] != 1:
            return False
        key, value, element = keys.data_ptr(), values.data_ptr(), size // shape[3]
        for head in range(shape[1]):
            to = at * size + head * between
            memmove(to_keys + to, key + head * from_keys[1] * element, size)
            memmove(to_values + to, value + head * from_values[1] * element, size)
        self._length = stop = self._length + 1
        if self.written is not None:
            self.written(self.index, stop - 1, stop, self._storage, self.origin)
        return True

    def next_place(self) -> tuple[int, np.ndarray, Any] | None:
        """Where in its tail the one row's next token is written, that memory [2, 1, heads, tokens, head_dim],
        and what is attended to then, as C sees it; None: it takes more than writing a token down.
        """
        at, call = self._length - self.origin, self._call
        if self._length == self.shape.most_tokens > 0 or self.written is not None:
            return None  # the last may go; its tokens are told of
        if call is None or at >= call[2].shape[3] or not self._reader():
            return None  # not read yet, or dense; no room
        segment, start = call[3][0]
        segment.tokens = self._length + 1 - start
        return at, call[2], call[0][0]

    def took(self) -> None:
        """The token was written at next_place()."""
        self._length += 1

    def crop(self, count: int) -> None:
        """What is cut from the tail leaves the blocks where they lie."""
        if not self._dense and self.is_initialized:
            length, pads = cropped(self._length, count), max(self._pads, default=0)
            if length >= self.origin and length > pads:  # each row has tokens left
                self._cut(length)
                return
        self.become_dense("crop")
        super().crop(count)

    def reset(self) -> None:
        """From here on a layer like any other: whose rows it holds next, and their padding, is not known."""
        self._dense or self._left("reset")
        super().reset()
        self._prefix, self._call, self._dense, self.origin = [], None, True, 0

    def detach_store(self) -> None:
        length = self._length if self.is_initialized else 0
        self._in_call = False
        super().detach_store()
        self._length = length
        if self._prefix is None:  # never asked for
            self._prefix, self._length, self.origin = [], 0, 0

    # DynamicLayer's attributes: whoever reads them makes the layer dense.

    @property
    def keys(self) -> torch.Tensor | None:
        if not self._dense and self.is_initialized:
            self.become_dense("read")
        return self._given[0]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._given = (value, self._given[1])

    @property
    def values(self) -> torch.Tensor | None:
        if not self._dense and self.is_initialized:
            self.become_dense("read")
        return self._given[1]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._given = (self._given[0], value)

    # ---------------------------------------------------------------- memory

    def become_dense(self, reason: str) -> None:
        """One tensor of all tokens, as StoreLayer has it."""
        if self._dense:
            return
        self._open_blocks()
        length, self._dense, self._call = self._length, True, None
        prefix, self._prefix = self._prefix or [], []
        if not self.is_initialized and not prefix:
            return
        self._left(reason)
        from_row = self._from_row()
        whole = self._allocate(len(from_row), max(length, self.origin + self.shape.capacity))
        whole[:, :, :, : self.origin] = 0
        self._copy_prefix(prefix, from_row, whole)
        if length > self.origin:
            self._copy_tail(whole[:, :, :, self.origin : length])
        self._storage, self.origin = whole, 0
        self._show(length)

    def _copy_prefix(self, prefix: list[Any], from_row: list[int], whole: torch.Tensor) -> None:
        """Writes the blocks' elements into [2, rows, heads, tokens, head_dim], for each row its own."""
        array = as_array(whole)
        for row, start, block, count, first in prefix:
            to: Any = [place for place, source in enumerate(from_row) if source == row]
            to = to[0] if len(to) == 1 else to  # an index is a quarter of what a list of them takes
            for states, place in zip(block, array[:, :, :, start : start + count], strict=True):
                if isinstance(states, kernels.Quantised):
                    states = kernels.dequantise(
                        states, np.empty((place.shape[1], states.tokens, states.head_dim), place.dtype)
                    )
                place[to] = states[:, first : first + count]

    def _from_row(self) -> list[int]:
        """For each row, the row of the prompt whose blocks it begins with."""
        return list(range(self.shape.rows if self._storage is None else self._storage.shape[1]))

    def _copy_tail(self, place: torch.Tensor) -> None:
        """Writes what is held behind `origin` into [2, rows, heads, tokens, head_dim]."""
        assert self._storage is not None
        place.copy_(self._storage[:, :, :, : self._length - self.origin])

    def _cut(self, length: int) -> None:
        self._length, self.cut_to = length, min(self.cut_to, length)

    def takes(self, reason: str | None, causal: bool) -> bool:
        """Whether attend() answers a call that the kernels would not take for that reason."""
        return reason is None and causal

    def _open(self, like: torch.Tensor | None = None, tokens: int = 0) -> None:
        if self._dense:
            super()._open(like, tokens)

    def _rows(self, change: Any, plain: Any, argument: Any) -> None:
        self.become_dense("rows")
        super()._rows(change, plain, argument)

    def _open_blocks(self) -> None:
        if self._prefix is None:
            source, self._source = self._source, None
            spans = source.arrays(self.index)
            self._prefix = [span for span in spans if span[1] < self.origin]
            if part := [span for span in spans if span[1] >= self.origin]:
                moved = [(row, column - self.origin, *rest) for row, column, *rest in part]
                count = self._length - self.origin
                self._storage = self._begun(1, count)
                self._copy_prefix(moved, [0], self._storage[:, :, :, :count])

    def _begun(self, rows: int, tokens: int) -> torch.Tensor:
        """Memory for a tail that has so many tokens at least."""
        spare, self._memory = self._memory, None
        if spare is not None and spare.shape[1] == rows and spare.shape[3] >= tokens:
            return writable(spare)
        return self._allocate(rows, max(tokens, self.shape.capacity))

    def _keep(
        self, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores them; views of what was stored, that nobody else has."""
        low, high = start - self.origin, stop - self.origin
        if self._storage is None:
            self._storage = self._begun(keys.shape[0], high)
        elif high > self._storage.shape[3]:
            grown = self._allocate(self._storage.shape[1], room_for(high, self._storage.shape[3]))
            grown[:, :, :, :low] = self._storage[:, :, :, :low]
            self._storage, self._call = grown, None
        elif (mutable := writable(self._storage)) is not self._storage:
            self._storage, self._call = mutable, None
        named = self.by_numpy and self.dtype != torch.bfloat16  # which NumPy has no name for
        if high - low == 1 and self._call is not None and named:
            array = self._call[2]
            array[0, :, :, low:high], array[1, :, :, low:high] = as_array(keys), as_array(values)
            return keys.view_as(keys), values
        place = self._storage[:, :, :, low:high]
        place[0], place[1] = keys, values
        return place[0], place[1]

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the cache: they point to their own memory."""
        gone = {"_call": None, "_args": None, "written": None, "_left": _nobody, "_in_call": False}
        gone |= {"_told": None, "_place": None}
        return {**self.__dict__, **gone}

    # ---------------------------------------------------------------- attention

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None, scale: float, softcap: float, window: int,
        path: int,
    ) -> torch.Tensor:  # fmt: skip
        """[B, T, heads, D] of the newest T tokens over all."""
        query = dense.heads_together(query)
        self._told = None
        out, position = self._asked(query)
        same = (query.shape, query.stride(), query.dtype, scale, softcap, window, path)
        if self._args is None or self._args[0] != same:
            args = dense.arguments(query, out, self.shape.heads, position, scale, path)
            args.softcap, args.window = softcap, window
            self._args = (same, args)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        self._args[1].sinks = None if sinks is None else sinks.data_ptr()
        return self._run(query, out, position, self._args[1])

    def _asked(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the answer goes, and which columns the queries stand in."""
        batch, heads, tokens, head_dim = query.shape
        position = dense.positions(self._length - tokens, self._length, batch)
        return dense.empty(query, (batch, tokens, heads, head_dim)), position

    def _run(
        self, query: torch.Tensor, out: torch.Tensor, position: torch.Tensor, args: contract.Attention
    ) -> torch.Tensor:
        args.q, args.out, args.q_position = query.data_ptr(), out.data_ptr(), position.data_ptr()
        args.threads = torch.get_num_threads()
        args.sequences = addressof(self.sequences())
        dense.run(args)
        return out

    def told(self, what: Any) -> None:
        """attend() was just asked with this, which says all that again() has to know."""
        self._told = what

    def again(self, query: torch.Tensor, what: Any) -> torch.Tensor | None:
        """attend() for queries like the last ones, asked for as then; None: they are others."""
        if self._told != what or self._args is None or torch.is_grad_enabled():
            return None
        (shape, stride, dtype, *_), args = self._args
        if query.shape != shape or query.stride() != stride or query.dtype is not dtype:
            return None
        take_back(self)
        return self._run(query, *self._asked(query), args)

    @property
    def in_place(self) -> bool:
        """Whether it still reads the store's blocks where they lie."""
        return not self._dense

    def sequences(self) -> Any:
        """What the rows attend to, as C sees it. Valid until the next update()."""
        if self._call is None:
            self._call = self._prepare()
        for tail, start in self._call[3]:
            tail.tokens = max(0, self._length - start)
        return self._call[0]

    def _prepare(self) -> tuple[Any, ...]:
        """The segments of every row, as C sees them: made once for as long as the tail stays where it is."""
        assert self._storage is not None
        _, rows, heads, room, head_dim = self._storage.shape
        size, address, codec = self._storage.element_size(), self._storage.data_ptr(), DTYPES[self.dtype]
        side, between, apart, step, _ = (size * stride for stride in self._storage.stride())
        parts: list[list[Any]] = [[] for _ in range(rows)]
        for row, start, (keys, values), count, first in self._prefix or []:
            parts[row].append(dense.block_segment(keys, values, start, first, count))
        lists = [(contract.Segment * len(segments_of_row))(*segments_of_row) for segments_of_row in parts]
        sequences = (contract.Sequence * rows)()
        tails = []
        for row, pad in enumerate(self._pads):
            sequences[row].segments, sequences[row].count = addressof(lists[row]), len(lists[row])
            start = max(pad, self.origin)
            at = address + row * between + (start - self.origin) * step
            sequences[row].tail = contract.Segment(
                at, at + side, apart, step, apart, step, base_position=start, new_position=start,
                tokens=max(0, room - start + self.origin), codec=codec,
            )  # fmt: skip
            tails.append((sequences[row].tail, start))
        few = rows == 1 and heads <= FEW_HEADS and not self.shape.most_tokens
        shape = torch.Size([1, heads, 1, head_dim])
        self._place = (shape, (address, address + side), apart, step, room) if few else None
        return sequences, lists, as_array(self._storage), tails


def cropped(length: int, count: int) -> int:
    """What crop(count) leaves of so many tokens: negative, so many go; what else it says differs between
    releases, so theirs is asked, over keys without elements."""
    layer = DynamicLayer()
    layer.keys = layer.values = torch.empty((1, 1, length, 0))
    layer.is_initialized = True
    layer.crop(count)
    return layer.keys.shape[-2]


def _nobody(reason: str) -> None:
    """Copies count nowhere."""


IN_PLACE_DEVICES = ("cpu", "cuda")
