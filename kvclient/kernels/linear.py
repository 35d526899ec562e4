"""Rows times a linear layer's weights, rows over the root of the mean of their squares, and heads turned to
their positions: in fp32, or in bf16 as its bits (uint16), on the CPU; a few rows times a matrix in 16 bits.

Owns the checks of shapes and types that the native calls cannot do. Never copies an operand. Invariant: a
row's result has the same bits whatever rows stand beside it and however many threads.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import numpy as np

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

ROWS = {"float32": contract.F32, "uint16": contract.BF16}
HALVES = {"float16": contract.F16, "uint16": contract.BF16}
HALVES_ROWS = 16  # of x in a call; native/kernels.h has it as KVK_PRODUCT_ROWS


def multiply(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, up: np.ndarray | None = None,
    up_bias: np.ndarray | None = None, threads: int = 1, path: str = "auto",
) -> np.ndarray:  # fmt: skip
    """[rows, outputs] of x [rows, inputs] and w [outputs, inputs], all float32 or all bf16: x w' + bias; with
    up, of w's shape: silu(x w' + bias) * (x up' + up_bias). x in bf16 and all else in float32: w counts as
    rounded to bf16. Raises InvalidArgument for anything else, and Unsupported where inputs are no multiple
    of 16, or up of rounded ones is asked for.
    """
    if w.ndim != 2 or x.ndim != 2:
        raise InvalidArgument(f"x is {list(x.shape)}, w {list(w.shape)}; both must have rows of inputs")
    outputs, inputs = w.shape
    dtype = _check("x", x, (len(x), inputs))
    if dtype == contract.BF16 and w.dtype == np.float32:
        dtype = contract.ROUNDED
    _check("w", w, (outputs, inputs), None if dtype == contract.ROUNDED else x.dtype)
    for name, array, shape in (
        ("bias", bias, (outputs,)),
        ("up", up, w.shape),
        ("up_bias", up_bias, (outputs,)),
    ):
        if array is not None:
            _check(name, array, shape, w.dtype)
    out = np.empty((len(x), outputs), w.dtype)
    args = contract.Linear(
        sizeof(contract.Linear), contract.ABI, inputs, outputs, len(x), dtype, contract.path_number(path),
        threads, x.ctypes.data, w.ctypes.data, _at(up), _at(bias), _at(up_bias), out.ctypes.data, inputs,
        outputs,
    )  # fmt: skip
    contract.check(contract.cpu().kvk_linear_multiply(byref(args)))
    return out


def multiply_halves(x: np.ndarray, weights: np.ndarray, threads: int = 1, path: str = "auto") -> np.ndarray:
    """x float32 [rows, inputs] times weights [outputs, inputs] of float16, or bfloat16 as its bits (uint16):
    float32 [rows, outputs], summed in float32. Raises InvalidArgument for anything else.
    """
    if weights.ndim != 2 or str(weights.dtype) not in HALVES or not weights.flags.c_contiguous:
        raise InvalidArgument(
            f"weights are {weights.dtype}{list(weights.shape)}; expected [outputs, inputs] in 16 bits"
        )
    outputs, inputs = weights.shape
    if x.dtype != "float32" or x.ndim != 2 or x.shape[1] != inputs or not x.flags.c_contiguous:
        raise InvalidArgument(f"x is {x.dtype}{list(x.shape)}; expected float32 rows of {inputs}, contiguous")
    out = np.empty((len(x), outputs), np.float32)
    for start in range(0, len(x), HALVES_ROWS):
        rows, at = min(HALVES_ROWS, len(x) - start), 4 * start
        args = contract.Product(
            sizeof(contract.Product), contract.ABI, inputs, outputs, rows, HALVES[str(weights.dtype)],
            contract.path_number(path), threads, weights.ctypes.data, x.ctypes.data + at * inputs,
            out.ctypes.data + at * outputs, 2 * inputs, 4 * inputs, 4 * outputs,
        )  # fmt: skip
        contract.check(contract.cpu().kvk_multiply(byref(args)))
    return out


def normalise(
    x: np.ndarray, weight: np.ndarray, epsilon: float, threads: int = 1, path: str = "auto"
) -> np.ndarray:
    """[rows, width]: weight [width] times the rows of x over the root of the mean of their squares and
    epsilon, both float32 or both bf16. Raises InvalidArgument for anything else.
    """
    if x.ndim != 2:
        raise InvalidArgument(f"x is {list(x.shape)}; it must have rows")
    rows, width = x.shape
    dtype = _check("x", x, (rows, width))
    _check("weight", weight, (width,), x.dtype)
    out = np.empty_like(x)
    args = contract.Norm(
        sizeof(contract.Norm), contract.ABI, rows, width, dtype, contract.path_number(path), threads,
        x.ctypes.data, weight.ctypes.data, out.ctypes.data, width, width, epsilon,
    )  # fmt: skip
    contract.check(contract.cpu().kvk_norm_rows(byref(args)))
    return out


def turn(
    q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, threads: int = 1, path: str = "auto"
) -> None:
    """In place, the heads x of q [rows, heads, head_dim] and of k, alike: x * cos + half(x) * sin, where
    half(x) is x's second half, negated, and then its first; cos and sin [rows, head_dim], all float32 or all
    bf16. Raises InvalidArgument for anything else, also for q or k that may not be written or share memory,
    and Unsupported where head_dim is no multiple of 32.
    """
    if q.ndim != 3 or k.ndim != 3:
        raise InvalidArgument(f"q is {list(q.shape)}, k {list(k.shape)}; both must have rows of heads")
    rows, heads, head_dim = q.shape
    dtype = _check("q", q, (rows, heads, head_dim))
    _check("k", k, (rows, k.shape[1], head_dim), q.dtype)
    _check("cos", cos, (rows, head_dim), q.dtype)
    _check("sin", sin, (rows, head_dim), q.dtype)
    _check_written(q, k, cos, sin)
    args = contract.Turns(
        sizeof(contract.Turns), contract.ABI, rows, heads, k.shape[1], head_dim, dtype,
        contract.path_number(path), threads, q.ctypes.data, k.ctypes.data, cos.ctypes.data, sin.ctypes.data,
    )  # fmt: skip
    contract.check(contract.cpu().kvk_turn_rows(byref(args)))


def _at(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _check_written(q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    for name, turned in (("q", q), ("k", k)):
        if not turned.flags.writeable:
            raise InvalidArgument(f"{name} is read-only; it is turned in place")
    pairs = (q, k), (q, cos), (q, sin), (k, cos), (k, sin)
    if any(np.may_share_memory(first, second) for first, second in pairs):
        raise InvalidArgument("q, k and the angles share memory; q and k are turned in place")


def _check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype | None = None) -> int:
    """The dtype's number; it must be `dtype`, if that is said."""
    found = str(array.dtype)
    alike = found in ROWS if dtype is None else array.dtype == dtype
    if not alike or array.shape != shape or not array.flags.c_contiguous:
        kind = "" if array.flags.c_contiguous else ", strided"
        wanted = "float32 or uint16" if dtype is None else str(dtype)
        raise InvalidArgument(
            f"{name} is {found}{list(array.shape)}{kind}; expected {wanted}{list(shape)}, contiguous"
        )
    return ROWS[found]
