"""What stands in the place of a module's forward: nn.Linear's, an RMSNorm's, a gated MLP's.

Owns the choice, call by call, between native/cpu and the module's class. Never changes a tensor of the
module. Invariant: what the kernels do not take (another dtype or device, a gradient, a trace) its class
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, sizeof
from typing import Any

import torch

from kvclient.kernels import contract

Forward = Callable[[torch.Tensor], torch.Tensor]
_LINEAR, _NORM = sizeof(contract.Linear), sizeof(contract.Norm)


def takes(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernels take x and weight, both [..., inputs]: fp32 on the CPU, whole rows, untraced."""
    return (
        weight is not None
        and x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and x.ndim > 1
        and x.shape[-1] == weight.shape[-1]
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


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
        weight = held["weight"]
        if not takes(input, weight):
            return usual(module, input)
        return multiply(input, weight, held["bias"])

    return forward


def of_norm(module: torch.nn.Module, epsilon: float) -> Forward:
    """In the place of an RMSNorm's, which multiplies by `weight`."""
    usual, held = type(module).forward, module._parameters

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = held["weight"]
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
    usual = type(module).forward
    gate, up, down = (part._parameters for part in (module.gate_proj, module.up_proj, module.down_proj))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not (takes(x, gate["weight"]) and takes(x, up["weight"])):
            return usual(module, x)
        between = multiply(x, gate["weight"], gate["bias"], up["weight"], up["bias"])
        return multiply(between, down["weight"], down["bias"])

    return forward
