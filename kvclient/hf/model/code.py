"""The code that a model runs: what its forward passes are made of, as a digest and as a list to look at.

Owns the walk from the classes of a model's modules to every function they reach: methods, properties, those
of bases by super(), plain functions in attributes, functions and classes of the modules they were written
in, of modules named or imported there, what they were wrapped around, what is registered as the model's
attention and masks; and the values these read (kvclient.hf.model.values). Never runs any of it. Invariant:
two processes with the same code have the same digest, whatever order things were imported in; an edited
function has another one, wherever it lies.

What it stops at is named, not read: torch, NumPy, Python's own library, and kvclient. What hides from it:
names that are put together while it runs, one of torch's own that was replaced in torch's namespace, classes
of transformers that are no layers, the environment and files, and code in C. It reads bytecode, so processes
of different minor versions of Python share nothing.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.util
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from kvclient.blocks.identity import encode
from kvclient.errors import InvalidArgument
from kvclient.hf.model.values import LIBRARIES, VALUES, Reached, named, of_class, plain_text, text_of

MADE_AND_CALLED = ("__init__", "__new__", "__call__", "__get__", "forward")  # without their names being read
OF_A_LAYER = ("__call__", "_call_impl", "__getattr__")
MOST_FUNCTIONS = 20_000  # a model reaches some hundreds; above it something walked out of the model
IMPORT = dis.opmap["IMPORT_NAME"]
LONGEST = 64  # letters of a constant that may be a name, as getattr() takes one


class Code:
    """Of the modules that the model has now. Some 15 ms for a model of 30 layers. functions: all that were
    reached; bindings: where a name was looked up (a namespace, a class, a registry), and the name. unsteady:
    ids of closures' cells, and (id of where, name), that hold what the passes themselves note down, which is
    no code: neither digested nor looked at.
    """

    def __init__(self, model: torch.nn.Module, unsteady: frozenset[Any] = frozenset()) -> None:
        self.unsteady = unsteady
        self.values = Reached(model, unsteady, weakref.proxy(self))  # no circle: what it keeps goes with this
        self._functions: dict[tuple[int, int], tuple[types.FunctionType, list[Any]]] = {}
        self._roots: list[list[Any]] = []
        self.frozen: set[int] = set()  # ids of defaults that cannot be written to
        for kind in {type(module): None for module in model.modules()}:
            self.reach_kind(kind)
        for name, module in model.named_modules():
            self.values.hold(name, module)
        for what, registry, chosen in _registered(model):
            self._root(what, registry.get(chosen), registry, chosen)
        self._roots += self.values.all_held()
        self.digest = hashlib.sha256(encode([self._roots, self._spelled()])).digest()
        self.functions = list({id(function): function for function, _ in self._functions.values()}.values())
        self.bindings = list(self.values.bindings.values())

    def reach_kind(self, kind: type) -> None:
        """A class of the model's modules, or of those that hide."""
        self._root(kind.__qualname__, of_class(kind, "forward"), kind, "forward", kind)
        for name in OF_A_LAYER:
            self.values.bindings[id(kind), name] = (kind, name)
            if _walked(found := of_class(kind, name)):
                self._root(f"{kind.__qualname__}.{name}", found, kind, name, kind)
        if not named(kind.__module__):
            numbers = [k for k, v in vars(kind).items() if type(v) in VALUES and not k.startswith("_")]
            self._roots.append([kind.__qualname__, sorted((k, text_of(vars(kind)[k])) for k in numbers)])
            self.values.bindings.update({(id(kind), k): (kind, k) for k in numbers})

    def _root(self, where: str, found: Any, holder: Any, name: str, owner: type | None = None) -> None:
        self._roots.append([where, self.reach(found, holder, name, owner, where)])

    def reach(
        self, found: Any, holder: Any, name: str, owner: type | None = None, where: str = "", depth: int = 0
    ) -> Any:
        """What `found` is called in the digest; its code is walked, once for each class that has it. holder:
        where it was looked up. owner: the class of its first argument. Raises InvalidArgument where the code
        has no end.
        """
        if holder is not None:
            self.values.bindings[id(holder), name] = (holder, name)
        if isinstance(found, functools.partial):
            said = [
                self.values.value(where, v, depth) for v in (*found.args, *sorted(found.keywords.items()))
            ]
            return ["partial", self.reach(found.func, None, "", None, where, depth), said]
        bound = getattr(found, "__self__", None) if isinstance(found, types.MethodType) else None
        found = _function(found)
        if isinstance(found, torch.jit.ScriptFunction):
            return f"script:{found.code}"
        original = getattr(found, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self.reach(original, None, "", None, where, depth)
        if not isinstance(found, types.FunctionType):
            return self._no_function(found, where, depth)
        called = f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
        if bound is not None and not isinstance(bound, type):
            owner = type(bound)
            called = f"{called} of {self.values.value(where, bound, depth)}"
        place = (id(found), id(owner))
        if _walked(found) and place not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise InvalidArgument(f"{called}: the model's code reaches over {MOST_FUNCTIONS} functions")
            self._functions[place] = (found, [])
            self._functions[place][1].extend(self._described(found, called, owner))
        return called

    def _no_function(self, found: Any, where: str, depth: int) -> Any:
        if isinstance(found, type):
            return [text_of(found), self._of_class(found, [])]
        if isinstance(found, torch.nn.Module) or not _walked(call := of_class(type(found), "__call__")):
            return self.values.value(where, found, depth, called=True)
        called = self.reach(call, type(found), "__call__", type(found), where, depth)
        return [called, self.values.value(where, found, depth, called=True)]

    def _described(self, function: types.FunctionType, called: str, owner: type | None) -> list[Any]:
        out: list[Any] = [called, _spelled(function.__code__)]
        names = sorted(_names(function.__code__, not named(function.__globals__.get("__name__"), LIBRARIES)))
        self.values.reads.update(names)
        fixed = (*VALUES, types.FunctionType, type)
        if all(type(value) in fixed for value in function.__defaults__ or ()):
            self.frozen.add(id(function.__defaults__))
        for place in ("__defaults__", "__kwdefaults__"):
            if (id(function), place) not in self.unsteady:
                out.append(self.values.value(f"{called}.{place}", getattr(function, place) or ()))
        if function.__dict__:
            self.values.hold_dict(called, function, function.__dict__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            if id(cell) in self.unsteady:
                continue
            out.append([name, self.values.value(f"{called}.{name}", held)])
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            out.append(["wrapped", self.reach(wrapped, None, "", owner, called)])
        if owner is not None:
            out += self.of_owner(owner, names)
        for name in names:
            if name in function.__globals__:
                out += self._looked_up(function.__globals__, name, names)
        for imported in _imports(function.__code__, function.__globals__):
            out += self._looked_up(sys.modules, imported, names)
        return out

    def of_owner(self, owner: type, names: list[str]) -> list[Any]:
        """What these names are of a class: methods, properties, plain values; with super() those of each base
        that has one."""
        out: list[Any] = []
        for name in names:
            for base in owner.__mro__ if "super" in names else owner.__mro__[:1]:
                found = of_class(owner, name) if base is owner else base.__dict__.get(name)
                if _walked(found):
                    out.append([f"self.{name}", self.reach(found, base, name, owner)])
                elif not name.startswith("__") and not named(base.__module__):
                    out += self._plain(base, name, found)
        return out

    def _looked_up(
        self, namespace: dict[str, Any], name: str, names: list[str], within: tuple[Any, ...] = ()
    ) -> list[Any]:
        """A name of a module's; of another module, or of a class that is nobody's layer, what these names
        are there. within: modules that this one was looked up in."""
        value = namespace.get(name)
        if isinstance(value, functools.partial) or _walked(value):
            return [[name, self.reach(value, namespace, name, None, name)]]
        if type(value) is types.ModuleType and not named(value.__name__):
            if value in within:
                return []
            there, within = [n for n in names if n in vars(value)], (*within, value)
            if namespace is sys.modules:
                self.values.bindings[id(namespace), name] = (namespace, name)
            return [said for n in there for said in self._looked_up(vars(value), n, names, within)]
        if isinstance(value, type):
            return self._of_class(value, names)
        return [] if namespace is sys.modules else self._plain(namespace, name, value)

    def _of_class(self, kind: type, names: list[str]) -> list[Any]:
        return (
            []
            if named(kind.__module__, LIBRARIES)
            else self.of_owner(kind, sorted({*names, *MADE_AND_CALLED}))
        )

    def _plain(self, holder: Any, name: str, value: Any) -> list[Any]:
        if isinstance(value, type | types.ModuleType) or (id(holder), name) in self.unsteady:
            return []
        theirs = isinstance(holder, dict) and named(holder.get("__name__"), LIBRARIES)
        if plain_text(value) is None and (theirs or not self.values.counts(value)):
            return []  # as transformers' registries, and activations that have a name like another's
        self.values.bindings[id(holder), name] = (holder, name)
        return [[name, self.values.value(f"{getattr(holder, '__qualname__', '')}.{name}", value)]]

    def _spelled(self) -> list[Any]:
        """In an order that does not depend on which was reached first."""
        return sorted((said for _, said in self._functions.values()), key=repr)


def _function(found: Any) -> Any:
    """The one that a method, a property or a cached property, or a function that remembers, is made of."""
    if isinstance(found, (staticmethod, classmethod, types.MethodType)):
        return _function(found.__func__)
    if isinstance(found, property):
        return found.fget
    if isinstance(found, functools._lru_cache_wrapper):
        return _function(found.__wrapped__)
    return found.func if isinstance(found, functools.cached_property) else found


def _walked(found: Any) -> bool:
    found = _function(found)
    return isinstance(found, types.FunctionType) and not named(found.__globals__.get("__name__"))


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


def _names(code: types.CodeType, texts: bool) -> set[str]:
    """What it reads by name, or, of a user's, may by getattr()."""
    inner = (_names(constant, texts) for constant in code.co_consts if isinstance(constant, types.CodeType))
    found = set(code.co_names).union(*inner)
    if not texts:
        return found
    said = (c for c in code.co_consts if type(c) is str and len(c) <= LONGEST and c.isidentifier())
    return found.union(said)


def _imports(code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
    """The modules that a function imports when it runs, and those that hold them."""
    found: dict[str, None] = {}
    if IMPORT in code.co_code[::2]:
        before: list[Any] = [None, None]
        for step in dis.get_instructions(code):
            if step.opcode == IMPORT:
                whole, level = str(step.argval), before[-2] if isinstance(before[-2], int) else 0
                with contextlib.suppress(ImportError):
                    package = namespace.get("__package__") or ""
                    whole = importlib.util.resolve_name("." * level + whole, package)
                found |= dict.fromkeys(whole.rsplit(".", n)[0] for n in range(whole.count(".") + 1))
            before.append(step.argval if step.opname == "LOAD_CONST" else None)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_imports(constant, namespace))
    return sorted(name for name in found if not named(name))


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
