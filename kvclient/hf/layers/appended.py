"""Keys and values of a stock cache with room behind them, so that a step's are written where they will lie.

Owns that memory, and which tensors of the cache show it. Never writes where a tensor that was handed out may
show it: what a cache holds that is not what was put there last is copied first. Invariant: a cache says of
itself what it would say had it put its tensors together.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_LEAST = 64  # tokens of room, at least
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
# What a layer and a cache do with what comes; of another release, whose do more, nothing is taken.
_JOINS = ("is_initialized", "lazy_initialization", "torch", "cat", "keys", "values")
_KEEPS = DynamicCache.update, DynamicLayer.update


def known() -> bool:
    """Whether the stock cache puts its tensors together, and does nothing else, in this release."""
    return DynamicLayer.update.__code__.co_names == _JOINS and DynamicCache.update is Cache.update


def stock(cache: Any) -> bool:
    """Whether it is the stock cache, in memory, as it was found."""
    if type(cache) is not DynamicCache or cache.offloading or "update" in cache.__dict__:
        return False
    return (DynamicCache.update, DynamicLayer.update) == _KEEPS


def takes(cache: Any, layers: int, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """How many tokens such a cache holds, of one row, alike in all layers, each of shape (heads, head_dim);
    0: none, or it is another.
    """
    if len(cache.layers) != layers or type(cache.layers[0]) is not DynamicLayer:
        return 0
    if not cache.layers[0].is_initialized:
        return 0
    tokens = cache.layers[0].keys.shape[2] if cache.layers[0].keys.ndim == 4 else 0
    wanted = (1, shape[0], tokens, shape[1])
    for layer in cache.layers:
        if type(layer) is not DynamicLayer or not layer.is_initialized or "update" in layer.__dict__:
            return 0
        for side in (layer.keys, layer.values):
            if type(side) is not torch.Tensor or side.shape != wanted or side.dtype is not dtype:
                return 0
            if not side.is_cpu or side.is_neg() or side.requires_grad:
                return 0
    return int(tokens)


def beside(cache: Any) -> Any:
    """A cache with the tensors that this one has now."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


class Appended:
    """What a cache's layers hold, [2, heads, capacity, head_dim] of each, K and then V."""

    def __init__(self, cache: Any, tokens: int) -> None:
        """tokens: that it holds; takes() said so."""
        heads, head_dim = cache.layers[0].keys.shape[1], cache.layers[0].keys.shape[3]
        self.tokens, self.capacity = tokens, tokens + max(_LEAST, tokens // 8)
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.places: list[tuple[int, int]] = []  # of K and V, by layer
        self._bits: list[np.ndarray] = []
        held = self._shown, self._sides, self._bits  # not this, which would keep itself until a collection
        self._cache = weakref.ref(cache, lambda _: [each.clear() for each in held])  # gone with the cache
        for layer in cache.layers:
            with torch.inference_mode(False):  # who comes first may be in it, and later ones not
                shape = 2, heads, self.capacity, head_dim
                memory = torch.empty(shape, dtype=layer.keys.dtype, device="cpu")
            memory[0, :, :tokens], memory[1, :, :tokens] = layer.keys[0], layer.values[0]
            sides = memory[:1], memory[1:]
            layer.keys, layer.values = shown = sides[0][:, :, :tokens], sides[1][:, :, :tokens]
            self._shown.append(shown)
            self._sides.append(sides)
            self.places.append((sides[0].data_ptr(), sides[1].data_ptr()))
            self._bits.append(memory.view(_BITS[memory.dtype]).numpy())

    def stands(self, cache: Any) -> bool:
        """Whether the cache holds what was put there last, which shows the same numbers, and there is room
        for a token.
        """
        if self._cache() is not cache or self.tokens == self.capacity:
            return False
        if len(cache.layers) != len(self._shown):
            return False
        layers = zip(cache.layers, self._shown, strict=True)
        whole = self._sides[0][0]
        shape, stride = (1, whole.shape[1], self.tokens, whole.shape[3]), whole.stride()
        for number, (layer, shown) in enumerate(layers):
            if "update" in layer.__dict__:
                return False
            for side, was, place in zip((layer.keys, layer.values), shown, self.places[number], strict=True):
                if side is not was or side.data_ptr() != place or side.dtype is not whole.dtype:
                    return False
                if side.shape != shape or side.stride() != stride or side.is_neg():
                    return False
        return True

    def write(self, layer: int, sides: np.ndarray) -> None:
        """The next token's K and V, [2, heads, head_dim] as bits. Nobody sees them before show()."""
        self._bits[layer][:, :, self.tokens] = sides

    def show(self, cache: Any) -> None:
        """The cache has the token that was written to all its layers."""
        self.tokens += 1
        for number, (layer, (keys, values)) in enumerate(zip(cache.layers, self._sides, strict=True)):
            layer.keys, layer.values = keys.narrow(2, 0, self.tokens), values.narrow(2, 0, self.tokens)
            self._shown[number] = layer.keys, layer.values
