"""An attention's forward with its products, norms and the turning of queries and keys by native/cpu.

Owns the copy of that forward, in the kinds of kinds.py. Never turns what somebody else holds: queries and
keys are what it has just multiplied. Invariant: each product and sum is rounded as torch rounds it, and what
attends and keeps K and V is what the model has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.layers import calls, kinds
from kvclient.hf.layers.forwards import Whole, is_watched, takes_product, takes_rows
from kvclient.hf.release import CACHE

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
LANES = 32  # a head's numbers are a multiple of it


def parts_of(kind: kinds.Attention) -> tuple[str, ...]:
    """The names of its modules."""
    return PARTS + NORMS if kind.norms else PARTS


class Attends:
    """A module's attention over rows that its norm has made, as its class computes it."""

    def __init__(self, module: Any, kind: kinds.Attention) -> None:
        self.module, self.kind, self.parts = module, kind, Whole()
        for name in parts_of(kind):
            self.parts.add(module, name)
        self.products = [getattr(module, name)._parameters for name in PARTS]
        self.norms = [getattr(module, name) for name in NORMS] if kind.norms else []
        self._names = kinds.plain(type(module).forward).__globals__
        self._usual, self._turns = type(module).forward, self._names["apply_rotary_pos_emb"]

    def stands(self) -> bool:
        """Whether it is as it was found, and nobody wants to see what lies between."""
        same = type(self.module).forward is self._usual
        return same and self._names["apply_rotary_pos_emb"] is self._turns and self.parts.stand()

    def fit(self, hidden: torch.Tensor, angles: Any) -> bool:
        """Whether angles, cos and sin [batch, tokens, head_dim], are there for hidden's rows."""
        if type(angles) is not tuple or len(angles) != 2:
            return False
        heads = self.module.head_dim
        if heads % LANES:
            return False
        return not self.is_turned() or (fits(angles[0], hidden, heads) and fits(angles[1], hidden, heads))

    def is_turned(self) -> bool:
        """Whether its queries and keys are."""
        return not self.kind.switched or bool(self.module.use_rope)

    def window(self) -> Any:
        """That its keys have now; None: none."""
        windowed = self.module.config if self.kind.window == "configuration" else self.module
        return getattr(windowed, "sliding_window", None) if self.kind.window else None

    def takes(self, hidden: torch.Tensor, angles: Any) -> bool:
        """Whether hidden [batch, tokens, inputs] and angles may be read with its weights."""
        heads, (query, key, value, out) = self.module.head_dim, self.products
        if hidden.ndim != 3 or not self.fit(hidden, angles):
            return False
        for held in (query, key, value):
            wide = takes_product(hidden, held.get("weight"), held.get("bias"))
            if not wide or len(held["weight"]) % heads:
                return False
        weight = out.get("weight")
        fits_out = weight is not None and weight.dtype is hidden.dtype
        return fits_out and all(_is_of_heads(norm, hidden, heads) for norm in self.norms)

    def __call__(
        self, hidden: torch.Tensor, angles: Any, mask: torch.Tensor | None, cache: Any, told: dict[str, Any],
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """What its class answers, of what takes() said yes to; wanted: of these of hidden's batch only."""
        module, heads, shape = self.module, self.module.head_dim, hidden.shape[:-1]
        query, key, value = (
            calls.multiply(hidden, held["weight"], held.get("bias")) for held in self.products[:3]
        )
        split = (*shape, -1, heads)
        if self.norms:
            first, second = self.norms
            query = normed(query.view(split), first).view(query.shape)
            key = normed(key.view(split), second).view(key.shape)
        if self.is_turned():
            cos, sin = (of_each(angle, shape) for angle in angles)
            calls.turn(query, key, cos, sin)
        sides = (side.view(split).transpose(1, 2) for side in (query, key, value))
        out, weights = self.attend(*sides, mask, cache, told)
        out, held = out if wanted is None else out[wanted], self.products[3]
        if not takes_product(out, held["weight"], held.get("bias")):
            return module.o_proj(out), weights
        return calls.multiply(out, held["weight"], held.get("bias")), weights

    def function(self) -> Any:
        """What attends, by transformers' interface."""
        names = self._names
        return names["ALL_ATTENTION_FUNCTIONS"].get_interface(
            self.module.config._attn_implementation, names["eager_attention_forward"]
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        cache: Any, told: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """What the model's attention answers, [batch, tokens, heads * head_dim] in one piece, and its
        weights, of [batch, heads, tokens, head_dim], behind what its cache holds.
        """
        module, kind = self.module, self.kind
        shape = query.shape
        if cache is not None:
            more = {"kwargs": told} if kind.tells else {}
            key, value = cache.update(key, value, module.layer_idx, **more)
        attend = self.function()
        dropout = module.attention_dropout if module.training else 0.0
        if kind.window:
            told = {"sliding_window": self.window(), **told}
        out, weights = attend(
            module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **told
        )
        return out.reshape(shape[0], shape[2], -1).contiguous(), weights


def normed(rows: torch.Tensor, norm: Any) -> torch.Tensor:
    """[..., width] by a norm whose forward stands, of rows that it takes."""
    return calls.normalise(rows, norm._parameters["weight"], norm.variance_epsilon)


def _is_of_heads(norm: Any, hidden: torch.Tensor, heads: int) -> bool:
    weight = norm._parameters.get("weight")
    return takes_rows(hidden, weight, heads) and weight.ndim == 1 and type(norm.variance_epsilon) is float


def of_each(angle: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A row of an angle [batch or 1, tokens, head_dim] for each of shape [batch, tokens]."""
    return (angle if angle.shape[:-1] == shape else angle.expand((*shape, -1))).contiguous()


def of_attention(module: Any) -> Callable[..., Any]:
    """In the place of its class's."""
    kind = kinds.attention(module)
    assert kind is not None
    attends = Attends(module, kind)

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        here = attends.stands() and not is_watched() and kinds.OLD_NAMES.isdisjoint(kwargs)
        if not here or not attends.takes(hidden_states, position_embeddings):
            return type(module).forward(module, hidden_states, position_embeddings, attention_mask, **kwargs)
        cache = kwargs.pop(CACHE, None)
        return attends(hidden_states, position_embeddings, attention_mask, cache, kwargs)

    return forward


def fits(cos: Any, hidden: torch.Tensor, head_dim: int) -> bool:
    """Whether cos [..., head_dim] has a row of hidden's type for each of hidden [batch, tokens, inputs], or
    for each token of all its batch: a model that turns a part of a head has narrower ones; and no gradient
    of it is wanted.
    """
    if type(cos) is not torch.Tensor or not cos.is_cpu or cos.is_neg() or cos.ndim != hidden.ndim:
        return False
    whole = cos.dtype is hidden.dtype and cos.shape[-1] == head_dim and cos.shape[1:-1] == hidden.shape[1:-1]
    return whole and cos.shape[0] in (1, len(hidden)) and not (torch.is_grad_enabled() and cos.requires_grad)
