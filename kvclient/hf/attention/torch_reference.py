"""Attention in torch: for what the kernels do not take, and the backend `torch`.

Owns nothing but the arithmetic. Invariant: the same meaning as the kernels for every argument, at any speed.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def visible(
    tokens: int, keys: int, starts: torch.Tensor | None, window: int, causal: bool, device: torch.device,
    position: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B or 1, 1, tokens, keys]: which keys a query sees. position: that each query stands at; else the last.
    """
    position = torch.arange(keys - tokens, keys, device=device) if position is None else position
    position = position[:, None]
    key = torch.arange(keys, device=device)[None]
    seen = key <= position if causal else torch.ones((tokens, keys), dtype=torch.bool, device=device)
    if window:
        seen = seen & (position - key < window)
    seen = seen[None, None]
    return seen if starts is None else seen & (key >= starts[:, None].to(device))[:, None, None]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float,
    softcap: float = 0.0, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """[B, T, heads, D]. `seen` as visible() makes it, or such a mask: bool, or added to the scores."""
    group = query.shape[1] // key.shape[1]
    if bias is not None:
        seen = bias.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else bias + seen
    if not softcap and sinks is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, seen, dropout_p=dropout, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).contiguous()
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen
    blind = (scores == float("-inf")).all(-1, keepdim=True)  # a query that sees no key: padding
    if sinks is not None:
        sink_scores = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]].masked_fill(blind, 0.0)
    weights = functional.dropout(weights, dropout).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()
