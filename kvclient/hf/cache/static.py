"""A layer whose memory never moves and whose length is read on the device: what a captured graph can replay.

Owns the writing of one token a row at a column that a tensor names, and attention over the whole memory
under a mask made from that tensor. Never grows, and syncs with nothing. Invariant: while steps run, nothing
that the host knows changes between two of them but Steps.length, which no kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvclient.hf.attention import torch_reference
from kvclient.hf.attention.handle import give_handle, in_step
from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.cache.layer import StoreLayer
from kvclient.kernels.cuda_attention import Table, Workspace

# Why the kernels would not take a call that torch's attention, which is asked here, takes.
TORCH_TAKES = (None, "torch", "device", "dtype", "head_dim")


class Steps:
    """Where the rows of one cache are: shared by its layers."""

    def __init__(self, pads: Sequence[int], capacity: int, device: torch.device) -> None:
        self.pads = torch.tensor(list(pads), device=device)[:, None]
        self.columns = torch.arange(capacity, device=device)[None]
        self.column = torch.zeros(1, dtype=torch.int64, device=device)  # that the step writes
        self.capacity, self.length, self.running = capacity, 0, False
        self.over = False  # a layer left: all are as any others again
        self.workspace = Workspace()  # of the layers' kernels, one after the other

    def start(self, length: int) -> None:
        """Recorded steps begin behind `length` columns."""
        self.length, self.running = length, True

    def seen(self, window: int) -> torch.Tensor:
        """[rows, 1, 1, capacity]: the columns that the newest token of each row sees."""
        seen = (self.columns <= self.column) & (self.columns >= self.pads)
        if window:
            seen &= self.column - self.columns < window
        return seen[:, None, None]


class Stepping:
    """Mixed into a cache layer: from Steps.start() on, update() takes one token a row, and whatever else is
    done with the layer ends that, for all layers.
    """

    _storage: torch.Tensor | None
    origin: int

    def __init__(self, *args: Any, steps: Steps, **kwargs: Any) -> None:
        self._steps: Steps | None = None
        super().__init__(*args, **kwargs)
        self._steps = steps

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values [batch, kv_heads, columns, head_dim] with the new ones behind them;
        inside a step the memory whole.
        """
        if self._stepping and not in_step():
            self._leave()
        if not self._stepping:
            return super().update(key_states, value_states, *args, **kwargs)
        storage = self._storage
        assert storage is not None and key_states.shape[-2] == 1
        place = self._steps.column - self.origin
        storage[0].index_copy_(2, place, key_states)
        storage[1].index_copy_(2, place, value_states)
        return self._handed_out(key_states, value_states)

    def get_seq_length(self) -> int:
        """How many columns are written."""
        return self._steps.length if self._stepping else super().get_seq_length()

    def crop(self, count: int) -> None:
        """Forgets what stands behind column `count`."""
        self._leave()
        super().crop(count)

    def reset(self) -> None:
        """Forgets all columns."""
        self._leave()
        super().reset()

    def detach_store(self) -> None:
        """The layer is the user's alone from now on."""
        self._leave()
        super().detach_store()

    @property
    def _stepping(self) -> bool:
        return self._steps is not None and self._steps.running

    def _leave(self) -> None:
        """From here on a layer like any other of its base."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        steps.over = True
        if steps.running:
            self._go_on(steps.length)

    def _handed_out(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What update() answers in a step that brought these."""
        raise NotImplementedError

    def _go_on(self, length: int) -> None:
        """Takes what steps have written, up to this column, as the base's own."""
        raise NotImplementedError


class StaticLayer(Stepping, StoreLayer):
    """Prefill is a StoreLayer's."""

    def takes(self, reason: str | None, causal: bool) -> bool:
        return causal and reason in TORCH_TAKES

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None, scale: float, softcap: float, window: int,
        path: int | None,
    ) -> torch.Tensor:  # fmt: skip
        assert self._steps is not None and self._storage is not None
        if path is not None:
            count_fallback("graph")  # torch answers: the kernels' lengths are the host's where keys are dense
        seen = self._steps.seen(window)
        return torch_reference.attend(query, self._storage[0], self._storage[1], seen, scale, softcap, sinks)

    def become_dense(self, reason: str) -> None:
        """Raises RuntimeError: a recorded step cannot change its memory."""
        raise RuntimeError(f"a step of a decode graph wants what cannot be replayed ({reason})")

    def _handed_out(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._storage is not None
        return give_handle(self._storage[0], self), self._storage[1]

    def _go_on(self, length: int) -> None:
        self._show(length)

    def _room(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        if self._storage is None:
            storage = super()._room(tokens, like)
            storage[:, :, :, self._length :] = 0  # columns that nobody wrote are masked, but 0 x NaN is NaN
            return storage
        return super()._room(tokens, like)


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
        """Raises RuntimeError inside of a recorded step."""
        if in_step():
            raise RuntimeError(f"a step of a decode graph wants what cannot be replayed ({reason})")
        self._leave()
        super().become_dense(reason)

    def __deepcopy__(self, memo: Any) -> StaticDeviceLayer:
        self._leave()
        return super().__deepcopy__(memo)
