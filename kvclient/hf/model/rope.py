"""How a model turns its keys with their position, found out by asking the model; and the turning of stored
keys.

Owns the probe. Never reads a configuration or a modelling file: it feeds single tokens at several positions.
Alone in its prompt a token attends to itself only, so between two positions nothing of its KV differs but the
turn of K. Invariant: a model passes only if one of the known conventions reproduces every layer's keys at
every probed position from those at another; everything else is Refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvclient import kernels
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.cache.layer import as_array
from kvclient.hf.model.structure import Refused
from kvclient.hf.release import passing

CONVENTIONS = ("half", "interleaved")
POSITIONS = (0, 1, 6, 37, 130, 251)  # those that the model has
TOKENS = 2  # different ones, in the middle of the vocabulary
# Largest difference of two keys over the largest key: the rounding of angles and of the model's dtype.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


FAR_TOLERANCE = 2e-2  # of reaches(): angles far away, computed in single precision


@dataclass(frozen=True)
class Turning:
    """One layer's convention. Without frequencies: its keys do not depend on the position."""

    convention: str
    inv_freq: np.ndarray | None


class Rope:
    """The turn of every layer; one for a whole stretch, with angles computed in double precision."""

    def __init__(self, layers: list[Turning]) -> None:
        self.layers = layers
        self._turns: dict[tuple[int, int], np.ndarray] = {}
        self._places: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # cosines, sines

    def turn(self, layer: int, keys: np.ndarray, shift: int, out: np.ndarray) -> None:
        """Writes `keys` [heads, tokens, head_dim], moved by `shift` positions, into `out`."""
        turning = self.layers[layer]
        if turning.inv_freq is None or shift == 0:
            out[...] = keys
            return
        place = (id(turning.inv_freq), shift)
        turned = self._turns.get(place)
        if turned is None:
            if len(self._turns) > 256:
                self._turns.clear()  # other threads go on with what they got
            turned = self._turns[place] = kernels.turn(turning.inv_freq, shift)
        kernels.rotate(keys, turned, turning.convention, out=out)

    def turn_each(self, layer: int, keys: torch.Tensor, places: torch.Tensor, way: int) -> None:
        """Turns keys [..., tokens, head_dim], in single precision, where they are: from position 0 each to
        its own (1), or back (-1). places: ascending.
        """
        turning = self.layers[layer]
        if turning.inv_freq is None:
            return
        known, last = (id(turning.inv_freq), keys.device), int(places[-1])
        tables = self._places.get(known)
        if tables is None or len(tables[0]) <= last:
            frequencies = torch.from_numpy(np.asarray(turning.inv_freq, np.float64))
            angles = torch.arange(2 * last + 1, dtype=torch.float64)[:, None] * frequencies
            tables = angles.cos().float().to(keys.device), angles.sin().float().to(keys.device)
            self._places[known] = tables  # another thread may put shorter ones there
        cos, sin = (table[places] for table in tables)
        size = 2 * cos.shape[1]
        if turning.convention == "half":
            first, second = keys[..., : size // 2], keys[..., size // 2 : size]
        else:
            first, second = keys[..., 0:size:2], keys[..., 1:size:2]
        before = first.clone()
        first.mul_(cos).sub_(second * sin, alpha=way)
        second.mul_(cos).add_(before * sin, alpha=way)


def probe_rope(model: torch.nn.Module) -> Rope:
    """Raises Refused, with the reason, if keys cannot be moved to another position."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or POSITIONS[-1] + 1
    positions = [p for p in POSITIONS if p < limit]
    tokens = [config.vocab_size // 2 + i for i in range(TOKENS)]
    seen = {(t, p): _layers_of(model, t, p) for t in tokens for p in positions}
    tables = _tables(model)
    turnings = []
    for layer in range(len(seen[tokens[0], 0])):
        keys = {place: layers[layer][0] for place, layers in seen.items()}
        values = {place: layers[layer][1] for place, layers in seen.items()}
        if any(
            _difference(values[t, p], values[t, 0]) > _tolerance(model) for t in tokens for p in positions
        ):
            raise Refused(
                f"{name} has positions in what it caches besides K (learned ones): no rotation moves them"
            )
        turnings.append(_turning(name, layer, keys, tables, _tolerance(model)))
    return Rope(turnings)


def reaches(model: torch.nn.Module, rope: Rope, position: int) -> bool:
    """Whether keys at that position, which may be beyond the model's, are those at another, turned."""
    token = model.config.get_text_config(decoder=True).vocab_size // 2
    try:
        here, there = _layers_of(model, token, 0), _layers_of(model, token, position)
    except Refused:
        return False
    for turning, (key, _), (other, _) in zip(rope.layers, here, there, strict=True):
        if turning.inv_freq is not None:
            key = rotated(key, turning.inv_freq, position, turning.convention)
        if _difference(key, other) > FAR_TOLERANCE + _tolerance(model):
            return False
    return True


def _turning(
    name: str, layer: int, keys: dict[Any, torch.Tensor], tables: list[np.ndarray], most: float
) -> Turning:
    if all(_difference(key, keys[token, 0]) <= most / 10 for (token, _), key in keys.items()):
        return Turning("half", None)
    for table in tables:
        for convention in CONVENTIONS:
            if 2 * len(table) <= next(iter(keys.values())).shape[-1] and all(
                _difference(rotated(keys[token, start], table, stop - start, convention), key) <= most
                for (token, stop), key in keys.items()
                for start in (0, 6)
                if (token, start) in keys
            ):
                return Turning(convention, table)
    raise Refused(f"{name}: no known rotation moves the keys of layer {layer} to another position")


def rotated(keys: torch.Tensor, inv_freq: np.ndarray, shift: int, convention: str) -> torch.Tensor:
    """The definition: keys [..., head_dim] turned by `shift` positions, in double precision."""
    angles = torch.from_numpy(np.asarray(inv_freq, np.float64) * shift)
    cos, sin = angles.cos(), angles.sin()
    out, size = keys.double().clone(), 2 * len(inv_freq)
    if convention == "half":
        first, second = slice(0, size // 2), slice(size // 2, size)
    else:
        first, second = slice(0, size, 2), slice(1, size, 2)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _tables(model: torch.nn.Module) -> list[np.ndarray]:
    """Every inv_freq the model has, each once; of sines and cosines of all positions (GPT-J), those they
    were made of."""
    found: dict[bytes, np.ndarray] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            table = None
            if key.endswith("inv_freq") and not key.startswith("original"):
                table = buffer
            elif key == "embed_positions":
                table = _frequencies(buffer)
            if table is not None and table.ndim == 1:
                array = table.detach().to("cpu", torch.float32).numpy().copy()
                found.setdefault(array.tobytes(), array)
    return list(found.values())


def _frequencies(table: torch.Tensor | None) -> torch.Tensor | None:
    """Of a table [positions, sines and then cosines]: the angles of position 1, none of which is a whole
    turn."""
    if table is None or table.ndim != 2 or len(table) < 2 or table.shape[1] % 2:
        return None
    sine, cosine = table[1].double().chunk(2)
    return torch.atan2(sine, cosine)


@torch.no_grad()
def _layers_of(model: torch.nn.Module, token: int, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V per layer of one token that stands alone at that position."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.tensor([[token]], device=model.device)
    positions = torch.full_like(ids, position)
    try:
        with evaluating(model):
            model(input_ids=ids, position_ids=positions, use_cache=True, **passing(cache))
    except Exception as error:  # whatever the model's own code raises
        reason = f"{type(model).__name__} takes no position_ids ({error!r:.120})"
        raise Refused(f"{reason}: where its positions are cannot be found out") from error
    return [(layer.keys[0, :, 0].cpu(), layer.values[0, :, 0].cpu()) for layer in cache.layers]


def _difference(value: torch.Tensor, other: torch.Tensor) -> float:
    scale = float(other.abs().max()) or 1.0
    return float((value.double() - other.double()).abs().max()) / scale


def _tolerance(model: torch.nn.Module) -> float:
    return TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])


def turned_tensor(rope: Rope, layer: int, keys: torch.Tensor, shift: int) -> torch.Tensor:
    """The same for a tensor [heads, tokens, head_dim] that is not in this machine's memory."""
    on_cpu = keys.to("cpu").contiguous()
    out = torch.empty_like(on_cpu)
    rope.turn(layer, as_array(on_cpu), shift, as_array(out))
    return out.to(keys.device)
