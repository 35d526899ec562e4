"""Values that a model's code reads, spelled out: what a digest and a look at a living model compare.

Owns what counts as plain: numbers, texts, small containers of them, small tensors on the CPU. Never calls
anything of a value's own. Invariant: what is spelled alike computes alike, in every process.
"""

from __future__ import annotations

import types
from typing import Any

import torch

VALUES = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (tuple, list, dict, set, frozenset)
MOST_ITEMS, DEEPEST = 256, 4  # of a container, or elements of a tensor; containers in containers


def plain_text(value: Any, depth: int = 0) -> str | None:
    """A plain value spelled out; None: it is, or holds, something else, or too much."""
    kind = type(value)
    if kind in VALUES:
        return repr(value)
    if kind is torch.Tensor:
        return _numbers(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if not isinstance(value, tuple) and kind not in CONTAINERS:
        return None
    if len(value) > MOST_ITEMS or depth == DEEPEST:
        return None
    pairs = isinstance(value, dict)
    items = [item for pair in value.items() for item in pair] if pairs else list(value)
    texts = [plain_text(item, depth + 1) for item in items]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    known = sorted(known) if isinstance(value, set | frozenset) else known
    return f"{kind.__name__}({', '.join(known)})"


def _numbers(tensor: torch.Tensor) -> str | None:
    """Of a small one on the CPU, of any shape. A sparse, quantized or nested one has no plain numbers."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    if tensor.numel() > MOST_ITEMS:
        return None
    try:
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.tolist()}"
    except RuntimeError:
        return None


def text_of(value: Any) -> str:
    """Of what is not plain, which may say another thing in every process, the type, or a function's name."""
    if (text := plain_text(value)) is not None:
        return text
    if isinstance(value, tuple | list) and len(value) <= MOST_ITEMS:
        return f"{type(value).__name__}({', '.join(_named(item) for item in value)})"
    return _named(value)


def _named(value: Any) -> str:
    if (text := plain_text(value)) is not None:
        return text
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
