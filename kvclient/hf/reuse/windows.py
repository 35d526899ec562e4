"""Which columns of a prompt can be computed where some layers see windows, and what of them is stored.

Owns that question for one prompt. Never computes, loads or chooses anything. Invariant: a column that may be
computed finds, in every layer, all that it sees: outside of what is reused, among what is stored of that
layer's group, or among the columns that are computed anyhow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvclient.blocks.match import Piece
from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.groups import LayerGroup


@dataclass(frozen=True)
class GroupPieces:
    """What was found of one group of layers, wherever in the prompt."""

    group: LayerGroup
    form: BlockFormat
    segments: tuple[Segment, ...]

    def within(self, segments: Sequence[Segment]) -> list[Segment]:
        """Of that, what lies in these, which are in order; so is what this answers."""
        out = [_part(found, wider.start, wider.stop) for wider in segments for found in self.segments]
        return sorted((part for part in out if part is not None), key=lambda part: part.start)

    def held(self, length: int) -> torch.Tensor:
        """Which columns: bool [length]."""
        held = torch.zeros(length, dtype=torch.bool)
        for segment in self.segments:
            held[segment.start : segment.stop] = True
        return held

    def first_seen(self, columns: torch.Tensor) -> torch.Tensor:
        """Per column the first that it sees, of the shape of `columns`."""
        if not self.group.window:
            return torch.zeros_like(columns)
        if self.group.chunked:
            return columns // self.group.window * self.group.window
        return (columns - self.group.window + 1).clamp_min(0)


class Windows:
    """Of one prompt of `length` tokens."""

    def __init__(self, parts: Sequence[GroupPieces], length: int) -> None:
        self.parts, self._length = parts, length

    def of(self, layer: int) -> GroupPieces | None:
        """None: a layer that needs all tokens, as every layer of most models."""
        return next((part for part in self.parts if layer in part.group.layers), None)

    def fitted(self, segments: Sequence[Segment], min_tokens: int) -> list[Segment]:
        """These stretches, each up to the last token behind which what stands there finds all it sees."""
        out = []
        for segment in segments:
            ends = torch.arange(segment.start, segment.stop + 1)
            fits = torch.ones(len(ends), dtype=torch.bool)
            for part in self.parts:
                missing = _counted(~part.held(self._length))
                first = part.first_seen(ends).clamp(min=segment.start).minimum(ends)
                fits &= missing[ends] == missing[first]
            stop = int(ends[fits][-1])
            if stop - segment.start >= min_tokens and (part := _part(segment, segment.start, stop)):
                out.append(part)
        return out

    def computable(
        self, segments: Sequence[Segment], fresh: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`fresh` [columns] without what cannot be computed, the columns inside the segments that can be
        besides and whose stored K and V there are in all layers). segments: as fitted() has them.
        """
        reused = torch.zeros(self._length, dtype=torch.bool)
        for segment in segments:
            reused[segment.start : segment.stop] = True
        held = [part.held(self._length) | ~reused for part in self.parts]
        there, fresh = [mask.clone() for mask in held], fresh.clone()
        for column in torch.nonzero(fresh & reused).flatten():
            sees = zip(self.parts, there, strict=True)
            if all(bool(mask[int(part.first_seen(column)) : column].all()) for part, mask in sees):
                for mask in there:
                    mask[column] = True
            else:
                fresh[column] = False
        may, columns = reused & ~fresh, torch.arange(self._length)
        for part, mask, stored in zip(self.parts, there, held, strict=True):
            missing = _counted(~mask)
            may &= (missing[columns] == missing[part.first_seen(columns)]) & stored
        return fresh, may

    def stored(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Which columns have stored K and V in all layers, or are not reused: bool [columns]."""
        stored = torch.ones(self._length, dtype=torch.bool)
        for part in self.parts:
            held = part.held(self._length)
            for segment in segments:
                stored[segment.start : segment.stop] &= held[segment.start : segment.stop]
        return stored


def _counted(mask: torch.Tensor) -> torch.Tensor:
    """[length + 1]: how many are set before each column."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])


def _part(segment: Segment, start: int, stop: int) -> Segment | None:
    """What of it lies in start..stop of the prompt."""
    start, stop = max(start, segment.start), min(stop, segment.stop)
    if start >= stop:
        return None
    pieces, at = [], segment.start
    for piece in segment.pieces:
        low, high = max(at, start), min(at + piece.count, stop)
        if low < high:
            pieces.append(Piece(piece.view, piece.offset + low - at, high - low, piece.key))
        at += piece.count
    position = segment.position + start - segment.start
    return dataclasses.replace(segment, start=start, stop=stop, pieces=tuple(pieces), position=position)
