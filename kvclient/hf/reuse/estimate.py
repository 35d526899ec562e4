"""How far the answer to a repaired prompt will be from a full prefill's, told from the prompt itself.

Owns the estimate and its constants; never chooses tokens and never runs a pass. Invariant: it hangs on this
prompt's own distributions alone, and is infinite where there are none to compare.

Compared are the next-token distributions at the prompt's last rows, which both passes compute: over what is
stored, and over what was repaired. How far the second moves them is what the tokens that it computed meant to
the question; those it left out mean less. So the KL of the answer is taken for a constant times the mean KL
that it moved the question by. The constants were found on the tuning half of bench.quality's texts;
docs/reuse.md has what they gave on the other half.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.reuse.repair import Repair

MOST_ROWS, FEWEST_ROWS = 64, 8
# KL of the answer, for each nat that the pass of repair moved the question by: where the question chose, and
# where deviation did. Of 84 prompts one had more than 1e-2 where 5e-3 was estimated.
LEFT, LEFT_UNASKED = 2.5, 8.0
LEFT_HALVES = 5.0  # LEFT of a model in 16 bits, whose question rounding moves as well
LEFT_ROUNDED = 1e-3  # where all are computed, rounded to bf16 in products: 2e-5 was measured, 5e-4 at worst


class Gauge:
    """Of one prompt. rows: of its end, so many, are compared. caution: times what is estimated."""

    def __init__(self, rows: int, caution: float = 1.0) -> None:
        self.rows, self._caution = rows, caution
        self._before: torch.Tensor | None = None  # [rows, vocabulary], log-probabilities
        self._now: torch.Tensor | None = None
        self._moved, self._asked_left = math.inf, LEFT  # by the last pass, and what each nat of it is worth

    @classmethod
    def of(cls, repair: Repair, segments: Sequence[Segment], length: int) -> Gauge | None:
        """None where nothing is promised, or everything computed anyhow."""
        if not repair.promises or repair.computes_all:
            return None
        last = segments[-1]
        rows = min(MOST_ROWS, length - last.stop + min(repair.recency_tokens, len(last)))
        return cls(rows, repair.caution or 1.0)

    def passed(self) -> None:
        """A pass has ended, whose logits were seen; without any, or of few rows, nothing can be said."""
        now, self._now = self._now, None
        if now is not None:
            self._asked_left = LEFT if now.dtype is torch.float32 else LEFT_HALVES
            now = now.float().log_softmax(-1)
        if self._before is not None:
            known = self.rows >= FEWEST_ROWS and now is not None and now.shape == self._before.shape
            self._moved = _mean_kl(now, self._before) if known else math.inf
        self._before = now if now is not None else torch.empty(0)

    def left(self, asked: bool) -> float:
        """KL of the answer, in nats, that the pass of repair leaves. asked: whether the question chose
        what it computed."""
        return self._caution * (self._asked_left if asked else LEFT_UNASKED) * self._moved

    @contextlib.contextmanager
    def reading(self, model: torch.nn.Module) -> Iterator[Gauge]:
        """Within it, the model's passes give the logits of these rows to the gauge, and that of the last row
        to whoever called it, as asked for."""
        wanted: list[Any] = []
        ours = threading.get_ident()  # others may ask the same model meanwhile

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != ours:
                return None
            wanted[:] = [kwargs.get("logits_to_keep")]
            return (args, {**kwargs, "logits_to_keep": self.rows}) if wanted == [1] else None

        def behind(_module: Any, _args: Any, outputs: Any) -> Any:
            logits = getattr(outputs, "logits", None) if threading.get_ident() == ours else None
            if not isinstance(logits, torch.Tensor) or logits.shape[0] != 1 or logits.shape[1] < self.rows:
                return None
            self._now = logits[0, -self.rows :].detach()
            if wanted == [1]:
                outputs.logits = logits[:, -1:]
            return outputs

        hooks = [model.register_forward_pre_hook(before, with_kwargs=True)]
        hooks.append(model.register_forward_hook(behind))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()


def _mean_kl(now: torch.Tensor, before: torch.Tensor) -> float:
    return float((now.exp() * (now - before)).sum(-1).clamp_min(0).mean())
