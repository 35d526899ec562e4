"""Attention on a GPU over segments where they lie, prepared once and run as often as one likes.

    call = Call(q, position, rows, scale, tails=tails)   # segments: kvclient.kernels.cuda.segment()
    call.run()                                           # one launch; call.out has the result

Owns the table of segments on the device and the workspace. Never waits for the device, never copies a key.
Invariant: what a call points to lives as long as the call; the table is read when the kernel runs, so that a
captured run() sees what was written into it since (`tail_tokens`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, sizeof
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract
from kvclient.kernels.cuda import DTYPES, run, segment

SEQUENCE_WORDS = sizeof(contract.Sequence) // 4
TAIL_TOKENS_WORD = (contract.Sequence.tail.offset + contract.Segment.tokens.offset) // 4


class Call:
    """q [batch, query heads, tokens, head_dim] at position [batch, tokens] (int64, on q's device), each batch
    row against its own segments and tail.

    window: keys less than so many positions behind the query; stretches: the keys are cut into at most so
    many; path: KVK_CUDA_*. lse: float32 [batch, query heads, tokens], written if given.
    """

    def __init__(
        self, q: torch.Tensor, position: torch.Tensor, rows: Sequence[Sequence[Any]], scale: float, *,
        kv_heads: int, tails: Sequence[Any] | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = True,
        window: int = 0, softcap: float = 0.0, interleaved: bool = False, rotary_dim: int = 0,
        stretches: int = 0, path: int = 0, alive: Any = None,
    ) -> None:  # fmt: skip
        batch, heads, tokens, head_dim = q.shape
        if len(rows) != batch or position.shape != (batch, tokens) or position.dtype != torch.int64:
            raise InvalidArgument(f"{len(rows)} rows, positions {list(position.shape)} for {list(q.shape)}")
        if q.stride(3) != 1 or q.dtype not in DTYPES:
            raise InvalidArgument(f"queries {q.dtype} with strides {q.stride()}; their elements lie apart")
        self.out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        position = position.contiguous()
        size = q.element_size()
        self.args = contract.Attention(
            sizeof(contract.Attention), contract.ABI, batch, heads, kv_heads, head_dim, tokens,
            DTYPES[q.dtype], q.data_ptr(), *(size * stride for stride in q.stride()[:3]),
            self.out.data_ptr(), *(size * stride for stride in self.out.stride()[:3]),
            None if lse is None else lse.data_ptr(), position.data_ptr(), None,
            None if sinks is None else sinks.data_ptr(), scale, softcap, causal, window, int(interleaved),
            rotary_dim, stretches, path,
        )  # fmt: skip
        self._alive = (q, position, lse, sinks, alive)
        self._library = contract.cuda()
        self.table = self._table(rows, tails or [None] * batch, q.device)
        need = self._library.kvk_attention_workspace(byref(self.args))
        if need == 0:
            contract.check(contract.INVALID, self._library)
        self._workspace = torch.zeros(need, dtype=torch.uint8, device=q.device)
        self.args.workspace, self.args.workspace_bytes = self._workspace.data_ptr(), need

    def run(self) -> torch.Tensor:
        run("kvk_attend", self.args, self.out)
        return self.out

    def tail_tokens(self, row: int) -> torch.Tensor:
        """How many tokens the tail of that row has, as the device reads it: int32 [1], to be written."""
        words = self.table.view(torch.int32)
        place = row * SEQUENCE_WORDS + TAIL_TOKENS_WORD
        return words[place : place + 1]

    def _table(
        self, rows: Sequence[Sequence[Any]], tails: Sequence[Any], device: torch.device
    ) -> torch.Tensor:
        lists = [(contract.Segment * len(row))(*row) for row in rows]
        sequences = (contract.Sequence * len(rows))()
        for sequence, items, tail in zip(sequences, lists, tails, strict=True):
            sequence.segments, sequence.count = addressof(items), len(items)
            if tail is not None:
                sequence.tail = tail
        self.args.sequences = addressof(sequences)
        need = self._library.kvk_cuda_table(byref(self.args), None, 0, 0)
        if need == 0:
            contract.check(contract.INVALID, self._library)
        table = torch.empty(need, dtype=torch.uint8, device=device)
        host = bytearray(need)
        self._library.kvk_cuda_table(
            byref(self.args), addressof((ctypes.c_char * need).from_buffer(host)), need, table.data_ptr()
        )
        table.copy_(torch.frombuffer(host, dtype=torch.uint8))
        self.args.sequences = table.data_ptr()
        return table


def attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, softcap: float, window: int, causal: bool, path: int = 0,
) -> torch.Tensor:  # fmt: skip
    """[B, T, heads, D] of query [B, heads, T, D] over [B, KV heads, N, D]; query t of T at key N - T + t.

    starts: per row, how many keys at its left are padding.
    """
    batch, heads, tokens, head_dim = query.shape
    keys = key.shape[2]
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty((batch, tokens, heads, head_dim))
    position = torch.arange(keys - tokens, keys, device=query.device).expand(batch, tokens)
    pads = [0] * batch if starts is None else starts.tolist()
    tails = [
        segment((key[row, :, pad:],), (value[row, :, pad:],), position=pad) for row, pad in enumerate(pads)
    ]
    Call(
        query, position, [[]] * batch, scale, kv_heads=key.shape[1], tails=tails, out=out.transpose(1, 2),
        sinks=None if sinks is None else sinks.float().contiguous(), causal=causal, window=window,
        softcap=softcap, path=path,
    ).run()  # fmt: skip
    return out
