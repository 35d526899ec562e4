"""Attention over keys and values where they lie: segments of any codec at any position, then a tail.

Owns the translation of arrays into the structs of native/kernels.h and the checks that need shapes. Never
copies a key or a value. Invariant: every array a segment points into lives as long as the segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from ctypes import addressof, byref, sizeof
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.checks import check_bounds, check_real
from kvclient.errors import InvalidArgument
from kvclient.kernels import contract
from kvclient.kernels.codec import (
    CODECS,
    ELEMENTS,
    Quantised,
    apart,
    check_quantised,
    element_code,
    elements_shape,
    rope_number,
    table_shape,
    writeable,
)

ALIGN = 64
MOST = (1 << 32) - 1  # of what the structs hold in 32 bits
MAX_POSITION = 1 << 62  # either way: differences of two of them fit 64 bits


@dataclass(frozen=True)
class Segment:
    """Tokens first..first + tokens of one block's keys and values, of one layer; `struct` is what C sees."""

    struct: Any
    heads: int
    head_dim: int
    alive: tuple[Any, ...]

    @property
    def tokens(self) -> int:
        """How many tokens of its block it uses."""
        return self.struct.tokens


def segment(
    keys: np.ndarray | Quantised,
    values: np.ndarray | Quantised,
    base_position: int,
    new_position: int | None = None,
    turned: np.ndarray | None = None,
    first: int = 0,
    tokens: int | None = None,
) -> Segment:
    """[heads, tokens, head_dim] of keys and values, elements or quantised, in place.

    base_position is where the keys were rotated for, new_position where they stand now (default: the same),
    both of token `first`. Where they differ and the model rotates, `turned` is turn(inv_freq, new - base).
    Raises InvalidArgument where keys and values do not match, or the tokens are not in the block.
    """
    quantised = isinstance(keys, Quantised)
    if quantised != isinstance(values, Quantised):
        raise InvalidArgument("keys and values must both be quantised, or neither")
    k, v = (keys.codes, values.codes) if quantised else (keys, values)
    if quantised:
        for coded in (keys, values):
            check_quantised(coded, coded.codes.shape[0], coded.tokens, coded.head_dim)
    else:
        elements_shape(keys), elements_shape(values)
    head_dim = keys.head_dim if quantised else keys.shape[2]
    codec = CODECS[keys.bits] if quantised else ELEMENTS[keys.dtype.name]
    if (
        k.shape != v.shape
        or k.dtype != v.dtype
        or (quantised and (keys.bits != values.bits or values.group != 0))
    ):
        raise InvalidArgument(
            f"keys {k.dtype}{list(k.shape)} and values {v.dtype}{list(v.shape)} do not match"
        )
    check_bounds("first", first, 0, k.shape[1])
    tokens = k.shape[1] - first if tokens is None else tokens
    check_bounds("tokens", tokens, 0, k.shape[1])
    if not 0 <= first <= first + tokens <= k.shape[1]:
        raise InvalidArgument(f"first={first}, tokens={tokens} of a block of {k.shape[1]}")
    for position in (base_position, base_position if new_position is None else new_position):
        check_bounds("position", position, 1 - MAX_POSITION, MAX_POSITION - 1)
    moved = new_position is not None and new_position != base_position
    if turned is not None:
        table_shape(turned)
    struct = contract.Segment(
        k.ctypes.data, v.ctypes.data, *k.strides[:2], *v.strides[:2],
        turn=turned.ctypes.data if moved and turned is not None else None,
        base_position=base_position, new_position=base_position if new_position is None else new_position,
        first=first, tokens=tokens, codec=codec,
    )  # fmt: skip
    if quantised:
        struct.k_scale, struct.k_zero = keys.scale.ctypes.data, keys.zero.ctypes.data
        struct.v_scale, struct.v_zero = values.scale.ctypes.data, values.zero.ctypes.data
        struct.k_scale_head_stride, struct.v_scale_head_stride = (
            keys.scale.strides[0],
            values.scale.strides[0],
        )
        struct.k_group = keys.group
    return Segment(struct, k.shape[0], head_dim, (keys, values, turned))


def attend(
    q: np.ndarray, q_position: np.ndarray, rows: Items[Items[Segment]], scale: float, **options: Any
) -> np.ndarray:
    """prepare(), run once; returns `out`, like q [batch, heads, queries, head_dim]."""
    out = options.pop("out", None)
    out = np.empty_like(q) if out is None else out
    prepare(q, q_position, rows, scale, out=out, **options).run()
    return out


def prepare(
    q: np.ndarray,
    q_position: np.ndarray,
    rows: Items[Items[Segment]],
    scale: float,
    *,
    tails: Items[Segment | None] | None = None,
    out: np.ndarray,
    lse: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    rope: str = "half",
    rotary_dim: int = 0,
    threads: int = 1,
    path: str = "auto",
) -> Call:
    """q [batch, query heads, tokens, head_dim] at q_position [batch, tokens], each batch row against its own.

    A window of W: keys less than W positions behind the query. lse: float32 [batch, query heads, tokens].
    Raises InvalidArgument where rows, heads, head_dim or tables do not match.
    """
    _check_numbers(q, window, threads, rotary_dim)
    check_real("scale", scale, -math.inf, math.inf)
    check_real("softcap", softcap, 0, math.inf)
    batch, heads, tokens, head_dim = q.shape
    tails = [None] * batch if tails is None else tails
    everything = [part for row in (*rows, tails) for part in row if part is not None]
    kv_heads = {part.heads for part in everything} or {heads}
    if len(rows) != batch or len(tails) != batch or q_position.shape != (batch, tokens):
        raise InvalidArgument(
            f"{len(rows)} rows, {len(tails)} tails and positions {q_position.shape} for {batch}"
        )
    if len(kv_heads) != 1 or {part.head_dim for part in everything} - {head_dim}:
        raise InvalidArgument(f"segments of {sorted(kv_heads)} heads for queries of head_dim {head_dim}")
    _check_arrays(q, q_position, out, lse, sinks)
    turns = {2 * part.alive[2].shape[1] for part in everything if part.struct.turn}
    if len(turns) > 1 or (turns and rotary_dim not in (0, *turns)):
        raise InvalidArgument(f"tables of turn() for {sorted(turns)} elements, rotary_dim={rotary_dim}")
    position = np.ascontiguousarray(q_position)
    args = contract.Attention(
        sizeof(contract.Attention), contract.ABI, batch, heads, kv_heads.pop(), head_dim, tokens,
        ELEMENTS[q.dtype.name], q.ctypes.data, *q.strides[:3], out.ctypes.data, *out.strides[:3],
        None if lse is None else lse.ctypes.data, position.ctypes.data, None,
        None if sinks is None else sinks.ctypes.data,
        scale, softcap, causal, window, rope_number(rope), max(turns, default=rotary_dim), threads,
        contract.path_number(path),
    )  # fmt: skip
    lists = [(contract.Segment * len(row))(*(part.struct for part in row)) for row in rows]
    sequences = (contract.Sequence * batch)()
    for sequence, items, tail in zip(sequences, lists, tails, strict=True):
        sequence.segments, sequence.count = addressof(items), len(items)
        if tail is not None:
            sequence.tail = tail.struct
    args.sequences = addressof(sequences)
    return Call(args, (q, out, lse, sinks, position, everything, lists, sequences))


def _check_numbers(q: np.ndarray, window: int, threads: int, rotary_dim: int) -> None:
    if not isinstance(q, np.ndarray) or q.ndim != 4 or element_code(q.dtype) is None:
        wanted = f"[batch, heads, tokens, head_dim] of {', '.join(ELEMENTS)} in native byte order"
        raise InvalidArgument(
            f"q is {getattr(q, 'dtype', type(q).__name__)}{list(np.shape(q))}; expected {wanted}"
        )
    check_bounds("window", window, 0, MOST)  # 0: none
    check_bounds("threads", threads, 1, MOST)
    check_bounds("rotary_dim", rotary_dim, 0, contract.MAX_HEAD_DIM)


def _check_arrays(
    q: np.ndarray, q_position: np.ndarray, out: np.ndarray, lse: np.ndarray | None, sinks: np.ndarray | None
) -> None:
    """Raises InvalidArgument if the kernel would read or write anything but these."""
    for name, array, dtype, shape in (
        ("out", out, q.dtype, q.shape),
        ("lse", lse, np.dtype(np.float32), q.shape[:3]),
        ("sinks", sinks, np.dtype(np.float32), q.shape[1:2]),
        ("q_position", q_position, np.dtype(np.int64), (q.shape[0], q.shape[2])),
    ):
        if array is not None and (array.dtype != dtype or array.shape != shape):
            raise InvalidArgument(
                f"{name} is {array.dtype}{list(array.shape)}; expected {dtype}{list(shape)}"
            )
    if q_position.size and not -MAX_POSITION < q_position.min() <= q_position.max() < MAX_POSITION:
        raise InvalidArgument(f"q_position beyond {MAX_POSITION}: {q_position.min()} to {q_position.max()}")
    if q.size and any(a.shape[3] > 1 and a.strides[3] != a.itemsize for a in (q, out)):
        raise InvalidArgument("the elements of a query lie apart")
    for name, array in (("lse", lse), ("sinks", sinks)):
        if array is not None and not array.flags.c_contiguous:
            raise InvalidArgument(f"{name} is strided; expected contiguous memory")
    apart(q, out)
    for array in (out, lse):
        if array is not None:
            writeable(array)


class Call:
    """Arguments that stay valid, and a workspace: run() costs one call into C."""

    def __init__(self, args: Any, alive: tuple[Any, ...]) -> None:
        self.args = args
        self._alive = alive
        library = contract.cpu()
        size = library.kvk_attention_workspace(byref(args))
        if size == 0:
            contract.check(contract.INVALID)
        self._memory = np.empty(size, np.uint8)
        args.workspace, args.workspace_bytes = self._memory.ctypes.data, size
        self._attend, self._reference = library.kvk_attend, byref(args)

    def run(self) -> None:
        """Computes what prepare() described, into its `out`, once more. Raises what the kernel refuses."""
        contract.check(self._attend(self._reference))
