"""Memory for what one part of a pass computes for the next, and lets go of.

Owns where it comes from. torch asks malloc for aligned memory, of which glibc 2.36 cuts off what is over and
keeps that for small objects: where a tensor was, one of the same size does not fit any more, and each layer
takes memory of its own for a long prompt (docs/log.md, "A server's memory in the middle of eight long
prompts"). Never keeps memory. Invariant: what is made here is, to whoever uses it, what new_empty() makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGN = 64  # bytes, as torch's own
LARGE = 128 << 10  # bytes: below, torch's way is as good, and takes less time


def empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape, of like's type and on its device, of which nothing was written yet."""
    size = math.prod(shape) * like.dtype.itemsize
    if size < LARGE or not like.is_cpu:
        return like.new_empty(shape)
    memory = torch.from_numpy(np.empty(size + ALIGN, np.uint8))
    start = -memory.data_ptr() % ALIGN
    return memory[start : start + size].view(like.dtype).view(*shape)
