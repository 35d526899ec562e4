"""A draft: tokens that may come next, as a tree.

Owns its shape. Never knows where the tokens come from. Invariant: node 0 is the newest token that is certain,
node i + 1 is tokens[i], and a node stands behind its parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from kvclient.errors import InvalidArgument


@dataclass(frozen=True)
class Draft:
    """parents: of tokens[i] the node before it. shares: of a node the probabilities [vocabulary] that its
    children were drawn from, one after the other and none twice; a node without them was not drawn but
    chosen.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    shares: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise InvalidArgument(f"{len(self.tokens)} tokens with {len(self.parents)} parents")
        if wrong := [parent for i, parent in enumerate(self.parents) if not 0 <= parent <= i]:
            raise InvalidArgument(f"parent {wrong[0]} does not stand before its child")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Draft:
        """A draft whose tokens follow each other."""
        return cls(tuple(tokens), tuple(range(len(tokens))))

    @property
    def is_chain(self) -> bool:
        """Whether its tokens follow each other."""
        return all(parent == i for i, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node, 0 for the certain token."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, in their order."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for i, parent in enumerate(self.parents):
            found[parent].append(i + 1)
        return tuple(map(tuple, found))

    def child(self, node: int, token: int) -> int | None:
        """The node behind `node` that has this token; None if none has."""
        return next((child for child in self.children[node] if self.tokens[child - 1] == token), None)

    def seen(self) -> torch.Tensor:
        """bool [nodes, nodes]: which nodes each one stands behind, itself included."""
        found = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            found[i + 1] |= found[parent]
        return found


NOTHING = Draft((), ())


class Session(Protocol):
    """Of one text."""

    def draft(self, ids: Sequence[int], depth: int, nodes: int, sample: float | None) -> Draft:
        """What may follow `ids`, which begin with those of the call before: at most `depth` tokens one behind
        the other and `nodes` in all. sample: the temperature at which the answer is drawn; None: it is the
        likeliest.
        """


class Drafter(Protocol):
    def begin(self, vocabulary: int) -> Session:
        """For a text of that many different tokens. Raises InvalidArgument if it cannot be."""
