"""A decoder layer as one forward: norm, attention, norm, gated MLP and both sums, where its class has a tower
of modules that call each other.

Owns that forward. Never computes what a part of the layer was changed to: its class does then, with whatever
stands in its parts. Invariant: the numbers are those that the parts' own forwards here compute, to the bit;
of packed weights but for silu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.attention import dense
from kvclient.hf.layers import kinds
from kvclient.hf.layers.attention import Attends, normed, of_each
from kvclient.hf.layers.forwards import Gates, Whole, is_watched, takes_rows
from kvclient.hf.layers.fused import ROWS, Calls, Fused, is_packed
from kvclient.hf.release import CACHE

_CALL = torch.nn.Module.__call__


class Layer:
    """A module and what is known of it."""

    def __init__(self, module: Any) -> None:
        kind = kinds.attention(module.self_attn)
        assert kind is not None
        self.module, self.usual, self.scaled = module, type(module).forward, kinds.scaled(module)
        self.attends, self.gates, self.parts = Attends(module.self_attn, kind), Gates(module.mlp), Whole()
        for name in kinds.LAYER:
            self.parts.add(module, name)
        self.fused = Fused(module, self.attends)
        weight = module.input_layernorm._parameters.get("weight")
        self.proven = None if weight is None else weight.dtype  # an activation may be another in other types
        self.packed = any(is_packed(part) for part in module.modules())
        self._norms = [module.input_layernorm, module.post_attention_layernorm, *self.attends.norms]

    def stands(self) -> bool:
        """Whether it is as it was found, and nobody watches or trains."""
        module = self.module
        here = type(module).forward is self.usual and torch.nn.Module.__call__ is _CALL
        if not here or module.training or is_watched() or not self.parts.stand():
            return False
        if not self.attends.stands() or not self.gates.parts.stand():
            return False
        return all(type(norm.variance_epsilon) is float for norm in self._norms)

    def takes(self, hidden: Any, angles: Any) -> Calls | None:
        """The calls for hidden [batch, tokens, hidden] and angles, if they may be read in one each way."""
        rows = takes_rows(hidden, self.module.input_layernorm._parameters.get("weight")) and hidden.ndim == 3
        few = rows and hidden.dtype is self.proven and 0 < hidden.shape[0] * hidden.shape[1] <= ROWS
        return self.fused.calls(hidden.dtype) if few and self.attends.fit(hidden, angles) else None

    def few(
        self, calls: Calls, hidden: torch.Tensor, angles: Any, mask: Any, cache: Any, told: dict[str, Any]
    ) -> Any:
        """What its class answers, [batch, tokens, hidden], by the calls that takes() had for them."""
        module, fused, structs = self.module, self.fused, calls.take()
        shape = hidden.shape[:2]
        rows = shape[0] * shape[1]
        turned = [of_each(angle, shape) for angle in angles] if self.attends.is_turned() else None
        sides = fused.heads(structs.before, hidden, turned, rows)
        query, key, value = (side.transpose(1, 2) for side in sides)
        out, _ = self.attends.attend(query, key, value, mask, cache, told)
        factor = float(module.residual_multiplier) if self.scaled else 1.0
        wide = shape == out.shape[:2] and out.shape[-1] == structs.behind.out.inputs
        wide = wide and not (torch.is_grad_enabled() and out.requires_grad)
        if not (wide and out.dtype is hidden.dtype and type(out) is torch.Tensor):
            return self._apart(hidden, module.self_attn.o_proj(out))
        result = fused.rest(structs.behind, hidden, out, factor, rows)
        calls.give(structs)
        return result

    def many(self, hidden: torch.Tensor, angles: Any, mask: Any, cache: Any, told: dict[str, Any]) -> Any:
        """The same of more rows, hidden [batch, tokens, hidden], to which takes_many() said yes."""
        wanted = self._wanted(cache)
        rows = normed(hidden, self.module.input_layernorm)
        out, _ = self.attends(rows, angles, mask, cache, told, wanted)
        return self._apart(hidden if wanted is None else hidden[wanted], out)

    def _wanted(self, cache: Any) -> torch.Tensor | None:
        """Of the last layer of a step of kvclient.hf.cache.ragged, of whom something is answered; None: of
        all.
        """
        layers = getattr(cache, "layers", ())
        if not layers or self.attends.module.layer_idx != len(layers) - 1:
            return None
        return layers[-1].wanted if getattr(layers[-1], "ends", False) else None

    def _apart(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """From the first sum on, each part by itself."""
        module, second = self.module, self.module.post_attention_layernorm
        hidden = _sum(hidden, out * module.residual_multiplier if self.scaled else out)
        out = module.mlp(second(hidden))
        return _sum(hidden, out * module.residual_multiplier if self.scaled else out)

    def takes_many(self, hidden: Any, angles: Any) -> bool:
        """takes() for many()."""
        rows = not self.packed and takes_rows(hidden, self.module.input_layernorm._parameters.get("weight"))
        return rows and self.attends.takes(hidden, angles) and self.gates.takes(hidden)


def _sum(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """hidden + out; what a part computed by itself may be of another kind."""
    alike = type(out) is torch.Tensor and (out.dtype, out.shape) == (hidden.dtype, hidden.shape)
    if not alike or (torch.is_grad_enabled() and (out.requires_grad or hidden.requires_grad)):
        return hidden + out
    return torch.add(hidden, out, out=dense.empty(hidden, hidden.shape))


def of_layer(module: Any) -> Callable[..., Any]:
    """In the place of its class's. Its parts have their forwards already."""
    layer = Layer(module)

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        angles = kwargs.get("position_embeddings")
        known = not args and kinds.OLD_NAMES.isdisjoint(kwargs) and layer.stands()
        calls = layer.takes(hidden_states, angles) if known else None
        if calls is None and not (known and layer.takes_many(hidden_states, angles)):
            return type(module).forward(module, hidden_states, *args, **kwargs)
        told = {"position_ids": kwargs.pop("position_ids", None), "use_cache": kwargs.pop("use_cache", False)}
        mask, cache = kwargs.pop("attention_mask", None), kwargs.pop(CACHE, None)
        kwargs.pop("position_embeddings", None)
        told.update(kwargs)
        if calls is None:
            return layer.many(hidden_states, angles, mask, cache, told)
        return layer.few(calls, hidden_states, angles, mask, cache, told)

    return forward
