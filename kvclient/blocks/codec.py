"""How a block holds quantised K and V: KIVI, in 8 or 4 bits, K per channel in groups of tokens, V per token.

Owns the arrangement of one layer's bytes and what of it is part of the reuse identity; the arithmetic is
kvclient.kernels'. Never decides what is quantised. Invariant: a group never crosses a block, and a layer of n
tokens takes n times bytes_per_token, so n is a multiple of the group.

    layer of n tokens:  codes of K [heads, n, head_dim x bits / 8] | codes of V, the same
                        K: scale, zero, each float16 [heads, n / group, head_dim]
                        V: scale, zero, each float16 [heads, n]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.errors import InvalidArgument
from kvclient.kernels import Quantised, dequantise, quantise

VERSION = 1  # of the arrangement and the arithmetic: another one must not find these blocks
BITS = {"int8": 8, "int4": 4}
GROUPS = (32, 64, 128)
SCALE_BYTES = 4  # a scale and a zero


@dataclass(frozen=True)
class Kivi:
    bits: int = 8
    group: int = 32  # tokens that share a scale of K

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS.values():  # 8.0 would be another identity
            raise InvalidArgument(f"bits={self.bits!r}; it must be 8 or 4")
        if type(self.group) is not int or self.group not in GROUPS:
            raise InvalidArgument(f"group={self.group!r}; it must be one of {', '.join(map(str, GROUPS))}")

    @classmethod
    def named(cls, name: str) -> Kivi:
        """ "int8" or "int4", with groups of 32. Raises InvalidArgument for another name."""
        if not isinstance(name, str) or name not in BITS:
            raise InvalidArgument(f"codec={name!r}; it must be one of {', '.join(BITS)}, a Kivi, or None")
        return cls(BITS[name])

    @property
    def name(self) -> str:
        """As options and layouts name it: int4 or int8."""
        return f"int{self.bits}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Its part of the reuse identity."""
        return {"name": "kivi", "version": VERSION, "bits": self.bits, "group": self.group}

    def check(self, block_tokens: int, head_dim: int) -> None:
        """Raises InvalidArgument if such blocks cannot be held."""
        if block_tokens % self.group:
            raise InvalidArgument(
                f"block_tokens={block_tokens} is no multiple of the codec's group of {self.group}"
            )
        if head_dim % 2:
            raise InvalidArgument(f"head_dim={head_dim} is odd")

    def bytes_per_token(self, heads: int, head_dim: int) -> int:
        """Of one layer."""
        codes = 2 * heads * head_dim * self.bits // 8
        scales = heads * (SCALE_BYTES * head_dim / self.group + SCALE_BYTES)
        return codes + math.ceil(scales)

    def views(self, layer: np.ndarray, tokens: int, heads: int, head_dim: int) -> tuple[Quantised, Quantised]:
        """K and V [heads, tokens, head_dim] of a layer's bytes [length], quantised, in place."""
        width, groups = head_dim * self.bits // 8, tokens // self.group
        at = 0

        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            nonlocal at
            length = math.prod(shape) * np.dtype(dtype).itemsize
            part = layer[at : at + length].view(dtype).reshape(shape)
            at += length
            return part

        codes = [take((heads, tokens, width), np.uint8) for _ in range(2)]
        k = Quantised(
            codes[0], *(take((heads, groups, head_dim), np.float16) for _ in range(2)), self.bits, self.group
        )
        v = Quantised(codes[1], *(take((heads, tokens), np.float16) for _ in range(2)), self.bits, 0)
        return k, v

    def encode(self, source: np.ndarray, layer: np.ndarray) -> None:
        """K and V [2, heads, tokens, head_dim] into a layer's bytes. Raises NotQuantisable."""
        _, heads, tokens, head_dim = source.shape
        k, v = self.views(layer, tokens, heads, head_dim)
        quantise(source[0], self.bits, self.group, out=k)
        quantise(source[1], self.bits, 0, out=v)

    def decode(self, layer: np.ndarray, out: np.ndarray) -> None:
        """A layer's bytes into `out` [2, heads, tokens, head_dim], in its type."""
        _, heads, tokens, head_dim = out.shape
        k, v = self.views(layer, tokens, heads, head_dim)
        dequantise(k, out[0])
        dequantise(v, out[1])
