"""A cache layer on a GPU: its first tokens as the store has them, in device memory, the tail behind them.

Owns the table that the kernel reads, and what its tail has. Never keeps a dense tensor of the prefix, unless
somebody asks for what only that can give; then one launch dequantises and scatters it. For one call with many
queries that is done too, and torch attends. Invariant: that of InPlaceLayer; and the table's tails are as
long as the tokens kept when the attention is queued.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from kvclient.hf.attention import dense, sdpa
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.cache.staging import Staged, segments_of_rows
from kvclient.kernels import cuda
from kvclient.kernels.cuda_attention import Table, Workspace, attend


class Positions:
    """Where the newest tokens stand, on the device: the same for all layers of a step."""

    def __init__(self) -> None:
        self._last: tuple[Any, torch.Tensor] | None = None

    def of(self, length: int, tokens: int, batch: int, device: torch.device) -> torch.Tensor:
        """Where the last `tokens` of `length` columns stand, int64 [batch, tokens]; kept for the next layer.
        """
        key = (length, tokens, batch, device)
        if self._last is None or self._last[0] != key:
            columns = torch.arange(length - tokens, length, device=device)
            self._last = (key, columns.expand(batch, tokens).contiguous())
        return self._last[1]


class DeviceLayer(InPlaceLayer):
    """`staged`: where its first tokens come from, None if there are none."""

    device_type = "cuda"
    by_numpy = False

    def __init__(
        self, *args: Any, staged: Staged | None = None, positions: Positions | None = None, **kwargs: Any
    ) -> None:
        self._staged, self._positions = staged, positions or Positions()
        self._held: torch.Tensor | None = None
        super().__init__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_staged": None}

    def __deepcopy__(self, memo: Any) -> DeviceLayer:
        """Over the same blocks, with a tail of its own."""
        self._open_blocks()
        other = copy.copy(self)
        if self._storage is not None:
            other._storage = self._storage.clone()
            if self._dense:
                other._show(self._length)
        return other

    def _open_blocks(self) -> None:
        if self._prefix is None:
            self._source = None
            assert self._staged is not None
            staged, self._staged = self._staged, None
            self._prefix, self._held = staged.layer(self.index)

    def reset(self) -> None:
        super().reset()
        self._staged = self._held = None

    def detach_store(self) -> None:
        super().detach_store()
        self._staged = None

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None, scale: float, softcap: float, window: int,
        path: int,
    ) -> torch.Tensor:  # fmt: skip
        """[B, T, heads, D] of the newest T tokens over all."""
        batch, heads, tokens, head_dim = query.shape
        if tokens >= sdpa.MANY_TOKENS and (keys_values := self._for_torch(query, sinks, softcap, window)):
            return sdpa.attend("torch_cudnn", query, *keys_values, scale, True)
        query = dense.heads_together(query)
        out = query.new_empty((batch, tokens, heads, head_dim))
        if self._call is None:
            self._call = self._tables(heads)
        table, starts = self._call
        position, workspace = self._tell(table, starts, batch, tokens)
        attend(
            table, query, position, scale, out.transpose(1, 2), self.shape.heads, workspace, softcap=softcap,
            window=window, sinks=None if sinks is None else sinks.float().contiguous(),
        )  # fmt: skip
        return out

    def _for_torch(
        self, query: torch.Tensor, sinks: torch.Tensor | None, softcap: float, window: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values [B, KV heads, N, D], for this call only; None if torch's attention is none for
        it, or ours is as fast.
        """
        storage, count = self._storage, self._length
        if storage is None or not query.is_cuda or any(self._pads):
            return None
        if sdpa.unfit(None, window, count, softcap, sinks) is not None:
            return None
        tail = storage[:, :, :, : count - self.origin]
        if not self._prefix:
            return tail[0], tail[1]
        rows, (_, _, heads, _, head_dim) = tail.shape[1], storage.shape
        whole = storage.new_empty((2, rows, heads, count, head_dim))
        self._bring(self._prefix, range(rows), whole)
        whole[:, :, :, self.origin :] = tail
        return whole[0], whole[1]

    def _tell(
        self, table: Table, starts: torch.Tensor, batch: int, tokens: int
    ) -> tuple[torch.Tensor, Workspace | None]:
        """Writes how many tokens the tails have; where the newest ones stand, and whose workspace it is."""
        torch.sub(self._length, starts, out=table.tail_tokens)
        return self._positions.of(self._length, tokens, batch, starts.device), None

    def _tables(self, heads: int) -> tuple[Table, torch.Tensor]:
        """The table, and the column that each row's tail begins at, on the device."""
        assert self._storage is not None
        storage, rows = self._storage, self._storage.shape[1]
        begins = [max(pad, self.origin) for pad in self._pads]
        tails = [
            cuda.segment(
                (storage[0, row],), (storage[1, row],), first=begin - self.origin, tokens=0, position=begin
            )
            for row, begin in enumerate(begins)
        ]
        table = Table(
            segments_of_rows(self._prefix or [], rows), storage.device, heads, self.shape.heads,
            self.shape.head_dim, tails, (self._held, storage), self.dtype,
        )  # fmt: skip
        return table, torch.tensor(begins, dtype=torch.int32, device=storage.device)

    def _copy_prefix(self, prefix: list[tuple[int, Any]], from_row: list[int], whole: torch.Tensor) -> None:
        self._held = None
        if prefix:
            self._bring(prefix, from_row, whole)

    def _bring(self, prefix: list[tuple[int, Any]], from_row: Sequence[int], whole: torch.Tensor) -> None:
        """Dequantises the blocks of row from_row[i] into row i of [2, rows, heads, columns, head_dim]."""
        keys, values = whole[:, 0]
        row, token = (whole.stride(axis) * whole.element_size() for axis in (1, 3))
        parts = [
            (to * row + struct.new_position * token, struct)
            for at, struct in prefix
            for to, source in enumerate(from_row)
            if source == at
        ]
        cuda.load(
            keys, values, cuda.table([struct for _, struct in parts], whole.device),
            torch.tensor([place for place, _ in parts], dtype=torch.int64, device=whole.device),
            max(struct.tokens for _, struct in parts), 0, False,
        )  # fmt: skip
