"""How a request hears of every new token: a stopping criterion that stops nothing, put behind the user's own.

Owns the reading of generate()'s positional arguments. Never changes what generate() answers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache

from kvclient.hf.release import NAMES
from kvclient.hf.request.request import Request
from kvclient.hf.speculation import Speculation

POSITIONAL = ("inputs", "generation_config", "logits_processor", "stopping_criteria")


class TokenSeen(StoppingCriteria):
    """Stops nothing: transformers calls it with every new token."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._none: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        self._request.token(input_ids)
        if self._none is None or self._none.shape[0] != input_ids.shape[0]:
            self._none = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._none


def with_criterion(
    args: tuple[Any, ...], kwargs: dict[str, Any], criterion: StoppingCriteria
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of generate() with this stopping criterion behind the user's."""
    place = POSITIONAL.index("stopping_criteria")
    users = args[place] if len(args) > place else kwargs.get("stopping_criteria")
    criteria = StoppingCriteriaList([*(users or []), criterion])
    if len(args) > place:
        return (*args[:place], criteria, *args[place + 1 :]), kwargs
    return args, {**kwargs, "stopping_criteria": criteria}


def none_of_ours(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the store has no part in a call with these arguments; None: it has."""
    arguments = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    caches = [arguments[name] for name in NAMES if arguments.get(name) is not None]
    if any(type(cache) is not DynamicCache for cache in caches):
        return "user_cache"
    custom = arguments.get("custom_generate")
    if custom is not None and not isinstance(custom, Speculation):  # which calls _prefill, and cuts first
        return "custom_generate"
    config = arguments.get("generation_config") or model.generation_config
    implementation = arguments.get("cache_implementation", getattr(config, "cache_implementation", None))
    return "cache_implementation" if implementation not in (None, "dynamic") else None
