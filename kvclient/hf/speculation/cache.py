"""One pass over a draft, and a cache that keeps of it what was accepted.

Owns the mask of a tree and the cut of a cache. Never decides what is accepted. Invariant: after keep() the
cache holds exactly what plain decoding would have put there; rejected tokens' keys and values are gone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvclient.hf.release import compresses, passing
from kvclient.hf.speculation.draft import Draft


def unfit(model: torch.nn.Module, cache: Any) -> str | None:
    """Why this cache cannot give tokens back, as a word; None: it can."""
    layers = getattr(cache, "layers", None)
    if not layers or getattr(model.config, "is_encoder_decoder", False):
        return "cache"
    for layer in layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, DynamicSlidingWindowLayer):
            return "cache"
        if hasattr(layer, "update_indexer") or compresses(layer):
            return "cache"
    return None


def trees(model: torch.nn.Module) -> bool:
    """Whether the model takes a mask of which tokens stand behind which, and their positions."""
    flash = "flash" in str(model.config._attn_implementation)
    return not flash and "position_ids" in inspect.signature(type(model).forward).parameters


def device_of(model: Any) -> torch.device:
    """Where a model's inputs go. The first weight of one whose vocabulary is streamed is nowhere ("meta")."""
    found: torch.device = model.device
    return torch.device("cpu") if found.type == "meta" else found


def score(model: torch.nn.Module, cache: Any, token: int, draft: Draft, pad: int = 0) -> torch.Tensor:
    """The logits [nodes, vocabulary] behind the newest certain token and each drafted one, all of which the
    cache then holds; it held everything before the newest. pad: columns of padding at its left. One row.
    """
    device, inputs = device_of(model), dict[str, Any]()
    placed = "position_ids" in inspect.signature(type(model).forward).parameters
    # Models of states alone (Mamba) are told no places, and their caches tell no length.
    past = cache.get_seq_length() if placed or pad or not draft.is_chain else 0
    if placed:
        inputs["position_ids"] = past - pad + torch.tensor([draft.depths], device=device)
    if not draft.is_chain:
        inputs["attention_mask"] = _mask(model, past, draft, pad)
    elif pad:
        inputs["attention_mask"] = torch.ones(
            (1, past + 1 + len(draft.tokens)), dtype=torch.int64, device=device
        )
        inputs["attention_mask"][:, :pad] = 0
    ids = torch.tensor([[token, *draft.tokens]], device=device)
    out = model(input_ids=ids, use_cache=True, return_dict=True, **inputs, **passing(cache, model))
    return out.logits[0]


def _mask(model: torch.nn.Module, past: int, draft: Draft, pad: int) -> torch.Tensor:
    """[1, 1, nodes, past + nodes]: True where a node looks; for "eager", which adds it, numbers."""
    nodes = len(draft.tokens) + 1
    seen = torch.ones((nodes, past + nodes), dtype=torch.bool)
    seen[:, :pad] = False
    seen[:, past:] = draft.seen()
    if model.config._attn_implementation == "eager":
        least = torch.finfo(model.dtype).min
        return torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(~seen, least)[None, None].to(
            device_of(model)
        )
    return seen[None, None].to(device_of(model))


def keep(cache: Any, draft: Draft, nodes: Sequence[int]) -> None:
    """Behind score(): of the drafted tokens only those of `nodes`, a path from the first, stay."""
    drop = len(draft.tokens) - len(nodes)
    if list(nodes) == list(range(1, len(nodes) + 1)):
        for layer in cache.layers:
            cut(layer, drop)
        return
    for layer in cache.layers:
        start = layer.get_seq_length() - len(draft.tokens) - 1
        places = torch.tensor([start + node for node in nodes], dtype=torch.int64, device=layer.keys.device)
        kept = layer.keys[:, :, places], layer.values[:, :, places]
        cut(layer, len(draft.tokens))
        if nodes:
            layer.update(*kept)


def cut(layer: Any, tokens: int) -> None:
    """Takes the newest away. A negative count means this in every release of transformers."""
    if tokens:
        layer.crop(-tokens)
