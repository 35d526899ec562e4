"""What a server never needs of what torch and transformers import: memory, and seconds of its start.

Owns what stands in the place of that. Never in a process that has transformers already, as a program that
uses this as a library: it asked by then what there is. Invariant: whoever asks the compiler for more than
stands there gets the compiler, and who imports scipy or boto3 later gets those. Transformers itself holds for
good that there is no scipy and one process alone: its losses of detection and its sharding are for training.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

# scipy is for transformers' losses of detection, boto3 for accelerate's SageMaker.
NEVER = ("scipy", "boto3")
# torch's compiler, with sympy and a thousand modules. transformers' masks need the one module of it.
COMPILER, MASKS = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"


class _Compiler(types.ModuleType):
    """In the compiler's place as long as functions are only marked for it: they stay what they are."""

    def disable(self, fn: Any = None, *_: Any, **__: Any) -> Any:
        return _same if fn is None else fn

    def allow_in_graph(self, fn: Any) -> Any:
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> types.ModuleType:
        """Imported now, in the place of this."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        real = importlib.import_module(COMPILER)
        setattr(real, MASKS.rpartition(".")[2], sys.modules[MASKS])  # imported before it, so not set by it
        return real


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Of the compiler's modules: who imports one gets the compiler first, and it may have come with it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        whole = sys.modules.get(COMPILER)
        if not name.startswith(COMPILER + ".") or not isinstance(whole, _Compiler):
            return None
        whole.real()
        return importlib.machinery.ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It was."""


def _same(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def import_transformers() -> None:
    """Without NEVER, which can be imported behind it; as if torch were not built for several processes; and
    with no compiler until one is asked for. Raises ModuleNotFoundError where torch or transformers is not
    there.
    """
    if "transformers" in sys.modules:
        return
    import torch

    hidden = [name for name in NEVER if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python takes for one that is not there
    asked, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        from transformers.utils import import_utils

        getattr(import_utils, "is_torch_distributed_available", bool)()  # which asks once, in most releases
        torch.distributed.is_available = asked
        _without_compiler()
        importlib.import_module("transformers.modeling_utils")
    finally:
        torch.distributed.is_available = asked
        for name in hidden:
            del sys.modules[name]


def _without_compiler() -> None:
    found = importlib.util.find_spec(COMPILER)
    if COMPILER in sys.modules or found is None:
        return
    sys.modules[COMPILER] = compiler = _Compiler(COMPILER)
    compiler.__path__ = list(found.submodule_search_locations or ())
    importlib.import_module(MASKS)
    sys.meta_path.insert(0, _Parts())
