"""The newest tokens of several requests on a GPU, each over its own cache: one launch a layer for all.

Owns the tables of such steps, which stay until another request joins, one leaves or a tail moves. Never
copies a key. Invariant: that of RaggedLayer; a table is used for the very layers and memory it was made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kvclient.hf.attention import dense
from kvclient.hf.attention.handle import forget_pending, give_handle
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.cache.ragged import RaggedLayer
from kvclient.hf.cache.staging import segments_of_rows
from kvclient.kernels import cuda
from kvclient.kernels.cuda_attention import Table, attend

Known = tuple[list[weakref.ref[Any]], Table]  # of one layer of the model; what it was made of is not held


class RaggedDeviceLayer(RaggedLayer):
    """calls: of this step, where its tokens stand; tables: by number of the layer, kept by who steps."""

    def __init__(self, *args: Any, tables: dict[int, Known]) -> None:
        super().__init__(*args)
        self._tables = tables

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """[tokens of all requests, heads, 1, D]."""
        self._held, self._heads = [], key_states.shape[1]
        for layer, count, end in zip(self._layers, self._counts, self._ends, strict=True):
            pair = (states[end - count : end].transpose(0, 2) for states in (key_states, value_states))
            self._held.append(layer.update(*pair))
            forget_pending()  # its attention is computed here, with the others'
        return give_handle(key_states, self), value_states

    def _attend(
        self, part: Sequence[int], query: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None,
        scale: float, softcap: float, window: int, path: int,
    ) -> None:  # fmt: skip
        """query: [B, heads, T, D], T new tokens of each request of this part; out: [B, T, heads, D]."""
        layers = [self._layers[row] for row in part]
        if query.shape[2] == 1 and all(type(layer) is DeviceLayer and layer.in_place for layer in layers):
            lengths, positions = self._lengths([layer.get_seq_length() for layer in layers], query.device)
            table = self._table(layers, query.shape[1])
            torch.sub(lengths, table.alive[0], out=table.tail_tokens)
            attend(
                table, query, positions, scale, out.transpose(1, 2), self._heads, None, softcap=softcap,
                window=window, sinks=sinks,
            )  # fmt: skip
            return
        for place, row in enumerate(part):
            layer, asked = self._layers[row], query[place : place + 1]
            if isinstance(layer, DeviceLayer) and layer.in_place:
                found = layer.attend(asked, sinks, scale, softcap, window, path)
            else:
                found = dense.attend(asked, *self._held[row], None, sinks, scale, softcap, window, True, path)
            out[place : place + 1] = found

    def _lengths(self, lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [B] on the device, and where the newest token of each stands, int64 [B, 1]."""
        if (known := self._calls.get("lengths")) is None or known[0] != lengths:
            told = torch.tensor(lengths, dtype=torch.int32).to(device, non_blocking=True)
            known = self._calls["lengths"] = (lengths, told, told[:, None].long() - 1)
        return known[1], known[2]

    def _table(self, layers: list[DeviceLayer], heads: int) -> Table:
        """Of these layers' blocks and tails. alive[0]: the column that each tail begins at, int32 [B]."""
        storages = [layer.storage for layer in layers]
        used = [*layers, *storages]
        known = self._tables.get(self.index)
        if known is not None and self._same(known[0], used):
            return known[1]
        begins = [max(layer._pads[0], layer.origin) for layer in layers]
        tails = [
            cuda.segment(
                (storage[0, 0],), (storage[1, 0],), first=begin - layer.origin, tokens=0, position=begin
            )
            for layer, storage, begin in zip(layers, storages, begins, strict=True)
        ]
        first = layers[0]
        starts = torch.tensor(begins, dtype=torch.int32, device=storages[0].device)
        rows = [segments_of_rows(layer._prefix or [], 1)[0] for layer in layers]
        table = Table(
            rows, storages[0].device, heads, self._heads, first.shape.head_dim, tails, (starts,), first.dtype
        )
        self._tables[self.index] = ([weakref.ref(layer) for layer in used], table)
        return table

    @staticmethod
    def _same(refs: Sequence[Any], used: Sequence[Any]) -> bool:
        return len(refs) == len(used) and all(ref() is held for ref, held in zip(refs, used, strict=True))
