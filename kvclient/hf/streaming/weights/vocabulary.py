"""An embedding of which only the rows that are asked for are read, and a head that is read in pieces.

Owns the two modules' weights while they compute, by hooks: their classes and forwards stay the stock ones, so
the model's identity does. Never decides whether they are streamed. Invariant: outside of a call the weights
have no memory (torch's "meta"), as a streamed layer's.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kvclient.hf.awq.head import Head, multiply
from kvclient.hf.streaming.files.index import BLOCK_BYTES, Part, Stored, Table
from kvclient.hf.streaming.mover import PAGE, Piece, StreamingFailed
from kvclient.hf.streaming.scheduler import TRIES, Mover, Scheduler
from kvclient.hf.streaming.weights.places import CPU, Away, away, changed, forward_only

ROWS_BYTES = 32 << 20  # of an embedding, in memory at one time


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module is called with: by its place, or by the name of a stock forward. Raises TypeError."""
    if len(args) + len(kwargs) != 1 or not (args or "input" in kwargs):
        names = [*(type(value).__name__ for value in args), *kwargs]
        raise TypeError(f"called with {', '.join(names) or 'nothing'}; expected one input")
    return args[0] if args else kwargs["input"]


def check(module: torch.nn.Module, table: Table) -> None:
    """Raises InvalidArgument where the module's weight is not what stands for the table's: somebody has put
    it there. (Embedding and head may have each other's, if they are tied.)
    """
    held, kind = module._parameters.get("weight"), getattr(torch, table.dtype)
    if not isinstance(held, Away) or held.dtype != kind or held.shape != torch.Size(table.shape):
        raise changed(table.name, held, kind)


def empty(table: Table) -> Any:
    """A parameter of the table's shape and dtype without memory."""
    return away(table.shape, getattr(torch, table.dtype), device=CPU)


def numbered_tables(tables: Iterable[Table], first: int) -> dict[int, dict[str, Part]]:
    """Of tables that stay in memory the parts that hold them, by name, numbered on behind the layers; of one
    that two modules share, one.
    """
    unique = {table.name: table for table in tables}
    return {
        first + i: {name: Part(table.pieces, (Stored("weight", table.dtype, table.shape, 0, table.length),))}
        for i, (name, table) in enumerate(unique.items())
    }


class StreamedEmbedding:
    """Rows lie at their place in memory that has pages only where rows were read."""

    def __init__(self, module: torch.nn.Module, table: Table, mover: Mover, layer: int) -> None:
        self._module, self._table, self._mover, self._layer = module, table, mover, layer
        length = table.pieces[-1].offset + table.pieces[-1].length - table.offset
        self._pages = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._pages)
        kind, (count, width) = getattr(torch, table.dtype), table.shape
        whole = torch.frombuffer(self._memory, dtype=kind, count=count * width).view(count, width)
        self._weight = torch.nn.Parameter(whole, requires_grad=False)
        self._there: set[int] = set()
        self._users: dict[int, set[int]] = {}  # what threads that look rows up now need, by their number
        self._lock = threading.Lock()
        self.bytes = 0  # read so far
        module._parameters["weight"] = empty(table)
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._after()  # torch calls no hook behind a call that Ctrl-C ended
        wanted = self._blocks(input_of(args, kwargs).unique().tolist())
        with self._lock:
            if not self._users:
                check(self._module, self._table)
            if len(self._there | wanted) * BLOCK_BYTES > ROWS_BYTES:
                needed = wanted.union(*self._users.values())
                for block in self._there - needed:
                    self._pages.madvise(mmap.MADV_DONTNEED, *self._place(block))
                self._there &= needed
            self._read(wanted)
            self._users[threading.get_ident()] = wanted
            self._module._parameters["weight"] = self._weight

    def _after(self, *_: Any) -> None:
        with self._lock:
            if self._users.pop(threading.get_ident(), None) is None:
                return  # reading failed; another thread may look rows up meanwhile
            if not self._users:
                self._module._parameters["weight"] = empty(self._table)

    def _blocks(self, rows: Sequence[int]) -> set[int]:
        """Those that the rows lie in."""
        table = self._table
        width = table.length // table.shape[0]
        return {
            block
            for row in rows
            if 0 <= row < table.shape[0]  # another is the module's own error
            for block in range(row * width // BLOCK_BYTES, ((row + 1) * width - 1) // BLOCK_BYTES + 1)
        }

    def _place(self, block: int) -> tuple[int, int]:
        """Where it lies in the memory, and its bytes."""
        at = block * BLOCK_BYTES
        return at, min(BLOCK_BYTES, len(self._memory) - at)

    def _read(self, wanted: set[int]) -> None:
        for block in sorted(wanted - self._there):
            at, length = self._place(block)
            piece = Piece(self._table.offset + at, length, self._table.blocks[block])
            fill(self._mover, self._layer, [piece], self._memory[at : at + length])
            self._there.add(block)
            self.bytes += length

    def rows_bytes(self, tokens: int) -> int:
        """That the rows of so many tokens, looked up at one time, may take."""
        width = self._table.length // self._table.shape[0]
        most = 1 if BLOCK_BYTES % width == 0 else -(-width // BLOCK_BYTES) + 1  # blocks of a row
        return min(len(self._memory), tokens * most * BLOCK_BYTES)

    def beyond(self, tokens: int, others: int = 0) -> int:
        """Bytes that all take above ROWS_BYTES, which the plan holds once: the rows of so many tokens, and
        others, the rows_bytes() of calls that may look some up at the same moment.
        """
        return max(0, min(len(self._memory), others + self.rows_bytes(tokens)) - ROWS_BYTES)


class StreamedHead:
    """logits = x W^T, a piece of W's rows at a time; they stand in the scheduler behind the layers."""

    def __init__(self, module: torch.nn.Module, table: Table, first: int) -> None:
        self._module, self._table, self._first = module, table, first
        self._inputs = threading.local()
        module._parameters["weight"] = empty(table)
        self._nothing = torch.empty((table.shape[0], 0), dtype=getattr(torch, table.dtype))
        self._users, self._lock = 0, threading.Lock()
        self.scheduler: Scheduler | None = None

    def follow(self, scheduler: Scheduler) -> None:
        """Its pieces come from this scheduler from now on."""
        self.scheduler = scheduler
        self._module.register_forward_pre_hook(self._before, with_kwargs=True)
        self._module.register_forward_hook(self._after, always_call=True)

    def _before(
        self, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        """The stock forward then multiplies nothing by nothing: memory for what the pieces give."""
        x = input_of(args, kwargs)
        held = self._inputs.__dict__.setdefault("stack", [])
        while held:  # as above
            self._after(module, (), None)
        with self._lock:
            if not self._users:
                check(module, self._table)
            held.append(x)
            self._users += 1
            module._parameters["weight"] = torch.nn.Parameter(self._nothing, requires_grad=False)
        return (x[..., :0],), {}

    def _after(self, module: torch.nn.Module, _args: Any, out: Any) -> Any:
        stack = self._inputs.__dict__.get("stack")
        if not stack:
            return None
        x = stack.pop()
        with self._lock:
            self._users -= 1
            if not self._users:
                module._parameters["weight"] = empty(self._table)
        if out is None:
            return None
        assert self.scheduler is not None
        return _multiplied(x, out, module, self._table, self._first, self.scheduler)


def _multiplied(
    x: torch.Tensor, out: torch.Tensor, head: Any, table: Table, first: int, scheduler: Scheduler
) -> torch.Tensor:
    """x [..., width] times the pieces, which the scheduler has from number `first` on: out [..., rows].
    Raises StreamingFailed, and Closed.
    """
    times = multiply if type(head) is Head else torch.nn.functional.linear
    for i, number in enumerate(numbered(table, first)):
        start = i * table.rows
        with scheduler.holding(number) as slot:
            weight = piece_of(table, i, slot.memory)
            columns = slice(start, start + len(weight))
            bias = None if head.bias is None else head.bias[columns]
            out[..., columns] = times(x, weight, bias)
            del weight
    return forward_only(out, "a head that is read in pieces")


def in_pieces(
    head: Any, table: Table, first: int, scheduler: Scheduler, ended: Callable[[], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward for a head whose weight is still to come: of x [..., width] the logits [..., rows], by pieces
    as a StreamedHead's, until it is there. ended: called behind the last of them.
    """
    usual = type(head).forward

    def forward(input: torch.Tensor) -> torch.Tensor:  # its caller may name it, as nn.Linear's
        if not isinstance(head._parameters.get("weight"), Away):
            return usual(head, input)
        out = input.new_empty((*input.shape[:-1], table.shape[0]))
        found = _multiplied(input, out, head, table, first, scheduler)
        ended()
        return found

    return forward


def numbered(table: Table, first: int) -> dict[int, tuple[Piece, ...]]:
    """A head's pieces by their numbers in the scheduler, behind those of the layers."""
    return {first + i: (piece,) for i, piece in enumerate(table.pieces)}


def piece_of(table: Table, i: int, memory: memoryview) -> torch.Tensor:
    """The rows of the table's i-th piece, as they lie: [rows, width]."""
    rows = min(table.rows, table.shape[0] - i * table.rows)
    kind = getattr(torch, table.dtype)
    return torch.frombuffer(memory, dtype=kind, count=rows * table.shape[1]).view(rows, table.shape[1])


def fill(mover: Mover, layer: int, pieces: Sequence[Piece], into: memoryview) -> None:
    """Again where the first read fails, as the scheduler does. Raises StreamingFailed, and Closed."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return mover.fill(layer, pieces, into)
        except StreamingFailed:
            if not left:
                raise
    return None


def digest(table: Table, mover: Mover, layer: int) -> bytes:
    """SHA-256 of the table's bytes."""
    found = hashlib.sha256()
    into = memoryview(mmap.mmap(-1, max(PAGE, *(piece.length for piece in table.pieces))))
    left = table.length
    for piece in table.pieces:
        fill(mover, layer, [piece], into[: piece.length])
        found.update(into[: min(left, piece.length)])
        left -= piece.length
    return found.digest()
