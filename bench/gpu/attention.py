"""Attention on a GPU beside torch's best: prefill, append over a prefix, decode. The rows of bench.gpu.

Owns the problems: Llama-3-8B's shape, 32 query heads, 8 of K and V, head dimension 128, blocks of 128 tokens,
K in groups of 128, random data. Invariant: ours and torch's see the same queries and, in bf16, the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu import clock as gpu_clock
from kvclient.kernels import cuda
from kvclient.kernels.cuda_attention import Call

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 128
SCALE = HEAD_DIM**-0.5
CONTEXT, PREFILL_TOKENS, APPEND_TOKENS = 32_768, (8192, 16_384), (256, 2048)
DECODE, PREFILL = 2, 3  # KVK_CUDA_DECODE, KVK_CUDA_PREFILL
FORMS = {"bf16": 0, "int8": 8, "int4": 4}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=gpu_clock.DEVICE, dtype=torch.bfloat16)


class Context:
    """K and V of `batch` rows of `tokens` tokens each: one tensor for torch, blocks for us."""

    def __init__(self, batch: int, tokens: int) -> None:
        self.batch, self.tokens = batch, tokens
        self.keys, self.values = (noise(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))

    def rows(self, bits: int) -> tuple[list[list[Any]], Any, int]:
        """(segments of each row, what they point to, their bytes)."""
        parts = [self._blocks(x, bits, group) for x, group in ((self.keys, BLOCK), (self.values, 0))]
        blocks = self.tokens // BLOCK
        keys, values = parts
        rows = [
            [
                cuda.segment(
                    tuple(part[row, i] for part in keys), tuple(part[row, i] for part in values),
                    BLOCK if bits else 0, bits=bits, position=i * BLOCK,
                )
                for i in range(blocks)
            ]
            for row in range(self.batch)
        ]  # fmt: skip
        return rows, parts, sum(part.nbytes for side in parts for part in side)

    def _blocks(self, x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, ...]:
        """[batch, block, heads, tokens, elements], and scales."""
        blocks = x.unflatten(2, (-1, BLOCK)).transpose(1, 2).contiguous()
        if not bits:
            return (blocks,)
        flat = blocks.reshape(-1, BLOCK, HEAD_DIM)
        codes, scale, zero, unfit = cuda.quantise(flat, bits, group)
        assert int(unfit) == 0
        lead = blocks.shape[:3]
        return tuple(part.reshape(*lead, *part.shape[1:]) for part in (codes, scale, zero))


def call_over(context: Context, q: torch.Tensor, first: int, bits: int, path: int, tail: Any = None) -> Call:
    """q stands at `first` and behind; `tail`: K and V of the queries' own tokens."""
    rows, alive, _ = context.rows(bits)
    tokens = q.shape[2]
    position = torch.arange(first, first + tokens, device=gpu_clock.DEVICE).expand(context.batch, tokens)
    tails = None
    if tail is not None:
        tails = [cuda.segment((k,), (v,), position=first) for k, v in zip(*tail, strict=True)]
    return Call(
        q, position, rows, SCALE, kv_heads=KV_HEADS, tails=tails, path=path, alive=(alive, tail)
    )  # fmt: skip


def by_torch(
    kind: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
) -> Callable[[], Any]:
    causal = mask == "causal"

    def call() -> torch.Tensor:
        with sdpa_kernel([kind]):
            return functional.scaled_dot_product_attention(
                q, k, v, None if causal else mask, is_causal=causal, scale=SCALE,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

    return call


def working(contenders: dict[str, Callable[[], Any]]) -> dict[str, list[Callable[[], Any]]]:
    """Those that this torch and this device can run."""
    found = {}
    for name, call in contenders.items():
        try:
            call()
            gpu_clock.settle()
        except RuntimeError:
            continue
        found[name] = [call]
    return found


def prefill(_ceilings: dict[str, float]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tokens in PREFILL_TOKENS:
        q = noise(1, HEADS, tokens, HEAD_DIM)
        k, v = (noise(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
        position = torch.arange(tokens, device=gpu_clock.DEVICE)[None]
        call = Call(
            q, position, [[]], SCALE, kv_heads=KV_HEADS, tails=[cuda.segment((k[0],), (v[0],))], path=PREFILL,
            alive=(k, v),
        )  # fmt: skip
        kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        others = {name: by_torch(kind, q, k, v, "causal") for name, kind in kinds.items()}
        took = gpu_clock.timed({"ours": [call.run], **working(others)})
        flop = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
        result[f"{tokens}"] = {name: {"us": us, "tflop_s": flop / us / 1e6} for name, us in took.items()}
    return result


def append(_ceilings: dict[str, float]) -> dict[str, Any]:
    """Queries of new tokens over a prefix of 32k: HF's own call builds a mask of booleans."""
    prefix, result = CONTEXT, {}
    context = Context(1, prefix)
    for tokens in APPEND_TOKENS:
        q = noise(1, HEADS, tokens, HEAD_DIM)
        appended = [noise(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2)]
        k, v = (torch.cat([x, y], 2) for x, y in ((context.keys, appended[0]), (context.values, appended[1])))
        total = prefix + tokens
        mask = torch.ones(tokens, total, dtype=torch.bool, device=gpu_clock.DEVICE).tril(prefix)[None, None]
        others = {
            "hf": lambda q=q, k=k, v=v, mask=mask: functional.scaled_dot_product_attention(
                q, k, v, mask, scale=SCALE, enable_gqa=True
            ),
            "flash_lower_right": lambda q=q, k=k, v=v, tokens=tokens, total=total: (
                functional.scaled_dot_product_attention(
                    q, k, v, causal_lower_right(tokens, total), scale=SCALE, enable_gqa=True
                )
            ),
        }
        ours = {
            f"ours {form}": [call_over(context, q, prefix, bits, PREFILL, appended).run]
            for form, bits in FORMS.items()
        }
        result[f"{tokens}"] = {
            name: {"us": us} for name, us in gpu_clock.timed({**ours, **working(others)}).items()
        }
    return result


def decode(ceilings: dict[str, float]) -> dict[str, Any]:
    result = {}
    for batch, tokens in ((8, CONTEXT), (1, CONTEXT)):
        q = noise(batch, HEADS, 1, HEAD_DIM)
        sets = [
            Context(batch, tokens)
            for _ in range(min(4, gpu_clock.sets_for(batch * tokens * KV_HEADS * HEAD_DIM)))
        ]
        took_bytes, contenders = {}, {}
        for form, bits in FORMS.items():
            contenders[f"ours {form}"] = [call_over(kv, q, tokens - 1, bits, DECODE).run for kv in sets]
            took_bytes[f"ours {form}"] = sets[0].rows(bits)[2]
        packed = q.reshape(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        for name, kind in kinds.items():
            for layout, queries in (("packed", packed), ("gqa", q)):
                calls = [by_torch(kind, queries, context.keys, context.values, None) for context in sets]
                if working({name: calls[0]}):
                    contenders[f"{name} {layout}"] = calls
                    took_bytes[f"{name} {layout}"] = 2 * sets[0].keys.nbytes
        rates = {}
        for name, us in gpu_clock.timed(contenders).items():
            rate = took_bytes[name] / us * 1e6
            rates[name] = {"us": us, "bytes_s": rate, "of_read": rate / ceilings["read_bytes_s"]}
        result[f"{batch}x{tokens}"] = rates
        del sets, contenders
        torch.cuda.empty_cache()
    return result
