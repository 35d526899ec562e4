"""A prefill in several passes: cut where states are stored, for a recurrent layer shows its state only behind
the last token of a pass; or cut by generate() as it was told.

Owns the cutting of generate()'s arguments, and the telling of where a pass begins. Never changes what the
last pass gives back. Invariant: the passes see the tokens of the prompt once each, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def run_in_pieces(
    run: Callable[..., Any], ids: torch.Tensor, model_kwargs: dict[str, Any], start: int, cuts: Sequence[int],
    at: Callable[[int], Any], *, whole: bool, stepwise: bool,
) -> Any:  # fmt: skip
    """What run(ids), ids [batch, columns], gives for the prompt's rest behind column `start`; at(column) is
    called after each pass.

    whole: generate() itself leaves out what the cache holds; without, as its cache tells no length, what is
    given is the rest. stepwise: the model goes on behind a state with one token at a time only.
    """
    length = ids.shape[1]
    saved = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
    mask = saved["attention_mask"]
    stops = [*(cut for cut in cuts if start < cut < length), length]
    if stepwise:
        stops = [*range(start or stops[0], length + 1)]
        stops = stops[1:] if start else stops
    outputs = None
    for stop in stops:
        first = 0 if whole else start
        if whole and stop < length and mask is None:  # its length is how generate() knows what is new
            mask = torch.ones_like(ids)
        if mask is not None:
            model_kwargs["attention_mask"] = mask[:, first:stop]
        if saved["position_ids"] is not None:
            model_kwargs["position_ids"] = saved["position_ids"][..., first:stop]
        outputs = run(ids[:, first:stop])
        at(stop)
        start = stop
    for name, value in saved.items():
        if name in model_kwargs or value is not None:
            model_kwargs[name] = value
    return outputs


def between_passes(written: Callable[..., None], behind: Callable[[], Any]) -> Callable[..., None]:
    """`written`, which is told of new columns with the layer's number first. behind() is called where a pass
    has ended and another has begun: before the first layer of that."""
    before = -1

    def tell(layer: int, *columns: Any) -> None:
        nonlocal before
        if layer <= before:
            behind()
        before = layer
        written(layer, *columns)

    return tell
