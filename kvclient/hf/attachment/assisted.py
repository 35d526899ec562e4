"""Assisted decoding and prompt look-up: the prompt is computed ahead, by way of the store, and their loop
begins with its last token.

Owns the pass ahead and the one cut of the inputs that follows it: that loop knows no prefill, and gives its
first pass the whole prompt with the first candidates. Never changes what is chosen. Invariant: the hook that
cuts is gone when its call has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.call import Bypassed, read_prompt
from kvclient.hf.release import CACHE

LONG = ("input_ids", "position_ids", "cache_position")  # inputs with a column per token
FEWEST = 2  # tokens of a prompt: one is computed ahead, one is left


def compute_ahead(
    request: Any, prefill: Callable[..., Any], begins: Callable[[], None], model: torch.nn.Module,
    input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Fills the cache of a loop that is about to begin with all but the last token of input_ids [1, tokens].
    prefill: the model's own, behind which nobody hears of it; begins: called as it begins.
    """
    rows, length = input_ids.shape
    if rows != 1 or length < FEWEST or config.output_attentions or config.output_hidden_states:
        return
    try:
        tokens = read_prompt(model, input_ids, model_kwargs).tokens
    except Bypassed as bypassed:
        request.report.bypassed, request.report.bypass_detail = bypassed.reason, bypassed.detail or None
        return
    if tokens < FEWEST:  # behind padding
        return
    ids, mask = input_ids[:, :-1], model_kwargs.get("attention_mask")
    ahead = {**model_kwargs, "attention_mask": torch.ones_like(ids) if mask is None else mask[:, :-1]}
    for name in LONG[1:]:
        if ahead.get(name) is not None:
            ahead[name] = ahead[name][..., :-1]

    def run(piece: torch.Tensor = ids) -> Any:
        begins()
        return prefill(piece, config, ahead)

    request.prefill(model, run, ids, config, ahead)
    request.report.prompt_tokens += 1
    request.ends_with(_cut_once(model, model_kwargs[CACHE], length - 1))


def _cut_once(model: torch.nn.Module, cache: Any, done: int) -> Any:
    """The handle of a hook that takes from this thread's next pass over the cache what is done."""
    thread = threading.get_ident()

    def cut(_module: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None or threading.get_ident() != thread or kwargs.get(CACHE) is not cache:
            return None
        handle.remove()
        short = {name: kwargs[name][..., done:] for name in LONG if kwargs.get(name) is not None}
        return args, {**kwargs, **short}

    handle = model.register_forward_pre_hook(cut, with_kwargs=True)
    return handle.remove
