"""The native kernels over dense tensors, as an operator that torch.compile knows; and what they are told.

Owns the translation of tensors, and of blocks where they lie, into the structs of native/kernels.h. Never
copies keys or values whose heads are contiguous. Invariant: query t of T stands at key N - T + t of the N, as
everywhere in transformers, unless the call says where.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from ctypes import addressof, byref, sizeof
from typing import Any

import numpy as np
import torch

from kvclient import kernels
from kvclient.errors import InvalidArgument
from kvclient.hf.attention import sdpa
from kvclient.hf.attention.backends import DTYPES
from kvclient.kernels import contract
from kvclient.kernels.cuda_attention import attend_dense

_NUMBERS = {"float32": contract.F32, "float16": contract.F16, "uint16": contract.BF16}
ELEMENTS = {np.dtype(name): number for name, number in _NUMBERS.items()}  # of an array that holds bits, too

ALIGN = 64  # bytes of empty(), as torch's own
LARGE = 128 << 10  # bytes: below, torch's way is as good, and takes less time

_local = threading.local()


def empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What new_empty() makes: a tensor of this shape, of like's type and on its device, of which nothing was
    written yet. A large one is in memory of NumPy's: torch asks malloc for aligned memory, of which glibc
    2.36 cuts off what is over and keeps that for small objects. Where a tensor was, one of the same size does
    not fit any more, and each layer takes memory of its own for a long prompt (docs/log.md, "A server's
    memory in the middle of eight long prompts").
    """
    size = math.prod(shape) * like.dtype.itemsize
    if size < LARGE or not like.is_cpu:
        return like.new_empty(shape)
    memory = torch.from_numpy(np.empty(size + ALIGN, np.uint8))
    start = -memory.data_ptr() % ALIGN
    return memory[start : start + size].view(like.dtype).view(*shape)


def run(args: contract.Attention) -> None:
    """kvk_attend() with this thread's workspace, which grows to what the largest call wanted."""
    library = contract.cpu()
    # Always: `args` may have been made, and last run, in another thread.
    args.workspace, args.workspace_bytes = getattr(_local, "memory", (None, 0))
    status = library.kvk_attend(byref(args))
    if status == contract.WORKSPACE:
        size = library.kvk_attention_workspace(byref(args))
        _local.tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        args.workspace, args.workspace_bytes = _local.memory = (_local.tensor.data_ptr(), size)
        status = library.kvk_attend(byref(args))
    if status != contract.OK:
        contract.check(status)


def positions(start: int, stop: int, rows: int) -> torch.Tensor:
    """start..stop for each row, int64 [rows, stop - start]; the same tensor for all layers of a step."""
    wanted = (start, stop, rows)
    known, tensor = getattr(_local, "positions", (None, None))
    if known != wanted or tensor is None:
        tensor = torch.arange(start, stop, device="cpu").expand(rows, stop - start).contiguous()
        _local.positions = (wanted, tensor)
    return tensor


def heads_together(tensor: torch.Tensor) -> torch.Tensor:
    """The same [..., head_dim], its last axis without gaps: a copy only where it has some."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def arguments(
    query: torch.Tensor, out: torch.Tensor, kv_heads: int, position: torch.Tensor, scale: float, path: int
) -> contract.Attention:
    """What a call needs besides its keys: query [B, heads, T, D], out [B, T, heads, D], position [B, T]."""
    batch, heads, tokens, head_dim = query.shape
    size = query.element_size()
    q, o = (tuple(size * stride for stride in tensor.stride()) for tensor in (query, out))
    return contract.Attention(
        sizeof(contract.Attention), contract.ABI, batch, heads, kv_heads, head_dim, tokens,
        DTYPES[query.dtype], query.data_ptr(), q[0], q[1], q[2], out.data_ptr(), o[0], o[2], o[1],
        None, position.data_ptr(), None, None, scale, 0.0, 1, 0, 0, 0, torch.get_num_threads(), path,
    )  # fmt: skip


def dense_segment(
    key: torch.Tensor, value: torch.Tensor, row: int, start: int, position: int
) -> contract.Segment:
    """Row `row` of [B, heads, N, D] from key `start` on, which stands at `position`."""
    size = key.element_size()
    k, v = (tuple(size * stride for stride in tensor.stride()) for tensor in (key, value))
    return contract.Segment(
        key.data_ptr() + row * k[0] + start * k[2], value.data_ptr() + row * v[0] + start * v[2],
        k[1], k[2], v[1], v[2], base_position=position, new_position=position,
        tokens=max(0, key.shape[2] - start), codec=DTYPES[key.dtype],
    )  # fmt: skip


def block_segment(keys: Any, values: Any, position: int, first: int, tokens: int) -> contract.Segment:
    """Tokens first..first + tokens of a block, which stand at `position` and behind it. K and V as
    kvclient.hf.connector.block_format gives them: quantised, or arrays [heads, N, D] that it looked at.
    """
    if not isinstance(keys, np.ndarray):
        return kernels.segment(keys, values, position, first=first, tokens=tokens).struct
    stop = first + tokens
    assert 0 <= first <= stop <= keys.shape[1], f"tokens {first} to {stop} of a block of {keys.shape[1]}"
    return contract.Segment(
        keys.ctypes.data, values.ctypes.data, *keys.strides[:2], *values.strides[:2],
        base_position=position, new_position=position, first=first, tokens=tokens, codec=ELEMENTS[keys.dtype],
    )  # fmt: skip


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, softcap: float, window: int, causal: bool, path: int,
    position: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B, T, heads, D]. `starts`: per row, how many keys at its left are padding. position: [B, T], the key
    that each query stands at, ascending.
    Raises InvalidArgument where keys and values differ in shape or dtype, or from the batch.
    """
    if query.device.type == "cuda":
        fits = starts is None and position is None and query.shape[2] >= sdpa.MANY_TOKENS
        if fits and sdpa.unfit(None, window, key.shape[2], softcap, sinks) is None:
            return sdpa.attend("torch_cudnn", query, key, value, scale, causal)
        terms = sinks, scale, softcap, window, causal
        return attend_dense(query, key, value, starts, *terms, position=position)
    batch, heads, tokens, head_dim = query.shape
    keys, came, _local.made = key.shape[2], (query, key, value), None
    if value.shape != key.shape or value.dtype != key.dtype or len(key) != batch:
        raise InvalidArgument(
            f"keys are {list(key.shape)} of {key.dtype}, values {list(value.shape)} of {value.dtype}, of "
            f"queries for {batch} rows: values must be as the keys are, and both have the queries' rows"
        )
    query, key, value = heads_together(query), heads_together(key), heads_together(value)
    out = empty(query, (batch, tokens, heads, head_dim))
    position = positions(keys - tokens, keys, batch) if position is None else position
    args = arguments(query, out, key.shape[1], position, scale, path)
    args.softcap, args.window, args.causal = softcap, window, causal
    if sinks is not None:
        sinks = sinks.float().contiguous()
        args.sinks = sinks.data_ptr()
    pads = [0] * batch if starts is None else starts.tolist()
    sequences = (contract.Sequence * batch)()
    for row, pad in enumerate(pads):
        sequences[row].tail = dense_segment(key, value, row, pad, pad)
    args.sequences = addressof(sequences)
    run(args)
    same = query is came[0] and key is came[1] and value is came[2]
    plain = same and batch == 1 and starts is None and sinks is None
    _local.made = (args, sequences) if plain else None
    return out


def told(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, what: Any) -> None:
    """attend() was just asked for these, [B, heads, tokens, head_dim] each, with this, which says all that
    again() has to know."""
    if (made := getattr(_local, "made", None)) is not None:
        _local.made, _local.known = None, (what, _alike(query, key, value), *made)


def _alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    sides = [(side.shape, side.stride(), side.dtype) for side in (query, key, value)]
    return (*sides[0], *sides[1], *sides[2])


def again(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, what: Any) -> torch.Tensor | None:
    """attend() for tensors [B, heads, tokens, head_dim] like those of this thread's last call, asked for as
    then: as the layers of a step are. None: they are others."""
    known = getattr(_local, "known", None)
    if known is None or known[0] != what or torch.is_grad_enabled() or not query.is_cpu:
        return None
    _, alike, args, sequences = known
    if _alike(query, key, value) != alike:
        return None
    batch, heads, tokens, head_dim = query.shape
    out = empty(query, (batch, tokens, heads, head_dim))
    position = positions(key.shape[2] - tokens, key.shape[2], batch)
    args.q, args.out, args.q_position = query.data_ptr(), out.data_ptr(), position.data_ptr()
    args.threads = torch.get_num_threads()
    tail = sequences[0].tail
    tail.k, tail.v = key.data_ptr(), value.data_ptr()
    run(args)
    return out


@torch.library.custom_op("kvclient::attend", mutates_args=(), device_types=("cpu", "cuda"))
def attend_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, softcap: float, window: int, causal: bool, path: int,
) -> torch.Tensor:  # fmt: skip
    """attend() of the same shapes as a registered operation: torch.compile sees its result's shape, not its
    body.
    """
    return attend(query, key, value, starts, sinks, scale, softcap, window, causal, path)


@attend_op.register_fake
def _(
    query, key, value, starts, sinks, scale, softcap, window, causal, path
):  # its shapes, without the numbers
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty((batch, tokens, heads, head_dim))
