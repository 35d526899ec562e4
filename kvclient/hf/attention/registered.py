"""What transformers calls: an attention and a mask function per backend, registered under its name.

Owns the registration, the counts of fallbacks and the switching of a model. Never answers silently by another
way: what the kernels do not take goes to torch and is counted by reason. Invariant: a mask is handed on only
in a form whose meaning the attention function knows: None (causal, the last query at the last key), 2-D (the
same with padding at the left), 4-D with the keys that the queries stand at (causal from there), other 4-D
(anything else: torch).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends, dense, proof, sdpa, torch_reference, triton
from kvclient.hf.attention.backends import Backend
from kvclient.hf.attention.call import AttentionCall, read_call
from kvclient.hf.attention.handle import HANDLE, in_step

PREFIX = "kvclient_"
PLACE = "_kvclient_attention"  # where a model keeps what it had before install()
BROUGHT = "_kvclient_attention_brought"  # …and that nobody asked for the kernels but an attachment
# Parts of mask functions whose meaning the kernels know; sliding windows come as an argument of
# attention, which install() proves.
SLIDING_MASK = "sliding_window_overlay.<locals>.inner_mask"
KNOWN_MASKS = ("causal_mask_function", SLIDING_MASK)



class Name(str):
    """Of our attention, in a model's configuration. A process that reads it from a file has the attention of
    before: it need not know ours.
    """

    def __new__(cls, name: str, before: str) -> Name:
        registered = super().__new__(cls, name)
        registered._before = before
        return registered

    def __deepcopy__(self, memo: Any) -> Name:
        return self  # a copy in this process has the kernels

    def __reduce__(self) -> Any:
        return str, (self._before,)


class Before(dict[str, str]):
    """What a model's parts had before install(); nothing in one from a file."""

    def __deepcopy__(self, memo: Any) -> Before:
        return Before(self)

    def __reduce__(self) -> Any:
        return type(None), ()


_lock = threading.Lock()
_fallbacks: Counter[str] = Counter()


def fallbacks() -> dict[str, int]:
    """Calls of attention that torch answered although a kernel backend was asked for, by reason."""
    with _lock:
        return dict(_fallbacks)


def count_fallback(reason: str) -> None:
    if proof.under_way():
        return
    with _lock:
        _fallbacks[reason] += 1


def install(model: torch.nn.Module, backend: str | None = None) -> str:
    """Gives the model the kernels as its attention, until uninstall(). Returns the name of the backend.

    backend: a name of available_backends(); default: KVCLIENT_BACKEND, or the best that fits. Raises
    InvalidArgument if that cannot run here, or if the model's attention cannot be replaced: a few tokens are
    computed both ways, once for each kind of model, and must come out the same.
    """
    return _install(model, backend, proven=False)


def _install(model: torch.nn.Module, backend: str | None, proven: bool) -> str:
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(f"{type(model).__name__} is no transformers model: give the one inside it")
    if model.__dict__.get(PLACE) is not None:
        raise InvalidArgument("the kernels are installed in this model already; uninstall() first")
    if not type(model)._can_set_attn_implementation():
        raise InvalidArgument(f"{type(model).__name__} calls its own attention and no registered function")
    chosen = backend_of(model, backend)
    before = Before({name: part.config._attn_implementation for name, part in _configured(model)})
    model.__dict__[PLACE] = before
    model.__dict__.pop(BROUGHT, None)  # of an attached one that this was, before it went through a file
    try:
        model.set_attn_implementation(register(chosen))
        for name, part in _configured(model):
            if (current := part.config._attn_implementation) == register(chosen):
                part.config._attn_implementation_internal = Name(current, before[name])
        if not proven:
            proof.prove(model, lambda: without(model), chosen.name)
    except BaseException:
        uninstall(model)
        raise
    return chosen.name


def backend_of(model: torch.nn.Module, name: str | None = None) -> Backend:
    """The backend that this model has, or that install() would give it."""
    if (chosen := installed(model)) is not None:
        return backends.backend(chosen)
    return backends.choose(model.device, model.dtype, backends.head_dim_of(model), name)


def uninstall(model: torch.nn.Module) -> None:
    """Gives the model back the attention it had; one that it was given since stays. Idempotent."""
    before = model.__dict__.pop(PLACE, None)
    model.__dict__.pop(BROUGHT, None)
    for name, part in _configured(model) if before is not None else ():
        if name in before and str(part.config._attn_implementation).startswith(PREFIX):
            part.config._attn_implementation_internal = before[name]


@contextlib.contextmanager
def without(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model computes with the attention it had before install()."""
    before, parts = model.__dict__.get(PLACE) or {}, _configured(model)
    ours = {name: part.config._attn_implementation for name, part in parts}
    try:
        for name, part in parts:
            part.config._attn_implementation_internal = before.get(name, ours[name])
        yield
    finally:
        for name, part in parts:
            part.config._attn_implementation_internal = ours[name]


def bring(model: torch.nn.Module, proven: bool = False) -> None:
    """Installs the kernels for an attachment, with which they leave. proven: they were compared before."""
    _install(model, None, proven)
    model.__dict__[BROUGHT] = id(model)


def copied(model: torch.nn.Module) -> bool:
    """Whether this is a copy of a model that had the kernels for its attachment's sake only."""
    return model.__dict__.get(BROUGHT, id(model)) != id(model)


def installed(model: torch.nn.Module) -> str | None:
    """The backend that install() gave this model."""
    name = str(model.config._attn_implementation)
    return name.removeprefix(PREFIX) if model.__dict__.get(PLACE) and name.startswith(PREFIX) else None


def _configured(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in model.named_modules() if hasattr(part, "set_attn_implementation")]


@functools.cache
def register(backend: Backend) -> str:
    name = PREFIX + backend.name
    AttentionInterface.register(name, functools.partial(attention, backend))
    AttentionMaskInterface.register(name, mask)
    return name


# ---------------------------------------------------------------- the mask


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    if in_step():
        return None
    padding, keys = kwargs.get("attention_mask"), kwargs.get("kv_length")
    if torch.compiler.is_compiling():
        function = kwargs.get("mask_function", causal_mask_function)
        if padding is None and function is causal_mask_function and _all_written(kwargs, keys):
            return None
        return _mask_outside(*args, **kwargs)  # its values decide
    return _mask_by_values(*args, **kwargs)


def _mask_by_values(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    padding, keys = kwargs.get("attention_mask"), kwargs.get("kv_length")
    function = kwargs.get("mask_function", causal_mask_function)
    if not _known(function) or not _all_written(kwargs, keys):
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    if proof.wants_windows():
        made = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
        setattr(made, proof.WINDOW, _window_of(function))
        return made
    if padding is None:
        return None
    padding = padding[:, -keys:]
    if padding.shape[1] != keys:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    if padding.all():
        return None
    starts = keys - padding.sum(1)
    if torch.equal(padding != 0, torch.arange(keys, device=padding.device) >= starts[:, None]):
        padding._kvclient_starts = starts
        return padding
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


_mask_outside = torch.compiler.disable(_mask_by_values)


def at(columns: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask [1, 1, T, keys] for queries at these keys, each of which sees those up to its own. It only says
    so: it has one element, which is no number, so that nobody takes it for a mask of numbers unnoticed.
    """
    nothing = torch.full((), torch.nan, dtype=dtype, device=columns.device)
    mask = nothing.expand(1, 1, len(columns), keys)
    mask._kvclient_positions = columns[None].contiguous()
    return mask


def _known(function: Callable[..., Any]) -> bool:
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = [cell.cell_contents for cell in function.__closure__ or ()]
        return all(_known(part) for inner in parts for part in inner)
    return function.__qualname__ in KNOWN_MASKS


def _window_of(function: Callable[..., Any]) -> int:
    """Of a known mask function; 0: none."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    if function.__qualname__ == SLIDING_MASK:
        return int(cells[0])
    return max((_window_of(part) for inner in cells for part in inner), default=0)


def _all_written(kwargs: dict[str, Any], keys: int) -> bool:
    """Whether the last key is the last query's: not so in a cache of fixed size."""
    offset = kwargs.get("kv_offset", 0)
    if (columns := kwargs.get("cache_position")) is not None:  # until transformers 5.4
        return int(columns[-1]) + 1 == keys + offset
    if "q_length" not in kwargs:
        return False
    return int(kwargs.get("q_offset", 0)) + kwargs["q_length"] == keys + offset


# ---------------------------------------------------------------- the attention


def attention(
    backend: Backend, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, position_bias: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if torch.compiler.is_compiling() and hasattr(key, HANDLE):  # what its layer does is not for a graph
        return _attention_outside(
            backend, module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap,
            s_aux, is_causal, position_bias, **kwargs,
        )  # fmt: skip
    call = read_call(
        backend, module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux,
        is_causal, position_bias, kwargs,
    )  # fmt: skip
    if call.layer is not None:
        return _of_layer(call), None
    reason = call.reason
    if reason is None:
        answer = KERNELS.get(backend.name, _cpu)(call)
        if not isinstance(answer, str):
            return answer, None
        reason = answer
    if backend != backends.TORCH:
        count_fallback(reason)
    return _torch(call), None


_attention_outside = torch.compiler.disable(attention)


def _of_layer(call: AttentionCall) -> torch.Tensor:
    """Over blocks where they lie, as long as the layer can."""
    layer = call.layer
    if layer.takes(call.reason, call.causal):
        return layer.attend(call.query, call.sinks, call.scale, call.softcap, call.window, call.backend.path)
    layer.become_dense(call.reason or "not_causal")
    return _torch(call._replace(key=layer.keys, value=layer.values))


def _fused(call: AttentionCall) -> torch.Tensor | str:
    if reason := sdpa.unfit(call.starts, call.window, call.keys, call.softcap, call.sinks):
        return reason
    return sdpa.attend(call.backend.name, call.query, call.key, call.value, call.scale, call.causal)


def _triton(call: AttentionCall) -> torch.Tensor | str:
    return triton.attend(
        call.query, call.key, call.value, call.starts, call.sinks, call.scale, call.softcap, call.window,
        call.causal, call.position,
    )  # fmt: skip


def _cpu(call: AttentionCall) -> torch.Tensor | str:
    told = (call.starts, call.sinks, call.scale, call.softcap, call.window, call.causal, call.backend.path)
    if call.rows:
        return dense.attend(call.query, call.key, call.value, *told, call.position)
    run = dense.attend_op if call.compiling else dense.attend
    return run(call.query, call.key, call.value, *told)


# Backend -> what answers a call that nothing speaks against: with the result, or with a reason of its own.
KERNELS: dict[str, Callable[[AttentionCall], torch.Tensor | str]] = {
    **dict.fromkeys(sdpa.ORDER, _fused), "triton": _triton,
}  # fmt: skip


def _torch(call: AttentionCall) -> torch.Tensor:
    """What no kernel takes."""
    shape, mask = (call.query.shape[2], call.keys), call.mask
    if call.position is not None:
        seen = torch_reference.visible(
            *shape, None, call.window, call.causal, call.query.device, call.position[0]
        )
    elif mask is not None and mask.ndim == 4:
        seen = mask[..., : call.keys]
    else:
        seen = torch_reference.visible(*shape, call.starts, call.window, call.causal, call.query.device)
        if mask is not None and call.starts is None:  # 2-D, from elsewhere or copied: its values count
            if mask.ndim != 2 or mask.shape[1] < call.keys:
                raise InvalidArgument(f"a mask {list(mask.shape)} for {call.keys} keys")
            seen = seen & (mask[:, None, None, -call.keys :] > 0)
    return torch_reference.attend(
        call.query, call.key, call.value, seen, call.scale, call.softcap, call.sinks, call.bias, call.dropout
    )
