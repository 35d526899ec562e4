"""The code that a model runs: what its forward passes are made of, as a digest and as a list to look at.

Owns the walk from the classes of a model's modules to every function they reach: methods, plain functions in
attributes, functions of the modules they were written in, what they were wrapped around, and the plain values
these read (constants, defaults, closures, numbers of a module or class). Never runs any of it. Invariant: two
processes with the same code have the same digest, whatever order things were imported in; an edited function
has another one, wherever it lies.

What it stops at is named, not read: torch, NumPy, Python's own library, and kvclient. What hides from it: a
function that is only reached through a container or a string, one of torch's own that was replaced in torch's
namespace, and code in C. It reads bytecode, so processes of different minor versions of Python share nothing.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from kvclient.blocks.identity import encode
from kvclient.errors import InvalidArgument

NAMED = frozenset({"torch", "numpy", "kvclient", "accelerate", "peft", "builtins"}) | sys.stdlib_module_names
VALUES = (bool, int, float, str, bytes, type(None))
MOST_FUNCTIONS = 20_000  # a model reaches some hundreds; above it something walked out of the model


class Code:
    """Of the modules that the model has now. About 5 ms for a model of 30 layers. functions: all that were
    reached; bindings: where a name was looked up, a namespace or a class, and the name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._functions: dict[int, tuple[types.FunctionType, list[Any]]] = {}
        self._bindings: dict[tuple[int, str], tuple[Any, str]] = {}
        self._roots: list[list[Any]] = []
        for kind in {type(module): None for module in model.modules()}:
            self._root(kind.__qualname__, _of_class(kind, "forward"), kind, "forward")
            if not _named(kind.__module__):
                numbers = {k: v for k, v in vars(kind).items() if type(v) in VALUES and not k.startswith("_")}
                self._roots.append([kind.__qualname__, sorted((k, _value(v)) for k, v in numbers.items())])
        for name, module in model.named_modules():
            for key, value in module.__dict__.items():
                if name and key != "forward" and not key.startswith("_") and callable(value):
                    self._root(f"{name}.{key}", value, module.__dict__, key)
        self._root("attention", _attention_of(model), None, "")
        self.digest = hashlib.sha256(encode([self._roots, self._spelled()])).digest()
        self.functions = [function for function, _ in self._functions.values()]
        self.bindings = list(self._bindings.values())

    def _root(self, where: str, found: Any, holder: Any, name: str) -> None:
        self._roots.append([where, self._reach(found, holder, name)])

    def _reach(self, found: Any, holder: Any, name: str) -> str:
        """What `found` is called in the digest; its code is walked, once."""
        if holder is not None:
            self._bindings[id(holder), name] = (holder, name)
        if isinstance(found, functools.partial):
            said = [_value(v) for v in (*found.args, *sorted(found.keywords.items()))]
            return f"partial({self._reach(found.func, None, '')}, {said})"
        if isinstance(found, (staticmethod, classmethod, types.MethodType)):
            found = found.__func__
        if isinstance(found, torch.jit.ScriptFunction):
            return f"script:{found.code}"
        original = getattr(found, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self._reach(original, None, "")
        if not isinstance(found, types.FunctionType):
            if isinstance(found, torch.nn.Module) or not callable(found) or isinstance(found, type):
                return _value(found)
            call = _of_class(type(found), "__call__")
            return self._reach(call, type(found), "__call__") if _walked(call) else _value(found)
        called = f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
        if _walked(found) and id(found) not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise InvalidArgument(f"{called}: the model's code reaches over {MOST_FUNCTIONS} functions")
            self._functions[id(found)] = (found, [])
            self._functions[id(found)][1].extend(self._described(found, called, holder))
        return called

    def _described(self, function: types.FunctionType, called: str, holder: Any) -> list[Any]:
        out: list[Any] = [called, _spelled(function.__code__)]
        out.append([_value(v) for v in function.__defaults__ or ()])
        out.append(sorted((k, _value(v)) for k, v in (function.__kwdefaults__ or {}).items()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            out.append([name, self._reach(held, None, "") if callable(held) else _value(held)])
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            out.append(["wrapped", self._reach(wrapped, None, "")])
        owner = holder if isinstance(holder, type) else None
        for name in sorted(_names(function.__code__)):
            if owner is not None and _walked(method := _of_class(owner, name)):
                out.append([f"self.{name}", self._reach(method, owner, name)])
            value = function.__globals__.get(name)
            if type(value) in VALUES:
                self._bindings[id(function.__globals__), name] = (function.__globals__, name)
                out.append([name, _value(value)])
            elif isinstance(value, functools.partial) or _walked(value):
                out.append([name, self._reach(value, function.__globals__, name)])
        return out

    def _spelled(self) -> list[Any]:
        """In an order that does not depend on which was reached first."""
        return sorted((said for _, said in self._functions.values()), key=repr)


def _named(module: str | None) -> bool:
    return (module or "").partition(".")[0] in NAMED


def _walked(found: Any) -> bool:
    if isinstance(found, (staticmethod, classmethod, types.MethodType)):
        found = found.__func__
    return isinstance(found, types.FunctionType) and not _named(found.__globals__.get("__name__"))


def _of_class(kind: type, name: str) -> Any:
    """What a class has under that name, by its own dict or that of a base; None if nothing."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _attention_of(model: torch.nn.Module) -> Any:
    """The function that a user registered under the name of the model's attention, or transformers' own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = getattr(model.config, "_attn_implementation", None)
    return ALL_ATTENTION_FUNCTIONS.get(chosen) if isinstance(chosen, str) else None


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _spelled(code: types.CodeType) -> list[Any]:
    """Bytecode and what it reads, without file names and line numbers."""
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, list(_constants(code))]


def _constants(code: types.CodeType) -> Iterator[Any]:
    documented = not code.co_name.startswith("<")  # the first string of a function is its documentation
    for index, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            yield _spelled(constant)
        elif index or not documented or not isinstance(constant, str):
            yield _value(constant)


def _value(value: Any) -> str:
    """A plain value spelled out; of others, which may say another thing in every process, the type."""
    if type(value) in VALUES:
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_value, value))})"
    if isinstance(value, frozenset | set):
        return f"{type(value).__name__}({', '.join(sorted(map(_value, value)))})"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
