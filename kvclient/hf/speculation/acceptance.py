"""What of a draft is right.

Owns the two rules. Never computes a logit. Invariant: the accepted tokens, with the one behind them, are
distributed as if the model had been asked for one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvclient.hf.speculation.draft import Draft


@dataclass(frozen=True)
class Path:
    """tokens: those of the nodes, and one more that the last node's logits gave."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


class Chance(Protocol):
    """Where randomness comes from."""

    def happens(self, probability: float) -> bool:
        """True with this probability."""

    def draw(self, p: torch.Tensor) -> int:
        """A token of [vocabulary] probabilities."""


class Dice:
    """torch's numbers; None: its global generator, as transformers uses."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def happens(self, probability: float) -> bool:
        """True with this probability."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator)) < probability

    def draw(self, p: torch.Tensor) -> int:
        """An index of p [vocabulary], each as often as it says."""
        return int(torch.multinomial(p, 1, generator=self._generator))


def match(draft: Draft, choose: Callable[[int, Sequence[int]], int]) -> Path:
    """The path that `choose` takes: it is given a node and the tokens chosen before, and gives the next token
    as plain decoding would. It is asked once for each token of the answer, in order, so that whatever it
    draws from (a generator, a grammar) is in the state of plain decoding.
    """
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        node = nodes[-1] if nodes else 0
        tokens.append(choose(node, tokens))
        found = draft.child(node, tokens[-1])
        if found is None:
            return Path(tuple(nodes), tuple(tokens))
        nodes.append(found)


def reject(
    draft: Draft, target: Callable[[int, Sequence[int]], torch.Tensor], chance: Chance | None = None
) -> Path:
    """Rejection sampling against the draft's shares. target: of a node, with the tokens before, the model's
    probabilities [vocabulary]. A child is accepted with min(1, p / q); after a refusal p becomes what it has
    above q, and q loses that child (Leviathan et al. 2023, arXiv 2211.17192; of several children drawn
    without replacement Jeon et al. 2024, arXiv 2402.14160).
    """
    chance = Dice() if chance is None else chance
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        node = nodes[-1] if nodes else 0
        p = target(node, tokens).double()
        q = draft.shares.get(node)
        q = None if q is None else q.double()
        found = None
        for child in draft.children[node]:
            token = draft.tokens[child - 1]
            chance_drafted = 1.0 if q is None else float(q[token])
            if chance_drafted > 0 and chance.happens(min(1.0, float(p[token]) / chance_drafted)):
                found = child
                break
            p, q = _refused(p, q, token)
        if found is None:
            tokens.append(chance.draw(p))
            return Path(tuple(nodes), tuple(tokens))
        nodes.append(found)
        tokens.append(draft.tokens[found - 1])


def _refused(
    p: torch.Tensor, q: torch.Tensor | None, token: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if q is None:  # all of it on that token
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp_(min=0)
        q = q.clone()
        q[token] = 0
        q = q / q.sum() if float(q.sum()) > 0 else q
    whole = float(left.sum())
    return (left / whole if whole > 0 else p), q  # p = q but for rounding: nothing is above
