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
from kvclient.hf.attention.handle import HANDLE, in_step, layer_of, tell
from kvclient.kernels import contract

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
        own = super().__new__(cls, name)
        own._before = before
        return own

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
            if (own := part.config._attn_implementation) == register(chosen):
                part.config._attn_implementation_internal = Name(own, before[name])
        if not proven:
            proof.prove(model, lambda: without(model), chosen.name)
    except BaseException:
        uninstall(model)
        raise
    return chosen.name


def backend_of(model: torch.nn.Module, name: str | None = None) -> Backend:
    """The backend that this model has, or that install() would give it."""
    if (own := installed(model)) is not None:
        return backends.backend(own)
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
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    if not torch.compiler.is_compiling():
        tell(key, query, scale)
        proof.check_call(attention_mask, int(sliding_window or 0), kwargs)
    window, cap = int(sliding_window or 0), float(softcap or 0.0)
    starts = None if attention_mask is None else getattr(attention_mask, "_kvclient_starts", None)
    position = None if attention_mask is None else getattr(attention_mask, "_kvclient_positions", None)
    layer = layer_of(key)
    eager = layer is None and not torch.compiler.is_compiling()
    rows = position is not None and eager and backend.name not in sdpa.ORDER
    strange = attention_mask is not None and starts is None and not rows
    reason = _unfit(backend, query, key, value, strange, dropout, s_aux, position_bias, kwargs)
    if layer is not None:
        if layer.takes(reason, causal):
            return layer.attend(query, s_aux, scale, cap, window, backend.path), None
        layer.become_dense(reason or "not_causal")
        key, value = layer.keys, layer.values
    elif reason is None and backend.name in sdpa.ORDER:
        reason = sdpa.unfit(starts, window, key.shape[2], cap, s_aux)
        if reason is None:
            return sdpa.attend(backend.name, query, key, value, scale, causal), None
    elif reason is None and backend.name == "triton":
        return triton.attend(query, key, value, starts, s_aux, scale, cap, window, causal, position), None
    elif reason is None and rows:
        own = starts, s_aux, scale, cap, window, causal, backend.path, position
        return dense.attend(query, key, value, *own), None
    elif reason is None:
        run = dense.attend_op if torch.compiler.is_compiling() else dense.attend
        return run(query, key, value, starts, s_aux, scale, cap, window, causal, backend.path), None
    if backend != backends.TORCH and layer is None:
        count_fallback(reason)
    shape = query.shape[2], key.shape[2]
    if position is not None:
        seen = torch_reference.visible(*shape, None, window, causal, query.device, position[0])
    elif attention_mask is not None and attention_mask.ndim == 4:
        seen = attention_mask[..., : key.shape[2]]
    else:
        seen = torch_reference.visible(*shape, starts, window, causal, query.device)
        if attention_mask is not None and starts is None:  # 2-D, from elsewhere or copied: its values count
            if attention_mask.ndim != 2 or attention_mask.shape[1] < shape[1]:
                raise InvalidArgument(f"a mask {list(attention_mask.shape)} for {shape[1]} keys")
            seen = seen & (attention_mask[:, None, None, -shape[1] :] > 0)
    return torch_reference.attend(query, key, value, seen, scale, cap, s_aux, position_bias, dropout), None


_attention_outside = torch.compiler.disable(attention)


def _unfit(
    backend: Backend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: bool,
    dropout: float, s_aux: torch.Tensor | None, position_bias: torch.Tensor | None, kwargs: dict[str, Any],
) -> str | None:  # fmt: skip
    """Why the kernels cannot take this call, as a word for counting; None: they can."""
    if kwargs.get("cache") is not None:
        raise InvalidArgument(
            "continuous batching brings a cache of its own, which these kernels do not read"
        )
    if masked:
        return "mask"
    given = (query, key, value, s_aux, position_bias)
    if dropout or (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)):
        return "training"
    if position_bias is not None:
        return "position_bias"
    if value.shape != key.shape or len(key) != len(query) or query.shape[-1] != key.shape[-1]:
        return "shape"
    if not query.dtype == key.dtype == value.dtype:  # autocast makes them differ
        return "shape"
    if query.shape[1] // key.shape[1] > contract.MAX_GQA:
        return "shape"
    return backends.unfit(query.device, query.dtype, query.shape[-1], backend)
