"""Whether a model is still the one that was digested: asked before every call, so it has to be cheap.

Owns a list of places to look at and what was seen there. Reads of every parameter and buffer a few numbers,
spread over it. Invariant: changed() is true after any tensor, module, foreign hook, forward of a module's own
or adapter was replaced, added, removed or written in place, by an optimizer too, or the precision, the
attention implementation, a field of the configuration, a module's class, plain value or tensor, or the
code that it runs (kvclient.hf.model.code) was changed; and after a write through `.data` or `.numpy()` that
reached one of the numbers read, as every write of a whole tensor does. What the passes themselves write
(counters, lists of what was seen) is no change. What hides from it: such a write that
missed them all, attributes that were not there before or are not plain (kvclient.hf.model.values), and what
hides from Code.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.modules import module as every
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvclient.blocks.identity import CONFIG_DENY_LIST
from kvclient.hf.model.around import adapter_state, adapters, foreign_forward, home_of
from kvclient.hf.model.code import Code
from kvclient.hf.model.modes import Modes
from kvclient.hf.model.values import (
    CONTAINERS,
    DEEPEST,
    MOST_ITEMS,
    SPELLED,
    VALUES,
    items_of,
    plain_text,
    spelled,
    told,
    without_bytes,
)
from kvclient.hf.streaming.registry import streams_of

KNOWN_HOOKS = ("transformers.", "accelerate.", "kvclient.")
CALLED = ("scaled_dot_product_attention", "linear", "embedding", "silu", "gelu", "softmax", "layer_norm")
SAMPLES = 4  # numbers of each tensor that are looked at


class Watch:
    """Less than a millisecond a look for a model of 30 layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.steps = (
            0  # of optimizers on its weights: the fused ones, the Trainer's default, count no versions
        )
        _watches.add(self)
        self.attributes = Attributes(model)
        self._place()
        self._seen = self._look()

    def _place(self) -> None:
        """Where to look, of the modules that the model has, and that its code reaches, now."""
        model = self._model
        self._modules = modules = [*model.modules(), *self.attributes.hidden]
        self._modes = Modes(model, modules)
        # A module that is exchanged shows in its parent's dict, so these dicts are all there is to look at.
        streams = streams_of(model)  # weights that come and go with each call are no change of the model
        moving = {(id(m), key) for m, key in streams.moving()} if streams is not None else set()
        moved = {number for number, _ in moving}
        held = [d for m in modules if id(m) not in moved for d in (m._parameters, m._buffers)]
        dicts = [*(m._modules for m in modules), *held]
        self._dicts, self._empty = [d for d in dicts if d], [d for d in dicts if not d]
        self._hooked = [(m, m._forward_hooks, m._forward_pre_hooks) for m in modules]
        self._hooks = [d for _, *both in self._hooked for d in both]
        tensors = [
            t for m in modules for d in (m._parameters, m._buffers) for key, t in d.items()
            if t is not None and (id(m), key) not in moving
        ]  # fmt: skip
        self._ordinary = [t for t in tensors if not t.is_inference()]  # others know no versions
        self._tensors = tensors
        self._parameters = {id(t) for t in tensors}
        self._adapters = adapters(model)
        self._samples = _samples(tensors)
        self._read = _samples([tensor for _, tensor in self.attributes.tensors()])

    def settle(self) -> None:
        """The model has run since, for us: what it changed of itself by that is no change of it."""
        hidden = self.attributes.hidden
        self.attributes.settle()
        if [id(module) for module in hidden] != [id(module) for module in self.attributes.hidden]:
            self._place()
            self._seen = self._look()
        self._read = _samples([tensor for _, tensor in self.attributes.tensors()])
        self._seen[:2] = self.attributes.look(), self._sampled(self._read)

    def changed(self) -> bool:
        """Whether a hook, an attribute or a tensor is another than when it began to watch."""
        return self._look() != self._seen

    def random(self) -> str | None:
        """Why a module in training mode makes KV another, as dropout does; None: none does."""
        if not any(module.training for module in self._modules):
            return None
        return self._modes.random()

    def _look(self) -> list[Any]:
        config = self._model.config
        return [
            self.attributes.look(),
            self._sampled(self._read),
            matmul_precision(),
            config._attn_implementation,
            [id(value) for d in self._dicts for value in d.values()],
            any(self._empty),
            [t.data_ptr() for t in self._tensors],
            [t._version for t in self._ordinary],
            self.steps,
            self._foreign_hooks() if any(self._hooks) else [],
            [id(hook) for hook in of_all_modules()],
            [adapter_state(module) for module in self._adapters],
            self._sampled(self._samples),
            [function for m in self._modules if "forward" in m.__dict__ for function in foreign_forward(m)],
        ]

    @staticmethod
    def _sampled(samples: list[list[torch.Tensor]]) -> list[bytes]:
        return [_bytes(torch.stack(numbers)) for numbers in samples]

    def _foreign_hooks(self) -> list[int]:
        return [id(hook) for module, *both in self._hooked if any(both) for hook in foreign(module)]


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not (watches := list(_watches)):
        return
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for watch in watches:
        watch.steps += not written.isdisjoint(watch._parameters)


register_optimizer_step_post_hook(_stepped)


def matmul_precision() -> str:
    """As torch's one switch says it; where a backend was set by itself, which torch does not sum up, each."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}
        return ",".join(f"{name}:{backend.fp32_precision}" for name, backend in backends.items())


def foreign_hook(model: torch.nn.Module) -> str | None:
    """The first forward hook or forward of a module's own that is none of the known libraries': it could
    change KV, and has no digest.
    """
    found = [(hook, "all modules") for hook in of_all_modules()] + [
        (hook, name or "the model")
        for name, module in model.named_modules()
        for hook in (*foreign(module), *foreign_forward(module))
    ]
    for hook, where in found:
        what = getattr(hook, "__qualname__", type(hook).__name__)
        return f"{home_of(hook)}.{what} on {where}"
    return None


def of_all_modules() -> list[Any]:
    """What torch calls for every module of the process, and what is called in its own functions' place."""
    replaced = [function for name in CALLED if _strange(function := getattr(functional, name, None))]
    return _foreign(every._global_forward_hooks, every._global_forward_pre_hooks) + replaced


def _strange(function: Any) -> bool:
    """Whether somebody has put it in the place of one of torch's own, as sageattention asks for."""
    if function is None or isinstance(function, BuiltinFunctionType):
        return False
    return not getattr(function, "__globals__", {}).get("__name__", "").startswith(("torch.", *KNOWN_HOOKS))


def foreign_mode() -> str | None:
    """The last mode of this thread's that sees, and may change, what torch computes; not a default device."""
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return None
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    kinds = [type(mode) for mode in modes if not isinstance(mode, DeviceContext)]
    return f"{kinds[-1].__module__}.{kinds[-1].__qualname__}" if kinds else None


def foreign(module: torch.nn.Module) -> list[Any]:
    """Hooks of the module that are not this library's."""
    return _foreign(module._forward_hooks, module._forward_pre_hooks)


def _foreign(*tables: dict[int, Any]) -> list[Any]:
    hooks = [hook for table in tables for hook in table.values()]
    return [hook for hook in hooks if not home_of(hook).startswith(KNOWN_HOOKS)]


def _samples(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A view of SAMPLES numbers of each, spread over it, which does not keep the tensor itself; together what
    can be stacked. Of a tensor that is not contiguous, or is none of plain numbers, the first number.
    """
    alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors if not without_bytes(t) and t.numel()}.values():
        plain, count = tensor.data, min(SAMPLES, tensor.numel())
        if type(plain) is torch.Tensor and plain.is_contiguous():
            view = plain.as_strided((count,), (tensor.numel() // count,))
        else:
            view = plain[(0,) * plain.ndim].reshape(1)
        alike.setdefault((view.device, view.dtype, len(view)), []).append(view)
    return list(alike.values())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()  # not numbers: a NaN would differ from itself


PLAIN = (bool, int, float, str, type(None))
ABSENT = object()
IN_PLACE = (list, dict, set, torch.Tensor, np.ndarray)
COUNTERS = (int, float)
FIXED = (tuple, frozenset)
BY_ITSELF = {*VALUES, FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, staticmethod, property}


class Attributes:
    """Of the modules that the model has now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._text = model, model.config.get_text_config(decoder=True)
        self._modules = list(model.modules())
        self._code = Code(model)
        self._code_first, self._noted = _code_state(self._code), _written(self._code)
        self._entries = [
            (name, module.__dict__, key)
            for name, module in model.named_modules()
            for key, value in module.__dict__.items()
            if (name or key in self._code.values.reads) and told(module, key, value, self._code.values.reads)
        ]
        self._kept = [held[key] for _, held, key in self._entries]  # or another could get the id of one
        self._first = self._values()

    def settle(self) -> None:
        """The model has run since, as it was: what is different by now is left out."""
        same = [now == first for now, first in zip(self._values(), self._first, strict=True)]
        self._entries = [entry for entry, stays in zip(self._entries, same, strict=True) if stays]
        if _code_state(self._code) == self._code_first:
            return  # else wrapped at its first run, as transformers does for some outputs, or noted down
        now = _written(self._code)
        noted = {place for place, first in self._noted.items() if _noted_down(first, now.get(place))}
        self._code = Code(self._model, self._code.unsteady | noted)
        self._code_first, self._noted = _code_state(self._code), _written(self._code)

    def look(self) -> list[Any]:
        """Equal to an earlier one if nothing has changed since."""
        parts = {id(config): config for config in (self._model.config, self._text)}
        return [
            self._values(),
            [type(module) for module in (*self._modules, *self.hidden)],
            _code_state(self._code),
            [_config_state(part) for part in parts.values()],
        ]

    @property
    def hidden(self) -> list[torch.nn.Module]:
        """The modules that the code reaches and the model has not."""
        return self._code.values.hidden

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Those that are tensors, of any shape, by their dotted names, and those that the code reads."""
        held = [(f"{name}.{key}", attributes.get(key)) for name, attributes, key in self._entries]
        read = [(f"read {where}", tensor) for where, tensor in self._code.values.tensors.items()]
        return [(name, value) for name, value in held if isinstance(value, torch.Tensor)] + read

    def numbers(self) -> dict[str, Any]:
        """Those that are plain values, by their dotted names."""
        held = {f"{name}.{key}": attributes.get(key) for name, attributes, key in self._entries}
        texts = {name: plain_text(value) for name, value in held.items() if spelled(value)}
        return {name: value for name, value in {**held, **texts}.items() if type(value) in PLAIN}

    def code(self) -> list[Any]:
        """Which classes the modules are of, and the digest of what their forward passes run."""
        kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in self._modules]
        return [kinds, self._code.digest]

    def _values(self) -> list[Any]:
        return [
            value if type(value := held.get(key, ABSENT)) in PLAIN else _seen(value)
            for _, held, key in self._entries
        ]


def _seen(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return mark(value) if spelled(value) else (id(value),)
    return id(value), value.data_ptr(), None if value.is_inference() else value._version


def _code_state(code: Code) -> list[Any]:
    """What the names that were looked up mean now, and what the functions that were reached are made of."""
    state = [mark(_looked_up(at, name)) for at, name in code.bindings]
    for function in code.functions:
        held = None
        if (cells := function.__closure__) is not None:
            held = [None if id(cell) in code.unsteady else mark(_content(cell)) for cell in cells]
        state.append((id(function.__code__), *_defaults(code, function), held))
    return state


def _looked_up(at: Any, name: str) -> Any:
    if type(at) is dict:
        return at.get(name)
    if isinstance(at, type):
        return at.__dict__[name] if name in at.__dict__ else getattr(at, name, None)
    return at.get(name) if isinstance(at, MutableMapping) else getattr(at, name, None)


def _defaults(code: Code, function: FunctionType) -> tuple[Any, Any]:
    """What they say now, for the look; those that cannot be written to are told by which they are."""
    defaults, keywords = function.__defaults__, function.__kwdefaults__
    steady = defaults is None or id(defaults) in code.frozen
    noted = keywords is None or (id(function), "__kwdefaults__") in code.unsteady
    if not steady and (id(function), "__defaults__") in code.unsteady:
        defaults = None
    return id(defaults) if steady else mark(defaults), id(keywords) if noted else mark(keywords)


def mark(value: Any, depth: int = 0) -> Any:
    """What is equal to an earlier one only if the value says the same, as far as that can be told: of plain
    ones what they say, else which it is."""
    if type(value) in BY_ITSELF:
        return value
    if isinstance(value, IN_PLACE) or type(value) in FIXED or isinstance(value, SPELLED):
        if (text := plain_text(value)) is not None:
            return text
        if isinstance(value, torch.Tensor):
            return id(value), None if value.is_inference() else value._version
        if isinstance(value, dict | list | tuple) and len(value) <= MOST_ITEMS and depth < DEEPEST:
            return id(value), [(mark(key, DEEPEST), mark(item, depth + 1)) for key, item in items_of(value)]
        return id(value), len(value) if isinstance(value, CONTAINERS) else 0
    return (id(value),)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _written(code: Code) -> dict[Any, tuple[Any, Any]]:
    """Of what the code reads all that can be written in place, counted, or kept by an object, by where: which
    it is, and what it says."""
    found = {(id(at), name): _looked_up(at, name) for at, name in code.bindings}
    found |= {id(cell): _content(cell) for f in code.functions for cell in f.__closure__ or ()}
    for function in code.functions:
        found[id(function), "__defaults__"] = function.__defaults__
        found[id(function), "__kwdefaults__"] = function.__kwdefaults__
    kept = {(id(at), name) for at, name in code.bindings if code.values.holds(at)}
    return {
        place: (None if place in kept or type(value) in COUNTERS else id(value), mark(value))
        for place, value in found.items()
        if place not in code.unsteady
        and (place in kept or isinstance(value, IN_PLACE) or type(value) in (tuple, *COUNTERS))
    }


def _noted_down(first: tuple[Any, Any], now: tuple[Any, Any] | None) -> bool:
    """Whether the same list, or its like, says something else, or a number another."""
    return now is not None and now[0] == first[0] and now[1] != first[1]


def _config_state(config: Any) -> str:
    """What the passes of some models read while they run, without parts that are configurations."""
    return repr([
        (key, value)
        for key, value in config.__dict__.items()
        if key not in CONFIG_DENY_LIST and not key.startswith("_") and not hasattr(value, "to_dict")
    ])  # fmt: skip
