"""Pages whose buffers are rows of an engine's tensors, on whatever device.

Owns the copies; knows no engine. Invariant: rows are contiguous bytes; a load fills all rows that are wanted,
or says that it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvclient.integrations.pages import Pages

Rows = Sequence[torch.Tensor | None]  # one-dimensional; None: that part is not wanted


class TensorPages(Pages):
    """As Pages, all of them compared before the first is copied. Copies to and from a device are done when
    the call returns.

    Rows of one CPU tensor go by one call for all pages, not by one for each: between two calls another thread
    of the engine may hold the interpreter's lock for 5 ms.
    """

    _verify_first = True

    def _copy_all_in(self, writer: Any, mine: list[int], sources: Sequence[Rows]) -> None:
        places = _places([sources[i] for i in mine])
        for i in mine if places is None else ():
            for layer, row in enumerate(sources[i]):
                assert row is not None, "a page is stored whole"
                writer[i].copy_layer(layer, row.contiguous().cpu().view(torch.uint8).numpy())
        for layer, (memory, offsets) in enumerate(places or ()):
            writer.copy_layer(layer, memory, mine, offsets)

    def _back(self, key: bytes, source: Rows) -> tuple[bool, bool]:
        """Through the engine's own memory, as at the start: whoever puts a page while none was tried sees to
        it that nobody uses its rows meanwhile."""
        rows = [row for row in source if row is not None]
        was = [row.clone() for row in rows]
        for row in rows:
            row.zero_()
        loaded = self.get([key], [source])[0]
        same = all(_equal(row, before) for row, before in zip(rows, was, strict=True))
        for row, before in zip(rows, was, strict=True):
            row.copy_(before)
        if any(row.is_cuda for row in rows):
            torch.cuda.synchronize()
        return loaded, loaded and same

    def _copy_all(self, blocks: Any, targets: Sequence[Rows]) -> list[bool]:
        places = _places(targets)
        if places is None or not self._all_fit(blocks, targets):
            return super()._copy_all(blocks, targets)
        for layer, (memory, offsets) in enumerate(places):
            blocks.copy_layer(layer, memory, list(range(len(targets))), offsets)
        return [True] * len(targets)

    def _all_fit(self, blocks: Any, targets: Sequence[Rows]) -> bool:
        """Whether all are there, and of the layout that rows of these sizes have."""
        if blocks.hits < len(targets):
            return False
        sizes = [row.numel() * row.element_size() for row in targets[0] if row is not None]
        return all(block.layout_id == self.format(sizes) for block in blocks)

    def _is_of(self, block: Any, rows: Rows) -> bool:
        return all(
            row is None or block.layer(layer).nbytes == row.numel() * row.element_size()
            for layer, row in enumerate(rows)
        )

    def _copy_out(self, blocks: Any, there: list[int], targets: Sequence[Rows]) -> set[int]:
        for i, rows in zip(there, targets, strict=True):
            for layer, row in enumerate(rows):
                if row is not None:
                    row.copy_(blocks[i].tensor(layer).reshape(-1).view(torch.uint8).view(row.dtype))
        return set()


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _places(pages: Sequence[Rows]) -> list[tuple[np.ndarray, list[int]]] | None:
    """For each buffer the CPU memory that has it of all pages, as bytes, and its offsets there; None where
    there is no such memory, or a part is not wanted."""
    found = []
    for rows in zip(*pages, strict=True):
        if any(row is None or row.device.type != "cpu" or not row.is_contiguous() for row in rows):
            return None
        storage = rows[0].untyped_storage()
        if any(
            row.untyped_storage().data_ptr() != storage.data_ptr() or row.numel() != rows[0].numel()
            for row in rows
        ):
            return None
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        found.append((memory, [row.storage_offset() * row.element_size() for row in rows]))
    return found or None
