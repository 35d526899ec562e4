"""The keys that a cache hands to attention, marked: attention must bring them back to the layer they are of.

Owns the mark, the question whether a model's attention brings them, and, per thread, the layer whose
attention has not been asked for yet. Never computes. Invariant: a handle that was lost on the way (a model
that works on its keys after the cache) raises: the answer would be silently wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

PREFIX = "kvclient_"  # of our implementations' names in a configuration
HANDLE = "_kvclient_layer"  # the attribute of the keys that update() returns
PADS = "_kvclient_pads"  # …of a mask of rows with padding at their left: how many columns of each
ASK = "_kvclient_ask"  # …of keys whose attention is to show its queries: a function
_pending = threading.local()  # the layer whose attention has not been asked for yet


def give_handle(keys: torch.Tensor, layer: Any) -> torch.Tensor:
    """These keys [batch, kv_heads, keys, head_dim], marked: the attention that is called next must bring
    them.
    """
    return hand_out(keys.view_as(keys), layer)


def hand_out(keys: torch.Tensor, layer: Any) -> torch.Tensor:
    """The same of keys [batch, kv_heads, keys, head_dim] that nobody asks for otherwise: they themselves are
    marked.
    """
    setattr(keys, HANDLE, layer)
    _pending.layer = layer
    return keys


@contextlib.contextmanager
def stepping() -> Iterator[None]:
    """Within it, this thread computes one token a row of a cache that knows by itself what each sees."""
    _pending.step = True
    try:
        yield
    finally:
        _pending.step = False


def in_step() -> bool:
    """Whether this thread is inside a recorded decode step."""
    return getattr(_pending, "step", False)


def layer_of(key: torch.Tensor) -> Any:
    """The layer that these keys [batch, kv_heads, keys, head_dim] are a handle of, or None. Raises
    RuntimeError if one was lost on the way.
    """
    layer = getattr(key, HANDLE, None)
    take_back(layer)
    return layer


def take_back(layer: Any) -> None:
    """The attention that is called has the handle of this layer; None: of none. Raises RuntimeError if
    another one was lost on the way.
    """
    expected, _pending.layer = getattr(_pending, "layer", None), None
    if expected is not None and layer is not expected:
        raise RuntimeError(
            f"the model changed the keys of layer {expected.index} after its cache had them: attention would "
            "miss what the store holds; attach with in_place=False"
        )


def awaited() -> bool:
    """Whether a handle was given out that has not come back."""
    return getattr(_pending, "layer", None) is not None


def expect_nothing() -> None:
    """Raises RuntimeError if a handle was given out and never came back."""
    expected, _pending.layer = getattr(_pending, "layer", None), None
    if expected is not None:
        raise RuntimeError(
            f"the attention of layer {expected.index} was computed by none of the registered functions; "
            "attach with in_place=False"
        )


def forget_pending() -> None:
    """A call begins, or has ended: what an earlier one left behind is nobody's."""
    _pending.layer = None


def hides_alike(layer: Any, mask: torch.Tensor | None) -> bool:
    """Whether a call's mask, [rows, columns], hides what the layer leaves out by itself: whoever goes on with
    its cache may say otherwise."""
    table = getattr(layer, "table", None)  # of pages, whose rows may have been chosen
    pads = table.pads if table is not None else getattr(layer, "_pads", None)
    if pads is None or in_step():
        return True
    if mask is None:
        return not any(pads)
    told = getattr(mask, PADS, None)  # of the columns so far: a prompt may come in chunks
    return told is None or told == [min(pad, mask.shape[1]) for pad in pads]


def tell(keys: torch.Tensor, query: torch.Tensor, scale: float) -> None:
    """The attention that these keys were handed to has its queries, both [batch, heads, tokens, head_dim]."""
    if (ask := getattr(keys, ASK, None)) is not None:
        ask(keys, query, scale)


class Reader:
    """Whether a model's attention is one that reads layers in place: asked by the layers themselves, whose
    cache may outlive the attachment, or what was set at the call.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        # Past __getattribute__ of configurations, which takes ten times as long, for each layer of each step.
        self._attributes = {} if config is None else object.__getattribute__(config, "__dict__")

    def __call__(self) -> bool:
        known = self._attributes.get("_attn_implementation_internal")
        if known is None:
            known = getattr(self._config, "_attn_implementation", "")
        return str(known).startswith(PREFIX)

    def __deepcopy__(self, memo: Any) -> Reader:
        return self  # a copied cache is for the same model

    def __reduce__(self) -> Any:
        return Reader, (None,)  # one from a file is for a model that nobody here knows
