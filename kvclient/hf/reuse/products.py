"""Linear layers of a repair's passes, whose rows are few, by native/cpu: equal but for rounding.

Owns the hooks that give torch's layer no rows and put what the kernel computed in the place of its answer.
Never changes a layer. Invariant: only this thread's passes have them, and none whose bits are promised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.hf.layers.forwards import multiply, takes
from kvclient.hf.layers.install import available, linears


@contextlib.contextmanager
def few_rows(decoder: torch.nn.ModuleList, usual: Callable[[], bool]) -> Iterator[None]:
    """Within it, this thread's passes through these layers. usual: whether they are torch's all the same."""
    swapped, hooks = _Swapped(usual), list[Any]()
    try:
        layers = linears(decoder) if available() else []
        for module in (each for each in layers if each.weight.dtype is torch.float32):
            hooks.append(module.register_forward_pre_hook(swapped.before))
            hooks.append(module.register_forward_hook(swapped.behind))
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Swapped:
    """What a layer was given, between its two hooks: no layer stands inside another."""

    def __init__(self, usual: Callable[[], bool]) -> None:
        self._usual, self._thread = usual, threading.get_ident()
        self._input: tuple[torch.nn.Module, torch.Tensor] | None = None

    def before(self, module: Any, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() != self._thread:
            return None
        self._input = None
        if len(args) != 1 or self._usual():
            return None
        x = args[0]
        if not takes(x, module.weight, module.bias) or x.ndim != 3 or x.shape[0] != 1:
            return None
        self._input = module, x
        return (x[:, :0],)

    def behind(self, module: Any, _args: Any, output: Any) -> Any:
        if threading.get_ident() != self._thread or self._input is None or self._input[0] is not module:
            return None
        (_, x), self._input = self._input, None
        return multiply(x, module.weight, module.bias)
