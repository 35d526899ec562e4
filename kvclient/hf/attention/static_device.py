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
from kvclient.hf.attention.static import Steps
from kvclient.kernels.cuda_attention import Table, Workspace


class StaticDeviceLayer(DeviceLayer):
    """Prefill is a DeviceLayer's. From Steps.start() on, update() takes one token a row."""

    def __init__(self, *args: Any, steps: Steps, **kwargs: Any) -> None:
        self._steps: Steps | None = None
        super().__init__(*args, **kwargs)
        self._steps = steps

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self._steps
        if steps is not None and steps.running and not in_step():
            steps.over = True
            self._leave()
            steps = None
        if steps is None or not steps.running:
            return super().update(key_states, value_states, *args, **kwargs)
        storage = self._storage
        assert storage is not None and key_states.shape[-2] == 1
        place = steps.column - self.origin
        storage[0].index_copy_(2, place, key_states)
        storage[1].index_copy_(2, place, value_states)
        return give_handle(key_states, self), value_states

    def get_seq_length(self) -> int:
        steps = self._steps
        return steps.length if steps is not None and steps.running else super().get_seq_length()

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
        if self._steps is not None:
            self._steps.over = True
        self._leave()
        super().become_dense(reason)

    def crop(self, count: int) -> None:
        self._leave()
        super().crop(count)

    def reset(self) -> None:
        self._leave()
        super().reset()

    def detach_store(self) -> None:
        self._leave()
        super().detach_store()

    def __deepcopy__(self, memo: Any) -> StaticDeviceLayer:
        self._leave()
        return super().__deepcopy__(memo)

    def _leave(self) -> None:
        """From here on a DeviceLayer like any other."""
        steps, self._steps = self._steps, None
        if steps is not None and steps.running:
            self._length = steps.length
