"""KVBoost 0.9.0 on the cases of bench.reuse_inside, with the same model object and the same token ids.

Owns one engine of theirs per case, as it comes (its defaults: "selective", which it leaves for its CacheBlend
where chunks match by content only). Measures what its user feels: CPU time from the call of generate() to the
first on_token(), and KL of what follows on exactly the KV that it has put together. Stores what it is asked
to measure only where the case says so.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from bench.install import VENVS, kvboost_tree

CACHE_BYTES = 4 << 30


class Boosted:
    """Token ids stand in for text, so that lengths are exact."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        path = os.environ.get("KVBENCH_KVBOOST") or (kvboost_tree() and str(VENVS / "kvboost"))
        sys.path.append(path)
        from kvboost import KVBoost

        logging.getLogger("kvboost").setLevel(logging.ERROR)
        self._make = lambda **options: KVBoost(model, tokenizer, device="cpu", **options)
        self._model = model
        self.fresh()

    def fresh(self, max_cache_bytes: int = CACHE_BYTES, **options: Any) -> None:
        """Forgets all."""
        self._engine = self._make(max_cache_bytes=max_cache_bytes, **options)
        self._engine._encode = list  # of the "text" that is its tokens
        self._kept: list[Any] = []
        normal = self._engine._normalize_past_kv

        def kept(past: Any) -> Any:
            self._kept.append(normal(past))
            return self._kept[-1]

        self._engine._normalize_past_kv = kept

    def store(self, ids: list[int]) -> None:
        self._engine.warm(ids)

    def first(self, ids: list[int], keep: bool = False) -> tuple[Any, Any, float, int]:
        """(logits of the first new token, the KV it was computed on, CPU seconds, tokens reused). keep: what
        is asked is stored, as its generate() does by itself.
        """
        import torch
        from transformers import DynamicCache

        self._kept.clear()
        at: list[tuple[float, Any]] = []
        began = time.process_time()
        result = self._engine.generate(
            ids, max_new_tokens=1, cacheable_prefix_len=None if keep else 0,
            on_token=lambda _: at.append(time.process_time()),
        )  # fmt: skip
        cache = self._kept[-1]
        if not hasattr(cache, "get_seq_length"):
            cache = DynamicCache(cache)
        return torch.from_numpy(result.first_token_logits), cache, at[0] - began, result.cached_tokens
