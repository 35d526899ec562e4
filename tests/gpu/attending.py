"""A case of tests/kernels/oracle.py run on a device, through kvclient.kernels.cuda_attention.

Owns the copies of its arrays on the device. Invariant: what is asked of the kernel is what the structs of the
case say, with the addresses of the copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvclient import kernels
from kvclient.kernels import cuda
from kvclient.kernels.cuda_attention import Call
from tests.gpu.oracle import as_array, as_tensor
from tests.kernels.compare import widen
from tests.kernels.oracle import Case

PATHS = {"auto": 0, "reference": 1, "decode": 2, "prefill": 3}


def prepared(case: Case, device: torch.device, path: str, splits: int = 0) -> tuple[Call, torch.Tensor]:
    """The call, and where it writes the LSE."""
    alive: list[Any] = []

    def moved(part: kernels.Segment | None) -> Any:
        if part is None:
            return None
        keys, values, turned = part.alive
        sides, bits = [], 0
        for half in (keys, values):
            if isinstance(half, kernels.Quantised):
                bits = half.bits
                arrays = (half.codes, half.scale, half.zero)
            else:
                arrays = (half,)
            sides.append(tuple(as_tensor(np.ascontiguousarray(array)).to(device) for array in arrays))
        struct = part.struct
        turn = torch.from_numpy(turned).to(device) if struct.turn else None
        alive.append((sides, turn))
        return cuda.segment(
            *sides, group=struct.k_group, first=struct.first, tokens=struct.tokens, turn=turn, bits=bits,
            position=struct.new_position, moved=struct.new_position - struct.base_position,
        )  # fmt: skip

    rows, tails = [[moved(part) for part in row] for row in case.rows], [moved(part) for part in case.tails]
    turns = [turn for _, turn in alive if turn is not None]
    options = dict(case.options)
    if (sinks := options.pop("sinks", None)) is not None:
        options["sinks"] = torch.from_numpy(sinks).to(device)
    q = as_tensor(case.q).to(device)
    lse = torch.full(q.shape[:3], 7, dtype=torch.float32, device=device)
    call = Call(
        q, torch.from_numpy(case.positions).to(device), rows, case.head_dim**-0.5, kv_heads=case.kv_heads,
        tails=tails, lse=lse, interleaved=case.rope == "interleaved", stretches=splits, path=PATHS[path],
        rotary_dim=case.rotary_dim or (2 * turns[0].shape[1] if turns else 0), alive=alive, **options,
    )  # fmt: skip
    return call, lse


def run(case: Case, path: str, splits: int = 0, *, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    call, lse = prepared(case, device, path, splits)
    call.out.fill_(7)
    call.run()
    return widen(as_array(call.out)), lse.cpu().numpy().astype(np.float64)
