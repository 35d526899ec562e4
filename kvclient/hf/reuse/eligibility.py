"""Whether a model lets stretches inside a prompt be reused: found out before the first is.

Owns the proof: stretches of a prompt, computed by the model itself, are turned away from their positions,
stored, found, turned back and put into a pass that computes the other rows only. That changes nothing but
rounding if the turn, the cut rows, their masks and positions are right for this architecture. Invariant: what
does not give the logits of a full prefill there is Refused with the reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvclient.blocks.match import Piece
from kvclient.blocks.reuse_plan import APPROXIMATE, Segment
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.cache.layer import Shape, as_array, replace_layers
from kvclient.hf.call import Clock
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.rope import probe_rope, rotated
from kvclient.hf.model.structure import KVShape, Refused, widest_window
from kvclient.hf.release import passing
from kvclient.hf.reuse.blend import Blend, NonPrefixReuse, decoder_layers
from kvclient.hf.reuse.blend_layer import BlendLayer
from kvclient.hf.reuse.repair import Repair

LENGTH = 40  # tokens of the proof's prompt
STRETCHES = ((3, 17, 9), (20, 33, -5))  # start, stop, and how far away they were computed
# Largest difference of two logits over their largest magnitude: rounding, not more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


def examine_non_prefix(model: torch.nn.Module, kv: KVShape, repair: Repair) -> NonPrefixReuse:
    """Raises Refused, with the reason."""
    if window := widest_window(model.config.get_text_config(decoder=True)):
        raise Refused(
            f"{type(model).__name__} has layers that see {window} tokens: only prefixes are reused"
        )
    if kv.states:
        raise Refused(
            f"{type(model).__name__} has recurrent layers, whose state is of all tokens before it: only "
            "prefixes are reused"
        )
    if not kv.plain and not kv.latent:
        raise Refused(f"{type(model).__name__} has layers of different shapes: only prefixes are reused")
    if kv.latent:
        raise Refused(
            f"{type(model).__name__} caches a latent and a rope key, no K and V of heads: only prefixes "
            "are reused"
        )
    non_prefix = NonPrefixReuse(probe_rope(model), decoder_layers(model, kv.layers), repair, model.config)
    with evaluating(model):
        for method in ("none", "cacheblend"):
            try:
                difference = _prove(model, kv, _trial(non_prefix, method))
            except RuntimeError as error:
                if non_prefix.refills or "invalid for input of size" not in str(error):  # of a view
                    raise
                non_prefix = dataclasses.replace(non_prefix, refills=True)
                difference = _prove(model, kv, _trial(non_prefix, method))
            if not difference <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
                raise Refused(
                    f"{type(model).__name__}: a pass over some rows ({method}) gives logits that differ by "
                    f"{difference:.2g} from a full one: it does not treat rows by their position alone"
                )
    return non_prefix


def _trial(non_prefix: NonPrefixReuse, method: str) -> NonPrefixReuse:
    return dataclasses.replace(non_prefix, repair=Repair(method, ratio=0.0, sink_tokens=0, min_tokens=1))


@torch.no_grad()
def _prove(model: torch.nn.Module, kv: KVShape, non_prefix: NonPrefixReuse) -> float:
    config = model.config.get_text_config(decoder=True)
    step = max(1, config.vocab_size // LENGTH)
    ids = ((torch.arange(LENGTH) * 7 % LENGTH) * step)[None].to(model.device)
    plain = DynamicCache(config=config)
    wanted = model(input_ids=ids, use_cache=True, **passing(plain)).logits[0, -1]
    segments = []
    for start, stop, away in STRETCHES:
        piece = Piece(_Stored(plain, non_prefix, start, stop, away), 0, stop - start)
        segments.append(Segment(start, stop, APPROXIMATE, (piece,), start + away))
    blend = Blend(non_prefix, segments, 0, LENGTH, Clock(), BlockFormat.main(kv))
    shape = Shape(1, kv.heads, kv.head_dim, kv.dtype, model.device, LENGTH)
    cache = DynamicCache(config=config)
    replace_layers(cache, [BlendLayer(blend, index, shape) for index in range(kv.layers)])
    with blend:
        got = model(input_ids=ids, use_cache=True, **passing(cache)).logits[0, -1]
    scale = float(wanted.abs().max()) or 1.0
    value = float((got.float() - wanted.float()).abs().max()) / scale
    return value if value == value else float("inf")


class _Stored:
    """A block with tokens start..stop of a cache, as if they had stood `away` positions behind."""

    def __init__(
        self, cache: DynamicCache, non_prefix: NonPrefixReuse, start: int, stop: int, away: int
    ) -> None:
        self.tokens = stop - start
        self._layers = []
        for layer, turning in zip(cache.layers, non_prefix.rope.layers, strict=True):
            keys, values = layer.keys[0, :, start:stop].cpu(), layer.values[0, :, start:stop].cpu()
            if turning.inv_freq is not None:
                keys = rotated(keys, turning.inv_freq, away, turning.convention).to(keys.dtype)
            self._layers.append(torch.stack([keys, values]))

    def layer(self, index: int) -> np.ndarray:
        return as_array(self._layers[index])

    def tensor(self, index: int) -> Any:
        return self._layers[index]
