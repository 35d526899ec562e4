"""Attention on a GPU over segments where they lie, prepared once and run as often as one likes.

    table = Table(rows, device, heads, tails)             # segments: kvclient.kernels.cuda.segment()
    attend(table, q, position, scale, out=out)            # one launch
    call = Call(q, position, rows, scale, kv_heads=8)     # the same with everything fixed: call.run()

Owns the table of segments on the device and the workspaces, one for each stream. Never waits for the device,
never copies a key. Invariant: what a call points to lives as long as the call; the table is read when the
kernel runs, so that a captured one sees what was written into it since (`tail_tokens`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, sizeof
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract
from kvclient.kernels.cuda import BOTH, DTYPES, run, segment

SEQUENCE_WORDS = sizeof(contract.Sequence) // 4
TAIL_TOKENS_WORD = (contract.Sequence.tail.offset + contract.Segment.tokens.offset) // 4


class Workspace:
    """Memory of calls that follow each other. Grows to what the largest of them needs."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def give(self, args: Any, device: torch.device) -> None:
        """Puts memory into `args`, as many bytes as the call needs, zeroed when it was made."""
        need = _needed(args)
        if self.memory is None or self.memory.numel() < need:
            self.memory = torch.zeros(need, dtype=torch.uint8, device=device)
        args.workspace, args.workspace_bytes = self.memory.data_ptr(), self.memory.numel()


_workspaces: dict[tuple[Any, int], Workspace] = {}  # by device and stream: one's calls follow each other


class Table:
    """What each row of a batch attends to, as the device reads it. `alive`: what the segments point into."""

    def __init__(
        self, rows: Sequence[Sequence[Any]], device: torch.device, heads: int, kv_heads: int, head_dim: int,
        tails: Sequence[Any] | None = None, alive: Any = None, dtype: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        if not rows:
            raise InvalidArgument("0 rows: there is nothing to attend to")
        self.rows, self.alive = len(rows), alive
        lists = [(contract.Segment * len(row))(*row) for row in rows]
        sequences = (contract.Sequence * len(rows))()
        for sequence, items, tail in zip(sequences, lists, tails or [None] * len(rows), strict=True):
            sequence.segments, sequence.count = addressof(items), len(items)
            if tail is not None:
                sequence.tail = tail
        rotary = head_dim if any(part.turn for row in rows for part in row) else 0
        args = contract.Attention(
            sizeof(contract.Attention), contract.ABI, len(rows), heads, kv_heads, head_dim, 0, DTYPES[dtype],
            sequences=addressof(sequences), scale=1.0, rotary_dim=rotary,
        )  # fmt: skip
        library = contract.cuda()
        need = library.kvk_cuda_table(byref(args), None, 0, 0)
        if need == 0:
            contract.check(contract.INVALID, library)
        self.memory = torch.empty(need, dtype=torch.uint8, device=device)
        host = bytearray(need)
        library.kvk_cuda_table(
            byref(args), addressof((ctypes.c_char * need).from_buffer(host)), need, self.memory.data_ptr()
        )
        self.memory.copy_(torch.frombuffer(host, dtype=torch.uint8))

    def of(self, q: torch.Tensor) -> torch.Tensor:
        """Its memory, uint8 [bytes], for a call with queries q [batch, heads, queries, head_dim]. Raises
        InvalidArgument for queries of another batch.
        """
        if self.rows != q.shape[0]:
            raise InvalidArgument(f"a table of {self.rows} rows for queries {list(q.shape)}")
        return self.memory

    @property
    def tail_tokens(self) -> torch.Tensor:
        """How many tokens the tail of each row has: int32 [rows], the table's own memory, to be written."""
        words = self.memory.view(torch.int32)[: self.rows * SEQUENCE_WORDS]
        return words.view(self.rows, SEQUENCE_WORDS)[:, TAIL_TOKENS_WORD]


def arguments(
    table: torch.Tensor, q: torch.Tensor, position: torch.Tensor, scale: float, out: torch.Tensor,
    kv_heads: int, *,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = True, window: int = 0,
    softcap: float = 0.0, interleaved: bool = False, rotary_dim: int = 0, stretches: int = 0, path: int = 0,
) -> Any:  # fmt: skip
    """q, out [batch, heads, tokens, head_dim] of any strides, position int64 [batch, tokens], contiguous; so
    are lse and sinks, float32.
    Raises InvalidArgument for other shapes, dtypes or strides.
    """
    batch, heads, tokens, head_dim = q.shape
    for name, tensor, dtype, shape in (
        ("out", out, q.dtype, q.shape),
        ("lse", lse, torch.float32, q.shape[:3]),
        ("sinks", sinks, torch.float32, (heads,)),
    ):
        if tensor is None:
            continue
        together = tensor.stride(3) == 1 if tensor is out and tensor.ndim == 4 else tensor.is_contiguous()
        if tensor.dtype != dtype or tensor.shape != shape or not together:
            found = f"{tensor.dtype}{list(tensor.shape)}, strides {tensor.stride()}"
            raise InvalidArgument(f"{name} is {found}; expected {dtype}{list(shape)}")
    if position.shape != (batch, tokens) or position.dtype != torch.int64:
        raise InvalidArgument(f"positions {position.dtype}{list(position.shape)} for {list(q.shape)}")
    if q.stride(3) != 1 or q.dtype not in DTYPES or not position.is_contiguous():
        raise InvalidArgument(f"queries {q.dtype} with strides {q.stride()}; their elements lie apart")
    size = q.element_size()
    return contract.Attention(
        sizeof(contract.Attention), contract.ABI, batch, heads, kv_heads, head_dim, tokens, DTYPES[q.dtype],
        q.data_ptr(), *(size * stride for stride in q.stride()[:3]), out.data_ptr(),
        *(size * stride for stride in out.stride()[:3]), None if lse is None else lse.data_ptr(),
        position.data_ptr(), table.data_ptr(), None if sinks is None else sinks.data_ptr(), scale,
        softcap, causal, window, int(interleaved), rotary_dim, stretches, path,
    )  # fmt: skip


def attend(
    table: Table, q: torch.Tensor, position: torch.Tensor, scale: float, out: torch.Tensor, kv_heads: int,
    workspace: Workspace | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """One launch for q [batch, heads, queries, head_dim], at `position` [batch, queries]; returns `out`, of
    q's shape. workspace: the current stream's, or that of who captures the launch and keeps it.
    """
    args = arguments(table.of(q), q, position, scale, out, kv_heads, **options)
    if workspace is None:
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        workspace = _workspaces.setdefault((q.device, stream), Workspace())
    workspace.give(args, q.device)
    run("kvk_attend", args, q)
    return out


@torch.library.custom_op("kvclient::attend_segments", mutates_args=(), device_types=BOTH)
def attend_op(
    table: torch.Tensor, q: torch.Tensor, position: torch.Tensor, scale: float, kv_heads: int,
    sinks: torch.Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0,
    interleaved: bool = False, rotary_dim: int = 0, path: int = 0,
) -> torch.Tensor:  # fmt: skip
    """attend() for torch.compile, of its shapes: `table` is Table.memory, which must outlive the launch."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    args = arguments(
        table, q, position, scale, out, kv_heads, sinks=sinks, causal=causal, window=window, softcap=softcap,
        interleaved=interleaved, rotary_dim=rotary_dim, path=path,
    )  # fmt: skip
    workspace = Workspace()
    workspace.give(args, q.device)
    run("kvk_attend", args, q)
    return out


@attend_op.register_fake
def _(table, q, position, scale, kv_heads, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


class Call:
    """q [batch, query heads, tokens, head_dim] at position [batch, tokens] (int64, on q's device), each batch
    row against its own segments and tail; options: those of arguments().

    window: keys less than so many positions behind the query; stretches: the keys are cut into at most so
    many; path: KVK_CUDA_*. lse: float32 [batch, query heads, tokens], written if given.
    """

    def __init__(
        self, q: torch.Tensor, position: torch.Tensor, rows: Sequence[Sequence[Any]], scale: float, *,
        kv_heads: int, tails: Sequence[Any] | None = None, out: torch.Tensor | None = None, alive: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        position = position.contiguous()
        self.table = Table(rows, q.device, q.shape[1], kv_heads, q.shape[3], tails, alive, q.dtype)
        self.args = arguments(self.table.of(q), q, position, scale, self.out, kv_heads, **options)
        self._alive = (q, position, options)
        self._workspace = Workspace()
        self._workspace.give(self.args, q.device)

    def run(self) -> torch.Tensor:
        """Launches it once more on the current stream; returns its `out`, of q's shape."""
        run("kvk_attend", self.args, self.out)
        return self.out

    def tail_tokens(self, row: int) -> torch.Tensor:
        """How many tokens the tail of that row has, as the device reads it: int32 [1], to be written."""
        return self.table.tail_tokens[row : row + 1]


def _needed(args: Any) -> int:
    library = contract.cuda()
    need = library.kvk_attention_workspace(byref(args))
    if need == 0:
        contract.check(contract.INVALID, library)
    return need


def attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, softcap: float, window: int, causal: bool, path: int = 0,
    position: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B, T, heads, D] of query [B, heads, T, D] over [B, KV heads, N, D]; query t of T at key N - T + t, or
    where `position` [B, T] says.

    starts: per row, how many keys at its left are padding.
    """
    batch, heads, tokens, head_dim = query.shape
    keys = key.shape[2]
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty((batch, tokens, heads, head_dim))
    if position is None:
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
