"""What layers keep of tokens beside K and V: keys of an indexer, or entries that tokens are compressed to.

Owns how these are numbered and shown, each as a layer with K and maybe V, for kvclient.hf.model.structure.
Never stores anything. Invariant: the numbers are those under which kvclient.hf.cache has them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.cache.compressed import NAMES
from kvclient.hf.cache.indexed import number_of
from kvclient.hf.model.own_caches import empty_cache
from kvclient.hf.release import compresses, passing


def indexers_in(cache: Any) -> dict[int, DynamicLayer]:
    """The keys of indexers, as layers of one head without V, by their numbers."""
    return {
        number_of(index, len(cache.layers)): _shown(keys[:, None], keys[:, None, :, :0])
        for index, layer in enumerate(cache.layers)
        if (keys := getattr(layer, "indexer_keys", None)) is not None
    }


def positions_in(cache: Any) -> tuple[int, int]:
    """How many kinds of positions are kept beside the keys of an indexer, and in which layer; 0: none are."""
    for index, layer in enumerate(cache.layers):
        if (positions := getattr(layer, "indexer_position_ids", None)) is not None:
            return len(positions), index
    return 0, 0


def compressed_in(model: torch.nn.Module) -> tuple[dict[int, int], dict[int, DynamicLayer], dict[int, Any]]:
    """Of layers that compress: how many tokens to an entry; what they keep, by number and as long as fills an
    entry of each, and which windows of it are needed. Raises InvalidArgument where entries cannot be spread
    over their tokens.
    """
    cache = empty_cache(model)
    rates = {index: layer.compress_rate for index, layer in enumerate(cache.layers) if compresses(layer)}
    if not rates:
        return {}, {}, {}
    stride = math.lcm(*rates.values())
    ids = torch.ones((1, stride), dtype=torch.int64, device=model.device)
    forget_pending()
    with torch.no_grad(), evaluating(model):
        model(input_ids=ids, use_cache=True, **passing(cache, model))
    kept: dict[int, DynamicLayer] = {}
    windows = {}
    for index, rate in rates.items():
        layer: Any = cache.layers[index]
        for place, name in enumerate(NAMES):
            number = number_of(index, len(cache.layers), 2 * place)
            if (entries := layer.compressed_kv.get(name)) is not None:
                if entries.shape[-1] % rate:
                    what = f"entries of {entries.shape[-1]} elements for {rate} tokens"
                    raise InvalidArgument(f"{type(model).__name__} has {what}")
                spread = entries.reshape(1, 1, stride, -1)
                kept[number] = _shown(spread, spread[..., :0])
            if (last := getattr(layer, "overlap_kv", {}).get(name)) is not None:
                number = number_of(index, len(cache.layers), 2 * place + 1)
                kept[number] = _shown(last[:, None], layer.overlap_gate[name][:, None])
                windows[number] = (rate + 1, False)  # of the next entry's first token: the entry before
    return rates, kept, windows


def _shown(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    return layer
