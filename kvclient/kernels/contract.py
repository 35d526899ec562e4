"""native/kernels.h in ctypes: the structs, the constants, and the library that has the functions.

Owns the loading of the CPU library and the translation of its status codes into exceptions. Never allocates
tensors and knows no framework. Invariant: the sizes here equal those in C, or the library refuses the call
before it touches memory.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from kvclient.errors import InvalidArgument, KVClientError

ABI = 2
OK, INVALID, UNSUPPORTED, WORKSPACE, RANGE, DEVICE = range(6)
F32, F16, BF16, INT8, INT4 = range(5)
ROUNDED = 5  # of a linear layer
ROPE_HALF, ROPE_INTERLEAVED = range(2)
PATHS = ("auto", "reference", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "amx")
_OWN = Path(__file__).parent
MAX_HEAD_DIM = 512
MAX_GQA = 128
GROUPS = (32, 64, 128)


class Unsupported(InvalidArgument):
    """Right, but not by this library or on this machine."""


class DeviceRefused(KVClientError):
    """CUDA would not do it; the text is its own."""


class NotQuantisable(InvalidArgument):
    """A value is not finite, or too large for fp16 scales."""


def _struct(name: str, fields: list[tuple[str, object]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def _fields(kind: object, names: str) -> list[tuple[str, object]]:
    return [(name, kind) for name in names.split()]


Segment = _struct(
    "Segment",
    [
        *_fields(c_void_p, "k v"),
        *_fields(c_int64, "k_head_stride k_token_stride v_head_stride v_token_stride"),
        *_fields(c_void_p, "k_scale k_zero v_scale v_zero"),
        *_fields(c_int64, "k_scale_head_stride v_scale_head_stride"),
        ("turn", c_void_p),
        *_fields(c_int64, "base_position new_position"),
        *_fields(c_uint32, "first tokens codec k_group"),
    ],
)
Sequence = _struct("Sequence", [("segments", c_void_p), ("count", c_uint64), ("tail", Segment)])
Attention = _struct(
    "Attention",
    [
        *_fields(c_uint32, "size abi batch query_heads kv_heads head_dim query_tokens dtype"),
        ("q", c_void_p),
        *_fields(c_int64, "q_batch_stride q_head_stride q_token_stride"),
        ("out", c_void_p),
        *_fields(c_int64, "out_batch_stride out_head_stride out_token_stride"),
        *_fields(c_void_p, "lse q_position sequences sinks"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_uint32, "causal window rope rotary_dim threads path"),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ],
)
Conversion = _struct(
    "Conversion",
    [
        *_fields(c_uint32, "size abi heads tokens head_dim dtype codec group"),
        ("elements", c_void_p),
        *_fields(c_int64, "head_stride token_stride"),
        ("codes", c_void_p),
        *_fields(c_int64, "codes_head_stride codes_token_stride"),
        *_fields(c_void_p, "scale zero"),
        ("scale_head_stride", c_int64),
        ("path", c_uint32),
        *_fields(c_void_p, "stream status"),
    ],
)
Rotation = _struct(
    "Rotation",
    [
        *_fields(c_uint32, "size abi heads tokens head_dim dtype rope rotary_dim"),
        ("in_", c_void_p),
        *_fields(c_int64, "in_head_stride in_token_stride"),
        ("out", c_void_p),
        *_fields(c_int64, "out_head_stride out_token_stride"),
        ("turn", c_void_p),
        ("path", c_uint32),
        ("stream", c_void_p),
    ],
)
_SHAPE = "size abi heads head_dim dtype rope rotary_dim count most_tokens path"
Loading = _struct(
    "Loading",
    [
        *_fields(c_uint32, _SHAPE),
        *_fields(c_void_p, "segments places k v"),
        *_fields(c_int64, "head_stride token_stride"),
        ("stream", c_void_p),
    ],
)
Scoring = _struct(
    "Scoring",
    [
        *_fields(c_uint32, _SHAPE),
        *_fields(c_void_p, "segments columns k v"),
        *_fields(c_int64, "head_stride token_stride"),
        *_fields(c_void_p, "square norm"),
        ("tokens", c_uint64),
        ("stream", c_void_p),
    ],
)
Pages = _struct(
    "Pages",
    [
        *_fields(c_uint32, "size abi count heads tokens row_bytes blocks path"),
        *_fields(c_void_p, "from_ to"),
        *_fields(c_int64, "from_head_stride from_token_stride to_head_stride to_token_stride"),
        ("stream", c_void_p),
    ],
)
Awq = _struct(
    "Awq",
    [
        *_fields(c_uint32, "size abi inputs outputs group dtype path rows"),
        *_fields(c_void_p, "words zeros scales x bias out"),
        *_fields(c_int64, "x_row_stride out_row_stride"),
        ("stream", c_void_p),
        *_fields(c_uint32, "threads columns order first"),
    ],
)
Linear = _struct(
    "Linear",
    [
        *_fields(c_uint32, "size abi inputs outputs rows dtype path threads"),
        *_fields(c_void_p, "x w up bias up_bias out"),
        *_fields(c_int64, "x_row_stride out_row_stride"),
    ],
)
Norm = _struct(
    "Norm",
    [
        *_fields(c_uint32, "size abi rows width dtype path threads"),
        *_fields(c_void_p, "x weight out"),
        *_fields(c_int64, "x_row_stride out_row_stride"),
        ("epsilon", c_float),
    ],
)
Turns = _struct(
    "Turns",
    [
        *_fields(c_uint32, "size abi rows query_heads kv_heads head_dim dtype path threads"),
        *_fields(c_void_p, "q k cos sin"),
    ],
)
Weights = _struct(
    "Weights",
    [
        *_fields(c_uint32, "inputs outputs group order"),
        *_fields(c_void_p, "values bias zeros scales"),
    ],
)
LayerIn = _struct(
    "LayerIn",
    [
        *_fields(c_uint32, "size abi rows head_dim dtype path threads"),
        *_fields(c_float, "epsilon query_epsilon key_epsilon"),
        *_fields(c_void_p, "x norm query_norm key_norm cos sin q k v workspace"),
        ("workspace_bytes", c_uint64),
        *_fields(Weights, "query key value"),
    ],
)
LayerOut = _struct(
    "LayerOut",
    [
        *_fields(c_uint32, "size abi rows dtype path threads"),
        *_fields(c_float, "epsilon factor"),
        *_fields(c_void_p, "attended residual norm middle result workspace"),
        ("workspace_bytes", c_uint64),
        *_fields(Weights, "out gate up down"),
    ],
)
Product = _struct(
    "Product",
    [
        *_fields(c_uint32, "size abi inputs outputs rows dtype path threads"),
        *_fields(c_void_p, "weights x out"),
        *_fields(c_int64, "weight_row_stride x_row_stride out_row_stride"),
    ],
)


_SHARED_FUNCTIONS = {
    "kvk_attend": Attention,
    "kvk_quantise": Conversion,
    "kvk_dequantise": Conversion,
    "kvk_rotate": Rotation,
    "kvk_awq_multiply": Awq,
    "kvk_awq_dequantise": Awq,
}
CPU_FUNCTIONS = _SHARED_FUNCTIONS | {
    "kvk_linear_multiply": Linear,
    "kvk_norm_rows": Norm,
    "kvk_turn_rows": Turns,
    "kvk_multiply": Product,
    "kvk_layer_before": LayerIn,
    "kvk_layer_behind": LayerOut,
}
CUDA_FUNCTIONS = _SHARED_FUNCTIONS | {
    "kvk_load": Loading,
    "kvk_score": Scoring,
    "kvk_copy_pages": Pages,
    "kvk_awq_repack": Awq,
}
_TRANSFER = {
    "kvk_host_register": [c_void_p, c_uint64, c_uint32],
    "kvk_host_unregister": [c_void_p],
    "kvk_host_allocate": [c_uint64, POINTER(c_void_p)],
    "kvk_host_free": [c_void_p],
    "kvk_copy": [c_void_p, c_void_p, c_void_p, c_uint64, c_void_p],
    "kvk_stream_create": [POINTER(c_void_p)],
    "kvk_stream_destroy": [c_void_p],
    "kvk_event_create": [POINTER(c_void_p)],
    "kvk_event_destroy": [c_void_p],
    "kvk_event_record": [c_void_p, c_void_p],
    "kvk_event_wait": [c_void_p, c_void_p],
    "kvk_event_synchronise": [c_void_p],
}


@cache
def cpu() -> ctypes.CDLL:
    """The CPU library. Raises Unsupported if it was not built or is of another version."""
    return opened(_OWN / "_cpu.so", "CPU", CPU_FUNCTIONS)


@cache
def cuda() -> ctypes.CDLL:
    """The CUDA library; it loads without a GPU. Raises Unsupported as cpu() does."""
    return opened(_OWN / "_cuda.so", "CUDA", CUDA_FUNCTIONS)


def built(name: str) -> bool:
    """Whether that library lies beside this file."""
    return (_OWN / name).exists()


def opened(path: Path, kind: str, functions: dict[str, type[ctypes.Structure]]) -> ctypes.CDLL:
    """A library with this contract's functions, ready to be called. Raises Unsupported if it cannot be
    loaded, or is of another ABI.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unsupported(f"the {kind} kernels cannot be loaded: {error}") from error
    if library.kvk_abi() != ABI:
        raise Unsupported(f"the {kind} kernels have ABI {library.kvk_abi()}, this library {ABI}")
    library.kvk_last_error.restype = c_char_p
    library.kvk_attention_workspace.restype = c_uint64
    library.kvk_attention_workspace.argtypes = [POINTER(Attention)]
    library.kvk_turn.restype, library.kvk_turn.argtypes = None, [c_void_p, c_uint32, c_int64, c_void_p]
    for function, struct in functions.items():
        if not hasattr(library, function):
            raise Unsupported(f"the {kind} kernels of this build have no {function}")
        getattr(library, function).restype = c_int
        getattr(library, function).argtypes = [POINTER(struct)]
    if functions is CPU_FUNCTIONS:
        for name, struct in (("kvk_layer_in_workspace", LayerIn), ("kvk_layer_out_workspace", LayerOut)):
            getattr(library, name).restype, getattr(library, name).argtypes = c_uint64, [POINTER(struct)]
        if not hasattr(library, "kvk_layers"):
            raise Unsupported(f"the {kind} kernels of this build have no kvk_layers")
        library.kvk_layers.restype = c_int
        library.kvk_layers.argtypes = [POINTER(LayerIn), POINTER(Attention), POINTER(LayerOut), c_uint32]
        library.kvk_cpu_lacks.restype, library.kvk_cpu_lacks.argtypes = c_char_p, [c_uint32]
    if functions is CUDA_FUNCTIONS:
        library.kvk_cuda_lacks.restype, library.kvk_cuda_lacks.argtypes = c_char_p, [c_int]
        library.kvk_cuda_table.restype = c_uint64
        library.kvk_cuda_table.argtypes = [POINTER(Attention), c_void_p, c_uint64, c_uint64]
        for name, arguments in _TRANSFER.items():
            getattr(library, name).restype, getattr(library, name).argtypes = c_int, arguments
    return library


def check(status: int, library: ctypes.CDLL | None = None) -> None:
    """Raises what a status other than OK stands for, with the library's (default: the CPU's) own words."""
    if status == OK:
        return
    text = (library or cpu()).kvk_last_error().decode()
    raise {UNSUPPORTED: Unsupported, RANGE: NotQuantisable, DEVICE: DeviceRefused}.get(
        status, InvalidArgument
    )(text)


def cuda_lacks(device: int = 0) -> str | None:
    """What this build or machine lacks for the CUDA kernels on a device; None if they can run."""
    try:
        text = cuda().kvk_cuda_lacks(device)
    except Unsupported as error:
        return str(error)
    return None if text is None else text.decode()


def path_number(name: str) -> int:
    """The number of a path by its name. Raises InvalidArgument for another name."""
    if name not in PATHS:
        raise InvalidArgument(f"path={name!r}; it must be one of {', '.join(PATHS)}")
    return PATHS.index(name)


def lacks(name: str) -> str | None:
    """What this machine lacks for that path of the CPU library; None if it can run."""
    text = cpu().kvk_cpu_lacks(path_number(name))
    return None if text is None else text.decode()


def auto_path() -> str:
    """The path that "auto" stands for on this machine.

    Raises InvalidArgument if KVK_CPU_PATH names one that there is not, or that cannot run here.
    """
    if reason := lacks("auto"):
        raise InvalidArgument(reason)
    return PATHS[cpu().kvk_cpu_auto()]
