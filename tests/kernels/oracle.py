"""Attention in double, from the sentences of native/kernels.h; and cases to try it on.

Owns the oracle and the building of segments whose exact content it knows. Invariant: the oracle shares no
code with the kernels: it dequantises, rotates K forward (the kernels rotate Q back) and sums by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvclient import kernels
from tests.kernels.compare import narrow, widen

BASE_FREQUENCY = 10_000.0


def dequantised(q: kernels.Quantised) -> np.ndarray:
    codes = (
        q.codes if q.bits == 8 else np.stack([q.codes & 15, q.codes >> 4], -1).reshape(*q.codes.shape[:2], -1)
    )
    scale, zero = q.scale.astype(np.float64), q.zero.astype(np.float64)
    if q.group == 0:
        return codes * scale[:, :, None] + zero[:, :, None]
    groups = np.arange(codes.shape[1]) // q.group
    return codes * scale[:, groups] + zero[:, groups]


def turned_forward(keys: np.ndarray, angle: np.ndarray, rope: str) -> np.ndarray:
    half = angle.size
    low = np.arange(half) if rope == "half" else 2 * np.arange(half)
    high = low + half if rope == "half" else low + 1
    out = keys.copy()
    out[..., low] = keys[..., low] * np.cos(angle) - keys[..., high] * np.sin(angle)
    out[..., high] = keys[..., high] * np.cos(angle) + keys[..., low] * np.sin(angle)
    return out


@dataclass
class Case:
    """One batch of queries against segments; `known` is what the segments stand for, in double."""

    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    tokens: int = 1
    dtype: str = "float32"
    rope: str = "half"
    rotary_dim: int = 0
    options: dict = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.rows: list[list[kernels.Segment]] = []
        self.tails: list[kernels.Segment | None] = []
        self.known: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        half = (self.rotary_dim or self.head_dim) // 2
        self.inv_freq = (1 / BASE_FREQUENCY ** (np.arange(half) / half)).astype(np.float32)

    def row(self) -> Case:
        self.rows.append([])
        self.tails.append(None)
        self.known.append([])
        return self

    def noise(self, tokens: int, scale: float = 1.0) -> np.ndarray:
        x = self.random.standard_normal((self.kv_heads, tokens, self.head_dim)) * scale
        x[..., :: max(1, self.head_dim // 3)] *= 4
        return x

    def segment(
        self, tokens: int, position: int, codec: str = "", delta: int = 0, first: int = 0, tail: bool = False,
        keys: np.ndarray | None = None, values: np.ndarray | None = None, group: int = 32, after: int = 0,
    ) -> Case:  # fmt: skip
        """`tokens` of a block with `first` before and `after` behind them. codec: a dtype, int8 or int4."""
        block = first + tokens + after
        elements = self.dtype if codec in ("", "int8", "int4") else codec
        k = narrow(self.noise(block) if keys is None else keys, elements)
        v = narrow(self.noise(block) if values is None else values, elements)
        if codec in ("int8", "int4"):
            bits = int(codec[3:])
            k, v = kernels.quantise(k, bits, group), kernels.quantise(v, bits, 0)
        exact_k, exact_v = ((dequantised(x) if codec in ("int8", "int4") else widen(x)) for x in (k, v))
        turned = kernels.turn(self.inv_freq, delta) if delta else None
        part = kernels.segment(k, v, position - delta, position, turned, first, tokens)
        exact_k = exact_k[:, first : first + tokens]
        if delta:
            exact_k = turned_forward(exact_k, delta * self.inv_freq.astype(np.float64), self.rope)
        self.known[-1].append((exact_k, exact_v[:, first : first + tokens], position + np.arange(tokens)))
        if tail:
            self.tails[-1] = part
        else:
            self.rows[-1].append(part)
        return self

    def queries(self, positions: np.ndarray | None = None, scale: float = 1.0) -> Case:
        batch = len(self.rows)
        shape = (batch, self.kv_heads * self.group, self.tokens, self.head_dim)
        self.q = narrow(self.random.standard_normal(shape) * scale, self.dtype)
        if positions is None:
            ends = [max((p[-1] for *_, p in row if p.size), default=0) for row in self.known]
            positions = np.stack([end + 1 - self.tokens + np.arange(self.tokens) for end in ends])
        self.positions = np.asarray(positions, np.int64)
        return self

    def run(self, path: str, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        lse = np.full(self.q.shape[:3], 7, np.float32)
        out = kernels.attend(
            self.q, self.positions, self.rows, self.head_dim**-0.5, tails=self.tails, lse=lse, rope=self.rope,
            path=path, threads=threads, **self.options,
        )  # fmt: skip
        return widen(out), lse.astype(np.float64)

    def oracle(self) -> tuple[np.ndarray, np.ndarray]:
        q, options = widen(self.q), self.options
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        for b, row in enumerate(self.known):
            if not row:
                row = [(np.zeros((self.kv_heads, 0, self.head_dim)),) * 2 + (np.zeros(0, int),)]
            keys, values = (np.concatenate([part[i] for part in row], 1) for i in (0, 1))
            positions = np.concatenate([part[2] for part in row])
            for h in range(q.shape[1]):
                scores = q[b, h] @ keys[h // self.group].T * self.head_dim**-0.5
                if cap := options.get("softcap"):
                    scores = cap * np.tanh(scores / cap)
                distance = self.positions[b][:, None] - positions[None]
                hidden = np.zeros(scores.shape, bool)
                if options.get("causal", True):
                    hidden |= distance < 0
                if window := options.get("window"):
                    hidden |= distance >= window
                scores[hidden] = -np.inf
                if (sinks := options.get("sinks")) is not None:
                    scores = np.concatenate([scores, np.full((self.tokens, 1), float(sinks[h]))], 1)
                most = scores.max(1, initial=-np.inf)
                weights = np.exp(scores - np.where(np.isinf(most), 0, most)[:, None])
                total = weights.sum(1)
                with np.errstate(divide="ignore"):
                    lse[b, h] = most + np.log(total)
                weights = weights[:, : keys.shape[1]] / np.where(total == 0, 1, total)[:, None]
                out[b, h] = weights @ values[h // self.group]
        return out, lse
