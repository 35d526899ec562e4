"""The passes over one prompt that is reused inside, until its error is estimated to be small enough.

Owns their order. Never chooses tokens (Repair does) and never touches a layer. Invariant: where `max_kl` is
promised, either what the last pass left is estimated to be at most that, or it computed every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.estimate import SECOND_SHARE


def run_passes(model: torch.nn.Module, blend: Blend, run: Callable[[], Any]) -> Any:
    """run: the model's own prefill. What the last pass gave; the blend says what is estimated of it."""
    if blend.gauge is None:
        if blend.asked is not None:
            blend.ask(run)
        return run()
    limit = blend.repair.promised
    with blend.gauge.reading(model) as gauge:
        blend.ask(run)
        gauge.passed()
        outputs = blend.repaired(run)
        gauge.passed()
        blend.estimated_kl = gauge.left(blend.scored)
        second = blend.scored and blend.can_compute(SECOND_SHARE) and gauge.left_by_second() <= limit
        if blend.estimated_kl > limit and second:
            blend.more(SECOND_SHARE)
            outputs, blend.estimated_kl = blend.repaired(run), gauge.left_by_second()
    if blend.estimated_kl > limit:
        blend.more(1.0)
        outputs, blend.estimated_kl = run(), 0.0
    blend.end()
    return outputs
