"""Which modules of a model the kernels compute, and the proof that they compute the same.

Owns the choice. Never goes by a name alone: what a class of norms or MLPs computes is tried on numbers,
beside its own forward, before one of its modules gets another. Invariant: no module that a hook, a quantiser
or an adapter touches is changed, and a model on a machine without the kernels stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _pop_mode, _push_mode

from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.hf.layers import attention, calls, decoder, forwards, fused, kinds, stack, trial
from kvclient.kernels import contract

EPSILONS = ("variance_epsilon", "eps")
OF_EACH = ("training", "layer_idx")  # differs between modules that compute the same
GATED = {"gate_proj", "up_proj", "down_proj"}
Candidate = tuple[torch.nn.Module, Callable[..., Any], Any, Callable[[], bool]]


def available() -> bool:
    """Whether this machine has the kernels, and they are wanted."""
    if os.environ.get(ENVIRONMENT) == "torch" or not contract.built("_cpu.so") or contract.lacks("auto"):
        return False
    return contract.auto_path() != "reference"  # all that this machine can run, and slower than torch


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The linear layers that they can compute."""
    return [module for module in model.modules() if _is_layer(module)]


def install(model: torch.nn.Module) -> int:
    """How many modules are computed by native/cpu from now on. A forward that was already exchanged stays. A
    model of which some linear layers are without memory now (it is streamed) stays as it is, for its layers
    would not be computed alike; so it does while a hook of all modules, a mode of operators or a transform
    sees calls, which are its classes'. Modes of functions, as a default device, do not see the trials.
    """
    if not available() or is_blind() or any(map(_is_elsewhere, model.modules())):
        return 0
    with _unseen():
        return _installed(model)


def _installed(model: torch.nn.Module) -> int:
    found = 0
    known: dict[Any, bool] = {}
    for candidates in (_rows, _blocks, _layers):  # what stands over others asks for theirs
        for module, made, kind, same in list(candidates(model)):
            if "forward" in module.__dict__ or _hooked(module):
                continue
            if kind is not None and kind not in known:
                known[kind] = same()
            if not known.get(kind, True):
                continue
            forwards.put(module, made)
            found += 1
    for module in model.modules():
        if "forward" not in module.__dict__ and not _hooked(module) and stack.fits(module):
            forwards.put(module, stack.of_model(module))
            found += 1
    return found


def is_blind() -> bool:
    """Whether a trial would see the modules' classes alone: what is tried would ask them too."""
    with _unseen():
        return bool(_has_any_global_hook()) or forwards.is_watched()


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Within it this thread's modes of functions are away."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _is_elsewhere(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and module.weight.is_meta


def _rows(model: torch.nn.Module) -> Iterator[Candidate]:
    """Modules with what could stand in their forward's place, what is to be tried once (None: nothing), and
    the trial: of layers and norms.
    """
    for module in model.modules():
        if _is_layer(module):
            yield module, forwards.of_linear(module), None, lambda: True
        elif _is_norm(module):
            made = _of_norm(module)
            yield module, made, _kind(module), lambda it=(module, made): trial.same_norm(*it)


def _of_norm(module: torch.nn.Module) -> Callable[..., Any]:
    told = (lambda: None) if kinds.norm(module) else (lambda: _kind(module))
    return forwards.of_norm(module, _epsilon(module), told)


def _blocks(model: torch.nn.Module) -> Iterator[Candidate]:
    """Of attentions and gated MLPs, whose parts have been exchanged."""
    for module in model.modules():
        if _is_gated(module):
            made, width = forwards.of_gated(module), module.gate_proj.in_features
            it = module, made, width, module.gate_proj.weight.dtype
            yield module, made, kinds_of(module), lambda it=it: trial.same_rows(*it)
        elif _is_attention(module):
            it = module, attention.of_attention(module), module, module.q_proj.in_features
            yield module, it[1], kinds_of(module), lambda it=it: trial.same_attention(*it)


def _layers(model: torch.nn.Module) -> Iterator[Candidate]:
    """Of decoder layers, whose blocks have been exchanged."""
    for module in model.modules():
        if kinds.layer(module) and _is_decoder(module):
            made, width = decoder.of_layer(module), module.self_attn.q_proj.in_features
            packed = any(map(fused.is_packed, module.modules()))  # more rows are its class's, whatever it is
            it = module, made, module.self_attn, width, trial.ROWS if packed else trial.MORE_ROWS
            yield module, made, kinds_of(module), lambda it=it: trial.same_attention(*it)


def kinds_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """What it has in common with those that compute the same: its kind, and that of all below it."""
    return tuple(map(_kind, module.modules()))


def made_again(proven: Any, module: Any) -> Callable[..., Any]:
    """What stands in the forward of one, made for another of its kind, whose weights may be elsewhere."""
    if type(proven) is torch.nn.Linear:
        return forwards.of_linear(module)
    if kinds.layer(proven):
        return decoder.of_layer(module)
    if kinds.attention(proven) is not None:
        return attention.of_attention(module)
    return forwards.of_gated(module) if _looks_gated(proven) else _of_norm(module)


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """What modules that compute the same have in common: their class, what it was told of how to, and in
    which types: what is fp32's is not proven of bf16.
    """
    told = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for name in (*EPSILONS, *OF_EACH, "forward"):  # which is put there, of each its own
        told.pop(name, None)
    plain = (bool, int, float, str, type(None))
    held = {**module._parameters, **module._buffers}
    types = tuple((name, None if tensor is None else tensor.dtype) for name, tensor in sorted(held.items()))
    return type(module), types, *((name, value if isinstance(value, plain) else id(value))
                                  for name, value in sorted(told.items()))  # fmt: skip


def _is_attention(module: Any, packed: bool = False) -> bool:
    kind = kinds.attention(module)
    if kind is None or module._parameters or module.head_dim % attention.LANES:
        return False
    parts = [module._modules.get(name) for name in attention.parts_of(kind)]
    if not all(part is not None and _stands(part, packed) for part in parts):
        return False
    return all(map(kinds.norm, parts[len(attention.PARTS) :]))


def _stands(part: Any, packed: bool) -> bool:
    """Whether a part is computed here; packed: or by its words, which no hook touches."""
    return forwards.stands(part) or (packed and fused.is_packed(part) and not _hooked(part))


def _is_decoder(module: Any) -> bool:
    """Whether what a known layer calls is computed here, or is packed."""
    parts = module._modules
    if not parts.keys() >= kinds.LAYER_PARTS or any(map(_hooked, parts.values())):
        return False
    if any("forward" in part.__dict__ and not forwards.stands(part) for part in parts.values()):
        return False  # somebody else's
    norms = module.input_layernorm, module.post_attention_layernorm
    known = all(forwards.stands(norm) and kinds.norm(norm) for norm in norms)
    return known and _is_attention(module.self_attn, True) and _is_gated(module.mlp, True)


def _is_norm(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    plain = len(module._parameters) == 1 and weight is not None and weight.ndim == 1 and _plain(weight)
    return type(module).__name__.endswith("RMSNorm") and plain and _epsilon(module) is not None


def _is_gated(module: Any, packed: bool = False) -> bool:
    return _looks_gated(module) and all(_stands(module.get_submodule(name), packed) for name in GATED)


def _looks_gated(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or set(code.co_names) != GATED | {"act_fn"}:
        return False  # one may clamp what only some numbers reach
    if module._modules.keys() != GATED | {"act_fn"} or not type(module.act_fn).__name__.startswith("SiLU"):
        return False
    return "forward" not in module.act_fn.__dict__ and not _hooked(module.act_fn)


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
    ours = tensor.dtype in calls.ROWS and tensor.device.type == "cpu" and tensor.is_contiguous()
    return ours and type(tensor) in (torch.nn.Parameter, torch.Tensor)


def _hooked(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _epsilon(module: torch.nn.Module) -> Any:
    """The name of the attribute that it is."""
    return next((name for name in EPSILONS if type(getattr(module, name, None)) is float), None)
