"""Caches that a call filled and gave back to its caller: what is known of the tokens they hold.

Owns that knowledge, for as long as the caller keeps the cache. Never holds one alive. Invariant: it is
answered only while the cache's memory is as the call left it, or shorter: whoever wrote to it since, by a
pass of their own or by hand, is not vouched for.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.call import Prompt

VOUCHED = (StoreLayer, InPlaceLayer)


@dataclass(frozen=True)
class Held:
    """What a cache holds: exact KV of these tokens, by the model of this identity."""

    identity: bytes
    tokens: list[np.ndarray]  # per row, without its padding
    pads: list[int]
    marks: list[tuple[Any, ...]]  # of the layers' memory

    def begins(self, prompt: Prompt, columns: int) -> bool:
        """Whether the prompt's rows begin with what the first columns hold, and go on."""
        rows = {row: group for group in prompt.groups for row in group.rows}
        if len(rows) != len(self.tokens) or columns >= prompt.length:
            return False
        known = enumerate(zip(self.tokens, self.pads, strict=True))
        return all(
            (count := columns - pad) >= 0
            and rows[row].pad == pad
            and np.array_equal(rows[row].tokens[:count], tokens[:count])
            for row, (tokens, pad) in known
        )


class Returned:
    """Of one attachment. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()

    def keep(self, cache: Any, identity: bytes, input_ids: torch.Tensor, pads: Sequence[int]) -> None:
        """The call that filled the cache ended with input_ids [batch, columns]; the last column has no KV
        yet.
        """
        columns = input_ids.shape[1] - 1
        marks = _marks(cache)
        if marks is None or {layer.get_seq_length() for layer in cache.layers} != {columns}:
            return
        ids = input_ids[:, :columns].to("cpu", torch.int32).numpy()
        tokens = [np.ascontiguousarray(row[pad:]) for row, pad in zip(ids, pads, strict=True)]
        for layer in cache.layers:
            if isinstance(layer, InPlaceLayer):
                layer.cut_to = math.inf
        with self._lock:
            self._held[cache] = Held(identity, tokens, list(pads), marks)

    def of(self, cache: Any, identity: bytes) -> Held | None:
        """What the cache holds, if it is still that, and of this model."""
        with self._lock:
            held = self._held.get(cache)
        same = held is not None and held.identity == identity and held.marks == _marks(cache)
        return held if same and not _written_again(cache) else None


def _written_again(cache: Any) -> bool:
    """Whether tokens were cut off and others written in their place, which a layer in place does past torch.
    """
    return any(layer.get_seq_length() > getattr(layer, "cut_to", math.inf) for layer in cache.layers)


def _marks(cache: Any) -> list[tuple[Any, ...]] | None:
    """What changes when a layer's memory is written or exchanged; None: nobody could tell."""
    marks = []
    for layer in cache.layers:
        storage = layer._storage if type(layer) in VOUCHED else None
        if storage is None or storage.is_inference():
            return None
        marks.append((id(layer), storage.data_ptr(), storage._version, layer.origin))
    return marks
