"""Whether modules in training mode make the model compute something else than in evaluation mode.

Owns that judgement: what is known to be random or to learn is named without running anything; the rest has to
give the same logits, bit by bit, in both modes. Never leaves a module in another mode than it was in, and
never touches the random number generators. Invariant: a model that is served in training mode gives the KV of
evaluation mode.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.proof import evaluating, tokens

RANDOM = ("drop", "jitter", "noise")  # in the names of numbers that only training mode reads
ELSEWHERE = ("classifier", "summary")  # …of heads that no causal model has
TOKENS, RUNS = 8, 2  # of the passes in training mode
ADVICE = "; call model.eval()"
KEPT = 8  # combinations of modes whose verdict is kept


class Modes:
    """Of one model, as long as nothing but its modules' modes changes."""

    def __init__(self, model: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        self._model, self._modules = model, modules
        self._verdicts: dict[bytes, str | None] = {}

    def random(self) -> str | None:
        """Why the model computes something else than in evaluation mode; None: it does not."""
        modes = bytes(module.training for module in self._modules)
        if 1 not in modes:
            return None
        if modes not in self._verdicts:
            if len(self._verdicts) >= KEPT:
                self._verdicts.clear()
            self._verdicts[modes] = self._judge()
        return self._verdicts[modes]

    def _judge(self) -> str | None:
        active = [module for module in self._modules if module.training]
        for holder in (*active, *_configs(self._model)):
            if (what := _active(holder)) is not None:
                return f"{what} in training mode makes KV random{ADVICE}"
        if not self._same():
            return f"in training mode the model gives other logits than in evaluation mode{ADVICE}"
        return None

    @torch.no_grad()
    def _same(self) -> bool:
        model, ids = self._model, tokens(self._model, TOKENS, 1)[None]
        devices = [model.device] if model.device.type == "cuda" else []
        forget_pending()
        try:
            with torch.random.fork_rng(devices=devices):
                with evaluating(model):
                    wanted = model(input_ids=ids, use_cache=False).logits
                return all(
                    torch.equal(model(input_ids=ids, use_cache=False).logits, wanted) for _ in range(RUNS)
                )
        except Exception:  # whatever the model's own code raises in training mode
            return False


def _configs(model: torch.nn.Module) -> list[Any]:
    parts = model.config, model.config.get_text_config(decoder=True)
    return list({id(part): part for part in parts}.values())


def _active(holder: Any) -> str | None:
    """What of a module in training mode, or of a configuration, is random or learns, in words."""
    name = type(holder).__name__
    if isinstance(holder, _NormBase) and holder.track_running_stats:
        return name
    if getattr(holder, "gradient_checkpointing", False) is True:
        return f"gradient checkpointing of {name}, which fills no cache,"
    if isinstance(holder, _DropoutNd):
        return f"{name}(p={holder.p})" if holder.p > 0 else None
    for key, value in vars(holder).items():
        known = any(word in key for word in RANDOM) and not key.startswith(ELSEWHERE)
        if known and isinstance(value, Real) and not isinstance(value, bool) and value > 0:
            return f"{name}.{key}={value}"
    return None
