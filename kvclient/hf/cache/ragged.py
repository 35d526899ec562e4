"""One token of several requests through a model in one forward pass, each over its own cache.

Owns nothing: a step borrows the caches of the requests it computes, whatever their lengths, and leaves in
each one more token. Never pads. Invariant: a row attends to its own request's keys and to no other's, so its
logits are what they would be alone, up to the order in which a matrix product sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvclient.hf.attention import dense
from kvclient.hf.attention.handle import forget_pending, give_handle, stepping
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.release import passing
from kvclient.kernels import contract


class RaggedLayer(CacheLayerMixin):
    """The same layer of every request's cache, a row each."""

    def __init__(self, index: int, layers: Sequence[Any], heads: int) -> None:
        super().__init__()
        self.index, self._layers, self._heads = index, layers, heads
        self._held: list[Any] = []
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self._held = []
        for row, layer in enumerate(self._layers):
            keys, values = layer.update(key_states[row : row + 1], value_states[row : row + 1])
            forget_pending()  # its attention is computed here, with the others'
            self._held.append((keys, values))
        return give_handle(key_states, self), value_states

    def takes(self, reason: str | None, causal: bool) -> bool:
        if reason is not None or not causal:
            raise RuntimeError(f"a step of several requests wants what the kernels do not take ({reason})")
        return True

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None, scale: float, softcap: float, window: int,
        path: int,
    ) -> torch.Tensor:  # fmt: skip
        """[B, 1, heads, D] of the newest token of each row over its own keys."""
        query = dense.heads_together(query)
        batch, heads, tokens, head_dim = query.shape
        out = query.new_empty((batch, tokens, heads, head_dim))
        position = torch.tensor([[layer.get_seq_length() - 1] for layer in self._layers])
        args = dense.arguments(query, out, self._heads, position, scale, path)
        args.softcap, args.window = softcap, window
        if sinks is not None:
            sinks = sinks.float().contiguous()
            args.sinks = sinks.data_ptr()
        sequences = (contract.Sequence * batch)()
        for row, layer in enumerate(self._layers):
            sequences[row] = self._sequence(layer, *self._held[row])
        args.sequences = addressof(sequences)
        dense.run(args)
        return out

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to set up: the requests' layers are."""

    def _sequence(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        if isinstance(layer, InPlaceLayer) and layer.in_place:
            return layer.sequences()[0]
        one = contract.Sequence()
        one.tail = dense.dense_segment(keys, values, 0, 0, 0)
        return one


class RaggedCache(Cache):
    """Of one step. caches: of one row each, at least one token long."""

    def __init__(self, caches: Sequence[Any], heads: int) -> None:
        layers = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[RaggedLayer(i, row, heads) for i, row in enumerate(layers)])


def step(model: torch.nn.Module, tokens: Sequence[int], caches: Sequence[Any], heads: int) -> torch.Tensor:
    """The logits [B, vocabulary] behind one new token of each request, which its cache then holds. heads: KV
    heads of a layer. The model's attention must be one of kvclient.hf.attention on a CPU.
    """
    ids = torch.tensor([[token] for token in tokens])
    places = torch.tensor([[cache.get_seq_length()] for cache in caches])
    with torch.no_grad(), stepping():
        out = type(model).forward(
            model, input_ids=ids, position_ids=places, use_cache=True, return_dict=True,
            **passing(RaggedCache(caches, heads)),
        )  # fmt: skip
    return out.logits[:, -1]
