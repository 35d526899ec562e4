"""Decoder layers of packed words whose weights come and go: of each kind the first is proven while it has
them, and the others are computed as that one is.

Owns which layers are of one kind. Never asks for the weights of another. Invariant: layers of one kind are
computed alike, whether their weights stay or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvclient.hf.layers import attention, forwards, kinds
from kvclient.hf.layers.fused import is_packed
from kvclient.hf.layers.install import available, install, is_blind, kinds_of, made_again


class Twins:
    """layers: as they were made, in the types that they are computed in; their weights may come later."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._of_kind: dict[Any, dict[int, torch.nn.Module]] = {}
        for number, layer in enumerate(layers) if available() else ():
            if _may_be_one(layer):
                kind = kinds_of(layer), tuple(map(_is_strange, layer.modules()))
                self._of_kind.setdefault(kind, {})[number] = layer

    def install(self, filled: Callable[[int], AbstractContextManager[Any]]) -> int:
        """How many modules are computed by native/cpu from now on. filled: within it a layer has its weights,
        and no other thread computes it; what that raises comes out.
        """
        found = 0
        for layers in self._of_kind.values() if not is_blind() else ():
            first, *others = layers
            with filled(first):
                found += install(layers[first])
                found += sum(_alike(layers[first], layers[number]) for number in others)
        return found


def _is_strange(module: torch.nn.Module) -> bool:
    """Whether a forward of its own, or a hook, keeps it and what stands over it as they are."""
    return "forward" in module.__dict__ or not forwards.is_unseen(module)


def _may_be_one(layer: Any) -> bool:
    if not kinds.layer(layer) or not any(map(is_packed, layer.modules())):
        return False
    return kinds.attention(layer.self_attn) is not None and layer.self_attn.head_dim % attention.LANES == 0


def _alike(proven: torch.nn.Module, layer: torch.nn.Module) -> int:
    """What stands in the proven one is put into the other, parts before what stands over them."""
    found = 0
    for was, now in reversed(list(zip(proven.modules(), layer.modules(), strict=True))):
        if forwards.stands(was) and "forward" not in now.__dict__ and forwards.is_unseen(now):
            forwards.put(now, made_again(was, now))
            found += 1
    return found
