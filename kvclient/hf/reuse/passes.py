"""The passes over one prompt that is reused inside, until its error is estimated to be small enough.

Owns their order. Never chooses tokens (Repair does) and never touches a layer. Invariant: where `max_kl` is
promised, either what the last pass left is estimated to be at most that, or it computed every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.estimate import LEFT_ROUNDED
from kvclient.hf.reuse.products import few_logits


def run_passes(model: torch.nn.Module, blend: Blend, run: Callable[[], Any]) -> Any:
    """run: the model's own prefill. What the last pass gave; the blend says what is estimated of it."""
    if blend.rounded:
        with blend.few_rows(blend.rounds):
            return run()
    if blend.gauge is None:
        if blend.asked is not None:
            blend.ask(run)
        return run()
    limit = blend.repair.promised
    rounds = limit >= LEFT_ROUNDED and blend.rounds  # asked before layers have hooks
    with blend.gauge.reading(model) as gauge, blend.few_rows(rounds), few_logits(model):
        blend.ask(run)
        gauge.passed()
        outputs = run()
        gauge.passed()
        blend.estimated_kl = gauge.left(blend.scored)
        if blend.estimated_kl > limit and blend.scored and rounds:
            blend.more(rounded=True)
            outputs, blend.estimated_kl = run(), LEFT_ROUNDED
    if blend.estimated_kl > limit:
        blend.more(rounded=False)
        outputs, blend.estimated_kl = run(), 0.0
    blend.end()
    return outputs
