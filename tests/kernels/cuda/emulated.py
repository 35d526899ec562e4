"""The CUDA kernels run on the CPU, thread by thread, for the tests: native/tests/emulation/cuda by its C
interface.

Owns the loading of that library and one call of it. What stands for device memory is host memory; the
workspace has exactly the bytes that were asked for.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from kvclient import kernels
from kvclient.kernels import contract
from tests.kernels.compare import widen
from tests.kernels.oracle import Case

LIBRARY = Path(__file__).resolve().parents[3] / "build/dev/emulation/cuda.so"
PATHS = {"auto": 0, "reference": 1, "decode": 2, "prefill": 3}


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.kvk_last_error.restype = c_char_p
    loaded.kvk_attention_workspace.restype = c_uint64
    loaded.kvk_attention_workspace.argtypes = [POINTER(contract.Attention)]
    loaded.kvk_attend.restype, loaded.kvk_attend.argtypes = c_int, [POINTER(contract.Attention)]
    loaded.kvk_cuda_table.restype = c_uint64
    loaded.kvk_cuda_table.argtypes = [POINTER(contract.Attention), c_void_p, c_uint64, c_uint64]
    return loaded


def arguments(
    case: Case, path: str, splits: int = 0
) -> tuple[contract.Attention, np.ndarray, np.ndarray, object]:
    """The struct of this case, its out and lse, and what must stay alive."""
    out = np.full_like(case.q, 7)
    lse = np.full(case.q.shape[:3], 7, np.float32)
    call = kernels.prepare(
        case.q, case.positions, case.rows, case.head_dim**-0.5, tails=case.tails, out=out, lse=lse,
        rope=case.rope, **case.options,
    )  # fmt: skip
    args = call.args
    args.path, args.threads = PATHS[path], splits
    return args, out, lse, call


def attend(args: contract.Attention) -> None:
    """Runs it; the workspace's counters must be zeros again."""
    lib = library()
    size = lib.kvk_attention_workspace(byref(args))
    assert size, lib.kvk_last_error()
    workspace = np.zeros(size, np.uint8)
    args.workspace, args.workspace_bytes = workspace.ctypes.data, size
    status = lib.kvk_attend(byref(args))
    assert status == contract.OK, lib.kvk_last_error()
    assert not workspace[:4096].any()


def run(case: Case, path: str, splits: int = 0) -> tuple[np.ndarray, np.ndarray]:
    args, out, lse, alive = arguments(case, path, splits)
    attend(args)
    del alive
    return widen(out), lse.astype(np.float64)


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page ends which no readable one follows: reading on ends the process."""
    pages = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, pages - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


def fence(case: Case) -> list[np.ndarray]:
    """Puts each array that a segment of this case points into before such a page."""
    moved = []
    for row, tail in zip(case.rows, case.tails, strict=True):
        for part in (*row, *([] if tail is None else [tail])):
            keys, values, turned = part.alive
            quantised = isinstance(keys, kernels.Quantised)
            arrays = {"k": keys.codes, "v": values.codes} if quantised else {"k": keys, "v": values}
            if quantised:
                arrays |= {"k_scale": keys.scale, "k_zero": keys.zero}
                arrays |= {"v_scale": values.scale, "v_zero": values.zero}
            if part.struct.turn:
                arrays["turn"] = turned
            for name, array in arrays.items():
                moved.append(fenced(array))
                setattr(part.struct, name, moved[-1].ctypes.data)
    return moved
