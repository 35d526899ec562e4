"""A few rows times a matrix in 16 bits, as it lies, on the CPU.

Owns the checks of shapes and types that the native call cannot do. Never copies the matrix. Invariant: an
element's bits depend on its row of x and its row of weights, and on the path, alone.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import numpy as np

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

ELEMENTS = {"float16": contract.F16, "uint16": contract.BF16}
ROWS = 16  # of x in a call; native/kernels.h has it as KVK_PRODUCT_ROWS


def multiply(x: np.ndarray, weights: np.ndarray, threads: int = 1, path: str = "auto") -> np.ndarray:
    """x float32 [rows, inputs] times weights [outputs, inputs] of float16, or bfloat16 as its bits (uint16):
    float32 [rows, outputs], summed in float32. Raises InvalidArgument for anything else.
    """
    if weights.ndim != 2 or str(weights.dtype) not in ELEMENTS or not weights.flags.c_contiguous:
        raise InvalidArgument(
            f"weights are {weights.dtype}{list(weights.shape)}; expected [outputs, inputs] in 16 bits"
        )
    outputs, inputs = weights.shape
    if x.dtype != "float32" or x.ndim != 2 or x.shape[1] != inputs or not x.flags.c_contiguous:
        raise InvalidArgument(f"x is {x.dtype}{list(x.shape)}; expected float32 rows of {inputs}, contiguous")
    out = np.empty((len(x), outputs), np.float32)
    for start in range(0, len(x), ROWS):
        rows, at = min(ROWS, len(x) - start), 4 * start
        args = contract.Product(
            sizeof(contract.Product), contract.ABI, inputs, outputs, rows, ELEMENTS[str(weights.dtype)],
            contract.path_number(path), threads, weights.ctypes.data, x.ctypes.data + at * inputs,
            out.ctypes.data + at * outputs, 2 * inputs, 4 * inputs, 4 * outputs,
        )  # fmt: skip
        contract.check(contract.cpu().kvk_multiply(byref(args)))
    return out
