"""Which reused tokens a question attends to, in a pass over what is stored.

Owns the sums and the way attention is asked for them: the keys that a cache layer hands to the model carry
a function, and the registered attention calls it with the queries. Never changes what is attended to.
Invariant: where the model's attention is another one, nothing is summed, and `of()` is None.
"""

from __future__ import annotations

import torch

from kvclient.hf.attention.layer import ASK

ROWS = 32  # of the question, at most: its last
# Of the layers: those before attend to what is near, those behind do not choose better.
FIRST, STOP = 1 / 6, 2 / 3


class Asked:
    """Of one pass. rows: how many tokens stand behind the last reused one; layers: of the model."""

    def __init__(self, length: int, rows: int, layers: int) -> None:
        self.first, self.stop = int(layers * FIRST), max(1, int(layers * STOP))
        self.last = layers - 1
        self._length, self._rows = length, min(rows, ROWS)
        self._sum: torch.Tensor | None = None

    def handed(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """These keys [B, heads, length, head_dim], so that their attention tells."""
        if self.first <= layer < self.stop:
            keys = keys.view_as(keys)
            setattr(keys, ASK, self._tell)
        return keys

    def of(self) -> torch.Tensor | None:
        """Per column the squares of the question's attention, summed over rows, heads and layers: what one
        head looks at counts more than what all see a little of.
        """
        return None if self._sum is None else self._sum.cpu()

    def _tell(self, keys: torch.Tensor, query: torch.Tensor, scale: float) -> None:
        key, rows = keys[0].float(), self._rows
        heads, _, head_dim = key.shape
        own = query[0, :, -rows:].float().reshape(heads, -1, head_dim)  # the query heads of each, row by row
        score = (own @ key.transpose(1, 2) * scale).view(heads, -1, rows, self._length)
        behind = torch.ones(rows, self._length, dtype=torch.bool, device=key.device)
        score.masked_fill_(behind.triu(self._length - rows + 1), -torch.inf)
        told = score.softmax(-1).square_().sum((0, 1, 2))
        self._sum = told if self._sum is None else self._sum + told
