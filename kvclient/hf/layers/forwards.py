"""What stands in the place of a module's forward: nn.Linear's, an RMSNorm's, a gated MLP's.

Owns the choice, call by call, between native/cpu and the module's class. Never changes a tensor of the
module. Invariant: what the kernels do not take (another dtype or device, a gradient, a trace) its class
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, sizeof
from types import MethodType
from typing import Any, TypeGuard

import torch

from kvclient.kernels import contract

Forward = Callable[[torch.Tensor], torch.Tensor]
_LINEAR, _NORM = sizeof(contract.Linear), sizeof(contract.Norm)


def takes(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> bool:
    """Whether the kernels take x and weight, both [..., inputs], and a bias [outputs]: fp32 on the CPU, whole
    rows, untraced.
    """
    return (
        type(x) is torch.Tensor
        and _is_plain(weight)
        and x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and x.ndim > 1
        and x.shape[-1] == weight.shape[-1]
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and (bias is None or _is_number_a_row(bias))
        and not x.is_neg()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(weight: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return type(weight) in (torch.nn.Parameter, torch.Tensor)


def _is_number_a_row(bias: torch.Tensor) -> bool:
    plain = _is_plain(bias) and bias.dtype is torch.float32 and bias.is_cpu and bias.is_contiguous()
    return plain and not (torch.is_grad_enabled() and bias.requires_grad)


class Installed:
    """What stands in a module's __dict__ as its forward. A copy of the module has its class's forward again,
    as what stands here reads the weights of the module that it was made for; so has one from a file.
    """

    def __init__(self, module: torch.nn.Module, made: Callable[..., Any]) -> None:
        self.module = module
        self.__func__ = made  # as a bound method names what it calls (kvclient.hf.model.watch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # of one that has nothing in its __dict__ yet


def stands(module: torch.nn.Module) -> bool:
    """Whether a module's forward is the one that was put there, and nobody wants to see what goes through it.
    """
    ours = type(module.__dict__.get("forward")) is Installed
    return ours and not (module._forward_hooks or module._forward_pre_hooks)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[..., outputs] of x [..., inputs], which takes() said yes to; with up, the gated half of an MLP."""
    outputs, inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], outputs))
    args = contract.Linear(
        _LINEAR, contract.ABI, inputs, outputs, x.numel() // inputs, 0, torch.get_num_threads(), x.data_ptr(),
        weight.data_ptr(), None if up is None else up.data_ptr(), None if bias is None else bias.data_ptr(),
        None if up_bias is None else up_bias.data_ptr(), out.data_ptr(), inputs, outputs,
    )  # fmt: skip
    if status := contract.cpu().kvk_linear_multiply(byref(args)):
        contract.check(status)
    return out


def of_linear(module: torch.nn.Linear) -> Forward:
    """In the place of an nn.Linear's."""
    usual, held = type(module).forward, module._parameters

    def forward(input: torch.Tensor) -> torch.Tensor:  # its caller may name it, as nn.Linear's
        weight, bias = held.get("weight"), held.get("bias")
        if not takes(input, weight, bias):
            return usual(module, input)
        return multiply(input, weight, bias)

    return forward


def of_norm(module: torch.nn.Module, epsilon: float) -> Forward:
    """In the place of an RMSNorm's, which multiplies by `weight`."""
    usual, held = type(module).forward, module._parameters

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = held.get("weight")
        if not takes(hidden_states, weight):
            return usual(module, hidden_states)
        out, width = torch.empty_like(hidden_states), hidden_states.shape[-1]
        args = contract.Norm(
            _NORM, contract.ABI, hidden_states.numel() // width, width, 0, torch.get_num_threads(),
            hidden_states.data_ptr(), weight.data_ptr(), out.data_ptr(), width, width, epsilon,
        )  # fmt: skip
        if status := contract.cpu().kvk_norm_rows(byref(args)):
            contract.check(status)
        return out

    return forward


def of_gated(module: Any) -> Forward:
    """In the place of down(silu(gate(x)) * up(x)): what lies between is one tensor, not three."""
    usual, modules = type(module).forward, module._modules
    parts = [module.gate_proj, module.up_proj, module.down_proj]
    gate, up, down = (part._parameters for part in parts)

    def forward(x: torch.Tensor) -> torch.Tensor:
        now = [modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")]
        same = all(part is was and stands(was) for part, was in zip(now, parts, strict=True))
        if not (
            same
            and takes(x, gate.get("weight"), gate.get("bias"))
            and takes(x, up.get("weight"), up.get("bias"))
        ):
            return usual(module, x)
        between = multiply(x, gate["weight"], gate["bias"], up["weight"], up["bias"])
        if not takes(between, down.get("weight"), down.get("bias")):
            return module.down_proj(between)
        return multiply(between, down["weight"], down["bias"])

    return forward
