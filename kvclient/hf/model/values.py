"""Values that a model's code reads: what a digest and a look at a living model compare.

Owns what counts as plain, and is spelled out: numbers, texts, small containers of them, small tensors on the
CPU, NumPy's and enums'; and the rest that is reached, by where: of an object, or a module, what the code that
is known reads the name of; tensors that are too large to be spelled are listed, to be digested and sampled;
modules that no state_dict has (in a list, an object, a closure) are listed, to be watched. Never calls
anything of a value's own. Invariant: what is spelled alike computes alike, in every process; a value is left
out only if it is a library's, beyond the bounds, or noted down by the passes themselves.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch

VALUES = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (tuple, list, dict, set, frozenset)
SPELLED = (np.generic, np.ndarray, enum.Enum)  # plain ones, too, if what they hold is
NAMED = frozenset({"torch", "numpy", "kvclient", "accelerate", "peft", "builtins"}) | sys.stdlib_module_names
HARMLESS = ("training", "gradient_checkpointing")  # the one is asked for by itself, the other needs it
OURS = frozenset({"kvclient"})
LIBRARIES = NAMED | {"transformers", "huggingface_hub"}  # whose classes are not walked, but for layers
OF_TORCH = frozenset({*torch.nn.Module().__dict__, "forward", "_gradient_checkpointing_func"})
MOST_HELD = 20_000  # objects and modules; a model has some hundreds
MOST_ITEMS, DEEPEST = 256, 4  # of a container, or elements of a tensor; containers in containers


def plain_text(value: Any, depth: int = 0) -> str | None:
    """A plain value spelled out; None: it is, or holds, something else, or too much."""
    kind = type(value)
    if kind in VALUES:
        return repr(value)
    if kind is torch.Tensor:
        return _numbers(value)
    if isinstance(value, SPELLED):
        return _spelled(value, depth)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if not isinstance(value, tuple) and kind not in CONTAINERS:
        return None
    if len(value) > MOST_ITEMS or depth == DEEPEST:
        return None
    pairs = isinstance(value, dict)
    items = [item for pair in value.items() for item in pair] if pairs else list(value)
    texts = [plain_text(item, depth + 1) for item in items]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    known = sorted(known) if isinstance(value, set | frozenset) else known
    return f"{kind.__name__}({', '.join(known)})"


def _spelled(value: Any, depth: int) -> str | None:
    if isinstance(value, enum.Enum):
        text = plain_text(value.__dict__.get("_value_"), depth + 1) if depth < DEEPEST else None
        return None if text is None else f"{type(value).__qualname__}.{text}"
    if value.dtype.kind not in "biufc" or value.size > MOST_ITEMS:
        return None
    return f"{value.dtype}{list(value.shape)}{value.tolist()}"


def _numbers(tensor: torch.Tensor) -> str | None:
    """Of a small one on the CPU, of any shape. A sparse, quantized or nested one has no plain numbers."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    if tensor.numel() > MOST_ITEMS:
        return None
    try:
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.tolist()}"
    except RuntimeError:
        return None


def text_of(value: Any) -> str:
    """Of what is not plain, which may say another thing in every process, the type, or a function's name."""
    if (text := plain_text(value)) is not None:
        return text
    if isinstance(value, tuple | list) and len(value) <= MOST_ITEMS:
        return f"{type(value).__name__}({', '.join(_named(item) for item in value)})"
    return _named(value)


def _named(value: Any) -> str:
    if (text := plain_text(value)) is not None:
        return text
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def named(module: str | None, known: frozenset[str] = NAMED) -> bool:
    """Whether a module, by its name, is one of those that are named, not read."""
    return (module or "").partition(".")[0] in known


def of_class(kind: type, name: str) -> Any:
    """What a class has under that name, by its own dict or that of a base; None if nothing."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


class Held:
    """The attributes of one object, function or module."""

    def __init__(self, where: str, what: Any, values: dict[str, Any], module: bool, hides: bool) -> None:
        self.where, self.what, self.values, self.module, self.hides = where, what, values, module, hides
        self.done, self.of_kind = set[str](), set[str]()  # names that were looked at, of it and of its class


class Walk(Protocol):
    """Who walks the code that values lead to: kvclient.hf.model.code."""

    def reach(
        self, found: Any, holder: Any, name: str, owner: type | None = None, where: str = "", depth: int = 0
    ) -> Any:
        """What `found` is called in the digest. Raises InvalidArgument for code without an end."""

    def of_owner(self, owner: type, names: list[str]) -> list[Any]:
        """What these names are of a class."""

    def reach_kind(self, kind: type) -> None:
        """A class of the model's modules, or of those that hide."""


class Reached:
    """The values of one model. reads: names that its code reads; tensors: those to digest, by where they were
    read; hidden: modules that no state_dict has, in the order in which they were reached; kept: what would
    get another's id if it went; bindings: by id of where and name.
    """

    def __init__(self, model: torch.nn.Module, unsteady: frozenset[Any], walk: Walk) -> None:
        self.unsteady, self.reads, self._walk = unsteady, set[str](), walk
        self.tensors: dict[str, torch.Tensor] = {}
        self.hidden: list[torch.nn.Module] = []
        self.kept: list[Any] = []
        self.bindings: dict[tuple[int, str], tuple[Any, str]] = {}
        self._held: dict[int, Held] = {}
        self._places: set[int] = set()
        self._known = {id(module) for module in model.modules()}
        self._saved = {
            id(t) for m in model.modules() for d in (m._parameters, m._buffers) for t in d.values()
        }

    # ---------------------------------------------------------------- values

    def counts(self, value: Any) -> bool:
        """Whether a value that is read by name is more than a library's own."""
        if plain_text(value) is not None or isinstance(value, torch.Tensor | np.ndarray | torch.nn.Module):
            return True
        called = types.FunctionType | types.MethodType | functools.partial | weakref.ref
        return _walkable(value) or isinstance(value, called) or _users(type(value))

    def value(self, where: str, value: Any, depth: int = 0, called: bool = False) -> Any:
        """What a value is in the digest. called: its code is known already."""
        if (text := plain_text(value)) is not None:
            return text
        self.kept.append(value)
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._tensor(where, value)
        if isinstance(value, torch.nn.Module):
            return self._module(where, value)
        if _walkable(value):
            if len(value) > MOST_ITEMS or depth >= DEEPEST:
                return text_of(value)
            return [type(value).__name__, *self._items(where, value, depth + 1)]
        if isinstance(value, weakref.ref) and depth < DEEPEST:
            return ["weakref", self.value(where, value(), depth + 1)]
        if callable(value) and not called:
            return self._walk.reach(value, None, "", None, where, depth)
        if _users(type(value)) and not isinstance(value, type):
            self.hold(where, value)
        return text_of(value)

    def _items(self, where: str, value: Any, depth: int) -> list[Any]:
        return [
            [plain_text(key) or text_of(key), self.value(f"{where}[{key!s:.40}]", item, depth)]
            for key, item in items_of(value)
        ]

    def _tensor(self, where: str, value: Any) -> str:
        if isinstance(value, np.ndarray):
            try:
                tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
            except (TypeError, ValueError):  # of objects, or as torch has none
                return text_of(value)
        elif type(value) not in (torch.Tensor, torch.nn.Parameter) or without_bytes(value):
            return text_of(value)
        else:
            tensor = value
        if id(value) not in self._saved:
            self.tensors[where] = tensor
        return f"{tensor.dtype}{list(tensor.shape)}"

    def _module(self, where: str, module: torch.nn.Module) -> str:
        for name, each in module.named_modules():
            if id(each) in self._known:
                continue
            self._known.add(id(each))
            self.hidden.append(each)
            self.hold(f"{where}.{name}", each, hides=True)
            self._walk.reach_kind(type(each))
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None:
                    self._tensor(f"{where}.{name}.{key}", tensor)
        return text_of(module)

    # ---------------------------------------------------------------- attributes, of which some are read

    def hold(self, where: str, what: Any, hides: bool = False) -> None:
        """An object, or a module, of which what is read counts. hides: the model has no such module."""
        try:
            values = object.__getattribute__(what, "__dict__")
        except AttributeError:
            values = None
        if not isinstance(values, dict):
            values = _slots(what)
        self.hold_dict(where, what, values, hides)

    def hold_dict(self, where: str, what: Any, values: dict[str, Any], hides: bool = False) -> None:
        """The same of a function, whose attributes these are."""
        if id(what) not in self._held and len(self._held) < MOST_HELD:
            self._places.add(id(what if isinstance(values, Slots) else values))
            self._held[id(what)] = Held(where, what, values, isinstance(what, torch.nn.Module), hides)

    def all_held(self) -> list[Any]:
        """What is read of all that is held; reading may reach more of both."""
        out: list[Any] = []
        while True:
            found = [said for held in list(self._held.values()) for said in self._of_held(held)]
            if not found:
                return out
            out += found

    def _of_held(self, held: Held) -> list[Any]:
        out = []
        for key, value in list(held.values.items()):
            if key in held.done or not self._told(held, key, value):
                continue
            held.done.add(key)
            if (id(held.values), key) not in self.unsteady and (callable(value) or self.counts(value)):
                if isinstance(held.values, Slots):
                    self.bindings[id(held.what), key] = (held.what, key)
                else:
                    self.bindings[id(held.values), key] = (held.values, key)
                out.append([held.where, key, self.value(f"{held.where}.{key}", value)])
        return out if isinstance(held.what, types.FunctionType) else out + self._of_kind(held)

    def holds(self, at: Any) -> bool:
        """Whether names are looked up there as an object's, or a module's, own."""
        return id(at) in self._places

    def _of_kind(self, held: Held) -> list[Any]:
        """Of its class, and of those that it is made of, where they are a user's."""
        users = [base for base in type(held.what).__mro__ if _users(base)]
        names = sorted({name for base in users for name in self.reads & vars(base).keys()} - held.of_kind)
        held.of_kind.update(names)
        if not isinstance(held.values, Slots):  # which one of its own would take the place of
            places = {(id(held.values), name): (held.values, name) for name in names}
            self.bindings.update({key: places[key] for key in places.keys() - self.unsteady})
        return self._walk.of_owner(type(held.what), names) if names else []

    def _told(self, held: Held, key: str, value: Any) -> bool:
        """Whether an attribute counts. Plain values and tensors of the model's modules are
        kvclient.hf.model.watch' own."""
        if not held.module:
            return key in self.reads and not key.startswith("__")
        if key in OF_TORCH:
            return False
        if held.hides and plain_text(value) is not None:
            return key in self.reads or (named(type(held.what).__module__) and not key.startswith("_"))
        if not held.hides and (plain_text(value) is not None or isinstance(value, torch.Tensor)):
            return False
        if isinstance(value, types.MethodType) and named(value.__func__.__module__, OURS):
            return False  # what stands in a method's place while a store is attached
        public = bool(held.where) and not key.startswith("_") and callable(value)
        return public or key in self.reads


class Slots(dict[str, Any]):
    """A copy of the values of an object without a dict."""


def _slots(what: Any) -> Slots:
    found = Slots()
    for kind in type(what).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(what, kind)
                except AttributeError:
                    continue
    return found


def _walkable(value: Any) -> bool:
    kind = type(value)
    if kind in CONTAINERS:
        return not isinstance(value, set | frozenset)  # which have no order
    return isinstance(value, dict | list | tuple) and (kind.__module__ == "collections" or _users(kind))


def _users(kind: type) -> bool:
    """Whether a class is no library's, nor of anything that was installed."""
    return kind is types.SimpleNamespace or not (
        named(kind.__module__, LIBRARIES) or _installed(kind.__module__)
    )


@functools.cache
def _installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def without_bytes(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor, of any shape, are not in its memory as they are."""
    return tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Keys, or numbers, and values of a container, by nothing of its own."""
    if isinstance(container, dict):
        return list(dict.items(container))
    walk = list.__iter__ if isinstance(container, list) else tuple.__iter__
    return list(enumerate(walk(container)))


def told(module: torch.nn.Module, key: str, value: Any, reads: set[str]) -> bool:
    """Whether an attribute of a module is part of what it computes, as far as it can be: numbers and tensors,
    and texts, containers and what is called private, where the code that is known reads such a name, or the
    module is torch's."""
    if key in HARMLESS or key in OF_TORCH:
        return False
    if type(value) in (bool, int, float, type(None)) or isinstance(value, torch.Tensor):
        return not key.startswith("_") or key in reads
    read = key in reads or (named(type(module).__module__) and not key.startswith("_"))
    return read and (type(value) is str or spelled(value)) and plain_text(value) is not None


def spelled(value: Any) -> bool:
    """Whether it is spelled out as one of a container's kind, if what it holds can be."""
    return type(value) in CONTAINERS or isinstance(value, SPELLED)
