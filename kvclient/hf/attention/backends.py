"""Which implementations of attention there are on this machine, and which one a model gets.

Owns the order of preference and the reasons. Never imports transformers. Invariant: what choose() returns can
run here; what cannot is never a silent substitute: forcing it raises with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

ENVIRONMENT = "KVCLIENT_BACKEND"
DTYPES = {torch.float32: contract.F32, torch.float16: contract.F16, torch.bfloat16: contract.BF16}

# In order of preference; the last one always runs.
_NOT_BUILT = {
    "cuda_sm90a": "this build has no CUDA kernels",
    "cuda": "this build has no CUDA kernels",
    "triton": "this build has no Triton kernels",
    "torch_cudnn": "this build serves CUDA devices by `torch` only",
    "torch_flash": "this build serves CUDA devices by `torch` only",
    "cpu_amx": "this build has no AMX kernels",
}
_CPU = {"cpu_avx512": ("avx512_vnni", "avx512"), "cpu_avx2": ("avx2",)}
NAMES = (*_NOT_BUILT, *_CPU, "torch")


@dataclass(frozen=True)
class Backend:
    """`path` is the CPU library's number for it, None for torch itself."""

    name: str
    path: int | None


TORCH = Backend("torch", None)


def available_backends() -> dict[str, str | None]:
    """Every backend by name, in order of preference: None if it can run here, else what is lacking."""
    return {name: _lacks(name) for name in NAMES}


def backend(name: str) -> Backend:
    """The backend of that name. Raises InvalidArgument, with the reason, if it cannot run here."""
    if name not in NAMES:
        raise InvalidArgument(f"backend={name!r}; it must be one of {', '.join(NAMES)}")
    if reason := _lacks(name):
        raise InvalidArgument(f"backend {name} cannot run here: {reason}")
    if name == "torch":
        return TORCH
    path = next(path for path in _CPU[name] if contract.lacks(path) is None)
    return Backend(name, contract.path_number(path))


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, name: str | None = None) -> Backend:
    """`name`, or what KVCLIENT_BACKEND names, or the first that fits.

    Raises InvalidArgument if a name is forced that cannot run here. One that does not fit the model is no
    error: torch answers, and is counted.
    """
    if forced := name or os.environ.get(ENVIRONMENT):
        return backend(forced)
    if unfit(device, dtype, head_dim) is None:
        for candidate in NAMES:
            if _lacks(candidate) is None:
                return backend(candidate)
    return TORCH


def unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the CPU kernels cannot take tensors like these, as a word for counting."""
    if device.type != "cpu":
        return "device"
    if dtype not in DTYPES:
        return "dtype"
    return "head_dim" if head_dim > contract.MAX_HEAD_DIM else None


def _lacks(name: str) -> str | None:
    if name in _NOT_BUILT:
        return _NOT_BUILT[name]
    if name == "torch":
        return None
    try:
        reasons = [contract.lacks(path) for path in _CPU[name]]
    except contract.Unsupported as error:
        return str(error)
    return None if None in reasons else reasons[-1]
