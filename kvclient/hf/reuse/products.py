"""Linear layers of a repair's passes, whose rows are few, by native/cpu: equal but for rounding.

Both factors are rounded to bf16 where the processor multiplies those in pairs, at half the time: that moves
an answer by 2e-5 nats, little beside what is promised (docs/log.md).

Owns the hooks that give torch's layer some rows or none and put what the kernel computed in the place of its
answer. Never changes a layer. Invariant: only this thread's passes have them, and none whose bits are
promised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.hf.layers.calls import multiply_into
from kvclient.hf.layers.forwards import takes
from kvclient.hf.layers.install import available, linears
from kvclient.kernels import contract

# That torch is given: fewer, or in others than fours, have other bits than the same rows of many. On AMD's
# processors from 8 on they have not, on Intel's with AVX-512 from 16 on (MKL of torch 2.13).
FOUR, LEAST_ROWS = 4, 16
IN_PAIRS = ("avx512_vnni", "avx512_fp16", "amx")  # paths with an instruction for it


def rounds(decoder: torch.nn.ModuleList) -> bool:
    """Whether few_rows() multiplies in bf16 here what may be."""
    if not available() or contract.auto_path() not in IN_PAIRS:
        return False
    return any(layer.weight.dtype is torch.float32 for layer in linears(decoder))


@contextlib.contextmanager
def few_rows(
    decoder: torch.nn.ModuleList, usual: Callable[[], int | None], rounded: bool
) -> Iterator[None]:
    """Within it, this thread's passes through these layers. usual: how many rows, the first, are torch's all
    the same, None: all. rounded: whether the others' factors are rounded to bf16; where rounds() says so."""
    swapped, hooks = _Swapped(usual, rounded), list[Any]()
    try:
        layers = linears(decoder) if available() else []
        for module in (each for each in layers if each.weight.dtype is torch.float32):
            hooks.append(module.register_forward_pre_hook(swapped.before))
            hooks.append(module.register_forward_hook(swapped.behind))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def few_logits(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, what this thread's passes say of their rows, in fp32, is not torch's product either."""
    asked = getattr(model, "get_output_embeddings", lambda: None)
    head = asked()
    return few_rows(torch.nn.ModuleList([] if head is None else [head]), lambda: 0, False)


class _Swapped:
    """What a layer was given, between its two hooks: no layer stands inside another."""

    def __init__(self, usual: Callable[[], int | None], rounded: bool) -> None:
        self._usual, self._thread, self._rounded = usual, threading.get_ident(), rounded
        self._input: tuple[torch.nn.Module, torch.Tensor, int] | None = None

    def before(self, module: Any, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() != self._thread:
            return None
        self._input = None
        if len(args) != 1 or (usual := self._usual()) is None:
            return None
        x = args[0]
        if not takes(x, module.weight, module.bias) or x.ndim != 3 or x.shape[0] != 1:
            return None
        usual = min(usual, x.shape[1])
        self._input = module, x, usual
        rows = max(LEAST_ROWS, -(-usual // FOUR) * FOUR) if usual else 0
        lacking = max(0, rows - x.shape[1])  # of a pass that has fewer: rows of zeros
        return (torch.nn.functional.pad(x[:, :rows], (0, 0, 0, lacking)) if lacking else x[:, :rows],)

    def behind(self, module: Any, _args: Any, output: Any) -> Any:
        if threading.get_ident() != self._thread or self._input is None or self._input[0] is not module:
            return None
        (_, x, first), self._input = self._input, None
        out = x.new_empty((1, x.shape[1], output.shape[-1]))
        out[:, :first] = output[:, :first]
        multiply_into(out[0, first:], x[0, first:], module.weight, module.bias, self._rounded)
        return out
