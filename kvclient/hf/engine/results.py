"""What an Engine's calls answer with.

Owns the fields. Never computes anything. Invariant: a field that KVBoost has under another name says the one
that it has here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvclient.hf.call import Report
from kvclient.hf.engine.renamed import RESULTS, WARMED, missing
from kvclient.hf.speculation import SpeculationReport


@dataclass(frozen=True)
class Warmed:
    """What warm() left in the store."""

    tokens: int
    blocks: int  # published by this call
    block_tokens: int
    aligned: bool  # whether the text fills whole blocks
    tail_tokens: int  # behind the last whole block
    note: str  # what of the text will not be found again as it stands; empty if all of it will
    parts: int  # that it was computed in; aligned and tail_tokens are the last one's

    def __getattr__(self, name: str) -> Any:
        raise missing("Warmed", WARMED, name)


@dataclass(frozen=True)
class Result:
    """One answer. Times in seconds; ttft_s from the call of generate() to the first token, tokenising
    included.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    ttft_s: float
    total_s: float
    tokens_per_s: float  # of those behind the first
    report: Report  # reuse per kind and tier; in a batch tokens are this row's, the rest the call's
    first_logits: torch.Tensor  # of the first new token
    finish: str  # "stop": the end of the text or a stop string; "length"; "sentence": soft_stop
    mode: str  # that it was asked for in
    speculation: SpeculationReport | None = None  # where it was asked for

    def __getattr__(self, name: str) -> Any:
        raise missing("Result", RESULTS, name)

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt's tokens that were not computed, or only in part."""
        found = self.report.reused_tokens + self.report.approximate_tokens
        return found / max(1, self.report.prompt_tokens)
