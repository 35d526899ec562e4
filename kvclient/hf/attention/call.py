"""One call of attention as a model makes it, read once: what is to be computed, and whether the kernels can.

Owns the reading of transformers' arguments and the reasons against the kernels. Never computes. Invariant: a
reason is a word that is counted; without one, every backend of ours takes the tensors as they are, except for
what it has a reason of its own against.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends, proof, sdpa
from kvclient.hf.attention.backends import Backend
from kvclient.hf.attention.handle import layer_of, tell
from kvclient.kernels import contract


class AttentionCall(NamedTuple):
    """Queries [B, heads, T, D], keys and values [B, kv heads, S, D], and what they mean."""

    backend: Backend
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    starts: torch.Tensor | None  # per row, the columns of padding at its left
    position: torch.Tensor | None  # the keys that the queries stand at; None: the last
    sinks: torch.Tensor | None  # a logit per head that takes part in the softmax alone
    bias: torch.Tensor | None  # added to the scores
    scale: float
    softcap: float  # 0: none
    window: int  # 0: none
    causal: bool
    dropout: float
    layer: Any  # whose handle the keys are: it attends where its blocks lie
    compiling: bool
    reason: str | None  # why the kernels cannot take it

    @property
    def rows(self) -> bool:
        """Whether queries stand at keys that are not the last, and the backend can be told which."""
        return _rows(self.backend, self.position, self.layer, self.compiling)

    @property
    def keys(self) -> int:
        return self.key.shape[2]


def read_call(
    backend: Backend, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None, scaling: float | None, dropout: float, sliding_window: int | None,
    softcap: float | None, sinks: torch.Tensor | None, is_causal: bool | None, bias: torch.Tensor | None,
    others: dict[str, Any],
) -> AttentionCall:  # fmt: skip
    """Raises InvalidArgument, and RuntimeError for a handle that was lost."""
    compiling = torch.compiler.is_compiling()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    window = int(sliding_window or 0)
    if not compiling:
        tell(key, query, scale)
        proof.check_call(mask, window, others)
    if others.get("cache") is not None:
        raise InvalidArgument(
            "continuous batching brings a cache of its own, which these kernels do not read"
        )
    starts = None if mask is None else getattr(mask, "_kvclient_starts", None)
    position = None if mask is None else getattr(mask, "_kvclient_positions", None)
    layer = layer_of(key)
    unknown = mask is not None and starts is None and not _rows(backend, position, layer, compiling)
    reason = "mask" if unknown else _unfit(backend, query, key, value, dropout, sinks, bias)
    return AttentionCall(
        backend, query, key, value, mask, starts, position, sinks, bias, scale, float(softcap or 0.0), window,
        causal, dropout, layer, compiling, reason,
    )  # fmt: skip


def _rows(backend: Backend, position: torch.Tensor | None, layer: Any, compiling: bool) -> bool:
    return position is not None and layer is None and not compiling and backend.name not in sdpa.ORDER


def _unfit(
    backend: Backend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float,
    sinks: torch.Tensor | None, bias: torch.Tensor | None,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take these tensors, as a word for counting; None: they can."""
    operands = (query, key, value, sinks, bias)
    if dropout or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)):
        return "training"
    if bias is not None:
        return "position_bias"
    if value.shape != key.shape or len(key) != len(query) or query.shape[-1] != key.shape[-1]:
        return "shape"
    if not query.dtype == key.dtype == value.dtype:  # autocast makes them differ
        return "shape"
    if query.shape[1] // key.shape[1] > contract.MAX_GQA:
        return "shape"
    return backends.unfit(query.device, query.dtype, query.shape[-1], backend)
