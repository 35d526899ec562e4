"""Which reused tokens a question attends to, in a pass over what is stored.

Owns the sums and the way attention is asked for them: the keys that a cache layer hands to the model carry
a function, and the registered attention calls it with the queries. Never changes what is attended to.
Invariant: where the model's attention is another one, nothing is summed, and `of()` is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kvclient.hf.attention.handle import ASK

ROWS = 32  # of the question, at most: its last
# Of the layers: those before attend to what is near, those behind do not choose better.
FIRST, STOP = 1 / 6, 2 / 3


class AttentionScores:
    """Of one pass. rows: how many tokens stand behind the last reused one; layers: of the model."""

    def __init__(
        self, length: int, rows: int, layers: int,
        seen: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """seen: of a layer and columns, the first columns that these see there; None: all see all."""
        self.first, self.stop = int(layers * FIRST), int(layers * STOP)  # where the pass ends
        self._length, self._rows, self._seen = length, min(rows, ROWS), seen
        self.values: list[torch.Tensor] = []  # of the layers that are asked: stored ones and live ones
        self._sum: torch.Tensor | None = None

    def handed(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """These keys [B, heads, length, head_dim], so that their attention tells."""
        if self.first <= layer < self.stop:
            keys = keys.view_as(keys)
            setattr(keys, ASK, functools.partial(self._tell, layer, values))
            self.values.append(values)
        return keys

    def of(self) -> torch.Tensor | None:
        """Per column what the question's attention owes it: the square of (weight times the distance from the
        value there to what the head says), which is how far that goes if the key is off, summed over rows,
        heads and layers. float32 [columns]; None if nothing was attended.
        """
        return None if self._sum is None else self._sum.cpu()

    def _tell(
        self, layer: int, values: torch.Tensor, keys: torch.Tensor, query: torch.Tensor, scale: float
    ) -> None:
        key, value, rows = keys[0].float(), values[0].float(), self._rows
        heads, _, head_dim = key.shape
        # The query heads of each, row by row.
        asking = query[0, :, -rows:].float().reshape(heads, -1, head_dim)
        score = (asking @ (key * scale).transpose(1, 2)).view(heads, -1, rows, self._length)
        behind = torch.ones(rows, rows, dtype=torch.bool, device=key.device).triu(1)
        score[..., -rows:].masked_fill_(behind, -torch.inf)
        if self._seen is not None:
            first = self._seen(layer, torch.arange(self._length - rows, self._length))
            outside = torch.arange(self._length) < first[:, None]
            score.masked_fill_(outside.to(key.device), -torch.inf)
        weight = score.softmax(-1).view(heads, -1, self._length)
        said, size = weight @ value, value.square().sum(-1)
        away = torch.baddbmm(size[:, None], said, value.transpose(1, 2), alpha=-2)  # |value - said|^2
        away += said.square().sum(-1, keepdim=True)
        told = away.mul_(weight).mul_(weight).sum((0, 1)) / size.mean().clamp_min(1e-30)
        self._sum = told if self._sum is None else self._sum + told
