"""The cache layers of a pass that computes some rows: fresh K and V among reused ones.

Owns what a layer holds between the passes of one prompt. Never chooses rows: the pass does. Invariant: until
the last pass has ended a layer is as long as it was before the first, so each of them begins where that did.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvclient.errors import BlockLost, Closed
from kvclient.hf.cache.layer import Shape, StoreLayer, as_array
from kvclient.hf.call import Lost
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.rope import Rope, turned_tensor
from kvclient.hf.reuse.attention_scores import AttentionScores
from kvclient.hf.reuse.drift import Drift
from kvclient.hf.reuse.estimate import Gauge
from kvclient.kernels import contract, cuda


class Seen(Exception):
    """K and V of all rows of a layer are there. Internal: ends the look, or the pass that asks."""


class Pass(Protocol):
    """What a layer asks of the Blend that it is part of, which says what each means."""

    exact: int
    length: int
    looking: bool
    chosen: bool
    stored: bool
    last: bool
    asked: AttentionScores | None
    drift: Drift | None
    gauge: Gauge | None
    waiting: list[Any]  # BlendLayers

    @property
    def whole(self) -> bool:
        """Whether every row goes through the layers."""

    def columns(self) -> torch.Tensor:
        """That the pass computes, int64 [rows]."""

    def load(self, layer: int, storage: torch.Tensor) -> None:
        """Puts what is reused of a layer into its storage [2, rows, heads, capacity, head_dim]."""

    def check(self, layer: int, storage: torch.Tensor) -> None:
        """How far the fresh K and V in storage [2, rows, heads, capacity, head_dim] are from the stored."""


class BlendLayer(StoreLayer):
    """A StoreLayer whose first update is part of a pass."""

    def __init__(self, blend: Pass, index: int, shape: Shape, *args: Any, **kwargs: Any) -> None:
        super().__init__(index, shape, *args, **kwargs)
        self._blend: Pass | None = blend
        self._asked = False  # and so holds what is stored
        self._seen: tuple[torch.Tensor, ...] | None = None  # columns that were looked at, their K and V
        # Of the last layer, whose last rows come once more.
        self._handed: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes K and V [batch, heads, tokens, head_dim]. Raises Seen when all that the pass was for is
        there."""
        blend = self._blend
        if self._handed is not None:
            handed, self._handed = self._handed, None
            return handed
        if blend is not None and blend.looking and not blend.chosen:
            storage = self._room(blend.length, key_states)
            columns = blend.columns().to(storage.device)
            storage[0][:, :, columns], storage[1][:, :, columns] = key_states, value_states
            self._seen = columns, key_states, value_states
            blend.check(self.index, storage)
            raise Seen
        if blend is not None and (blend.asked is not None or blend.stored):
            return self._ask(blend, blend.asked, key_states, value_states)
        if blend is None or (blend.whole and blend.last):
            self._blend = None
            return super().update(key_states, value_states, *args, **kwargs)
        handed = self._put(blend, key_states, value_states)
        if blend.looking:
            self._handed = handed
            raise Seen
        return handed

    def _put(
        self, blend: Pass, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh columns beside the others; all of both."""
        before = self._length
        storage = self._room(blend.length, key_states)
        columns = blend.columns().to(storage.device)
        if not self._asked or (blend.drift is None and blend.gauge is None):
            blend.load(self.index, storage)
        if blend.drift is not None:
            blend.drift.add(self.index, storage, columns, torch.stack([key_states, value_states]))
        if self._seen is not None:
            looked, *fresh = self._seen
            storage[0][:, :, looked], storage[1][:, :, looked] = fresh
            self._seen = None
        storage[0][:, :, columns] = key_states
        storage[1][:, :, columns] = value_states
        if blend.last:
            self.commit(blend)
            return self.keys, self.values
        self._show(blend.length)
        handed = self.keys, self.values
        self._show(before)  # a pass that follows begins where this one did
        if self not in blend.waiting:
            blend.waiting.append(self)
        return handed

    @property
    def waits(self) -> bool:
        """Whether no pass has filled it for good."""
        return self._blend is not None

    def commit(self, blend: Pass) -> None:
        """What this layer holds is the prompt's."""
        assert self._storage is not None
        self._blend = None
        self._show(blend.length)
        if self.written is not None:
            self.written(self.index, blend.exact, blend.length, self._storage, self.origin)

    def _ask(
        self, blend: Pass, asked: AttentionScores | None, key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        before = self._length
        storage = self._room(blend.length, key_states)
        columns = blend.columns().to(storage.device)
        blend.load(self.index, storage)
        storage[0][:, :, columns], storage[1][:, :, columns] = key_states, value_states
        self._asked = True
        self._show(blend.length)
        keys, values = self.keys, self.values
        if asked is not None:
            keys = asked.handed(self.index, keys, values)
        self._show(before)  # the pass that follows begins where this one did
        return keys, values


def compared(
    stored: torch.Tensor, fresh: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, columns] of K and V [2, heads, tokens, head_dim]: (stored - fresh)^2 and fresh^2, summed."""
    if fresh.device.type in cuda.DEVICES and contract.cuda_lacks(fresh.device.index or 0) is None:
        whole = cuda.table([cuda.segment((stored[0],), (stored[1],))], fresh.device)
        first = torch.zeros(1, dtype=torch.int64, device=fresh.device)
        square, norm = cuda.score(fresh[0], fresh[1], whole, first, fresh.shape[2], 0, False)
        return square[:, columns], norm[:, columns]
    fresh = fresh[:, :, columns].float()
    return (stored[:, :, columns].float() - fresh).pow_(2).sum(dim=(1, 3)), fresh.pow(2).sum(dim=(1, 3))


def place(
    rope: Rope, form: BlockFormat, layer: int, piece: Any, shift: int, storage: torch.Tensor, at: int
) -> None:
    """Copies one piece of a block to columns at.. of storage [arrays, 1, heads, columns, head_dim], its keys
    turned. Raises Lost if the block is gone or the store was closed meanwhile.
    """
    part, where = slice(piece.offset, piece.offset + piece.count), slice(at, at + piece.count)
    stands = form.place(layer)
    assert stands is not None
    try:
        if storage.device.type == "cpu":
            block, target = form.read(piece.view, stands)[:, :, part], as_array(storage)
            rope.turn(layer, block[0], shift, target[0, 0, :, where])
            target[1, 0, :, where] = block[1]
            target[:, 1:, :, where] = target[:, :1, :, where]
        else:
            block = form.read_tensor(piece.view, stands)[:, :, part]
            storage[0, :, :, where] = turned_tensor(rope, layer, block[0], shift)
            storage[1, :, :, where] = block[1].to(storage.device)
    except (BlockLost, Closed) as error:
        raise Lost(str(error)) from error
