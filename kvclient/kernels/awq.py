"""A few rows times an AWQ layer's packed words, on the CPU.

Owns the checks of shapes and types that the native call cannot do. Never dequantises and never copies an
operand. Invariant: a row's result has the same bits whatever rows stand beside it and however many threads.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import numpy as np

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

ROWS = 16  # of x, at most; native/kernels.h has it as KVK_CPU_AWQ_ROWS


def multiply(
    x: np.ndarray, words: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray,
    bias: np.ndarray | None, group: int, threads: int = 1, path: str = "auto",
) -> np.ndarray:  # fmt: skip
    """x float32 [rows, inputs], up to 16 rows, times a checkpoint's words: float32 [rows, outputs].

    words: int32 [inputs, outputs / 8]; zeros: int32 [inputs / group, outputs / 8], None: all are 8; scales:
    float16 [inputs / group, outputs]; bias: float32 [outputs]. Raises InvalidArgument for anything else.
    """
    if words.ndim != 2 or group < 1 or words.shape[0] % group:
        raise InvalidArgument(f"words {list(words.shape)} have no groups of {group} inputs")
    inputs, columns = words.shape
    groups, outputs = inputs // group, 8 * columns
    _check("words", words, "int32", (inputs, columns))
    _check("scales", scales, "float16", (groups, outputs))
    if zeros is not None:
        _check("zeros", zeros, "int32", (groups, columns))
    if bias is not None:
        _check("bias", bias, "float32", (outputs,))
    rows = len(x)
    if rows > ROWS:
        raise InvalidArgument(f"x has {rows} rows; at most {ROWS}")
    _check("x", x, "float32", (rows, inputs))
    out = np.empty((rows, outputs), np.float32)
    args = contract.Awq(
        sizeof(contract.Awq), contract.ABI, inputs, outputs, group, contract.F32,
        contract.path_number(path), rows, words.ctypes.data, None if zeros is None else zeros.ctypes.data,
        scales.ctypes.data, x.ctypes.data, None if bias is None else bias.ctypes.data, out.ctypes.data,
        4 * inputs, 4 * outputs, None, threads,
    )  # fmt: skip
    contract.check(contract.cpu().kvk_awq_multiply(byref(args)))
    return out


def _check(name: str, array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        kind = "" if array.flags.c_contiguous else ", strided"
        raise InvalidArgument(
            f"{name} is {array.dtype}{list(array.shape)}{kind}; expected {dtype}{list(shape)}, contiguous"
        )
