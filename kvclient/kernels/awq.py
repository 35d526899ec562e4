"""Rows times an AWQ layer's packed words, and a tile of its columns as numbers, on the CPU.

Owns the checks of shapes and types that the native calls cannot do. Never copies an operand. Invariant: a
row's result has the same bits whatever rows stand beside it and however many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, sizeof

import numpy as np

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

ELEMENTS = {"float32": contract.F32, "float16": contract.F16, "uint16": contract.BF16}
ROWS = 48  # of x in a call; native/kernels.h has it as KVK_CPU_AWQ_ROWS
CHECKPOINT, PANELS = 0, 1  # how words lie: native/kernels.h has it as kvk_awq_order
PANELS_INPUTS, PANELS_WORDS = 128, 16  # of a tile; the group divides the inputs


def multiply(
    x: np.ndarray, words: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray,
    bias: np.ndarray | None, group: int, threads: int = 1, path: str = "auto", bf16: bool = False,
    panels: bool = False,
) -> np.ndarray:  # fmt: skip
    """x float32 [rows, inputs] times a checkpoint's words: float32 [rows, outputs].

    words: int32 [inputs, outputs / 8]; zeros: int32 [inputs / group, outputs / 8], None: all are 8; scales:
    float16 [inputs / group, outputs]; bias: float32 [outputs]. bf16: x holds values of that type, and what
    is computed need not be nearer than it: an element is off by up to 2^-14 of the largest of its 128, else
    2^-22, where integers are multiplied. panels: the words lie in that order (hf/awq/packing.py), the bits
    are the same. Raises InvalidArgument for anything else.
    """
    inputs, outputs = _check_layer(words, zeros, scales, group)
    if bias is not None:
        _check("bias", bias, "float32", (outputs,))
    _check("x", x, "float32", (len(x), inputs))
    out = np.empty((len(x), outputs), np.float32)
    lie = [None if array is None else array.ctypes.data for array in (words, zeros, scales, bias)]
    shape = inputs, outputs, group
    multiply_at(x.ctypes.data, out.ctypes.data, len(x), shape, lie, threads, path, bf16, panels)
    return out


def multiply_at(
    x: int, out: int, count: int, shape: tuple[int, int, int], lie: Sequence[int | None], threads: int,
    path: str = "auto", bf16: bool = False, panels: bool = False,
) -> None:  # fmt: skip
    """multiply() of operands that whoever calls has looked at, by their addresses: count rows of x and out,
    the layer's inputs, outputs and group, and where its words, zeros, scales and bias lie.
    """
    (inputs, outputs, _), (words, zeros, scales, bias) = shape, lie
    kind, number = contract.BF16 if bf16 else contract.F32, contract.path_number(path)
    calls = -(-count // ROWS)
    most = -(-count // max(1, 6 * calls)) * 6  # alike, of whole sixes
    for start in range(0, count, max(1, most)):
        args = contract.Awq(
            sizeof(contract.Awq), contract.ABI, *shape, kind, number, min(most, count - start), words, zeros,
            scales, x + 4 * start * inputs, bias, out + 4 * start * outputs, 4 * inputs, 4 * outputs, None,
            threads, 0, int(panels),
        )  # fmt: skip
        contract.check(contract.cpu().kvk_awq_multiply(byref(args)))


def dequantise(
    out: np.ndarray, start: int, words: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int,
    threads: int = 1, path: str = "auto", panels: bool = False,
) -> np.ndarray:  # fmt: skip
    """Columns start.. of a layer, as multiply() takes it, into out [inputs, columns]: float32, float16, or
    bfloat16 as its bits (uint16). Both are multiples of 8. Raises InvalidArgument for anything else.
    """
    inputs, outputs = _check_layer(words, zeros, scales, group)
    columns = out.shape[-1]
    if start < 0 or start % 8 or columns % 8 or start + columns > outputs:
        raise InvalidArgument(f"columns {start}..{start + columns} of {outputs}; multiples of 8 are wanted")
    if str(out.dtype) not in ELEMENTS:
        raise InvalidArgument(f"out is {out.dtype}; it must be one of {', '.join(ELEMENTS)}")
    _check("out", out, str(out.dtype), (inputs, columns))
    at = 4 * (start // 8)
    args = contract.Awq(
        sizeof(contract.Awq), contract.ABI, inputs, outputs, group, ELEMENTS[str(out.dtype)],
        contract.path_number(path), 0, words.ctypes.data + (0 if panels else at),
        None if zeros is None else zeros.ctypes.data + at, scales.ctypes.data + 2 * start, None, None,
        out.ctypes.data, 0, columns * out.itemsize, None, threads, columns, int(panels),
        start if panels else 0,
    )  # fmt: skip
    contract.check(contract.cpu().kvk_awq_dequantise(byref(args)))
    return out


def _check_layer(
    words: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int
) -> tuple[int, int]:
    """Its inputs and outputs."""
    if words.ndim != 2 or group < 1 or words.shape[0] % group:
        raise InvalidArgument(f"words {list(words.shape)} have no groups of {group} inputs")
    inputs, columns = words.shape
    groups, outputs = inputs // group, 8 * columns
    _check("words", words, "int32", (inputs, columns))
    _check("scales", scales, "float16", (groups, outputs))
    if zeros is not None:
        _check("zeros", zeros, "int32", (groups, columns))
    return inputs, outputs


def _check(name: str, array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        kind = "" if array.flags.c_contiguous else ", strided"
        raise InvalidArgument(
            f"{name} is {array.dtype}{list(array.shape)}{kind}; expected {dtype}{list(shape)}, contiguous"
        )
