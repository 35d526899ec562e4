"""How an Engine's arguments say in generate()'s words which token is chosen.

Owns their bounds. Never chooses a token. Invariant: temperature 0 is greedy, whatever else is said.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from kvclient.errors import InvalidArgument


def sampling_of(
    temperature: float, top_p: float, top_k: int, repetition_penalty: float, prefill_chunk_size: int | None
) -> dict[str, Any]:
    """The arguments of generate(); a chunk has so many tokens. Raises InvalidArgument."""
    whole = isinstance(top_k, Integral) and top_k >= 0
    if not (temperature >= 0 and 0 < top_p <= 1 and whole and repetition_penalty > 0):
        values = f"temperature={temperature}, top_p={top_p}, top_k={top_k}"
        values += f", repetition_penalty={repetition_penalty}"
        raise InvalidArgument(f"{values}; allowed are ≥ 0, above 0 to 1, whole and ≥ 0, above 0")
    if prefill_chunk_size is not None and prefill_chunk_size < 1:
        raise InvalidArgument(f"prefill_chunk_size={prefill_chunk_size}; it must be 1 at least, or None")
    out: dict[str, Any] = {"do_sample": temperature > 0, "num_beams": 1}
    out["repetition_penalty"] = repetition_penalty
    if temperature > 0:
        out |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if prefill_chunk_size is not None:
        out["prefill_chunk_size"] = prefill_chunk_size
    return out
