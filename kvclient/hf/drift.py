"""What stored K and V are off by where they were not computed anew, told from those near them that were.

Owns the estimate and its addition. Knows no store. Invariant: only columns of a reused stretch that this pass
does not compute are changed, and with next to nothing computed in a stretch none of it is.

A stretch that stands behind other tokens than it was computed behind is off by much the same everywhere near,
in each head of each layer: by what its tokens read there. So each stored column gets the mean of (fresh -
stored) of the stretch's computed columns, weighted by exp(-distance / REACH), beside a weight of PRIOR for
"by nothing". Keys are compared and moved as they would be at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvclient.blocks.cover import Segment
from kvclient.hf.rope import Rope, Turning

REACH = 30.0  # tokens
PRIOR = 6.0
LEAST = 1 / 20  # of a stretch: where fewer are computed, nothing is told


class Drift:
    """Of one pass. chosen: the columns it computes."""

    def __init__(self, rope: Rope, segments: Sequence[Segment], chosen: torch.Tensor) -> None:
        self._rope, self._length = rope, len(chosen)
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stretches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for segment in segments:
            inside = slice(segment.start, segment.stop)
            computed = torch.nonzero(chosen[inside]).squeeze(1) + segment.start
            others = torch.nonzero(~chosen[inside]).squeeze(1) + segment.start
            if len(computed) >= max(1, LEAST * len(segment)) and len(others):
                weights = torch.exp((others[:, None] - computed[None]).abs() / -REACH)
                weights /= weights.sum(1, keepdim=True) + PRIOR
                self._stretches.append((computed, others, weights))

    def add(self, layer: int, storage: torch.Tensor, columns: torch.Tensor, fresh: torch.Tensor) -> None:
        """storage [2, rows, heads, capacity, head_dim] holds a layer as it was stored; fresh [2, rows, heads,
        columns, head_dim] is what is about to take these columns' place.
        """
        for stretch in self._stretches:
            computed, others, weights = (tensor.to(storage.device) for tensor in stretch)
            stored = storage.index_select(3, computed)
            off = fresh.index_select(3, torch.searchsorted(columns, computed)).float() - stored
            self._turn(layer, off[0], computed, -1)
            told = weights @ off.movedim(3, 0).reshape(len(computed), -1)
            rest = told.view(len(others), *off.shape[:3], off.shape[4]).movedim(0, 3).contiguous()
            self._turn(layer, rest[0], others, 1)
            storage.index_add_(3, others, rest.to(storage.dtype))

    def _turn(self, layer: int, keys: torch.Tensor, columns: torch.Tensor, way: int) -> None:
        """Turns keys [rows, heads, columns, head_dim] from position 0 to their columns (1), or back (-1)."""
        turning = self._rope.layers[layer]
        if turning.inv_freq is None:
            return
        cos, sin = (table[columns] for table in self._table(turning, keys.device))
        sin, size = sin * way, 2 * cos.shape[1]
        if turning.convention == "half":
            one, two = keys[..., : size // 2], keys[..., size // 2 : size]
        else:
            one, two = keys[..., 0:size:2], keys[..., 1:size:2]
        before = one.clone()
        one.mul_(cos).sub_(two * sin)
        two.mul_(cos).add_(before * sin)

    def _table(self, turning: Turning, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each column's angles."""
        place = id(turning.inv_freq)
        if place not in self._angles:
            positions = torch.arange(self._length, dtype=torch.float64)[:, None]
            angles = positions * torch.from_numpy(np.asarray(turning.inv_freq, np.float64))
            self._angles[place] = angles.cos().float().to(device), angles.sin().float().to(device)
        return self._angles[place]
