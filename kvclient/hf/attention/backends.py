"""Which implementations of attention there are on this machine, and which one a model gets.

Owns the order of preference and the reasons. Never imports transformers. Invariant: what choose() returns can
run here; what cannot is never a silent substitute: forcing it raises with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import devices
from kvclient.kernels import contract, triton_calls

ENVIRONMENT = "KVCLIENT_BACKEND"
PATH = "KVK_CPU_PATH"  # the CPU library's own, read once in a process
DTYPES = {torch.float32: contract.F32, torch.float16: contract.F16, torch.bfloat16: contract.BF16}

# In order of preference; the last one always runs.
_CPU = {
    "cpu_amx": ("amx",),
    "cpu_avx512": ("avx512_fp16", "avx512_vnni", "avx512"),
    "cpu_avx2": ("avx2",),
    "cpu_reference": ("reference",),  # naive: only for who names it
}
_OWN_GPU, _TORCH_GPU = ("cuda_sm90a", "cuda"), ("torch_cudnn", "torch_flash")
NAMES = (*_OWN_GPU, "triton", *_TORCH_GPU, *_CPU, "torch")
_HALVES = (torch.float16, torch.bfloat16)  # what attention on a GPU computes in
_GPU_HEAD_DIMS: dict[str, Callable[[int], bool]] = {
    "cuda_sm90a": lambda n: n == 128,
    "cuda": lambda n: n <= 256,
    "triton": lambda n: n <= 256,
    "torch_cudnn": lambda n: n % 8 == 0 and n <= 128,
    "torch_flash": lambda n: n % 8 == 0 and n <= 256,
}


@dataclass(frozen=True)
class Backend:
    """`path` is the library's number for it, None for torch itself; `device` the type of tensors it takes."""

    name: str
    path: int | None
    device: str = "cpu"


TORCH = Backend("torch", None, "")


def available_backends() -> dict[str, str | None]:
    """Every backend by name, in order of preference: None if it can run here, else what is lacking."""
    return {name: _lacks(name) or _misnamed_path(name) for name in NAMES}


def backend(name: str) -> Backend:
    """The backend of that name. Raises InvalidArgument, with the reason, if it cannot run here."""
    if name not in NAMES:
        raise InvalidArgument(f"backend={name!r}; it must be one of {', '.join(NAMES)}")
    if reason := _lacks(name):
        raise InvalidArgument(f"backend {name} cannot run here: {reason}")
    if name == "torch":
        return TORCH
    if name in _OWN_GPU:
        return Backend(name, 0, "cuda")
    if name == "triton":
        return Backend(name, None, triton_calls.device().type)
    if name in _TORCH_GPU:
        return Backend(name, None, "cuda")
    if (path := contract.auto_path()) not in _CPU[name]:  # KVK_CPU_PATH may name another of the same backend
        path = next(path for path in _CPU[name] if contract.lacks(path) is None)
    return Backend(name, contract.path_number(path))


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, name: str | None = None) -> Backend:
    """`name`, or what KVCLIENT_BACKEND names, or the first that fits.

    Raises InvalidArgument if a name is forced that cannot run here. One that does not fit the model is no
    error: torch answers, and is counted.
    """
    if name:
        return backend(name)
    if forced := os.environ.get(ENVIRONMENT):
        try:
            return backend(forced)
        except InvalidArgument as error:
            raise InvalidArgument(f"{ENVIRONMENT}: {error}") from error
    for candidate in NAMES[:-1]:
        if candidate == "triton" and device.type == "cpu":
            continue  # interpreted: only for who names it
        if candidate in _CPU and not _wanted(candidate):
            continue
        if _lacks(candidate) is None and unfit(device, dtype, head_dim, backend(candidate)) is None:
            return backend(candidate)
    return TORCH


def unfit(
    device: torch.device, dtype: torch.dtype, head_dim: int, taker: Backend | None = None
) -> str | None:
    """Why a backend (default: the CPU kernels) cannot take tensors like these, as a word for counting."""
    if taker == TORCH:
        return "torch"
    if device.type != ("cpu" if taker is None else taker.device):
        return "device"
    if device.type == "cpu":
        if dtype not in DTYPES:
            return "dtype"
        return None if 1 <= head_dim <= contract.MAX_HEAD_DIM else "head_dim"
    if dtype not in _HALVES:
        return "dtype"
    return None if _GPU_HEAD_DIMS[taker.name](head_dim) else "head_dim"


def head_dim_of(model: torch.nn.Module) -> int:
    """0 if its configuration does not say, or says another for each layer."""
    config = model.config.get_text_config(decoder=True)
    try:
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "hidden_size", 0) // heads if heads else 0
        return getattr(config, "head_dim", None) or size
    except (AttributeError, ValueError, RuntimeError):  # transformers' own, where layers differ
        return 0


def _wanted(name: str) -> bool:
    """Whether this backend is one to be chosen: by KVK_CPU_PATH, which names a path of it, or by default."""
    if PATH not in os.environ:
        return name != "cpu_reference"
    return _lacks(name) is None and contract.auto_path() in _CPU[name]


def _misnamed_path(name: str) -> str | None:
    return contract.lacks("auto") if name in _CPU else None


def _lacks(name: str) -> str | None:
    if name == "triton":
        return triton_calls.lacks()
    if name in _GPU_HEAD_DIMS:
        return devices.lacks(name)
    if name == "torch":
        return None
    try:
        reasons = [contract.lacks(path) for path in _CPU[name]]
    except contract.Unsupported as error:
        return str(error)
    return None if None in reasons else reasons[-1]
