"""The code that a model runs: what its forward passes are made of, as a digest and as a list to look at.

Owns the walk from the classes of a model's modules to every function they reach: methods, properties, those
of bases by super(), plain functions in attributes, functions and classes of the modules they were written in
and of modules named there, what they were wrapped around, what is registered as the model's attention and
masks; and the plain values these read (constants, defaults, closures, of a module or class;
kvclient.hf.model.values says which). Never runs any of it. Invariant: two processes with the same code have
the same digest, whatever order things were imported in; an edited function has another one, wherever it lies.

What it stops at is named, not read: torch, NumPy, Python's own library, and kvclient. What hides from it: a
function that is only reached through a container, a string or an object that is no layer, one of torch's own
that was replaced in torch's namespace, classes of transformers that are no layers, and code in C. It reads
bytecode, so processes of different minor versions of Python share nothing.
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
from kvclient.hf.model.values import VALUES, plain_text, text_of

NAMED = frozenset({"torch", "numpy", "kvclient", "accelerate", "peft", "builtins"}) | sys.stdlib_module_names
LIBRARIES = NAMED | {"transformers", "huggingface_hub"}  # whose classes are not walked, but for layers
MADE_AND_CALLED = ("__init__", "__new__", "__call__", "forward")  # of a class, without its name being read
MOST_FUNCTIONS = 20_000  # a model reaches some hundreds; above it something walked out of the model


class Code:
    """Of the modules that the model has now. About 5 ms for a model of 30 layers. functions: all that were
    reached; bindings: where a name was looked up (a namespace, a class, a registry), and the name; reads: the
    names that it reads. unsteady: ids of closures' cells, and (id of where, name), that hold what the passes
    themselves note down, which is no code: neither digested nor looked at.
    """

    def __init__(self, model: torch.nn.Module, unsteady: frozenset[Any] = frozenset()) -> None:
        self.unsteady = unsteady
        self._functions: dict[tuple[int, int], tuple[types.FunctionType, list[Any]]] = {}
        self._bindings: dict[tuple[int, str], tuple[Any, str]] = {}
        self._roots: list[list[Any]] = []
        self.reads: set[str] = set()
        for kind in {type(module): None for module in model.modules()}:
            self._root(kind.__qualname__, _of_class(kind, "forward"), kind, "forward", kind)
            if not _named(kind.__module__):
                numbers = [k for k, v in vars(kind).items() if type(v) in VALUES and not k.startswith("_")]
                self._roots.append([kind.__qualname__, sorted((k, text_of(vars(kind)[k])) for k in numbers)])
                self._bindings.update({(id(kind), k): (kind, k) for k in numbers})
        for name, module in model.named_modules():
            for key, value in module.__dict__.items():
                if name and key != "forward" and not key.startswith("_") and callable(value):
                    self._root(f"{name}.{key}", value, module.__dict__, key)
        for what, registry, chosen in _registered(model):
            self._root(what, registry.get(chosen), registry, chosen)
        self.digest = hashlib.sha256(encode([self._roots, self._spelled()])).digest()
        self.functions = list({id(function): function for function, _ in self._functions.values()}.values())
        self.bindings = list(self._bindings.values())

    def _root(self, where: str, found: Any, holder: Any, name: str, owner: type | None = None) -> None:
        self._roots.append([where, self._reach(found, holder, name, owner)])

    def _reach(self, found: Any, holder: Any, name: str, owner: type | None = None) -> str:
        """What `found` is called in the digest; its code is walked, once for each class that has it. holder:
        where it was looked up. owner: the class of its first argument."""
        if holder is not None:
            self._bindings[id(holder), name] = (holder, name)
        if isinstance(found, functools.partial):
            said = [text_of(v) for v in (*found.args, *sorted(found.keywords.items()))]
            return f"partial({self._reach(found.func, None, '')}, {said})"
        found = _function(found)
        if isinstance(found, torch.jit.ScriptFunction):
            return f"script:{found.code}"
        original = getattr(found, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self._reach(original, None, "")
        if not isinstance(found, types.FunctionType):
            if isinstance(found, torch.nn.Module) or not callable(found) or isinstance(found, type):
                return text_of(found)
            call = _of_class(type(found), "__call__")
            if not _walked(call):
                return text_of(found)
            return self._reach(call, type(found), "__call__", type(found))
        called = f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
        place = (id(found), id(owner))
        if _walked(found) and place not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise InvalidArgument(f"{called}: the model's code reaches over {MOST_FUNCTIONS} functions")
            self._functions[place] = (found, [])
            self._functions[place][1].extend(self._described(found, called, owner))
        return called

    def _described(self, function: types.FunctionType, called: str, owner: type | None) -> list[Any]:
        out: list[Any] = [called, _spelled(function.__code__)]
        out.append([text_of(v) for v in function.__defaults__ or ()])
        out.append(sorted((k, text_of(v)) for k, v in (function.__kwdefaults__ or {}).items()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            if id(cell) in self.unsteady:
                continue
            out.append([name, self._reach(held, None, "") if callable(held) else text_of(held)])
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            out.append(["wrapped", self._reach(wrapped, None, "", owner)])
        names = sorted(_names(function.__code__))
        self.reads.update(names)
        if owner is not None:
            out += self._of_owner(owner, names)
        for name in names:
            if name in function.__globals__:
                out += self._looked_up(function.__globals__, name, names)
        return out

    def _of_owner(self, owner: type, names: list[str]) -> list[Any]:
        """What these names are of a class: methods, properties, plain values; with super() those of each base
        that has one."""
        out: list[Any] = []
        for name in names:
            for base in owner.__mro__ if "super" in names else owner.__mro__[:1]:
                found = _of_class(owner, name) if base is owner else base.__dict__.get(name)
                if _walked(found):
                    out.append([f"self.{name}", self._reach(found, base, name, owner)])
                elif not name.startswith("__") and not _named(base.__module__):
                    out += self._plain(base, name, found)
        return out

    def _looked_up(
        self, namespace: dict[str, Any], name: str, names: list[str], within: tuple[Any, ...] = ()
    ) -> list[Any]:
        """A name of a module's; of another module, or of a class that is nobody's layer, what these names
        are there. within: modules that this one was looked up in."""
        value = namespace[name]
        if isinstance(value, functools.partial) or _walked(value):
            return [[name, self._reach(value, namespace, name)]]
        if type(value) is types.ModuleType and not _named(value.__name__):
            if value in within:
                return []
            there, within = [n for n in names if n in vars(value)], (*within, value)
            return [said for n in there for said in self._looked_up(vars(value), n, names, within)]
        if isinstance(value, type):
            return self._of_class(value, names)
        return self._plain(namespace, name, value)

    def _of_class(self, kind: type, names: list[str]) -> list[Any]:
        library = _named(kind.__module__, LIBRARIES) or issubclass(kind, torch.nn.Module)
        return [] if library else self._of_owner(kind, sorted({*names, *MADE_AND_CALLED}))

    def _plain(self, holder: Any, name: str, value: Any) -> list[Any]:
        if isinstance(value, type) or (id(holder), name) in self.unsteady:
            return []
        if (text := plain_text(value)) is None:
            return []
        self._bindings[id(holder), name] = (holder, name)
        return [[name, text]]

    def _spelled(self) -> list[Any]:
        """In an order that does not depend on which was reached first."""
        return sorted((said for _, said in self._functions.values()), key=repr)


def _named(module: str | None, known: frozenset[str] = NAMED) -> bool:
    return (module or "").partition(".")[0] in known


def _function(found: Any) -> Any:
    """The one that a method, a property or a cached property is made of."""
    if isinstance(found, (staticmethod, classmethod, types.MethodType)):
        return found.__func__
    if isinstance(found, property):
        return found.fget
    return found.func if isinstance(found, functools.cached_property) else found


def _walked(found: Any) -> bool:
    found = _function(found)
    return isinstance(found, types.FunctionType) and not _named(found.__globals__.get("__name__"))


def _of_class(kind: type, name: str) -> Any:
    """What a class has under that name, by its own dict or that of a base; None if nothing."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _registered(model: torch.nn.Module) -> list[tuple[str, Any, str]]:
    """Where transformers looks the model's attention up, and its masks, by which name: a user may register
    another one under it."""
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = getattr(model.config, "_attn_implementation", None)
    if not isinstance(chosen, str):
        return []
    found = [("attention", ALL_ATTENTION_FUNCTIONS, chosen)]
    if (masks := getattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", None)) is not None:
        found.append(("mask", masks, chosen))
    return found


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
            yield text_of(constant)
