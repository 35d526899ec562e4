"""What the GPU kernels must give, on the CPU: by the CPU library byte for byte, and in double.

Owns blocks whose content is known. Invariant: nothing here touches the device's library: the CPU library is
opened before any test can put the emulation in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvclient import kernels
from kvclient.kernels import contract, cuda

CPU = contract.cpu()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ARRAYS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """KV-like: a few channels are much larger than the others."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    x[..., :: max(1, shape[-1] // 4)] *= 8
    return x.to(dtype)


def as_array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def as_tensor(x: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == np.uint16
        else torch.from_numpy(x)
    )


def quantised(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, ...]:
    """(codes, scale, zero) by the CPU library."""
    packed = with_cpu(lambda: kernels.quantise(as_array(x), bits, group))
    return tuple(torch.from_numpy(part) for part in (packed.codes, packed.scale, packed.zero))


def dequantised(parts: tuple[torch.Tensor, ...], bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """By the CPU library."""
    codes, scale, zero = (part.cpu().numpy() for part in parts)
    packed = kernels.Quantised(codes, scale, zero, bits, group)
    out = np.empty((*codes.shape[:2], packed.head_dim), ARRAYS[dtype])
    return as_tensor(with_cpu(lambda: kernels.dequantise(packed, out)))


def turned(x: torch.Tensor, turn: np.ndarray, interleaved: bool) -> torch.Tensor:
    array = as_array(x)
    rope = "interleaved" if interleaved else "half"
    return as_tensor(with_cpu(lambda: kernels.rotate(array, turn, rope, np.empty_like(array))))


def turn_of(rotary_dim: int, delta: int) -> np.ndarray:
    half = rotary_dim // 2
    frequencies = (1 / 10_000 ** (np.arange(half) / max(1, half))).astype(np.float32)
    return with_cpu(lambda: kernels.turn(frequencies, delta))


def with_cpu(call):
    """Runs it with the CPU library, whatever stands in its place."""
    before, contract.cpu = contract.cpu, lambda: CPU
    try:
        return call()
    finally:
        contract.cpu = before


@dataclass
class Block:
    """K and V [heads, tokens, head_dim] of one block, on a device, and what it stands for, in fp32."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, torch.Tensor]  # of the tokens used, keys turned
    turn: torch.Tensor | None
    segment: object

    @classmethod
    def made(
        cls, device: torch.device, heads: int, tokens: int, head_dim: int, dtype: torch.dtype, bits: int = 0,
        group: int = 32, first: int = 0, count: int | None = None, delta: int = 0, rotary_dim: int = 0,
        interleaved: bool = False, seed: int = 0,
    ) -> Block:  # fmt: skip
        k, v = noise(2, heads, tokens, head_dim, dtype=dtype, seed=seed)
        if bits:
            keys, values = quantised(k, bits, group), quantised(v, bits, 0)
            exact = [dequantised(p, bits, g, torch.float32) for p, g in ((keys, group), (values, 0))]
        else:
            keys, values, exact = (k,), (v,), [k.float(), v.float()]
        turn = None
        if delta:
            table = turn_of(rotary_dim or head_dim, delta)
            exact[0] = turned(exact[0], table, interleaved)
            turn = torch.from_numpy(table).to(device)
        keys, values = (tuple(part.to(device) for part in side) for side in (keys, values))
        segment = cuda.segment(keys, values, group if bits else 0, first, count, turn, bits)
        stop = first + segment.tokens
        return cls(keys, values, tuple(x[:, first:stop] for x in exact), turn, segment)
