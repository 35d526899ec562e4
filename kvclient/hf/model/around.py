"""What other libraries put around a model's modules: adapters, and forwards of a module's own.

Owns the telling of those that compute something else from those that only go round. Never calls any.
Invariant: a forward of a module's own that is not known to end in its class's is told.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

ADAPTER_STATE = ("active_adapter", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


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
        if isinstance(forward, functools.partial) and home_of(forward.func).startswith("accelerate."):
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


def home_of(hook: Any) -> str:
    """The module that it, or its class, was written in."""
    return getattr(hook, "__module__", None) or type(hook).__module__
