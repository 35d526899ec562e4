"""Two calls that are no generate() from the first token on: one goes on with the cache of an earlier call, in
the other a prompt is computed by its caller beside others, in a pass that is not generate()'s.

Owns the question whether a cache is still what that call left, and the two halves of a Request around the
caller's pass. Never computes, and never waits for unsealed blocks of others: they may be computed in the same
pass, or later in this thread. Invariant: blocks are published only of tokens that the cache was left with, or
that are computed behind them; finish() gives back whatever a pass that failed, or never was, had pinned and
claimed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvclient.hf.call import Bypassed, read_prompt
from kvclient.hf.request.claims import Claims
from kvclient.hf.request.request import Request


class Continuation(Request):
    """In the place of a Request whose cache is not empty."""

    def prefill(
        self, model: torch.nn.Module, run: Callable[[], Any], input_ids: torch.Tensor, config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """The first pass over what of input_ids [batch, columns] the cache does not hold; one changed since
        is Bypassed.
        """
        name = self._options.cache_name
        cache, columns = model_kwargs[name], 0
        try:
            prompt = read_prompt(model, input_ids, {**model_kwargs, name: None})
            held = self._returned.of(cache, self._served_model.identity)
            if held is None or not held.begins(prompt, columns := cache.get_seq_length()):
                raise Bypassed("user_cache", f"{columns or 'some'} tokens in it")
        except Bypassed as bypassed:
            return self._pass_by(bypassed, run)
        self._prompt = prompt
        self.report.prompt_tokens, self.report.read_bypassed = prompt.tokens, "user_cache"
        self._note_config(config)
        self._claims = Claims(self._client, self._served_model, self._options, self._clock, self._same)
        self._layers = list(cache.layers)
        if not self._beams:
            self._kept = weakref.ref(cache)
        began = time.perf_counter()
        outputs = run()
        self.report.prefill_s = time.perf_counter() - began
        if self._generated:
            self._claims.go_on(prompt.groups, columns, max(layer.origin for layer in self._layers))
        return outputs


class Opened(Request):
    """Made as a Request is. `cache` is for ragged.step(), which the rest of the prompt goes through, in one
    pass or in several: what is found, claimed and told is that of one. `held`: tokens in the cache; `upto`:
    of the prompt, those that it holds behind the next pass.
    """

    cache: Any = None
    held = upto = 0
    _seconds = 0.0

    def begin(self, model: torch.nn.Module, input_ids: torch.Tensor, config: Any) -> bool:
        """input_ids: [1, tokens]. config: a GenerationConfig. False: only generate() can serve this prompt,
        as it waits for who computes it now, too; finish() gives back what was claimed. Raises the store's
        errors where attach() was told to.
        """
        served = self._served_model
        try:
            self._prompt = read_prompt(model, input_ids, {})
            self._prompt.check(config, served.states is not None, self._padded, served.most_tokens)
        except Bypassed:
            return False
        inside = served.non_prefix is not None and served.inside(self.report) is not None
        if served.grouped or inside or self._options.in_place is None:
            return False  # states, windows and repairs cut a prompt's pass
        self.report.prompt_tokens = self._prompt.tokens
        self._note_config(config)
        self._generated = False  # its caller publishes the answer
        self.cache = self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._begin(model, self.cache, config, self._read, False, input_ids.device)
        self.held, self.upto = self._hit, self._prompt.length
        assert self._claims is not None
        return self._steps is None and self.report.dense is None and not self._claims.awaited

    @property
    def rest(self) -> list[int]:
        """The tokens of the next pass: one at least."""
        assert self._prompt is not None
        return list(self._prompt.groups[0].tokens[self.held : self.upto].tolist())

    def computed(self, seconds: float) -> None:
        """The cache holds the prompt up to `upto`, and the pass took so long. Blocks that are full are sealed
        now, so that others need not wait for the end.
        """
        assert self._prompt is not None and self._claims is not None
        self.held, self._seconds = self.upto, self._seconds + seconds
        if self.held == self._prompt.length:
            return self._prefilled(self._seconds)
        began = time.perf_counter()
        if not self._tolerance.tried(self._claims.seal, False):
            self._stop_writing()
        self._seconds += time.perf_counter() - began
        return None

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.cache = None  # its caller's alone: what it pins goes with it, not with the next collection
