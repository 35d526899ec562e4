"""The tiny models of tests/hf on the device of tests/gpu.

Owns their element type there, and how near to plain generation they must come.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.hf.zoo import known


def model_on(place: torch.device, name: str) -> Any:
    dtype = torch.float32 if place.type == "cpu" else torch.float16
    return known(name, dtype).to(place)


def bound(place: torch.device) -> dict[str, float]:
    return {} if place.type == "cpu" else {"bound": 2e-2}
