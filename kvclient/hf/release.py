"""What differs between the releases of transformers that are served: the name a cache goes in and out under.

Owns those names, and which layers of a cache there are. Never looks at a version: it asks what the classes
have. Invariant: what passing() names is what the models of the installed release call it, so none of them
warns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import cache_utils
from transformers.generation import GenerateDecoderOnlyOutput

NAMES = ("past_key_values", "cache", "cache_params")  # that generate() may be given one under
# Until transformers 5.23, and since 5.24.
CACHE = next(
    field.name
    for field in dataclasses.fields(GenerateDecoderOnlyOutput)
    if field.name in ("past_key_values", "cache")
)

# Layers with a state, alone or beside K and V. Older releases keep states in caches of each model's own.
STATES: tuple[type, ...] = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name) and hasattr(cache_utils, "LinearAttentionCacheLayerMixin")
)
BOTH: Any = STATES[1] if len(STATES) > 1 else object  # a state beside K and V
# Layers with the keys of an indexer beside K and V.
INDEXED: tuple[type, ...] = tuple(
    getattr(cache_utils, name) for name in ("DynamicIndexedLayer",) if hasattr(cache_utils, name)
)
# Layers that keep nothing: they read another's K and V, or have no attention.
DUMMIES: tuple[type, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)


def compresses(layer: Any) -> bool:
    """Whether a layer of a cache keeps entries that tokens are compressed to (DeepSeek V4)."""
    return hasattr(layer, "store_compression_weights")


def name_of(model: Any = None) -> str:
    """The argument that this model, or without one most models, takes its cache in."""
    return "cache_params" if CACHE == "past_key_values" and "mamba" in type(model).__name__.lower() else CACHE


def passing(cache: Any, model: Any = None) -> dict[str, Any]:
    """The argument of a model, an output or generate() that hands over a cache."""
    return {name_of(model): cache}


def cache_of(outputs: Any, model: Any = None) -> Any:
    """The cache that a model or generate() gives back; None without one."""
    return getattr(outputs, name_of(model), None)
