"""Numbers that a module computes twice: by its class, and by what is to stand in its place.

Owns those trials, and the attention that stands in while one of an attention runs: it keeps what it was
given, so that K, V and every argument are compared too. Never leaves a module changed. Invariant: an
exception of the class is a no, for it wants more than rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from transformers import AttentionInterface

from kvclient.hf.release import CACHE

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # of the largest number of a row
UNEQUAL = 0.05  # of a norm's numbers in bf16, that may be rounded to their other neighbour
ROWS = (1, 5)
MORE_ROWS = (1, 5, 60)  # few are computed in other calls than many
SIZES = (1.0, 30.0, 1e-3, 0.0)  # of a norm's and an MLP's numbers: small ones tell where epsilon stands
STANDS_IN = "kvclient_trial"


@torch.no_grad()
def same_rows(module: Any, made: Callable[..., Any], width: int, dtype: torch.dtype) -> bool:
    """Whether rows [1, rows, width] come out near enough, of many sizes."""
    numbers = torch.Generator().manual_seed(0)
    for rows, size in product(ROWS, SIZES):
        x = size * _noise(numbers, dtype, 1, rows, width)
        try:
            wanted = type(module).forward(module, x)
        except Exception:
            return False
        if not isinstance(wanted, torch.Tensor) or wanted.dtype is not dtype:
            return False
        if not _near(made(x), wanted):
            return False
    return True


@torch.no_grad()
def same_norm(module: Any, made: Callable[..., Any]) -> bool:
    """same_rows() with weights that are not all one, by which a norm of bf16 tells where it rounds."""
    weight = module._parameters["weight"]
    width, dtype = len(weight), weight.dtype
    noise = torch.nn.Parameter(_noise(torch.Generator().manual_seed(1), dtype, width), requires_grad=False)
    module._parameters["weight"] = noise
    try:
        if not same_rows(module, made, width, dtype):
            return False
        x = _noise(torch.Generator().manual_seed(2), dtype, 1, 1 + 2048 // width, width)
        unequal = made(x) != type(module).forward(module, x)
    finally:
        module._parameters["weight"] = weight
    return dtype is torch.float32 or float(unequal.float().mean()) <= UNEQUAL


@torch.no_grad()
def same_attention(
    module: Any, made: Callable[..., Any], attention: Any, width: int, counts: Sequence[int] = MORE_ROWS
) -> bool:
    """Whether a module in which `attention` attends gives it the same queries, keys, values and arguments,
    gives a cache the same, all to the bit, and makes near the same of what comes back. counts: of rows.
    """
    dtype = module.dtype if hasattr(module, "dtype") else next(module.parameters()).dtype
    numbers = torch.Generator().manual_seed(0)
    for rows in counts:
        x = _noise(numbers, dtype, 1, rows, width)
        angles = tuple(_noise(numbers, dtype, 2, 1, rows, attention.head_dim).unbind())
        places = torch.arange(rows, device="cpu")[None]
        seen: list[Any] = []
        for forward in (lambda *args, **told: type(module).forward(module, *args, **told), made):
            with _standing_in(attention) as calls:
                told = {"position_embeddings": angles, "attention_mask": None, "position_ids": places}
                try:
                    out = forward(x, **told, **{CACHE: calls.cache}, use_cache=True)
                except Exception:
                    return False
            seen.append((out, calls))
        (wanted, usual), (found, ours) = seen
        if not usual.seen or not _alike(usual.seen, ours.seen) or not _near(*map(_first, (found, wanted))):
            return False
    return True


class _Calls:
    """An attention and a cache in one, that keep what they were given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.cache = self

    def update(self, key: Any, value: Any, *more: Any, **told: Any) -> tuple[Any, Any]:
        self.seen.append(("update", key.clone(), value.clone(), more, told))
        return key, value

    def attend(self, query: Any, key: Any, value: Any, mask: Any, told: dict[str, Any]) -> tuple[Any, None]:
        self.seen.append(("attend", query.clone(), key.clone(), value.clone(), mask, told))
        repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (query + repeated).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _standing_in(attention: Any) -> Iterator[_Calls]:
    """Within it, a module's attention function is what comes; one thread at a time tries a module."""
    calls, config = _Calls(), attention.config

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **told: Any
    ) -> tuple[torch.Tensor, None]:
        if module is not attention:
            raise ValueError("another module's attention")
        return calls.attend(query, key, value, mask, told)

    name = f"{STANDS_IN}_{id(calls)}"
    AttentionInterface.register(name, attend)
    attention.config = copy.copy(config)
    attention.config._attn_implementation_internal = name
    try:
        yield calls
    finally:
        attention.config = config
        AttentionInterface._global_mapping.pop(name, None)


def _noise(numbers: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu").to(dtype)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _near(found: Any, wanted: torch.Tensor) -> bool:
    within = CLOSE[wanted.dtype] * float(wanted.abs().max())
    return torch.allclose(found.float(), wanted.float(), rtol=0, atol=within)


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(found, torch.Tensor):
        same = isinstance(wanted, torch.Tensor) and found.dtype is wanted.dtype
        return same and torch.equal(found, wanted)
    if isinstance(found, dict):
        return isinstance(wanted, dict) and found.keys() == wanted.keys() and all(
            _alike(value, wanted[name]) for name, value in found.items())  # fmt: skip
    if isinstance(found, (list, tuple)):
        same = type(found) is type(wanted) and len(found) == len(wanted)
        return same and all(map(_alike, found, wanted))
    return found is wanted or bool(found == wanted)
