"""Whether a model is still the one that was digested: asked before every call, so it has to be cheap.

Owns a list of places to look at and what was seen there. Reads no weight but the first number of each of an
adapter's: peft's hotswap writes them through `.data`. Invariant: changed() is true
after any tensor, module, foreign hook, forward of a module's own or adapter was replaced, added, removed or
written in place, by an optimizer too, or the precision, the attention implementation, a field of the
configuration, or a module's class, plain number or plain tensor (kvclient.hf.attributes) was changed. What
hides from it: a write through `.data` or `.numpy()` into the same memory, attributes of other types or that
were not there before, and functions of the model's code that are no module's forward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as every
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvclient.hf.attributes import Attributes

KNOWN_HOOKS = ("transformers.", "accelerate.", "kvclient.")
ADAPTER_STATE = ("active_adapter", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Watch:
    """About 0.15 ms a look for a model of 30 layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = modules = list(model.modules())
        # A module that is exchanged shows in its parent's dict, so these dicts are all there is to look at.
        self._dicts = [d for m in modules for d in (m._modules, m._parameters, m._buffers) if d]
        self._empty = [d for m in modules for d in (m._parameters, m._buffers, m._modules) if not d]
        self._hooked = [(m, m._forward_hooks, m._forward_pre_hooks) for m in modules]
        self._hooks = [d for _, *both in self._hooked for d in both]
        tensors = [
            t for m in modules for d in (m._parameters, m._buffers) for t in d.values() if t is not None
        ]
        self._ordinary = [t for t in tensors if not t.is_inference()]  # others know no versions
        self._tensors = tensors
        self._parameters = {id(t) for t in tensors}
        self.steps = 0  # of optimizers on them: the fused ones, the Trainer's default, count no versions
        _watches.add(self)
        self._adapters = adapters(model)
        self._first_numbers = _first_numbers([p for m in self._adapters for p in adapter_parameters(m)])
        self.attributes = Attributes(model)
        self._seen = self._look()

    def settle(self) -> None:
        """The model has run since, for us: what it changed of itself by that is no change of it."""
        self.attributes.settle()
        self._seen[0] = self.attributes.look()

    def changed(self) -> bool:
        return self._look() != self._seen

    def training(self) -> bool:
        """Whether any module is in training mode: the dropout in it makes KV random."""
        return any(module.training for module in self._modules)

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
            [_bytes(torch.stack(numbers)) for numbers in self._first_numbers],
            [own for m in self._modules if "forward" in m.__dict__ for own in foreign_forward(m)],
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
        return ",".join(f"{name}:{own.fp32_precision}" for name, own in backends.items())


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
    """What torch calls for every module of the process."""
    return _foreign(every._global_forward_hooks, every._global_forward_pre_hooks)


def foreign(module: torch.nn.Module) -> list[Any]:
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
            inner = module.__dict__.get("_old_forward")
        else:
            inner = getattr(forward, "_torchdynamo_orig_callable", None)
        if inner is None:
            return [forward]
        forward = inner
    return []


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model is in evaluation mode; then each of its modules in the one it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def adapters(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that peft, which is never imported here, has put into the model."""
    return [module for module in model.modules() if type(module).__module__.startswith("peft.")]


def adapter_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those of a module of peft's that are not of the layer it stands around."""
    base = getattr(module, "base_layer", None)
    inherited = {id(p) for p in base.parameters()} if base is not None else set()
    return [p for p in module.parameters() if id(p) not in inherited]


def adapter_state(module: torch.nn.Module) -> str:
    state = {name: getattr(module, name) for name in ADAPTER_STATE if hasattr(module, name)}
    if isinstance(scaling := state.get("scaling"), dict):  # of tensors maybe, which repr rounds
        state["scaling"] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in scaling.items()}
    return repr(list(state.items()))


def _first_numbers(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A view of one number of each, which does not keep the tensor itself; together what can be stacked."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors if t.numel() and not t.is_meta}.values():
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.data[(0,) * tensor.ndim])
    return list(alike.values())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()  # not numbers: a NaN would differ from itself


def _home(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__
