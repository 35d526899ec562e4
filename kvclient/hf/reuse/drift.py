"""What stored K and V are off by where they were not computed anew, told from those that were.

Owns the estimate and its addition. Knows no store. Invariant: only columns of a reused stretch are changed,
and with next to nothing computed in a stretch none of it is.

A stretch that stands behind other tokens than it was computed behind is off by what its tokens read there:
by much the same everywhere, more alike the nearer two tokens are, and the more alike they are themselves. So
what it is off by is taken for a Gaussian process. Two tokens have in common a share each as exp(-distance /
reach) says for every reach of REACHES, and ALIKE such as the inner product of their stored values says; NOISE
is each one's own. Told is its mean, given (fresh - stored) of the computed columns: by the same weights in
all layers. Keys are compared and moved as they would be at position 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.model.rope import Rope

REACHES = (4.0, 30.0, math.inf)  # tokens
ALIKE = 3.0
NOISE = 12.0
LEAST = 1 / 20  # of a stretch: where fewer are computed, nothing is told
MOST = 1024  # tokens: a longer stretch is told in parts, as the work grows with the square of each


class Drift:
    """Of one pass. chosen: the columns it computes."""

    def __init__(
        self, rope: Rope, segments: Sequence[Segment], chosen: torch.Tensor, values: Sequence[torch.Tensor]
    ) -> None:
        """values [rows, heads, columns, head_dim]: as they are stored, of some layers."""
        self._rope = rope
        # Where; which columns of these are computed; [columns, computed] what each counts.
        self._told: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        for inside in (part for segment in segments for part in _parts(segment)):
            computed = torch.nonzero(chosen[inside]).squeeze(1)
            count = inside.stop - inside.start
            if max(1, LEAST * count) <= len(computed) < count:
                stored = [tensor[0, :, inside] for tensor in values]
                computed = computed.to(stored[0].device)
                self._told.append((inside, computed, _weights(computed, stored)))

    def add(self, layer: int, storage: torch.Tensor, columns: torch.Tensor, fresh: torch.Tensor) -> None:
        """storage [2, rows, heads, capacity, head_dim] holds a layer as it was stored; fresh [2, rows, heads,
        columns, head_dim] is what is about to take these columns' place.
        """
        for inside, computed, weights in self._told:
            stretch = storage[..., inside, :]
            places = torch.searchsorted(columns, computed + inside.start)
            off = fresh.index_select(3, places).float() - stretch.index_select(3, computed)
            self._rope.turn_each(layer, off[0], inside.start + computed, -1)
            told = weights @ off
            self._rope.turn_each(layer, told[0], torch.arange(inside.start, inside.stop), 1)
            stretch += told.to(storage.dtype)


def _parts(segment: Segment) -> Iterator[slice]:
    step = math.ceil(len(segment) / math.ceil(len(segment) / MOST))
    for start in range(segment.start, segment.stop, step):
        yield slice(start, min(start + step, segment.stop))


def _weights(computed: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """[tokens, computed]. values [heads, tokens, head_dim]: of some layers."""
    tokens = torch.arange(values[0].shape[1], device=computed.device)
    distance = (tokens[:, None] - computed).abs()
    common = torch.stack([torch.exp(distance / -reach) for reach in REACHES]).sum(0)
    for tensor in values:
        like = tensor.transpose(0, 1).flatten(1).float()
        like = like - like.mean(0)
        share = ALIKE / len(values) / like.square().sum(1).mean().clamp_min(1e-30)
        common += share * (like @ like[computed].T)
    known = common[computed]
    known.diagonal().add_(NOISE)
    return torch.linalg.solve(known, common, left=False)
