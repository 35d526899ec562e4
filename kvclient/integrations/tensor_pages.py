"""Pages whose buffers are rows of an engine's tensors, on whatever device.

Owns the copies; knows no engine. Invariant: rows are contiguous bytes; a load fills all rows that are wanted,
or says that it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvclient.integrations.pages import Pages

Rows = Sequence[torch.Tensor | None]  # one-dimensional; None: that part is not wanted


class TensorPages(Pages):
    """As Pages. Copies to and from a device are done when the call returns."""

    def _copy_in(self, block: Any, buffers: Rows) -> None:
        for layer, row in enumerate(buffers):
            assert row is not None, "a page is stored whole"
            block.copy_layer(layer, row.contiguous().cpu().view(torch.uint8).numpy())

    def _copy_out(self, block: Any, buffers: Rows) -> bool:
        for layer, row in enumerate(buffers):
            if row is None:
                continue
            source = block.tensor(layer).reshape(-1)
            if source.numel() * source.element_size() != row.numel() * row.element_size():
                return False
            row.copy_(source.view(row.dtype))
        return True
