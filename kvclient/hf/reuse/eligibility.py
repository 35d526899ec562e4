"""Whether a model lets stretches inside a prompt be reused: found out before the first is.

Owns the proof: stretches of a prompt, computed by the model itself, are turned away from their positions,
stored, found, turned back and put into a pass that computes the other rows only. That changes nothing but
rounding if the turn, the cut rows, their masks and positions are right for this architecture. Invariant: what
does not give the logits of a full prefill there is Refused with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvclient.blocks.match import Piece
from kvclient.blocks.reuse_plan import APPROXIMATE, Segment
from kvclient.errors import InvalidArgument
from kvclient.hf.attention.proof import TOLERANCE, evaluating
from kvclient.hf.cache.layer import Shape, as_array, replace_layers
from kvclient.hf.call import Clock
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.rope import probe_rope, rotated
from kvclient.hf.model.structure import KVShape, Refused
from kvclient.hf.release import passing
from kvclient.hf.reuse.blend import Blend, NonPrefixReuse, decoder_layers
from kvclient.hf.reuse.blend_layer import BlendLayer
from kvclient.hf.reuse.repair import Repair
from kvclient.hf.reuse.windows import GroupPieces, Windows

LENGTH = 40  # tokens of the proof's prompt
STRETCHES = ((3, 17, 9), (20, 33, -5))  # start, stop, and how far away they were computed
BEHIND, MOST = 24, 640  # tokens: so many more than a window, which is tried as far as the second


def examine_non_prefix(model: torch.nn.Module, kv: KVShape, repair: Repair) -> NonPrefixReuse:
    """Raises Refused, with the reason."""
    if kv.states:
        raise Refused(
            f"{type(model).__name__} has recurrent layers, whose state is of all tokens before it: only "
            "prefixes are reused"
        )
    if kv.latent:
        raise Refused(
            f"{type(model).__name__} caches a latent and a rope key, no K and V of heads: only prefixes "
            "are reused"
        )
    if kv.beside:
        raise Refused(
            f"{type(model).__name__} keeps more of a token than K and V of heads: only prefixes are reused"
        )
    if kv.shares:
        raise Refused(
            f"{type(model).__name__} has layers that keep no K and V of their own: only prefixes are reused"
        )
    non_prefix = NonPrefixReuse(probe_rope(model), decoder_layers(model, kv.layers), repair, model.config)
    with evaluating(model):
        for method in ("none", "cacheblend"):
            try:
                difference = _prove(model, kv, _trial(non_prefix, method))
            except Refilling:
                non_prefix = dataclasses.replace(non_prefix, refills=True)
                difference = _prove(model, kv, _trial(non_prefix, method))
            if not difference <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
                raise Refused(
                    f"{type(model).__name__}: a pass over some rows ({method}) gives logits that differ by "
                    f"{difference:.2g} from a full one: it does not treat rows by their position alone"
                )
    return non_prefix


class Refilling(Exception):
    """Behind its last layer the model wants as many rows as tokens. Internal."""


@contextlib.contextmanager
def _cut(model: torch.nn.Module, non_prefix: NonPrefixReuse) -> Iterator[None]:
    """Of a pass over some rows. Raises Refused for what the model's own code raises then."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, InvalidArgument):
        raise
    except Exception as error:
        if not non_prefix.refills and "invalid for input of size" in str(error):  # of a view
            raise Refilling from error
        raise Refused(
            f"{type(model).__name__} does not run over some rows of a prompt ({error!r:.200}): only prefixes "
            "are reused"
        ) from error


def _trial(non_prefix: NonPrefixReuse, method: str) -> NonPrefixReuse:
    return dataclasses.replace(non_prefix, repair=Repair(method, ratio=0.0, sink_tokens=0, min_tokens=1))


@torch.no_grad()
def _prove(model: torch.nn.Module, kv: KVShape, non_prefix: NonPrefixReuse) -> float:
    config = model.config.get_text_config(decoder=True)
    windows = [group.window for group in kv.groups if group.window]
    longest = getattr(config, "max_position_embeddings", None) or MOST
    length = max(LENGTH, min(min(windows) + BEHIND, MOST, longest)) if windows else LENGTH
    step = max(1, config.vocab_size // LENGTH)
    ids = ((torch.arange(length) * 7 % LENGTH) * step)[None].to(model.device)
    plain = DynamicCache()  # keeps what left a window
    wanted = model(input_ids=ids, use_cache=True, **passing(plain)).logits[0, -1]
    first, (start, stop, away) = STRETCHES
    stretches = (first, (start, stop + length - LENGTH, away))

    def found(layers: Sequence[int]) -> list[Segment]:
        out = []
        for start, stop, away in stretches:
            piece = Piece(_Stored(plain, non_prefix, layers, start, stop, away), 0, stop - start)
            out.append(Segment(start, stop, APPROXIMATE, (piece,), start + away))
        return out

    main, groups = BlockFormat.main(kv), [(group, BlockFormat.group(group, kv.dtype)) for group in kv.groups]
    parts = Windows([GroupPieces(group, form, tuple(found(group.layers))) for group, form in groups], length)
    of = range(kv.layers) if main.of is None else main.of
    blend = Blend(non_prefix, found(of), 0, length, Clock(), main, parts if groups else None)
    cache, layers = DynamicCache(config=config), []
    for form, these in [(main, of), *((form, group.layers) for group, form in groups)]:
        shape = Shape(1, form.heads, form.head_dim, form.dtype, model.device, length)
        layers += [BlendLayer(blend, index, shape) for index in these]
    replace_layers(cache, sorted(layers, key=lambda layer: layer.index))
    with blend, _cut(model, non_prefix):
        got = model(input_ids=ids, use_cache=True, **passing(cache)).logits[0, -1]
    scale = float(wanted.abs().max()) or 1.0
    value = float((got.float() - wanted.float()).abs().max()) / scale
    return value if value == value else float("inf")


class _Stored:
    """A block with tokens start..stop of some layers of a cache, as if they had stood `away` further on."""

    def __init__(
        self, cache: DynamicCache, non_prefix: NonPrefixReuse, layers: Sequence[int], start: int, stop: int,
        away: int,
    ) -> None:  # fmt: skip
        self.tokens = stop - start
        self._layers = []
        for index in layers:
            layer, turning = cache.layers[index], non_prefix.rope.layers[index]
            keys, values = layer.keys[0, :, start:stop].cpu(), layer.values[0, :, start:stop].cpu()
            if turning.inv_freq is not None:
                keys = rotated(keys, turning.inv_freq, away, turning.convention).to(keys.dtype)
            self._layers.append(torch.stack([keys, values]))

    def layer(self, index: int) -> np.ndarray:
        return as_array(self._layers[index])

    def tensor(self, index: int) -> Any:
        return self._layers[index]
