"""LlamaAttention's forward with queries and keys turned to their positions by native/cpu.

Owns the copy of that forward, and the question whether a class's is the one that was copied: by the names its
code uses, for numbers alone would not tell what only some calls need. Never turns what somebody else holds:
queries and keys are fresh from their layers. Invariant: each product and sum is rounded as torch rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, sizeof
from typing import Any

import torch

from kvclient.hf.layers.forwards import stands, takes
from kvclient.hf.release import CACHE
from kvclient.kernels import contract

NAMES = {
    "shape", "head_dim", "q_proj", "view", "transpose", "k_proj", "v_proj", "apply_rotary_pos_emb", "update",
    "layer_idx", "ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation",
    "eager_attention_forward", "training", "attention_dropout", "scaling", "reshape", "contiguous", "o_proj",
}  # fmt: skip
PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
LANES = 32  # a head's numbers are a multiple of it
_TURNS = sizeof(contract.Turns)


def is_known(module: Any) -> bool:
    """Whether its forward is the one below, and of heads that the kernel takes."""
    code = getattr(type(module).forward, "__code__", None)
    # Early releases hand a cache_position on, which the copy does not know.
    known = code is not None and "cache_position" not in code.co_varnames
    known = known and set(code.co_names) == NAMES and code.co_consts[-1] == ("dropout", "scaling")
    parts = module._modules.keys() >= PARTS and not module._parameters
    return known and parts and module.head_dim % LANES == 0


def of_attention(module: Any) -> Callable[..., Any]:
    """In the place of LlamaAttention's."""
    usual, names = type(module).forward, type(module).forward.__globals__
    head_dim, turns = module.head_dim, names["apply_rotary_pos_emb"]

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        cos, sin = position_embeddings or (None, None)
        alike = fits(cos, hidden_states, head_dim) and fits(sin, hidden_states, head_dim)
        seen = not (stands(module.q_proj) and stands(module.k_proj))  # by who would see them turned
        changed = type(module).forward is not usual or names["apply_rotary_pos_emb"] is not turns
        if changed or seen or not alike or not takes(hidden_states, module.q_proj.weight):
            return type(module).forward(module, hidden_states, position_embeddings, attention_mask, **kwargs)
        query, key = module.q_proj(hidden_states), module.k_proj(hidden_states)
        if not (is_fresh(query) and is_fresh(key)):  # of a layer that an adapter took the place of since
            return usual(module, hidden_states, position_embeddings, attention_mask, **kwargs)
        cache = kwargs.pop(CACHE, None)
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, head_dim)
        value = module.v_proj(hidden_states).view(heads).transpose(1, 2)
        turn(query, key, cos, sin)
        query, key = query.view(heads).transpose(1, 2), key.view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        implementation = module.config._attn_implementation
        attend = names["ALL_ATTENTION_FUNCTIONS"].get_interface(
            implementation, names["eager_attention_forward"]
        )
        dropout = module.attention_dropout if module.training else 0.0
        out, weights = attend(
            module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs
        )
        return module.o_proj(out.reshape(*shape, -1).contiguous()), weights

    return forward


def fits(cos: torch.Tensor | None, hidden: torch.Tensor, head_dim: int) -> bool:
    """Whether cos [..., head_dim] has a row of fp32 for each of hidden [..., inputs]: a model that turns a
    part of a head has narrower ones; and no gradient of it is wanted.
    """
    if type(cos) is not torch.Tensor or not cos.is_cpu or cos.is_neg():
        return False
    whole = cos.dtype is torch.float32 and cos.shape[-1] == head_dim and cos.shape[:-1] == hidden.shape[:-1]
    return whole and not (torch.is_grad_enabled() and cos.requires_grad)


def is_fresh(states: torch.Tensor) -> bool:
    """Whether states [..., heads * head_dim] may be written: whole rows of fp32, and no gradient wanted."""
    plain = states.dtype is torch.float32 and states.is_contiguous()
    return plain and not (torch.is_grad_enabled() and states.requires_grad)


def turn(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """In place: query and key [..., heads * head_dim], cos and sin [..., head_dim], all fp32 on the CPU."""
    head_dim, cos, sin = cos.shape[-1], cos.contiguous(), sin.contiguous()
    heads = (tensor.shape[-1] // head_dim for tensor in (query, key))
    args = contract.Turns(
        _TURNS, contract.ABI, cos.numel() // head_dim, *heads, head_dim, 0, torch.get_num_threads(),
        query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(),
    )  # fmt: skip
    if status := contract.cpu().kvk_turn_rows(byref(args)):
        contract.check(status)
