"""What transformers calls: an attention and a mask function per backend, registered under its name.

Owns the reading of transformers' arguments, the choice of who answers, and the counts of fallbacks. Never
answers silently by another way: what the kernels do not take goes to torch and is counted by reason.
Invariants: a mask is handed on only in a form whose meaning the attention function knows: None (causal, the
last query at the last key), 2-D (the same with padding at the left), 4-D with the keys that the queries stand
at (causal from there), other 4-D (anything else: torch). A reason is a word that is counted; without one,
every backend of ours takes the tensors as they are, except for what it has a reason of its own against.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends, dense, sdpa, torch_reference, triton
from kvclient.hf.attention.backends import Backend
from kvclient.hf.attention.handle import ASK, HANDLE, PREFIX, awaited, hides_alike, in_step, layer_of, tell
from kvclient.kernels import contract

# Parts of mask functions whose meaning the kernels know; sliding windows come as an argument of
# attention, which install() proves.
SLIDING_MASK = "sliding_window_overlay.<locals>.inner_mask"
KNOWN_MASKS = ("causal_mask_function", SLIDING_MASK)
WINDOW = "_kvclient_window"  # of a mask made in trying(windows=True): what it was asked for with
# What changes scores or which keys count, under names that neither the kernels nor torch's way here reads.
UNREAD = ("sinks", "indices", "block_indices", "block_mask", "head_mask")
LOOKED_AT = frozenset((*UNREAD, "cache"))

_lock = threading.Lock()
_fallbacks: Counter[str] = Counter()
_trial = threading.local()


def fallbacks() -> dict[str, int]:
    """Calls of attention that torch answered although a kernel backend was asked for, by reason."""
    with _lock:
        return dict(_fallbacks)


def count_fallback(reason: str) -> None:
    """One call more that a backend left to torch, under this reason; not while a self-test runs."""
    if getattr(_trial, "under_way", False):
        return
    with _lock:
        _fallbacks[reason] += 1


@contextlib.contextmanager
def trying(windows: bool = False) -> Iterator[None]:
    """Within it, this thread tries a model: nothing is counted. windows: masks are made, with their WINDOW,
    instead of being left to the attention.
    """
    before = dict(_trial.__dict__)
    _trial.__dict__.update(under_way=True, windows=windows)
    try:
        yield
    finally:
        _trial.__dict__.clear()
        _trial.__dict__.update(before)


def implementation(backend: str) -> str:
    """A backend's name for transformers, which looks for a package where a name has `flash` in it."""
    return PREFIX + backend.replace("flash", "fused")


def backend_named(name: str) -> str:
    """The backend behind what implementation() gave."""
    return name.removeprefix(PREFIX).replace("fused", "flash")


@functools.cache
def register(backend: Backend) -> str:
    """Makes the backend known to transformers; returns the name that attn_implementation takes."""
    name = implementation(backend.name)
    AttentionInterface.register(name, functools.partial(attention, backend))
    AttentionMaskInterface.register(name, mask)
    return name


# ---------------------------------------------------------------- the mask


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers asks for: None in a step and where attention needs none, [batch, keys] where
    rows are padded on the left, else [batch, 1, queries, keys].
    """
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
    if getattr(_trial, "windows", False):
        made = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
        setattr(made, WINDOW, _window_of(function))
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
        padding._kvclient_pads = starts.tolist()
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


# ---------------------------------------------------------------- one call of attention, read


class AttentionCall(NamedTuple):
    """Queries [B, heads, T, D], keys and values [B, kv heads, S, D], and what they mean."""

    backend: Backend
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    starts: torch.Tensor | None  # per row, the columns of padding at its left
    position: torch.Tensor | None  # the keys that the queries stand at; None: the last
    sinks: torch.Tensor | None  # a logit per head that takes part in the softmax alone
    bias: torch.Tensor | None  # added to the scores
    scale: float
    softcap: float  # 0: none
    window: int  # 0: none
    causal: bool
    dropout: float
    layer: Any  # whose handle the keys are: it attends where its blocks lie
    compiling: bool
    reason: str | None  # why the kernels cannot take it

    @property
    def rows(self) -> bool:
        """Whether queries stand at keys that are not the last, and the backend can be told which."""
        return _rows(self.backend, self.position, self.layer, self.compiling)

    @property
    def keys(self) -> int:
        """How many columns of keys the call brings."""
        return self.key.shape[2]


def _read(
    backend: Backend, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None, scaling: float | None, dropout: float, sliding_window: int | None,
    softcap: float | None, sinks: torch.Tensor | None, is_causal: bool | None, bias: torch.Tensor | None,
    others: dict[str, Any], compiling: bool,
) -> AttentionCall:  # fmt: skip
    """Raises InvalidArgument, and RuntimeError for a handle that was lost."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    window = int(sliding_window or 0)
    if not compiling:
        tell(key, query, scale)
        _check_meaning(mask, window, others)
    if others.get("cache") is not None:
        raise InvalidArgument(
            "continuous batching brings a cache of its own, which these kernels do not read"
        )
    starts = None if mask is None else getattr(mask, "_kvclient_starts", None)
    position = None if mask is None else getattr(mask, "_kvclient_positions", None)
    layer = layer_of(key)
    unknown = mask is not None and starts is None and not _rows(backend, position, layer, compiling)
    reason = "mask" if unknown else _unfit(backend, query, key, value, dropout, sinks, bias, compiling)
    return AttentionCall(
        backend, query, key, value, mask, starts, position, sinks, bias, scale, float(softcap or 0.0), window,
        causal, dropout, layer, compiling, reason,
    )  # fmt: skip


def _rows(backend: Backend, position: torch.Tensor | None, layer: Any, compiling: bool) -> bool:
    return position is not None and layer is None and not compiling and backend.name not in sdpa.ORDER


def _unfit(
    backend: Backend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float,
    sinks: torch.Tensor | None, bias: torch.Tensor | None, compiling: bool,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take these tensors, as a word for counting; None: they can."""
    operands, asked, stored = (query, key, value, sinks, bias), query.shape, key.shape
    if dropout or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)):
        return "training"
    if bias is not None:
        return "position_bias"
    if value.shape != stored or stored[0] != asked[0] or asked[-1] != stored[-1]:
        return "shape"
    if not query.dtype == key.dtype == value.dtype:  # autocast makes them differ
        return "shape"
    if asked[1] // stored[1] > contract.MAX_GQA:
        return "shape"
    unfit = backends.unfit if compiling else _unfit_known
    return unfit(query.device, query.dtype, asked[-1], backend)


_unfit_known = functools.cache(backends.unfit)  # dynamo would look into it, and say so


def _check_meaning(mask: torch.Tensor | None, window: int, others: dict[str, Any]) -> None:
    """Raises InvalidArgument if this call of attention means what no argument known here says."""
    if unread := [name for name in UNREAD if others.get(name) is not None]:
        raise InvalidArgument(f"the model gives its attention {unread[0]}, which is not read here")
    asked = getattr(mask, WINDOW, window)
    if asked != window:
        raise InvalidArgument(
            f"the model's mask has a window of {asked} (0: none), its call of attention one of {window}"
        )


# ---------------------------------------------------------------- who answers it


def attention(
    backend: Backend, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, position_bias: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [batch, heads, queries, head_dim], key and value [batch,
    kv_heads, keys, head_dim]; returns [batch, queries, heads, head_dim] and no weights. Raises
    InvalidArgument for a call that means what is not read here, RuntimeError for a handle that was lost.
    """
    compiling = torch.compiler.is_compiling()
    told = None
    if attention_mask is None and s_aux is None and position_bias is None and not (dropout or compiling):
        # Between two layers of a step nothing changes but the tensors: what was looked at is not again.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        told = (backend.path, scaling, sliding_window, softcap, causal)
        answer = _again(query, key, value, told) if LOOKED_AT.isdisjoint(kwargs) else None
        if answer is not None:
            return answer, None
    if compiling and hasattr(key, HANDLE):  # what its layer does is not for a graph
        return _attention_outside(
            backend, module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap,
            s_aux, is_causal, position_bias, **kwargs,
        )  # fmt: skip
    call = _read(
        backend, module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux,
        is_causal, position_bias, kwargs, compiling,
    )  # fmt: skip
    if call.layer is not None:
        return _of_layer(call, told), None
    reason = call.reason
    if reason is None:
        answer = KERNELS.get(backend.name, _cpu)(call)
        if not isinstance(answer, str):
            if backend.path is not None and _plain(told):
                dense.told(query, key, value, told)
            return answer, None
        reason = answer
    if backend != backends.TORCH:
        count_fallback(reason)
    return _torch(call), None


_attention_outside = torch.compiler.disable(attention)


def _plain(told: tuple[Any, ...] | None) -> bool:
    """Whether it is there, and what it says cannot become something else (tensors can)."""
    return told is not None and all(value is None or isinstance(value, (int, float)) for value in told)


def _again(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, told: tuple[Any, ...]
) -> torch.Tensor | None:
    """What answers a call that says no more than `told`, and is like the last one; None: it is not."""
    marks = key.__dict__
    if (layer := marks.get(HANDLE)) is not None:
        again = getattr(layer, "again", None)
        return None if again is None else again(query, told)
    return None if ASK in marks or awaited() else dense.again(query, key, value, told)


def _of_layer(call: AttentionCall, told: tuple[Any, ...] | None) -> torch.Tensor:
    """Over blocks where they lie, as long as the layer can."""
    layer = call.layer
    if layer.takes(call.reason, call.causal) and hides_alike(layer, call.mask):
        how = (call.sinks, call.scale, call.softcap, call.window, call.backend.path)
        answer = layer.attend(call.query, *how)
        if _plain(told) and hasattr(layer, "told"):
            layer.told(told)
        return answer
    layer.become_dense(call.reason or ("padding" if call.causal else "not_causal"))
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
