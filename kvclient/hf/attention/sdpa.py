"""torch's own fused attention on a GPU, for what our kernels do not take: torch_cudnn and torch_flash.

Owns the choice of torch's kernel and of its mask. Never computes otherwise than by
scaled_dot_product_attention. Invariant: queries are the last of the keys; a query sees the keys up to its
own, by a mask that torch's flash attention knows (lower-right causal), never by a tensor of booleans, which
rules it out.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

# From so many new tokens on, torch's fused attention takes less time than our kernels, whatever these save of
# reading: it has twice their rate (docs/gpu.md).
MANY_TOKENS = 256
_LAST = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ORDER = {
    "torch_cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_LAST],
    "torch_flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_LAST],
}


def unfit(
    starts: torch.Tensor | None, window: int, keys: int, softcap: float, sinks: torch.Tensor | None
) -> str | None:
    """Why torch's fused attention cannot take this call, as a word for counting; None if it can. starts:
    [batch], sinks: [heads].
    """
    if starts is not None:
        return "mask"
    if window and window < keys:
        return "window"
    if softcap:
        return "softcap"
    return "sinks" if sinks is not None else None


def attend(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """[B, T, heads, D] of query [B, heads, T, D] over key and value [B, KV heads, N, D]."""
    tokens, keys = query.shape[2], key.shape[2]
    mask, whole = None, False
    if causal and tokens > 1:
        whole = tokens == keys
        mask = None if whole else causal_lower_right(tokens, keys)
    with sdpa_kernel(ORDER[name], set_priority=True):
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=whole, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2).contiguous()
