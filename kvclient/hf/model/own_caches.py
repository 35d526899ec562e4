"""The empty cache that a call of a model begins with, as transformers makes it, or with states where this
library looks for them.

Owns what models do with states that are not in transformers' own cache layers: MiniMax keeps them in a cache
of its own class, RecurrentGemma in its modules. Never changes what they compute. Invariant: in every cache
made here a layer with a state is one of kvclient.hf.release.STATES.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvclient.hf.release import STATES

LAYER: Any = STATES[0] if STATES else object


class _Unordered(LAYER):
    """A state that transformers leaves where it is when beams change places: so its answers are, with such
    models, and so they stay.
    """

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        pass


class _InModules(_Unordered):
    """The states that a RecurrentGemma block keeps of the last call."""

    def __init__(self, block: Any) -> None:
        self._block = block
        super().__init__()

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        return {0: self._block.conv1d_state}

    @conv_states.setter
    def conv_states(self, value: Any) -> None:
        pass  # of __init__

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        return {0: self._block.rg_lru.recurrent_states}

    @recurrent_states.setter
    def recurrent_states(self, value: Any) -> None:
        pass

    def reset(self) -> None:
        self._block.conv1d_state = self._block.rg_lru.recurrent_states = None

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self._block.conv1d_state = conv_states
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._block.rg_lru.recurrent_states = recurrent_states
        return recurrent_states


@functools.cache
def _with_states(kind: type) -> type:
    """MiniMax's class of cache, its linear attention's states in layers as other models' are."""

    class LinearCache(kind):
        linear_cache = ()

        def __init__(self, config: Any) -> None:
            DynamicCache.__init__(self, config=config)
            self.layers[:] = [_Unordered() if isinstance(layer, STATES) else layer for layer in self.layers]

        def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
            return self.get_recurrent_state(layer_idx)

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            self.update_recurrent_state(linear_cache, layer_idx)
            self.layers[layer_idx].has_previous_state[0] = True

        def __len__(self) -> int:
            return DynamicCache.__len__(self)

    return LinearCache


def empty_cache(model: Any) -> Any:
    """For one call. Raises what transformers raises for layers that it has no cache for."""
    config = model.config.get_text_config(decoder=True)
    if not STATES:
        return DynamicCache(config=config)
    if (kind := getattr(sys.modules.get(type(model).__module__), "MiniMaxCache", None)) is not None:
        return _with_states(kind)(config)
    cache = DynamicCache(config=config)
    for index, block in enumerate(_blocks(model) if keeps_states(model) else ()):
        if hasattr(block, "rg_lru"):
            cache.layers[index] = layer = _InModules(block)
            layer.reset()  # behind one token the block would go on with what the call before left in it
    return cache


def keeps_states(model: Any) -> bool:
    """Whether states lie in the model's modules; such a model does not hand its cache back either."""
    return bool(STATES) and any(hasattr(block, "rg_lru") for block in _blocks(model))


def _blocks(model: Any) -> list[Any]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    return [getattr(layer, "temporal_block", None) for layer in layers]
