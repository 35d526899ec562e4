"""Attention of one query a row over all keys, on the CPU, for a model that computes by torch's.

Owns what transformers calls in the place of "sdpa", and which models call it: none whose code asks whether
that is the name. Never answers otherwise than torch's would, but for rounding: what is not one query without
a mask goes there. Invariant: nothing is proven of the model, for nothing of it is asked: the arguments are
torch's, and mean what they mean there.

torch's own takes 3 ms for a row of bf16 over 512 keys of 28 heads, on one core: for a packed model of 7B a
third of each token.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvclient.hf.attention import backends, dense
from kvclient.hf.attention.switch import Name, configured
from kvclient.kernels import contract

ONE_ROW = "sdpa_one_row"
USUAL = "sdpa"
UNREAD = ("position_bias", "cache", "softcap")
ASKED = re.compile(r"_attn_implementation\s*(==|!=|in\b|not\b)")


def give(model: Any) -> None:
    """The parts of the model that compute by torch's attention decode by the kernels, on a CPU."""
    if not type(model)._can_set_attn_implementation() or _asks_for_the_name(model):
        return
    AttentionInterface.register(ONE_ROW, attention)
    AttentionMaskInterface.register(ONE_ROW, sdpa_mask)
    for _, part in configured(model):
        if part.config._attn_implementation == USUAL:
            part.config._attn_implementation_internal = Name(ONE_ROW, USUAL)


def _asks_for_the_name(model: Any) -> bool:
    """Whether a model's own code does something else for "sdpa" than for another name: Gemma 4 keeps rows of
    queries, models of sparse attention put their indices into the mask.
    """
    modules = {sys.modules.get(type(part).__module__) for part in model.modules()}
    texts = [inspect.getsource(module) for module in modules if module and ".models." in module.__name__]
    return any(map(ASKED.search, texts))


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [batch, heads, queries, head_dim], key and value [batch,
    kv_heads, keys, head_dim]; returns [batch, queries, heads, head_dim] and no weights.
    """
    told_more = any(kwargs.get(name) is not None for name in UNREAD)
    plain = attention_mask is None and not dropout and not told_more
    if plain and (path := _path(query, key, value)) is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return dense.attend(query, key, value, None, None, scale, 0.0, 0, False, path), None
    told = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    out: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **told)
    return out


def _path(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Of the CPU's kernels, by which these are computed; None: by torch."""
    if query.shape[2] != 1 or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if not type(query) is type(key) is type(value) is torch.Tensor:
        return None
    if not query.dtype == key.dtype == value.dtype or key.shape != value.shape:
        return None
    if len(query) != len(key) or query.shape[-1] != key.shape[-1] or not key.shape[2]:
        return None
    if query.shape[1] % key.shape[1] or query.shape[1] // key.shape[1] > contract.MAX_GQA:
        return None
    if torch.is_autocast_enabled("cpu") or (
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    ):
        return None
    if any(tensor.device.type != "cpu" for tensor in (query, key, value)):
        return None
    return path_of(query.dtype, query.shape[-1])


def path_of(dtype: torch.dtype, head_dim: int) -> int | None:
    """Of the CPU's kernels, for one query of such numbers; None: by torch."""
    return _path_of(dtype, head_dim, os.environ.get(backends.ENVIRONMENT))


@functools.cache
def _path_of(dtype: torch.dtype, head_dim: int, asked: str | None) -> int | None:
    here = torch.device("cpu")
    if (asked is not None and not asked.startswith("cpu_")) or backends.unfit(here, dtype, head_dim):
        return None
    return backends.choose(here, dtype, head_dim).path
