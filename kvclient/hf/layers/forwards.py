"""What stands in the place of a module's forward: nn.Linear's, an RMSNorm's, a gated MLP's.

Owns the choice, call by call, between native/cpu and the module's class. Never changes a tensor of the
module. Invariant: what the kernels do not take (another dtype or device, a gradient, a trace, a transform, a
mode that watches), and what was changed of the module or its class since, its class computes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from kvclient.hf.layers import calls
from kvclient.hf.layers.calls import multiply

Forward = Callable[..., torch.Tensor]
LANES = 16  # inputs of a layer are a multiple of it
_PRODUCT = functional.linear


def is_watched() -> bool:
    """Whether torch does more with a call than compute it: a mode or a transform that sees operators, a
    derivative that runs forwards, a trace, other types, another product in F.linear's place.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or functional.linear is not _PRODUCT
    )


def takes_rows(x: torch.Tensor, weight: torch.Tensor | None, width: int = 0) -> TypeGuard[torch.Tensor]:
    """Whether the kernels may read x [..., inputs] and weight [..., inputs], or [..., width], where they lie:
    whole rows of fp32 or bf16 on the CPU, both of one type, of which no gradient is wanted.
    """
    return (
        type(x) is torch.Tensor
        and is_plain(x)
        and is_plain(weight)
        and x.dtype is weight.dtype
        and x.ndim > 1
        and (width or x.shape[-1]) == weight.shape[-1]
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def takes_product(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """takes_rows() of a product: weight [outputs, inputs] and a bias [outputs]."""
    if not takes_rows(x, weight) or weight is None or weight.ndim != 2:
        return False
    outputs, inputs = weight.shape
    return inputs % LANES == 0 and inputs > 0 and (bias is None or _is_number_a_row(bias, outputs, x.dtype))


def takes(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> bool:
    """takes_product() of x [..., inputs], weight [outputs, inputs] and bias [outputs], and nobody watches."""
    return takes_product(x, weight, bias) and not is_watched()


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a tensor's numbers, of any shape, lie on the CPU, in their order and in a type that the kernels
    read.
    """
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.dtype in calls.ROWS
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _is_number_a_row(bias: torch.Tensor, rows: int, dtype: torch.dtype) -> bool:
    plain = is_plain(bias) and bias.dtype is dtype and bias.shape == (rows,)
    return plain and not (torch.is_grad_enabled() and bias.requires_grad)


class Installed:
    """What stands in a module's __dict__ as its forward. A copy of the module has its class's forward again,
    as what stands here reads the weights of the module that it was made for; so has one from a file. Under a
    compiler it is its class's too: that reads no tensor's numbers, and none of what is asked of torch here.
    """

    def __init__(self, module: torch.nn.Module, made: Callable[..., Any]) -> None:
        self.module, self.usual = module, type(module).forward
        self.__func__ = made  # as a bound method names what it calls (kvclient.hf.model.watch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.__func__(*args, **kwargs)

    @property
    def __code__(self) -> Any:
        """Of what it stands for; torch.export takes the names of arguments from there."""
        return self.usual.__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # of one that has nothing in its __dict__ yet


def put(module: torch.nn.Module, made: Callable[..., Any]) -> None:
    """In the place of a module's forward. Who copies the module or writes it asks for its state, and is told
    of one without what was put there. (A copy of its __dict__ by other means computes with this module.)
    """
    module.__dict__["forward"] = Installed(module, made)
    module.__dict__["__getstate__"] = MethodType(_state, module)


def take_away(module: torch.nn.Module) -> None:
    """Its class's forward is the module's again, if one was put there."""
    for name in ("forward", "__getstate__") if type(module.__dict__.get("forward")) is Installed else ():
        module.__dict__.pop(name, None)


def _state(module: Any) -> Any:
    usual = type(module).__getstate__(module)
    if not isinstance(usual, dict):
        return usual
    state = dict(usual)
    if type(state.get("forward")) is Installed:
        del state["forward"]
    state.pop("__getstate__", None)
    return state


def stands(module: torch.nn.Module) -> bool:
    """Whether a module's forward is the one that was put there, in the place of what its class has now, and
    nobody wants to see what goes through it.
    """
    put = module.__dict__.get("forward")
    return type(put) is Installed and type(module).forward is put.usual and is_unseen(module)


def is_unseen(module: torch.nn.Module) -> bool:
    """Whether no hook, of its own or of all modules, sees what goes through it."""
    return not (module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook())


class Whole:
    """Modules below another that were there, each with the forward that it had, when they were proven."""

    def __init__(self) -> None:
        self._were: list[tuple[dict[str, Any], str, torch.nn.Module, Any, Any]] = []

    def add(self, parent: torch.nn.Module, name: str) -> None:
        """A module, under its name in its parent."""
        module: Any = parent._modules[name]
        found = parent._modules, name, module, type(module).forward, module.__dict__.get("forward")
        self._were.append(found)

    def stand(self) -> bool:
        """Whether all are there still, and no hook sees what goes through one."""
        for names, name, module, usual, put in self._were:
            if names.get(name) is not module or type(module).forward is not usual:
                return False
            held = module.__dict__
            if held.get("forward") is not put or held["_forward_hooks"] or held["_forward_pre_hooks"]:
                return False
        return not _has_any_global_hook()


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


def of_norm(module: torch.nn.Module, epsilon: str, told: Callable[[], Any]) -> Forward:
    """In the place of an RMSNorm's, which multiplies by `weight`. epsilon: the attribute's name. told: what
    else its class may read of it, which is to be as it was.
    """
    usual, was = type(module).forward, told()

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight, least = module._parameters.get("weight"), getattr(module, epsilon)
        plain = len(args) == 1 and not kwargs and type(least) is float and type(module).forward is usual
        if not plain or not takes_rows(x := args[0], weight) or weight.ndim != 1 or is_watched():
            return type(module).forward(module, *args, **kwargs)
        if was is not None and told() != was:
            return type(module).forward(module, *args, **kwargs)
        return calls.normalise(x, weight, least)

    return forward


class Gates:
    """down(silu(gate(x)) * up(x)) of a module: what lies between is one tensor, not three."""

    def __init__(self, module: Any) -> None:
        self.parts = Whole()
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
            self.parts.add(module, name)
        self._down = module.down_proj
        self._gate, self._up = module.gate_proj._parameters, module.up_proj._parameters

    def takes(self, x: torch.Tensor) -> bool:
        """Whether its weights may be read with x [..., inputs]."""
        gate, up = self._gate.get("weight"), self._up.get("weight")
        taken = takes_product(x, gate, self._gate.get("bias"))
        return taken and takes_product(x, up, self._up.get("bias")) and gate.shape == up.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of x that takes() said yes to."""
        gate, up, down = self._gate, self._up, self._down._parameters
        between = multiply(x, gate["weight"], gate.get("bias"), up["weight"], up.get("bias"))
        if not takes_product(between, down.get("weight"), down.get("bias")):
            return self._down(between)
        return multiply(between, down["weight"], down.get("bias"))


def of_gated(module: Any) -> Forward:
    """In the place of a gated MLP's."""
    usual, gates = type(module).forward, Gates(module)
    weight = module.gate_proj._parameters.get("weight")
    proven = None if weight is None else weight.dtype  # an activation may be another in other types

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        usual_call = len(args) == 1 and not kwargs and type(module).forward is usual
        usual_call = usual_call and getattr(args[0], "dtype", None) is proven
        stand = usual_call and not is_watched() and gates.parts.stand()
        if not stand or not gates.takes(args[0]):
            return type(module).forward(module, *args, **kwargs)
        return gates(args[0])

    return forward
