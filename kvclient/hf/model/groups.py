"""Which layers of a model need which tokens: groups of layers that are stored together.

Owns the description, and the proof that a layer sees no more than its window. Never stores anything.
Invariant: a layer is in one group at most, and what its group says it sees is all that its attention looks
at, tried with a context one window long and a few tokens more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.model.own_caches import empty_cache
from kvclient.hf.release import passing

BEHIND = 7  # tokens behind a window in the proof
LOUD = 30.0  # V of the tokens that must not be seen


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose K and V are of one shape and that need the same tokens. `window`: how many a token of
    theirs sees, itself included, or how many a chunk has; 0: all.
    """

    layers: tuple[int, ...]  # of the model, or what is kept beside them (kvclient.hf.cache.indexed)
    heads: int
    head_dim: int  # of K and of V; where they are of different widths, of both together
    key_dim: int = 0  # of K, where V is of another width; 0: it is not
    window: int = 0
    chunked: bool = False
    stride: int = 1  # a hit ends behind a multiple of so many tokens only

    def first_seen(self, token: int) -> int:
        """The first token that this one sees."""
        if not self.window:
            return 0
        return token // self.window * self.window if self.chunked else max(0, token - self.window + 1)


def windows_of(config: Any) -> list[tuple[int, bool]]:
    """Per layer its window, 0 for none, and whether it is one of chunks, as transformers' cache has it."""
    made = DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or [""] * len(made)
    chunks = bool(getattr(config, "attention_chunk_size", None))
    chunks &= not getattr(config, "sliding_window", None)
    out = []
    for layer, kind in zip(made, kinds, strict=True):
        window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0
        out.append((window, bool(window) and (kind == "chunked_attention" or (not kind and chunks))))
    return out


class _Past:
    """Put before the class of a cache's layer: it has a past that is made when it is asked for. K is 0, V is
    LOUD up to a token and 0 behind; the keys of an indexer are 0."""

    _layer_type = None  # else transformers takes a subclass for its own layer from then on

    def begin(self, group: LayerGroup, length: int, loud: int, like: torch.Tensor) -> None:
        value_dim = group.head_dim - group.key_dim
        self._widths = (group.key_dim or value_dim, value_dim)
        self._heads, self._length, self._loud, self._like = group.heads, length, loud, like
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        keys, values = (self._like.new_zeros((1, self._heads, self._length, width)) for width in self._widths)
        values[:, :, : self._loud] = LOUD
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._like.new_zeros((1, self._length, keys.shape[-1])), keys], 1)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, queries: int | torch.Tensor) -> tuple[int, int]:
        """queries: how many; transformers 5.0 gives their positions."""
        return self._length + (queries if isinstance(queries, int) else len(queries)), 0


@torch.no_grad()
def sees_only_windows(model: torch.nn.Module, groups: Sequence[LayerGroup], dtype: torch.dtype) -> bool:
    """Whether one more token behind a long past is computed alike whatever stands outside the windows. False
    too where that cannot be tried: a model that takes more than tokens, or whose positions end before."""
    layers = {index: group for group in groups for index in group.layers}
    past = max(group.window for group in groups) + BEHIND
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(longest, int) and past >= longest:
        return False
    ids = torch.ones((1, 1), dtype=torch.int64, device=model.device)
    mask = torch.ones((1, past + 1), dtype=torch.int64, device=model.device)
    like = torch.empty(0, dtype=dtype, device=model.device)
    answers = []
    for loud in (False, True):
        cache = empty_cache(model)
        cache.reset()  # of states that lie in the model
        for index, group in layers.items():
            layer = cache.layers[index]
            made: Any = object.__new__(type("_PastLayer", (_Past, type(layer)), {}))
            vars(made).update(vars(layer))
            made.begin(group, past, loud * group.first_seen(past), like)
            cache.layers[index] = made
        forget_pending()
        try:
            with evaluating(model):
                out = model(input_ids=ids, attention_mask=mask, use_cache=True, **passing(cache))
            answers.append(out.logits[0, -1])
        except Exception:  # whatever the model's own code raises
            return False
    return bool(torch.equal(*answers)) and bool(torch.isfinite(answers[0]).all())
