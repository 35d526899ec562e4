"""A layer in place whose own tokens lie in pages of a fixed pool, not in a tensor that grows; on a GPU too.

Owns the structs that tell the kernels where a row's blocks and pages lie; they change when a page is added or
changes hands, once in PAGE_TOKENS tokens, and not with every token. Never copies a page but to part from
another owner (kvclient.hf.cache.page_pool). Invariant: all layers of a cache follow one table, and each does
to it what the cache was told exactly once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from ctypes import sizeof
from typing import Any

import numpy as np
import torch

from kvclient.hf.attention import dense
from kvclient.hf.attention.backends import DTYPES
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.cache.in_place import Blocks, InPlaceLayer
from kvclient.hf.cache.layer import Shape
from kvclient.hf.cache.page_pool import PAGE_TOKENS, PageTable
from kvclient.kernels import contract
from kvclient.kernels.cuda_attention import Table

_C_TYPES = {name: getattr(contract.Segment, name) for name, _ in contract.Segment._fields_}
SEGMENT = np.dtype(
    {
        "names": list(_C_TYPES),
        "formats": [f"V{field.size}" if field.size > 8 else f"u{field.size}" for field in _C_TYPES.values()],
        "offsets": [field.offset for field in _C_TYPES.values()],
        "itemsize": sizeof(contract.Segment),
    }
)


class PagedLayer(InPlaceLayer):
    def __init__(
        self, index: int, shape: Shape, source: Blocks | None, written: Callable[..., None] | None,
        memory: torch.Tensor | None, pads: list[int], left: Callable[[str], None], reader: Callable[[], bool],
        table: PageTable, **of_device: Any,
    ) -> None:  # fmt: skip
        super().__init__(index, shape, source, written, None, pads, left, reader, **of_device)
        self.table = table
        self._version = -1
        self._of_prompt: np.ndarray | None = None  # SEGMENT [rows of the prompt, blocks]
        self._chosen = 0

    # ---------------------------------------------------------------- what the cache is told

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._choose(beam_idx.tolist, super().reorder_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        def rows() -> list[int]:
            return [row for row in range(len(self.table.rows)) for _ in range(repeats)]

        self._choose(rows, super().batch_repeat_interleave, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        def rows() -> list[int]:
            return torch.arange(len(self.table.rows))[indices.to("cpu")].tolist()

        self._choose(rows, super().batch_select_indices, indices)

    def reset(self) -> None:
        """From here on a layer like any other."""
        super().reset()
        if self.table is not None:
            self.table.clear()

    def become_dense(self, reason: str) -> None:
        before = self._dense
        super().become_dense(reason)
        if not before:
            self.table.leave()

    def _choose(
        self, rows: Callable[[], list[int]], dense: Callable[[Any], None], argument: Any
    ) -> None:
        if self._dense:
            dense(argument)
            return
        self._open_blocks()
        self._chosen += 1
        if self._chosen > self.table.chosen:  # the first layer that hears of it
            self.table.choose(rows())

    def _cut(self, length: int) -> None:
        self._length = length
        self.table.cut(length)
        self._version = -1

    # ---------------------------------------------------------------- memory

    @property
    def storage(self) -> torch.Tensor | None:
        """What is held behind `origin`, copied together: for who publishes it, block by block."""
        if self._dense or (not self.is_initialized and self._length == self.origin):
            return self._storage
        place = self._allocate(len(self.table.rows), self.table.stop - self.origin)
        self._gather(place)
        return place

    def _gather(self, place: torch.Tensor) -> None:
        tokens = place.shape[3]
        for row, pages in enumerate(self.table.rows):
            gathered = self.table.pool.memory[pages, self.index].permute(1, 2, 0, 3, 4)
            place[:, row] = gathered.flatten(2, 3)[:, :, :tokens]
            place[:, row, :, : max(0, self.table.pads[row] - self.origin)] = 0  # 0 x NaN is NaN

    def _copy_tail(self, place: torch.Tensor) -> None:
        self._gather(place)

    def _from_row(self) -> list[int]:
        return self.table.from_row

    def _keep(
        self, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.table
        table.begin(self.origin)
        rows = table.extend(start, stop)
        memory, column = table.pool.memory, start
        while column < stop:
            page, low = divmod(column - self.origin, PAGE_TOKENS)
            high = min(PAGE_TOKENS, low + stop - column)
            new = slice(column - start, column - start + high - low)
            if len(rows) == 1:
                place = memory[table.rows[rows[0]][page], self.index, :, :, low:high]
                place[0], place[1] = keys[rows[0], :, new], values[rows[0], :, new]
            else:
                pages = table.ids(page, rows)
                every = slice(None) if len(rows) == len(table.rows) else rows
                memory[pages, self.index, 0, :, low:high] = keys[every, :, new]
                memory[pages, self.index, 1, :, low:high] = values[every, :, new]
            column += high - low
        return keys.view_as(keys), values

    def __getstate__(self) -> dict[str, Any]:
        """A dense one needs no pages, which cannot go to another process."""
        return super().__getstate__() | ({"table": None} if self._dense else {})

    def __deepcopy__(self, memo: Any) -> PagedLayer:
        """Over the same blocks and pages: who writes first, copies a page."""
        self._open_blocks()
        other = copy.copy(self)
        other.table, other._of_prompt = copy.deepcopy(self.table, memo), None
        if self._storage is not None:
            other._storage = self._storage.clone()
            other._show(self._length)
        return other

    # ---------------------------------------------------------------- attention

    def sequences(self) -> Any:
        if self._call is None or self._version != self.table.version:
            self._call, self._version = self._prepare(), self.table.version
        sequences, pages, before = self._call[0], self._call[1], self._call[2]
        pages["tokens"][:, -1] = np.maximum(self._length - before, 0)
        return sequences

    def _prepare(self) -> tuple[Any, ...]:
        segments, begins = self._segments()
        sequences = (contract.Sequence * len(segments))()
        for row, sequence in enumerate(sequences):
            sequence.segments = segments.ctypes.data + row * segments.strides[0]
            sequence.count = segments.shape[1]
        pages = segments[:, self._of_prompt.shape[1] :]
        return sequences, pages, begins, segments

    def _segments(self) -> tuple[np.ndarray, np.ndarray]:
        """SEGMENT [rows, blocks and pages], and the column that each row's last page begins to count at."""
        table = self.table
        if self._of_prompt is None:
            self._of_prompt = self._blocks_of_prompt()
        ids = np.array(table.rows, np.uint64)
        count, blocks = ids.shape[1], self._of_prompt.shape[1]
        segments = np.zeros((ids.shape[0], blocks + count), SEGMENT)
        segments[:, :blocks] = self._of_prompt[table.from_row]
        pages = segments[:, blocks:]
        memory = table.pool.memory
        item = memory.element_size()
        page, layer, kind, head, token, _ = (item * stride for stride in memory.stride())
        columns = self.origin + PAGE_TOKENS * np.arange(count)[None]
        first = np.clip(np.array(table.pads)[:, None] - columns, 0, PAGE_TOKENS)
        pages["k"] = memory.data_ptr() + layer * self.index + ids * np.uint64(page)
        pages["v"] = pages["k"] + kind
        for name in ("k", "v"):
            pages[f"{name}_head_stride"], pages[f"{name}_token_stride"] = head, token
        pages["base_position"] = pages["new_position"] = columns + first
        pages["first"], pages["codec"] = first, DTYPES[memory.dtype]
        pages["tokens"] = np.clip(self._length - columns, 0, PAGE_TOKENS) - np.minimum(
            first, np.clip(self._length - columns, 0, PAGE_TOKENS)
        )
        return segments, (columns + first)[:, -1]

    def _blocks_of_prompt(self) -> np.ndarray:
        """The structs of the store's blocks: made once, whatever becomes of the rows."""
        parts: list[list[bytes]] = [[] for _ in range(self.shape.rows)]
        for row, struct in self._structs():
            parts[row].append(bytes(struct))
        most = max(map(len, parts))
        rows = [b"".join(structs).ljust(most * SEGMENT.itemsize, b"\0") for structs in parts]
        return np.frombuffer(b"".join(rows), SEGMENT).reshape(len(parts), most)

    def _structs(self) -> Iterable[tuple[int, Any]]:
        for row, start, (keys, values), count, first in self._prefix or []:
            yield row, dense.block_segment(keys, values, start, first, count)


class PagedDeviceLayer(PagedLayer, DeviceLayer):
    """The same on a GPU: blocks and pages in device memory, and the table of both, which is written anew when
    a page is added or changes hands. A row's last page is what DeviceLayer has as its tail.
    """

    def attend(self, *args: Any) -> torch.Tensor:
        if self._version != self.table.version:
            self._call, self._version = None, self.table.version
        return DeviceLayer.attend(self, *args)

    def _for_torch(self, *_: Any) -> None:
        return None  # pages lie apart

    def _tables(self, heads: int) -> tuple[Table, torch.Tensor]:
        segments, begins = self._segments()
        kind = contract.Segment * segments.shape[1]
        rows = [kind.from_buffer(row) for row in segments]
        memory = self.table.pool.memory
        table = Table(
            [list(row)[:-1] for row in rows], memory.device, heads, self.shape.heads, self.shape.head_dim,
            [row[-1] for row in rows], (self._held, memory), self.dtype,
        )  # fmt: skip
        return table, torch.tensor(begins.astype(np.int32), device=memory.device)

    def _structs(self) -> Iterable[tuple[int, Any]]:
        return self._prefix or []


def leaders(groups: Sequence[Sequence[int]], rows: int) -> list[int]:
    """Per row, the first row of its group."""
    first = list(range(rows))
    for group in groups:
        for row in group:
            first[row] = min(group)
    return first
