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

import functools
import weakref
from types import BuiltinFunctionType, CellType
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
from kvclient.hf.model.code import NAMED, Code
from kvclient.hf.model.modes import Modes
from kvclient.hf.model.values import CONTAINERS, plain_text
from kvclient.hf.streaming.registry import streams_of

KNOWN_HOOKS = ("transformers.", "accelerate.", "kvclient.")
CALLED = ("scaled_dot_product_attention", "linear", "embedding", "silu", "gelu", "softmax", "layer_norm")
SAMPLES = 4  # numbers of each tensor that are looked at
ADAPTER_STATE = ("active_adapter", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Watch:
    """About 0.15 ms a look for a model of 30 layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = modules = list(model.modules())
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
        self.steps = 0  # of optimizers on them: the fused ones, the Trainer's default, count no versions
        _watches.add(self)
        self._adapters = adapters(model)
        self._samples = _samples(tensors)
        self.attributes = Attributes(model)
        self._seen = self._look()

    def settle(self) -> None:
        """The model has run since, for us: what it changed of itself by that is no change of it."""
        self.attributes.settle()
        self._seen[0] = self.attributes.look()

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
            [_bytes(torch.stack(numbers)) for numbers in self._samples],
            [function for m in self._modules if "forward" in m.__dict__ for function in foreign_forward(m)],
        ]

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
    """As torch's one switch says it; where a backend was set by itself, which torch refuses to sum up, each.
    """
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
        return f"{_home(hook)}.{what} on {where}"
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
    return [hook for hook in hooks if not _home(hook).startswith(KNOWN_HOOKS)]


def foreign_forward(module: torch.nn.Module) -> list[Any]:
    """What was put on this module in the place of its class's forward. Not counted: what only goes round that
    one, of accelerate, torch.compile and this library.
    """
    forward = module.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        of_class = function is type(module).forward and getattr(forward, "__self__", None) is module
        # Its own name would not do: functools.wraps gives a wrapper that of what it wraps.
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if of_class or home.startswith("kvclient."):
            break
        if isinstance(forward, functools.partial) and _home(forward.func).startswith("accelerate."):
            if strangers := _of_accelerate(module):
                return strangers
            inner = module.__dict__.get("_old_forward")
        else:
            inner = getattr(forward, "_torchdynamo_orig_callable", None)
        if inner is None:
            return [forward]
        forward = inner
    return []


def _of_accelerate(module: torch.nn.Module) -> list[Any]:
    """Of the hooks that accelerate puts around a module's forward those that are not its own."""
    hook = module.__dict__.get("_hf_hook")
    hooks = [hook, *getattr(hook, "hooks", ())]
    return [each for each in hooks if not type(each).__module__.startswith("accelerate.")]


def adapters(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that peft, which is never imported here, has put into the model."""
    return [module for module in model.modules() if type(module).__module__.startswith("peft.")]


def adapter_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those of a module of peft's that are not of the layer it stands around."""
    base = getattr(module, "base_layer", None)
    inherited = {id(p) for p in base.parameters()} if base is not None else set()
    return [p for p in module.parameters() if id(p) not in inherited]


def adapter_state(module: torch.nn.Module) -> str:
    """What an adapter's layer multiplies and adds, as text to compare."""
    state = {name: getattr(module, name) for name in ADAPTER_STATE if hasattr(module, name)}
    if isinstance(scaling := state.get("scaling"), dict):  # of tensors maybe, which repr rounds
        state["scaling"] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in scaling.items()}
    return repr(list(state.items()))


def _samples(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A view of SAMPLES numbers of each, spread over it, which does not keep the tensor itself; together what
    can be stacked. Of a tensor that is not contiguous, or is none of plain numbers, the first number.
    """
    alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors if t.numel() and not t.is_meta}.values():
        plain, count = tensor.data, min(SAMPLES, tensor.numel())
        if type(plain) is torch.Tensor and plain.is_contiguous():
            view = plain.as_strided((count,), (tensor.numel() // count,))
        else:
            view = plain[(0,) * plain.ndim].reshape(1)
        alike.setdefault((view.device, view.dtype, len(view)), []).append(view)
    return list(alike.values())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()  # not numbers: a NaN would differ from itself


def _home(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


PLAIN = (bool, int, float, str, type(None))
ABSENT = object()
IN_PLACE = (list, dict, set, torch.Tensor)
OF_TORCH = frozenset(torch.nn.Module().__dict__)
HARMLESS = ("training", "gradient_checkpointing")  # the one is asked for by itself, the other needs it


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
            if name and _told(module, key, value, self._code.reads)
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
            [type(module) for module in self._modules],
            _code_state(self._code),
            [_config_state(part) for part in parts.values()],
        ]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Those that are tensors, of any shape, by their dotted names."""
        held = [(f"{name}.{key}", attributes.get(key)) for name, attributes, key in self._entries]
        return [(name, value) for name, value in held if isinstance(value, torch.Tensor)]

    def numbers(self) -> dict[str, Any]:
        """Those that are plain values, by their dotted names."""
        held = {f"{name}.{key}": attributes.get(key) for name, attributes, key in self._entries}
        texts = {name: plain_text(value) for name, value in held.items() if type(value) in CONTAINERS}
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


def _told(module: torch.nn.Module, key: str, value: Any, reads: set[str]) -> bool:
    """Whether an attribute of a module is part of what it computes, as far as it can be: numbers and tensors,
    and texts, containers and what is called private, where the code that is known reads such a name, or the
    module is torch's."""
    if key in HARMLESS or key in OF_TORCH:
        return False
    if type(value) in (bool, int, float, type(None)) or isinstance(value, torch.Tensor):
        return not key.startswith("_") or key in reads
    read = key in reads or (type(module).__module__.partition(".")[0] in NAMED and not key.startswith("_"))
    return read and type(value) in (str, *CONTAINERS) and plain_text(value) is not None


def _seen(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return mark(value) if type(value) in CONTAINERS else (id(value),)
    return id(value), value.data_ptr(), None if value.is_inference() else value._version


def _code_state(code: Code) -> list[Any]:
    """What the names that were looked up mean now, and what the functions that were reached are made of."""
    state = [
        mark(getattr(at, name, None) if isinstance(at, type) else at.get(name)) for at, name in code.bindings
    ]
    for function in code.functions:
        cells = function.__closure__ or ()
        held = [None if id(cell) in code.unsteady else _held(cell) for cell in cells]
        defaults, keywords = function.__defaults__, function.__kwdefaults__
        state.append((id(function.__code__), id(defaults), id(keywords), held))
    return state


def mark(value: Any) -> Any:
    """What is equal to an earlier one only if the value says the same, as far as that can be told: of plain
    ones what they say, else which it is."""
    if isinstance(value, (torch.Tensor, np.ndarray, *CONTAINERS)):
        return plain_text(value) or id(value)
    return value


def _held(cell: CellType) -> Any:
    return mark(_content(cell))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _written(code: Code) -> dict[Any, tuple[int, Any]]:
    """Of what the code reads all that can be written in place, by where: which it is, and what it says."""
    found = {
        (id(at), name): getattr(at, name, None) if isinstance(at, type) else at.get(name)
        for at, name in code.bindings
    }
    found |= {id(cell): _content(cell) for f in code.functions for cell in f.__closure__ or ()}
    return {
        place: (id(value), mark(value))
        for place, value in found.items()
        if isinstance(value, IN_PLACE) and place not in code.unsteady
    }


def _noted_down(first: tuple[int, Any], now: tuple[int, Any] | None) -> bool:
    """Whether the same list, or its like, says something else."""
    return now is not None and now[0] == first[0] and now[1] != first[1]


def _config_state(config: Any) -> str:
    """What the passes of some models read while they run, without parts that are configurations."""
    return repr([
        (key, value)
        for key, value in config.__dict__.items()
        if key not in CONFIG_DENY_LIST and not key.startswith("_") and not hasattr(value, "to_dict")
    ])  # fmt: skip

