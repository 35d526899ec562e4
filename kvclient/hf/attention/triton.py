"""The Triton twins over dense tensors.

Owns the translation of tensors into the structs that kvclient.kernels.triton_calls takes. Never copies keys
or values whose heads are contiguous. Invariant: that of kvclient.hf.attention.dense.
"""

from __future__ import annotations

from ctypes import addressof

import torch

from kvclient.hf.attention.dense import arguments, dense_segment, heads_together
from kvclient.kernels import contract, triton_calls


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, softcap: float, window: int, causal: bool,
    position: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B, T, heads, D]. `starts`, `position`: as kvclient.hf.attention.dense has them."""
    batch, heads, tokens, head_dim = query.shape
    keys = key.shape[2]
    query, key, value = heads_together(query), heads_together(key), heads_together(value)
    out = query.new_empty((batch, tokens, heads, head_dim))
    if position is None:
        position = torch.arange(keys - tokens, keys, device=query.device).expand(batch, tokens).contiguous()
    args = arguments(query, out, key.shape[1], position, scale, 0)
    args.softcap, args.window, args.causal = softcap, window, causal
    if sinks is not None:
        sinks = sinks.float().contiguous()
        args.sinks = sinks.data_ptr()
    sequences = (contract.Sequence * batch)()
    for row, pad in enumerate([0] * batch if starts is None else starts.tolist()):
        sequences[row].tail = dense_segment(key, value, row, pad, pad)
    args.sequences = addressof(sequences)
    triton_calls.attend(args)
    return out
