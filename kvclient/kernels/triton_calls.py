"""Calls of the Triton twins with the structs of native/kernels.h: what kvk_attend and kvk_quantise are given.

Owns the tables and the shapes of tiles. Never imports triton until it is asked for. Invariant: a call means
what the same struct means to the CPU library; what a twin does not do raises Unsupported before anything is
read. TRITON_INTERPRET=1, set before the first call, runs them on the CPU over host memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from typing import Any

import torch

from kvclient.kernels import contract
from kvclient.kernels.contract import Unsupported

SEGMENT_BYTES = ctypes.sizeof(contract.Segment)
STAGES = 1  # what a tile is loaded from is rarely what is multiplied: there is nothing to load ahead
SPLIT_ROWS = 16  # so few rows of a KV head are cut along the keys
MAX_SPLITS = 32


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def lacks() -> str | None:
    """What this machine lacks for the twins; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (the extra `triton`)"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; TRITON_INTERPRET=1 runs the Triton kernels on a CPU, slowly"
    return None


@cache
def tiles() -> Any:
    """The module of kernels, imported at its first use: whoever only asks has no Triton."""
    from kvclient.kernels import triton_tiles

    return triton_tiles


def device() -> torch.device:
    """Where the tensors of a call belong: the CPU if interpreted."""
    return torch.device("cpu") if interpreted() else torch.device("cuda", torch.cuda.current_device())


def tile_of(rows: int, head_dim: int) -> tuple[int, int, int]:
    """(rows, keys, padded head dimension) of a tile: what fits the shared memory of sm_86."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    block_m = 16 if rows <= SPLIT_ROWS or block_d > 128 else 32 if block_d > 64 else 64
    return block_m, 64 if block_d <= 64 else 32 if block_d <= 128 else 16, block_d


def attend(args: contract.Attention) -> None:
    """kvk_attend() by the twins. `sequences` and their segments are the host's; what those point to, and all
    other pointers, the device's.
    """
    _check(args)
    if not args.batch or not args.query_tokens:
        return
    table, segments, turned = _table(args)
    group = args.query_heads // args.kv_heads
    rows = args.query_tokens * group
    block_m, block_n, block_d = tile_of(rows, args.head_dim)
    blocks = -(-rows // block_m)
    splits = min(segments, MAX_SPLITS) if rows <= SPLIT_ROWS else 1
    partial = torch.empty(0, device=table.device)
    if splits > 1:
        size = splits * args.batch * args.kv_heads * rows * (block_d + 2)
        partial = torch.empty(size, dtype=torch.float32, device=table.device)
    out = (args.out, args.out_batch_stride, args.out_head_stride, args.out_token_stride)
    ends = (args.lse or 0, args.sinks or 0)
    shape = {"D": args.head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m, "QUERY": args.dtype}
    grid = (blocks, args.batch * args.kv_heads, splits)
    tiles().attend_tile[grid](
        table.data_ptr(), segments, args.q, args.q_batch_stride, args.q_head_stride, args.q_token_stride,
        args.q_position, *out, *ends, partial.data_ptr(), args.kv_heads, group, args.query_tokens,
        args.scale, args.softcap, args.window, args.rotary_dim, splits,
        BLOCK_N=block_n, CAUSAL=bool(args.causal), num_stages=STAGES,
        INTERLEAVED=args.rope == contract.ROPE_INTERLEAVED, TURNED=turned,
        PRECISION="ieee" if args.dtype == contract.F32 else "tf32x3", **shape,
    )  # fmt: skip
    if splits > 1:
        tiles().merge_tile[grid[:2]](
            partial.data_ptr(), *out, *ends, args.kv_heads, group, args.query_tokens, splits, **shape
        )


def quantise(args: contract.Conversion) -> None:
    """kvk_quantise() by the twin. Raises NotQuantisable, which waits for the device. Unsupported for a codec
    or group it has not, InvalidArgument for int4 of an odd head_dim.
    """
    _check_version(args)
    if args.codec not in (contract.INT8, contract.INT4) or args.group not in (0, *contract.GROUPS):
        raise Unsupported(f"codec={args.codec}, group={args.group} are no codes and groups of tokens")
    if args.codec == contract.INT4 and args.head_dim % 2:
        raise contract.InvalidArgument(f"head_dim={args.head_dim}; int4 needs an even one")
    if not args.heads or not args.tokens:
        return
    status = torch.zeros(1, dtype=torch.int32, device=device())
    many = args.group or 16
    tiles().quantise_tile[(-(-args.tokens // many), args.heads)](
        args.elements, args.head_stride, args.token_stride, args.codes, args.codes_head_stride,
        args.codes_token_stride, args.scale, args.zero, args.scale_head_stride, status.data_ptr(),
        args.tokens, D=args.head_dim, BLOCK_D=max(16, 1 << (args.head_dim - 1).bit_length()),
        num_stages=STAGES, GROUP=args.group, DTYPE=args.dtype, BITS=8 if args.codec == contract.INT8 else 4,
    )  # fmt: skip
    if int(status):
        raise contract.NotQuantisable("a value is not finite or beyond 65504")


def _check(args: contract.Attention) -> None:
    _check_version(args)
    if args.dtype not in (contract.F32, contract.F16, contract.BF16):
        raise contract.InvalidArgument(f"dtype={args.dtype}; queries are f32, f16 or bf16")
    heads = args.kv_heads and args.query_heads % args.kv_heads == 0
    if not 1 <= args.head_dim <= contract.MAX_HEAD_DIM or not heads:
        raise contract.InvalidArgument(
            f"head_dim={args.head_dim}, query_heads={args.query_heads}, kv_heads={args.kv_heads}"
        )


def _check_version(args: Any) -> None:
    if (args.size, args.abi) != (ctypes.sizeof(args), contract.ABI):
        here = f"this one is of {ctypes.sizeof(args)}, ABI {contract.ABI}"
        raise contract.InvalidArgument(f"a struct of {args.size} bytes, ABI {args.abi}; {here}")


def _check_segment(segment: contract.Segment, args: contract.Attention) -> None:
    if segment.codec > contract.INT4:
        raise contract.InvalidArgument(f"codec={segment.codec}; the last known is {contract.INT4}")
    if segment.codec <= contract.BF16 and segment.codec != args.dtype:
        raise Unsupported(f"a segment of codec {segment.codec} under queries of dtype {args.dtype}")
    if segment.codec > contract.BF16 and segment.k_group not in contract.GROUPS:
        raise contract.InvalidArgument(f"k_group={segment.k_group}; it must be one of {contract.GROUPS}")
    if not segment.k or not segment.v:
        raise contract.InvalidArgument(f"a segment of {segment.tokens} tokens without K or V")


def _table(args: contract.Attention) -> tuple[torch.Tensor, int, bool]:
    """(the segments of every row and its tail, padded to equal numbers; how many; whether any is turned)."""
    rows: list[bytes] = []
    sequences = (contract.Sequence * args.batch).from_address(args.sequences)
    for sequence in sequences:
        size = sequence.count * SEGMENT_BYTES
        listed = ctypes.string_at(sequence.segments, size) if size else b""
        rows.append(listed + bytes(sequence.tail))
    most = max(map(len, rows)) // SEGMENT_BYTES
    words = bytearray(b"".join(row.ljust(most * SEGMENT_BYTES, b"\0") for row in rows))
    turned = False
    for segment in (contract.Segment * (len(words) // SEGMENT_BYTES)).from_buffer(words):
        if segment.tokens:
            _check_segment(segment, args)
        turned |= bool(segment.tokens and segment.turn)
    table = torch.frombuffer(words, dtype=torch.int64)
    return table.to(device()), most, turned
