"""Repair: which reused tokens of an approximate chunk are computed anew in their true context.

Owns the strategies and the choice of tokens. Knows no model and no store. Invariant: live tokens are always
computed; at ratio 1.0 every token is.

    none        nothing but the sinks and the recency below
    selective   the first seam_tokens behind each seam: what stood before them is what changed most
    cacheblend  layers before check_layer in full for the first scan_tokens behind each seam; there K and V of
                these are compared with the fresh ones, and only as many as the fraction `ratio` of all, those
                that deviate most, are computed from there on
    attention   the fraction `attended_ratio` that the live question owes most to, in a pass of the live
                tokens over what is stored; what is not computed is moved by what those like it were off by
    auto        the first `front_tokens` of each chunk, and attention, as far as the model tells what it
                attends to, but nothing else is moved; then the KL of the answer is estimated
                (kvclient.hf.reuse.estimate): where that is more than `max_kl`, all is computed. Where
                nobody measured what the estimate is worth on this model, nothing is reused, nor where it is
                likely to end with all computed (not_worth_trying).
                Without max_kl: attention where an approximate chunk stands behind `behind_tokens` that it
                may not have been computed behind, else cacheblend

Exact ones stay untouched under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvclient.blocks.layout import MAX_LAYERS
from kvclient.blocks.reuse_plan import MOST_TOKENS, Segment
from kvclient.checks import check_bounds, check_real
from kvclient.errors import InvalidArgument

DEEP = 20  # layers
# What is promised behind other chunks, at least, for passes over what is stored to cost less than computing
# all: at 5e-3 25 of 30 such prompts of bench.quality's tuning half ended so, at 1.33 times that.
LEAST_BEHIND_OTHERS = 1.2e-2
# And in 16 bits, where rounding moves the question too: of 48 such prompts the least estimate was 7e-3, and
# half of them had more than this.
LEAST_IN_HALVES = 1.2e-2
MOST_CAUTION = 1e6
ATTENDED, ATTENDED_BEHIND_FRONT = 0.18, 0.05
METHODS = ("none", "selective", "cacheblend", "attention", "auto")


@dataclass(frozen=True)
class Repair:
    method: str = "auto"
    ratio: float = 0.05  # of the approximate tokens (cacheblend)
    # Of the approximate tokens (attention, auto). None: 0.18; under a promise 0.05, beside the front.
    attended_ratio: float | None = None
    max_kl: float | None = 5e-3  # nats, mean over answers: what is promised (auto). None: nothing is
    # Times the estimate (auto). None: what calibrate(max_kl=) found that this model needs; before, and for
    # less than the max_kl it was found for, nothing is promised: nothing is reused.
    caution: float | None = None
    # Before a chunk, inexact: worth asking the question (auto without max_kl). With max_kl, of chunks that it
    # was not computed behind: worth computing all (not_worth_trying).
    behind_tokens: int = 256
    # Where deviation is measured. Layer 1 is the first whose K and V know the context, 2 says much more.
    # None: 2 in a model of twenty layers and more.
    check_layer: int | None = None
    scan_tokens: int = 256  # behind each seam: those that may be chosen; at least twice as many as will be
    seam_tokens: int = 16  # behind each seam (selective)
    # Of each chunk, always fresh under a promise. What they are off by the answer misses most, and those of
    # the first chunk are exact but for rounding, as all before them is.
    front_tokens: int = 64
    sink_tokens: int = 4  # at the start of a prompt, and of a chunk that was computed at one: always fresh
    recency_tokens: int = 16  # before the live text that ends the prompt: always fresh
    min_tokens: int = 32  # shorter stretches are computed: a seam costs more than they give

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidArgument(f"repair: method={self.method!r}; it must be one of {', '.join(METHODS)}")
        check_real("ratio", self.ratio, 0, 1)
        if self.attended_ratio is not None:
            check_real("attended_ratio", self.attended_ratio, 0, 1)
        if self.max_kl is not None:
            check_real("max_kl", self.max_kl, 0, math.inf)
        if self.caution is not None:
            check_real("caution", self.caution, 1, MOST_CAUTION)
        if self.check_layer is not None:
            check_bounds("check_layer", self.check_layer, 0, MAX_LAYERS)
        counts = (
            "behind_tokens",
            "scan_tokens",
            "seam_tokens",
            "front_tokens",
            "sink_tokens",
            "recency_tokens",
        )
        for name in counts:
            check_bounds(name, getattr(self, name), 0, MOST_TOKENS)
        check_bounds("min_tokens", self.min_tokens, 1, MOST_TOKENS)

    @property
    def checks(self) -> bool:
        """Whether tokens are chosen by their deviation, where the question is not asked."""
        return self.method in ("cacheblend", "attention", "auto")

    @property
    def promises(self) -> bool:
        """Whether the error of every prompt is estimated and kept below max_kl."""
        return self.method == "auto" and self.max_kl is not None

    @property
    def attends(self) -> float:
        """attended_ratio, as it is."""
        if self.attended_ratio is not None:
            return self.attended_ratio
        return ATTENDED_BEHIND_FRONT if self.promises else ATTENDED

    @property
    def uncalibrated(self) -> bool:
        """Whether nobody knows what keeps the promise on this model: its estimate may be any factor off."""
        estimates = self.promises and 0 < self.promised < math.inf and self.attends < 1
        return estimates and self.caution is None

    @property
    def computes_all(self) -> bool:
        """Whether nothing of what is found is good enough, where the question would choose."""
        return self.attended_ratio == 1 or (self.promises and (self.max_kl == 0 or self.ratio == 1))

    @property
    def promised(self) -> float:
        """Nats."""
        assert self.max_kl is not None
        return self.max_kl

    def asks(self, segments: Sequence[Segment], exact: int) -> bool:
        """Whether tokens are chosen by the question's attention. exact: where the exact prefix ends."""
        if self.promises:
            return True
        if self.method == "auto":
            far = any(segment.start - exact >= self.behind_tokens for segment in segments)
            return far and self.attends > self.ratio
        return self.method == "attention"

    def not_worth_trying(self, segments: Sequence[Segment], halves: bool) -> str | None:
        """Why passes over what is stored are likely to cost more than to compute all: "reordered", where a
        chunk stands behind others that it was not computed behind (documents that change places, or were
        computed apart), or "rounding", in a model of 16 bits (halves); both where little may be off.
        """
        if not self.promises or self.computes_all:
            return None
        may_be_off = self.promised / (self.caution or 1.0)
        if halves and may_be_off < LEAST_IN_HALVES:
            return "rounding"
        if may_be_off >= LEAST_BEHIND_OTHERS:
            return None
        others = 0
        for number, segment in enumerate(segments):
            before = (other for other in segments[:number] if segment.position < other.position + len(other))
            others = max(others, sum(map(len, before)))
        return "reordered" if others >= self.behind_tokens else None

    def cut(self, layers: int) -> int:
        """The first layer that only chosen tokens go through."""
        if not self.checks:
            return 0
        return min(self.check_layer if self.check_layer is not None else 1 + (layers >= DEEP), layers - 1)

    def fresh(self, segments: Sequence[Segment], length: int) -> torch.Tensor:
        """Which columns are computed in every layer, whatever deviates: bool [length]."""
        fresh = torch.ones(length, dtype=torch.bool)
        for segment in segments:
            fresh[segment.start : segment.stop] = False
        for segment in segments:
            sink = max(self.sink_tokens - min(segment.start, segment.position), 0)
            seam = (
                self.seam_tokens if self.method == "selective" else self.front_tokens if self.promises else 0
            )
            fresh[segment.start : min(segment.stop, segment.start + max(sink, seam))] = True
        last = segments[-1]
        fresh[max(last.start, last.stop - self.recency_tokens) : last.stop] = True
        return fresh

    def scanned(self, segments: Sequence[Segment], fresh: torch.Tensor) -> torch.Tensor:
        """`fresh`, bool [columns], with the tokens added that may be chosen for their deviation."""
        out = fresh.clone()
        for segment in segments:
            count = max(self.scan_tokens, math.ceil(2 * self.ratio * len(segment)))
            out[segment.start : min(segment.stop, segment.start + count)] = True
        return out

    def worst(self, deviation: torch.Tensor, fresh: torch.Tensor, scanned: torch.Tensor) -> torch.Tensor:
        """`fresh` with those of the scanned tokens added that deviate most. All [columns]."""
        candidates = torch.nonzero(scanned & ~fresh).squeeze(1)
        return _most(deviation, candidates, self.ratio * int((~fresh).sum()), fresh)

    def attended(
        self, attention: torch.Tensor, fresh: torch.Tensor, may: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`fresh` with those of the other tokens added that are attended to most. All [columns]. may: those
        that can be computed; None: all.
        """
        count = self.attends * int((~fresh).sum())
        candidates = torch.nonzero(~fresh if may is None else ~fresh & may).squeeze(1)
        return _most(attention, candidates, count, fresh)


def _most(score: torch.Tensor, candidates: torch.Tensor, count: float, fresh: torch.Tensor) -> torch.Tensor:
    out = fresh.clone()
    best = score[candidates].topk(min(math.ceil(count), len(candidates))).indices
    out[candidates[best]] = True
    return out
