"""Drafts for the requests that run: which of them gets one, and what of it is right.

Owns the drafter, the cost of a step and each request's record. Never runs the served model and never cuts a
cache. Invariant: a request says what it would say without drafts: greedy or with a seed the very same tokens,
without a seed tokens of the same distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.hf.speculation import NOTHING, Draft, Drafter, Path, match, reject
from kvclient.serve.engine.sampling import Chosen, Sampler

KEPT = 0.98  # of what older steps say, with each new one
NEWEST = 0.2  # of the newest draft in a request's means
TRIAL = 8  # drafts before the first judgement
REST, MOST_REST = 32, 1024  # steps without a draft after a judgement against it: twice as many each time
CHECKED = 64  # every so many drafts one step has none, so that the cost of a row stays known


class StepCost:
    """Seconds of a step as base + each x rows, by least squares over the steps of lately."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so many seconds."""
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        old = (self._weight, self._rows, self._seconds, self._squares, self._products)
        kept = [KEPT * was + now for was, now in zip(old, new, strict=True)]
        self._weight, self._rows, self._seconds, self._squares, self._products = kept

    @property
    def each(self) -> float | None:
        """Seconds that one row more takes; None while all steps had as many."""
        spread = self._weight * self._squares - self._rows**2
        if spread < 1e-3 * max(1.0, self._rows**2):
            return None
        return max(0.0, (self._weight * self._products - self._rows * self._seconds) / spread)

    def of(self, rows: int) -> float:
        """Seconds of a step of so many."""
        each = self.each or 0.0
        base = (self._seconds - each * self._rows) / self._weight if self._weight else 0.0
        return max(0.0, base) + each * rows


@dataclass(eq=False)
class Record:
    """Of one request. accepted, rejected: tokens that were guessed for it, in all."""

    session: Any
    accepted: int = 0
    rejected: int = 0
    _steps: int = 0
    _trials: int = 0
    _rest: int = REST
    _left: int = 0
    _means: tuple[float, float, float] = (0.0, 0.0, 0.0)  # guessed, accepted, seconds of guessing

    def due(self, cost: StepCost) -> bool:
        """Whether this step of the row tries a draft."""
        self._steps += 1
        if self._left:
            self._left -= 1
            return False
        if cost.each is None:
            return self._steps % 2 == 0
        return self._steps % CHECKED != 0

    def note(self, guessed: int, accepted: int, draft_s: float, cost: StepCost, batch: int) -> None:
        """batch: requests in the step. A draft pays where what it gives would have cost more without."""
        self.accepted += accepted
        self.rejected += guessed - accepted
        new, share = (guessed, accepted, draft_s), NEWEST if self._trials else 1.0
        mixed = [(1 - share) * a + share * b for a, b in zip(self._means, new, strict=True)]
        self._means = (mixed[0], mixed[1], mixed[2])
        self._trials += 1
        if self._trials < TRIAL or cost.each is None:
            return
        if self._means[1] * cost.of(batch) / batch <= self._means[0] * cost.each + self._means[2]:
            self._left, self._rest, self._trials = self._rest, min(2 * self._rest, MOST_REST), 0
        elif self._trials >= 2 * TRIAL:
            self._rest = REST


class Drafting:
    """tokens: guessed for one request in one step, at most."""

    def __init__(
        self, drafter: Drafter, tokens: int, vocabulary: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter, self.tokens, self._vocabulary, self.clock = drafter, tokens, vocabulary, clock
        self.cost = StepCost()

    def begin(self) -> Record:
        """What is kept of a request that begins."""
        return Record(self._drafter.begin(self._vocabulary))

    def draft(self, record: Record, ids: Sequence[int], left: int, sampler: Sampler) -> tuple[Draft, float]:
        """A chain behind ids, and the seconds it took. left: tokens that may still be generated."""
        if left < 2 or not record.due(self.cost):
            return NOTHING, 0.0
        began, sampling = self.clock(), sampler.sampling
        # With a seed it is guessed, not drawn: the request's numbers are drawn as without a draft.
        drawn = sampling.temperature if sampling.temperature and sampling.seed is None else None
        most = min(self.tokens, left - 1)
        made = record.session.draft(ids, most, most, drawn)
        return made, self.clock() - began


def accept(draft: Draft, sampler: Sampler, logits: torch.Tensor) -> tuple[Path, list[Chosen]]:
    """The tokens that are right, and the one behind them. logits: [nodes, vocabulary] in their order."""
    said: list[Chosen] = []
    if not draft.shares:

        def choose(node: int, _: Sequence[int]) -> int:
            said.append(sampler.pick(logits[node]))
            return said[-1].token

        return match(draft, choose), said

    nodes: list[int] = []

    def target(node: int, before: Sequence[int]) -> torch.Tensor:
        if before:
            said.append(sampler.take(before[-1], logits[nodes[-1]]))
        nodes.append(node)
        return sampler.distribution(logits[node])

    path = reject(draft, target, sampler)
    said.append(sampler.take(path.tokens[-1], logits[nodes[-1]]))
    return path, said
