"""Choosing a token from logits, for one request: nothing of it is shared with the requests beside it.

Owns the request's random numbers and counts. Never computes logits. Invariant: the same seed, settings and
logits choose the same tokens, whatever runs beside them; temperature 0 takes the most likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

COLD, COLDEST = 1e-6, 1e-30  # temperatures: in single precision


@dataclass(frozen=True)
class Sampling:
    """temperature 0: greedy. top_k 0: all. logprobs: how many alternatives are told; None: nothing is. among:
    the tokens whose logprobs are told instead, in this order. continues: the answer goes on with the prompt's
    text, so the prompt's tokens are present in it; how often a token came is counted in the answer alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    among: tuple[int, ...] = ()
    continues: bool = False


@dataclass(frozen=True)
class Chosen:
    """logprob, top: natural logarithms, of the model's own distribution."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """matcher: llguidance's, which says what may come next; None: anything may."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], matcher: Any = None) -> None:
        self.sampling, self.matcher = sampling, matcher
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % (1 << 63))
        present = prompt if sampling.continues and sampling.presence_penalty else ()
        self._counts = Counter(dict.fromkeys(present, 0))
        self._seen = set(prompt) if sampling.repetition_penalty != 1 else set()

    def pick(self, logits: torch.Tensor) -> Chosen:
        """Chooses and takes. logits: [vocabulary], of any floating point type."""
        if self.sampling.temperature == 0:
            return self.take(int(self._scores(logits).argmax()), logits)
        return self.take(self.draw(self.distribution(logits)), logits)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The probabilities [vocabulary] that the next token is drawn from; temperature above 0."""
        return self._shares(self._scores(logits))

    def take(self, token: int, logits: torch.Tensor) -> Chosen:
        """It is the next, behind these logits [vocabulary]."""
        wanted = self.sampling
        self._counts[token] += 1
        self._seen.add(token) if wanted.repetition_penalty != 1 else None
        if self.matcher is not None:
            self.matcher.take(token)
        if wanted.among:
            logprobs = logits.float().log_softmax(-1)
            told = zip(wanted.among, logprobs[list(wanted.among)].tolist(), strict=True)
            return Chosen(token, float(logprobs[token]), tuple(told))
        if wanted.logprobs is None:
            return Chosen(token)
        return chosen(logits.float(), token, wanted.logprobs)

    # Where randomness comes from, for kvclient.hf.speculation too.

    def happens(self, probability: float) -> bool:
        """Whether something of that probability does, by the request's own random numbers."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator)) < probability

    def draw(self, p: torch.Tensor) -> int:
        """A token by its probabilities p [vocabulary]."""
        return int(torch.multinomial(p, 1, generator=self._generator))

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        return self._allowed(self._penalised(logits.float()))

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.sampling
        if not (wanted.logit_bias or wanted.presence_penalty or wanted.frequency_penalty or self._seen):
            return scores
        scores = scores.clone()
        if self._seen:
            ids = torch.tensor(sorted(self._seen))
            held = scores[ids]
            scores[ids] = torch.where(
                held > 0, held / wanted.repetition_penalty, held * wanted.repetition_penalty
            )
        if self._counts and (wanted.presence_penalty or wanted.frequency_penalty):
            ids, counts = torch.tensor(list(self._counts)), torch.tensor(list(self._counts.values()))
            scores[ids] -= wanted.presence_penalty + wanted.frequency_penalty * counts
        if wanted.logit_bias:
            scores[torch.tensor(list(wanted.logit_bias))] += torch.tensor(list(wanted.logit_bias.values()))
        return scores

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.matcher is None else self.matcher.mask(scores)

    def _shares(self, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.sampling
        if wanted.temperature < COLD:  # the quotients would be beyond what a number holds
            scores = (scores - scores.max()) / max(wanted.temperature, COLDEST)
        else:
            scores = scores / wanted.temperature
        if wanted.top_k and wanted.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(wanted.top_k).values[-1], float("-inf"))
        probabilities = scores.softmax(-1)
        if wanted.min_p:
            probabilities = probabilities.masked_fill(probabilities < wanted.min_p * probabilities.max(), 0)
        if wanted.top_p < 1:
            ordered, places = probabilities.sort(descending=True)
            gone = ordered.cumsum(-1) - ordered >= wanted.top_p
            ordered[gone.index_fill(0, torch.tensor(0), False)] = 0  # the likeliest stays in any case
            probabilities = torch.zeros_like(probabilities).scatter_(0, places, ordered)
        return probabilities


def chosen(logits: torch.Tensor, token: int, alternatives: int) -> Chosen:
    """A token as the model's own distribution sees it. logits: [vocabulary] in fp32."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(alternatives) if alternatives else (torch.empty(0), torch.empty(0))
    top = tuple(zip(ids.int().tolist(), values.tolist(), strict=True))
    return Chosen(token, float(logprobs[token]), top)
