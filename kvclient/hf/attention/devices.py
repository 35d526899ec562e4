"""What the backends of a GPU need that this machine or build has not, in a sentence each.

Owns the looking; asks each thing once a process. Never initialises CUDA where torch sees no device.
Invariant: a backend without a reason here can run on the current CUDA device.
"""

from __future__ import annotations

from functools import cache

import torch

from kvclient.kernels import contract

HOPPER = (9, 0)
FLASH = (8, 0)  # the least compute capability of torch's own flash attention


@cache
def lacks(name: str) -> str | None:
    """For the names here that begin with cuda and torch_; None: nothing."""
    if name.startswith("cuda"):
        return _own(name)
    if (reason := no_device()) is not None:
        return reason
    capability = torch.cuda.get_device_capability()
    if name == "torch_cudnn":
        if capability != HOPPER:
            return (
                f"compute capability {_dotted(capability)}; cuDNN's attention is faster on 9.0 only"
            )
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    if capability < FLASH:
        return f"compute capability {_dotted(capability)}; torch's flash attention needs 8.0"
    return None if torch.backends.cuda.is_flash_attention_available() else "this torch has no flash attention"


def no_device() -> str | None:
    """Why there is no CUDA device; None if there is one."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _own(name: str) -> str | None:
    if name == "cuda_sm90a":
        return "this build has no wgmma kernels; on sm_90a `cuda` is used"
    if not contract.built("_cuda.so"):
        return "this build has no CUDA kernels: `make cuda` builds them"
    return no_device() or contract.cuda_lacks(torch.cuda.current_device())


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
