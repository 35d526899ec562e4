"""Which modules of a model the kernels compute, and the proof that they compute the same.

Owns the choice. Never goes by a name alone: what a class of norms or MLPs computes is tried on numbers,
beside its own forward, before one of its modules gets another. Invariant: no module that a hook, a quantiser
or an adapter touches is changed, and a model on a machine without the kernels stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.hf.layers import attention, forwards
from kvclient.kernels import contract

EPSILONS = ("variance_epsilon", "eps")
OF_EACH = ("training", "layer_idx")  # differs between modules that compute the same
GATED = {"gate_proj", "up_proj", "down_proj"}
CLOSE = 1e-5  # of the largest number of a row
TRIED_ROWS = (1, 5)
TRIED_SIZES = (1.0, 30.0, 1e-3, 0.0)  # of a norm's and an MLP's numbers: small ones tell where epsilon stands


def available() -> bool:
    """Whether this machine has the kernels, and they are wanted."""
    if os.environ.get(ENVIRONMENT) == "torch" or not contract.built("_cpu.so") or contract.lacks("auto"):
        return False
    return contract.auto_path() != "reference"  # all that this machine can run, and slower than torch


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The linear layers that they can compute."""
    return [module for module in model.modules() if _is_layer(module)]


def install(model: torch.nn.Module) -> int:
    """How many modules are computed by native/cpu from now on. A forward that was already exchanged stays."""
    if not available():
        return 0
    found = 0
    known: dict[Any, bool] = {}
    # All are found before any is changed; layers come first, for what stands over them asks for theirs.
    for module, made, kind in sorted(_candidates(model), key=lambda found: found[2] is not None):
        if "forward" in module.__dict__ or _hooked(module):
            continue
        if kind is not None and kind not in known:
            known[kind] = _same(module, made)
        if not known.get(kind, True):
            continue
        module.__dict__["forward"] = forwards.Installed(module, made)
        found += 1
    return found


def _candidates(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Callable[..., Any], Any]]:
    """Modules with what could stand in their forward's place, and what is to be tried once: None, nothing."""
    for module in model.modules():
        if _is_layer(module):
            yield module, forwards.of_linear(module), None
        elif _is_norm(module):
            yield module, forwards.of_norm(module, _epsilon(module)), _kind(module)
        elif _is_gated(module):
            yield module, forwards.of_gated(module), (_kind(module), _kind(module.act_fn))
        elif attention.is_known(module) and all(_is_layer(getattr(module, name)) for name in attention.PARTS):
            yield module, attention.of_attention(module), _kind(module)


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """What modules that compute the same have in common: their class, and what it was told of how to."""
    told = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for name in (*EPSILONS, *OF_EACH):
        told.pop(name, None)
    plain = (bool, int, float, str, type(None))
    return type(module), *((name, value if isinstance(value, plain) else id(value))
                           for name, value in sorted(told.items()))  # fmt: skip


def _is_norm(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    plain = len(module._parameters) == 1 and weight is not None and weight.ndim == 1 and _plain(weight)
    return type(module).__name__.endswith("RMSNorm") and plain and _epsilon(module) is not None


def _is_gated(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or set(code.co_names) != GATED | {"act_fn"}:
        return False  # one may clamp what only some numbers reach
    if module._modules.keys() != GATED | {"act_fn"} or not type(module.act_fn).__name__.startswith("SiLU"):
        return False
    if "forward" in module.act_fn.__dict__ or _hooked(module.act_fn):
        return False
    return all(_is_layer(part) for part in map(module.get_submodule, GATED))


def _is_layer(module: Any) -> bool:
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__ and _fits(module)


def _fits(module: torch.nn.Linear) -> bool:
    bias = module._parameters.get("bias")
    return (
        _plain(module.weight)
        and (bias is None or _plain(bias))
        and module.in_features % forwards.LANES == 0
        and module.in_features > 0
        and not _hooked(module)
    )


def _plain(tensor: torch.Tensor) -> bool:
    ours = tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return ours and type(tensor) in (torch.nn.Parameter, torch.Tensor)


def _hooked(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _epsilon(module: torch.nn.Module) -> Any:
    """The name of the attribute that it is."""
    return next((name for name in EPSILONS if type(getattr(module, name, None)) is float), None)


def _same(module: torch.nn.Module, made: Callable[..., Any]) -> bool:
    """Whether it computes what its class does, of a few rows."""
    width, attends = next(module.parameters()).shape[-1], hasattr(module, "head_dim")
    numbers, on = torch.Generator().manual_seed(0), {"dtype": torch.float32, "device": "cpu"}
    with torch.no_grad():
        for rows, size in product(TRIED_ROWS, TRIED_SIZES[:1] if attends else TRIED_SIZES):
            args = [size * torch.randn((1, rows, width), generator=numbers, **on)]
            if attends:  # the angles' cosines and sines too
                args.append(torch.randn((2, 1, rows, module.head_dim), generator=numbers, **on).unbind())
            try:
                wanted = _tensor(type(module).forward(module, *args))
            except Exception:  # it wants more than rows: none of these
                return False
            if not isinstance(wanted, torch.Tensor) or wanted.dtype is not torch.float32:
                return False
            found = _tensor(made(*args))
            if not torch.allclose(found, wanted, rtol=0, atol=CLOSE * float(wanted.abs().max())):
                return False
    return True


def _tensor(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out
