"""What differs between the releases of transformers that are served: the name a cache goes in and out under.

Owns those names, and nothing else here says them. Never looks at a version: it asks what the classes have.
Invariant: what passing() names is what the models of the installed release call it, so none of them warns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput

NAMES = ("past_key_values", "cache", "cache_params")  # that generate() may be given one under
# Until transformers 5.23, and since 5.24.
CACHE = next(
    field.name
    for field in dataclasses.fields(GenerateDecoderOnlyOutput)
    if field.name in ("past_key_values", "cache")
)


def passing(cache: Any) -> dict[str, Any]:
    """The argument of a model, an output or generate() that hands over a cache."""
    return {CACHE: cache}


def cache_of(outputs: Any) -> Any:
    """The cache that a model or generate() gives back; None without one."""
    return getattr(outputs, CACHE, None)
