"""What stands in the place of a module's forward: nn.Linear's, an RMSNorm's, a gated MLP's.

Owns the choice, call by call, between native/cpu and the module's class. Never changes a tensor of the
module. Invariant: what the kernels do not take (another dtype or device, a gradient, a trace, a transform, a
mode that watches), and what was changed of the module or its class since, its class computes.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, sizeof
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from kvclient.kernels import contract

Forward = Callable[..., torch.Tensor]
LANES = 16  # inputs of a layer are a multiple of it
_PRODUCT = functional.linear
_LINEAR, _NORM = sizeof(contract.Linear), sizeof(contract.Norm)


def is_watched() -> bool:
    """Whether torch does more with a call than compute it: a mode or a transform that sees operators, a
    derivative that runs forwards, a trace, a compiler, other types, another product in F.linear's place.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or functional.linear is not _PRODUCT
    )


def takes_rows(x: torch.Tensor, weight: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether the kernels may read x [..., inputs] and weight [..., inputs] where they lie: whole rows of
    fp32 on the CPU, of which no gradient is wanted.
    """
    return (
        type(x) is torch.Tensor
        and _is_plain(x)
        and _is_plain(weight)
        and x.ndim > 1
        and x.shape[-1] == weight.shape[-1]
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def takes_product(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """takes_rows() of a product: weight [outputs, inputs] and a bias [outputs]."""
    if not takes_rows(x, weight) or weight is None or weight.ndim != 2:
        return False
    outputs, inputs = weight.shape
    return inputs % LANES == 0 and inputs > 0 and (bias is None or _is_number_a_row(bias, outputs))


def takes(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> bool:
    """takes_product() of x [..., inputs], weight [outputs, inputs] and bias [outputs], and nobody watches."""
    return takes_product(x, weight, bias) and not is_watched()


def _is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _is_number_a_row(bias: torch.Tensor, rows: int) -> bool:
    plain = _is_plain(bias) and bias.shape == (rows,)
    return plain and not (torch.is_grad_enabled() and bias.requires_grad)


class Installed:
    """What stands in a module's __dict__ as its forward. A copy of the module has its class's forward again,
    as what stands here reads the weights of the module that it was made for; so has one from a file.
    """

    def __init__(self, module: torch.nn.Module, made: Callable[..., Any]) -> None:
        self.module, self.usual = module, type(module).forward
        self.__func__ = made  # as a bound method names what it calls (kvclient.hf.model.watch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # of one that has nothing in its __dict__ yet


def stands(module: torch.nn.Module) -> bool:
    """Whether a module's forward is the one that was put there, in the place of what its class has now, and
    nobody wants to see what goes through it.
    """
    put = module.__dict__.get("forward")
    return type(put) is Installed and type(module).forward is put.usual and is_unseen(module)


def is_unseen(module: torch.nn.Module) -> bool:
    """Whether no hook, of its own or of all modules, sees what goes through it."""
    return not (module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook())


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
    usual = type(module).forward

    def forward(input: torch.Tensor) -> torch.Tensor:  # its caller may name it, as nn.Linear's
        held = module._parameters
        weight, bias = held.get("weight"), held.get("bias")
        if type(module).forward is not usual or not takes(input, weight, bias):
            return type(module).forward(module, input)
        return multiply(input, weight, bias)

    return forward


def of_norm(module: torch.nn.Module, epsilon: str) -> Forward:
    """In the place of an RMSNorm's, which multiplies by `weight`. epsilon: the attribute's name."""
    usual = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight, least = module._parameters.get("weight"), getattr(module, epsilon)
        plain = len(args) == 1 and not kwargs and type(least) is float and type(module).forward is usual
        if not plain or not takes_rows(x := args[0], weight) or weight.ndim != 1 or is_watched():
            return type(module).forward(module, *args, **kwargs)
        out, width = torch.empty_like(x), x.shape[-1]
        asked = contract.Norm(
            _NORM, contract.ABI, x.numel() // width, width, 0, torch.get_num_threads(),
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, width, least,
        )  # fmt: skip
        if status := contract.cpu().kvk_norm_rows(byref(asked)):
            contract.check(status)
        return out

    return forward


def of_gated(module: Any) -> Forward:
    """In the place of down(silu(gate(x)) * up(x)): what lies between is one tensor, not three."""
    usual, silu = type(module).forward, module.act_fn
    parts, bends = [module.gate_proj, module.up_proj, module.down_proj], type(silu).forward

    def is_whole() -> bool:
        """Whether its parts are those that were tried, and nobody sees what goes between them."""
        modules = module._modules
        now = modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")
        same = modules.get("act_fn") is silu and type(silu).forward is bends and type(module).forward is usual
        same = same and "forward" not in silu.__dict__ and is_unseen(silu)
        return same and all(part is was and stands(was) for part, was in zip(now, parts, strict=True))

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 1 or kwargs or not is_whole() or is_watched():
            return type(module).forward(module, *args, **kwargs)
        gate, up, down = (part._parameters for part in parts)
        x, wide = args[0], [gate.get("weight"), up.get("weight")]
        taken = takes_product(x, wide[0], gate.get("bias")) and takes_product(x, wide[1], up.get("bias"))
        if not taken or wide[0].shape != wide[1].shape:
            return type(module).forward(module, x)
        between = multiply(x, gate["weight"], gate.get("bias"), up["weight"], up.get("bias"))
        if not takes_product(between, down.get("weight"), down.get("bias")):
            return parts[2](between)
        return multiply(between, down["weight"], down.get("bias"))

    return forward
