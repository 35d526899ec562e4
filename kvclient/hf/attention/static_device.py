"""A layer over the store's blocks on a GPU whose tail never moves: what a graph can replay, in place.

Owns the writing of one token a row at a column that a tensor names, and telling the kernel of it on the
device. Never builds a dense tensor of the prefix, and syncs with nothing in a step. Invariant: that of
StaticLayer: while steps run, nothing that the host knows changes between two of them but Steps.length.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.hf.attention.device_layer import DeviceLayer
from kvclient.hf.attention.layer import give_handle, in_step
from kvclient.hf.attention.static import Stepping
from kvclient.kernels.cuda_attention import Table, Workspace


class StaticDeviceLayer(Stepping, DeviceLayer):
    """Prefill is a DeviceLayer's."""

    def _handed_out(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return give_handle(key, self), value

    def _go_on(self, length: int) -> None:
        self._length = length

    def _tell(
        self, table: Table, starts: torch.Tensor, batch: int, tokens: int
    ) -> tuple[torch.Tensor, Workspace | None]:
        steps = self._steps
        if steps is None or not steps.running:
            return super()._tell(table, starts, batch, tokens)
        torch.sub(steps.column + 1, starts, out=table.tail_tokens)
        return steps.column.expand(batch, tokens).contiguous(), steps.workspace

    def become_dense(self, reason: str) -> None:
        if in_step():
            raise RuntimeError(f"a step of a decode graph wants what cannot be replayed ({reason})")
        self._leave()
        super().become_dense(reason)

    def __deepcopy__(self, memo: Any) -> StaticDeviceLayer:
        self._leave()
        return super().__deepcopy__(memo)
