"""Where a conversation lies in the store between its turns: one block per state, in two places by turns.

Owns the format of that block. Never computes anything. Invariant: the newest state in the store is forgotten
only for one of the same turn, so a process that dies at any point leaves the last one that was saved or the
one before; and what is loaded is, bit by bit, what was saved.

    layer 0: JSON | layer i + 1: a byte per older group (1: quantised) | head | older groups | recent
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.blocks.keys import chain
from kvclient.blocks.layout import Layout
from kvclient.errors import BlockLost, PinsExhausted
from kvclient.hf.cache.layer import array_dtype, as_array
from kvclient.hf.engine.window import Window, WindowCache, WindowLayer

VERSION = 1
UNIT = 4096  # bytes of a layer per "token" of such a block, so that one layout serves every size
MAX_UNITS = 65_535
PLACES = 2
WAIT_S = 5.0  # for a state that lies on disk, or that another process is writing
TRIES = 3  # to save one
FIELDS = ("turn", "pending", "tokens", "dropped", "head_wanted", "head", "older", "recent")


@dataclass
class State:
    """What a turn leaves besides KV."""

    turn: int = 0
    pending: int = -1  # the last token chosen: it has no KV yet. -1: none


class SavedState:
    """The two places of one conversation of one model, under one window."""

    def __init__(
        self, client: Any, identity: Callable[[], bytes], name: str, window: Window, priority: int
    ) -> None:
        codec = window.codec.parameters
        text = json.dumps(
            [VERSION, name, window.recent, window.older, window.sink_tokens, codec], sort_keys=True
        )
        self._client, self._priority, self._identity, self._own = client, priority, identity, text.encode()

    @property
    def _keys(self) -> list[bytes]:
        """Asked each time: the identity changes with the namespace's salt, which a daemon met late says."""
        digest = hashlib.sha256(b"kvstored conversation\0" + self._identity() + self._own).digest()
        return [chain(digest, [place], 1).keys[0] for place in range(PLACES)]

    def newest(self) -> int:
        """The turn of the newest state there is; 0 if there is none."""
        return max((header["turn"] for header in self._headers() if header is not None), default=0)

    def load(self, cache: WindowCache) -> State | None:
        """Fills an empty cache with the newest state. None if there is none."""
        headers = enumerate(self._headers())
        known = [(header["turn"], place) for place, header in headers if header is not None]
        if not known:
            return None
        blocks = self._client.get([self._keys[max(known)[1]]], wait_s=WAIT_S)
        try:
            view = blocks[0]
            header = _header(view) if view is not None else None
            if header is None:
                return self.load(cache)  # replaced meanwhile, by a newer one
            for index, layer in enumerate(cache.layers):
                _unpack(layer, view.layer(index + 1).reshape(-1), header)
            cache.head_tokens, cache.tokens = header["head_wanted"], header["tokens"]
            cache.dropped = header["dropped"]
            return State(header["turn"], header["pending"])
        finally:
            blocks.release()

    def save(self, cache: WindowCache, state: State) -> bool:
        """False if the store has no room, or others save the same turn all the time: it has the turn before
        then, or theirs.
        """
        packed = [_pack(layer) for layer in cache.layers]
        units = -(-max(len(part) for part in packed) // UNIT)
        layout = Layout(len(packed) + 1, 1, UNIT, "uint8", MAX_UNITS, 1, meta_fixed=0, meta_per_token=0)
        key = self._keys[self._place(state.turn)]
        layout_id = self._client.register_layout(layout)
        for _ in range(TRIES):  # of two that save the same turn the last to end stays
            self._client.delete([key])
            writer = self._client.create([key], layout_id, priority=self._priority, token_counts=[units])
            if writer.results[0] not in ("pending", "exists"):
                break
            self._client.get([key], wait_s=WAIT_S).release()
        if not writer.granted:
            return False
        try:
            block = writer[0]
            for index, part in enumerate([_header_bytes(cache, state), *packed]):
                target = block.layer(index).reshape(-1)
                target[: len(part)] = part
                target[len(part) :] = 0  # the memory was another prompt's
                block.mark_layer(index)
            writer.seal()
        except BlockLost:
            return False
        finally:
            writer.abort()
        return True

    def _place(self, turn: int) -> int:
        """Where that turn lies already, or else the older state."""
        turns = [0 if header is None else header["turn"] for header in self._headers()]
        return turns.index(turn if turn in turns else min(turns))

    def forget(self) -> None:
        """Deletes its blocks from the store."""
        self._client.delete(self._keys)

    def _headers(self) -> list[dict[str, int] | None]:
        """Of each place what its state says of itself."""
        return [self._header_at(place) for place in range(PLACES)]

    def _header_at(self, place: int) -> dict[str, int] | None:
        blocks = self._client.get([self._keys[place]], wait_s=WAIT_S)
        try:
            view = blocks[0]
            return _header(view) if view is not None else None
        except PinsExhausted:
            return None
        finally:
            blocks.release()


def _header_bytes(cache: WindowCache, state: State) -> np.ndarray:
    layer = cache.layers[0]
    header = {
        "turn": state.turn, "pending": state.pending, "tokens": cache.tokens, "dropped": cache.dropped,
        "head_wanted": cache.head_tokens, "head": layer.head.shape[2], "older": len(layer.older),
        "recent": layer.recent.shape[2],
    }  # fmt: skip
    return np.frombuffer(json.dumps(header).encode(), np.uint8)


def _header(view: Any) -> dict[str, int] | None:
    text = view.layer(0).reshape(-1)[:UNIT].tobytes().rstrip(b"\0")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(header, dict) and all(type(header.get(name)) is int for name in FIELDS)
    return header if whole and min(header[name] for name in FIELDS if name != "pending") >= 0 else None


def _pack(layer: WindowLayer) -> np.ndarray:
    flags = np.array([isinstance(group, np.ndarray) for group in layer.older], np.uint8)
    return np.concatenate([flags, *(_bytes_of(part) for part in (layer.head, *layer.older, layer.recent))])


def _bytes_of(part: np.ndarray | torch.Tensor) -> np.ndarray:
    array = part if isinstance(part, np.ndarray) else as_array(part.to("cpu").contiguous())
    return array.reshape(-1).view(np.uint8)


def _unpack(layer: WindowLayer, stored: np.ndarray, header: dict[str, int]) -> None:
    kv, group = layer.kv, layer.window.codec.group
    at = header["older"]
    flags = stored[:at]

    def tokens(count: int) -> torch.Tensor:
        nonlocal at
        size = 2 * kv.heads * count * kv.head_dim * kv.dtype.itemsize
        array = stored[at : at + size].copy().view(array_dtype(kv.dtype))
        at += size
        tensor = torch.from_numpy(array.reshape(2, kv.heads, count, kv.head_dim))
        tensor = tensor.view(torch.bfloat16) if kv.dtype == torch.bfloat16 else tensor
        return tensor.to(layer.device)

    layer.head = tokens(header["head"])
    layer.older = []
    for quantised in flags:
        if quantised:
            layer.older.append(stored[at : at + layer.quantised_bytes()].copy())
            at += layer.quantised_bytes()
        else:
            layer.older.append(tokens(group))
    layer.recent = tokens(header["recent"])
