"""The CPU library's paths as tests run them: by instruction, or by emulation where this CPU lacks it.

Owns the choice. native/tests/emulation/cpu has AVX512-FP16 and AMX only: all else that such a path does runs
as it
is built, so the CPU must have AVX-512 VNNI and BF16 itself. Elsewhere a test is skipped, with the reason.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest

from kvclient import kernels
from kvclient.kernels import contract

LIBRARY = Path(__file__).resolve().parents[2] / "build/dev/emulation/cpu.so"
EMULATED = ("avx512_fp16", "amx")
PATHS = ("reference", "avx2", "avx512", "avx512_vnni", *EMULATED)


@cache
def emulation() -> ctypes.CDLL:
    return contract.opened(LIBRARY, "emulated CPU", contract.CPU_FUNCTIONS)


def provide(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`path`, ready to run for the rest of the test."""
    reason = kernels.lacks(path)
    if reason and path in EMULATED:
        if not LIBRARY.exists():
            pytest.skip(f"{path}: {reason}, and its emulation is not built: `make native-tests`")
        monkeypatch.setattr(contract, "cpu", emulation)
        reason = kernels.lacks(path)
    if reason:
        pytest.skip(f"{path}: {reason}")
    return path
