"""One generate() call that goes on with the cache of an earlier one: nothing is looked up, what it grows by
is published.

Owns the question whether the cache is still what that call left. Never reads from the store. Invariant:
blocks are published only of tokens that the cache was left with, or that this call computes behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.call import Bypassed, read_prompt
from kvclient.hf.release import CACHE
from kvclient.hf.request.claiming import make_claims
from kvclient.hf.request.request import Request


class Continuation(Request):
    """In the place of a Request whose cache is not empty."""

    def prefill(
        self, model: torch.nn.Module, run: Callable[[], Any], input_ids: torch.Tensor, config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """The first pass, over what the cache does not hold; one changed since is Bypassed."""
        cache = model_kwargs[CACHE]
        columns = cache.get_seq_length()
        try:
            prompt = read_prompt(model, input_ids, {**model_kwargs, CACHE: None})
            held = self._returned.of(cache, self._served_model.identity)
            if held is None or not held.begins(prompt, columns):
                raise Bypassed("user_cache", f"{columns} tokens in it")
        except Bypassed as bypassed:
            return self._pass_by(bypassed, run)
        self._prompt = prompt
        self.report.prompt_tokens, self.report.read_bypassed = prompt.tokens, "user_cache"
        self._note_config(config)
        self._claims = make_claims(
            self._client, self._served_model, self._options, self._clock, self._same
        )
        self._layers = list(cache.layers)
        self._keep(cache)
        began = time.perf_counter()
        outputs = run()
        self.report.prefill_s = time.perf_counter() - began
        if self._generated:
            self._claims.go_on(prompt.groups, columns, max(layer.origin for layer in self._layers))
        return outputs
