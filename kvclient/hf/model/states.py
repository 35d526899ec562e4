"""Recurrent layers: what they keep of all tokens so far, and how it is put back.

Owns the reading and the writing of transformers' cache layers with states. Never stores anything. Invariant:
a layer into which restore() has put what capture() took computes what it would have computed behind the same
tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.hf.attention.proof import TOLERANCE, evaluating, tokens
from kvclient.hf.model.own_caches import empty_cache
from kvclient.hf.release import STATES, passing

FIRST, MORE = 24, 9  # tokens of a pass from nothing, and behind its state


@dataclass(frozen=True)
class StateTensor:
    """One tensor of one layer, for one row."""

    layer: int
    recurrent: bool  # else of its convolution
    index: int  # among the layer's states of that kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


def states_in(cache: Any) -> tuple[StateTensor, ...]:
    """What a cache's layers keep, with the shape of one row of each, after a forward pass of one row."""
    out = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, STATES):
            continue
        for recurrent, states in ((False, layer.conv_states), (True, layer.recurrent_states)):
            for index, state in states.items():
                if state is not None:
                    out.append(StateTensor(number, recurrent, index, tuple(state.shape[1:]), state.dtype))
    return tuple(out)


def _place(cache: Any, state: StateTensor) -> dict[int, torch.Tensor]:
    layer = cache.layers[state.layer]
    return layer.recurrent_states if state.recurrent else layer.conv_states


def capture(cache: Any, states: Iterable[StateTensor], row: int) -> list[torch.Tensor]:
    """Copies of one row's states, each of its StateTensor's shape."""
    return [_place(cache, state)[state.index][row].clone() for state in states]


def restore(
    cache: Any, states: Sequence[StateTensor], rows: Sequence[Sequence[torch.Tensor]], device: Any
) -> None:
    """Puts each row's states, each of its StateTensor's shape, into fresh layers."""
    for number, state in enumerate(states):
        whole = torch.stack([row[number] for row in rows]).to(device)
        layer = cache.layers[state.layer]
        if state.recurrent:
            layer.update_recurrent_state(whole, state_idx=state.index)
        else:
            layer.update_conv_state(whole, state_idx=state.index)
        layer.has_previous_state[state.index] = True


def goes_on(model: torch.nn.Module, most: int = MORE) -> bool:
    """Whether the model computes behind what its cache keeps of tokens, `most` at a time, what it computes of
    all in one pass. It does not if a token changes what was kept of those before it.
    """
    ids = tokens(model, FIRST + MORE, 1)[None]
    whole = _logits(model, [ids])
    apart = float((_logits(model, [ids[:, :FIRST], *ids[:, FIRST:].split(most, dim=1)]) - whole).abs().max())
    largest = float(whole.abs().max()) or 1.0
    return apart <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]) * largest


@torch.no_grad()
def _logits(model: torch.nn.Module, passes: Sequence[torch.Tensor]) -> torch.Tensor:
    cache = empty_cache(model)
    placed, start = "position_ids" in inspect.signature(type(model).forward).parameters, 0
    with evaluating(model), torch.autocast(model.device.type, enabled=False):  # of a caller's
        for ids in passes:  # as generate() gives them: not every model knows by itself how far it is
            places = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
            positions = {"position_ids": places} if placed else {}
            out = model(input_ids=ids, use_cache=True, **positions, **passing(cache, model))
            start += ids.shape[1]
    return out.logits[0, -1].float()
