"""The two comparisons of the kernel tests, and the shapes and values they try.

Owns nothing else; a test states its own bound. Both say where the first difference is.
"""

from __future__ import annotations

import numpy as np


def calc_diff(found: np.ndarray, other: np.ndarray) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>) in double: one number, comparable over types and shapes; 0 is equal."""
    x, y = np.asarray(found, np.float64), np.asarray(other, np.float64)
    assert x.shape == y.shape, (x.shape, y.shape)
    assert np.isfinite(x).all() and np.isfinite(y).all(), "not finite"
    scale = (x * x + y * y).sum()
    return 0.0 if scale == 0 else float(1 - 2 * (x * y).sum() / scale)


def assert_bitwise_equal(found: np.ndarray, other: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (other.dtype, other.shape)
    a = np.ascontiguousarray(found).view(np.uint8).reshape(*found.shape, -1)
    b = np.ascontiguousarray(other).view(np.uint8).reshape(*other.shape, -1)
    if not np.array_equal(a, b):
        place = tuple(int(i) for i in np.argwhere(a != b)[0])
        raise AssertionError(f"first difference at {place[:-1]}, byte {place[-1]}: {a[place]} and {b[place]}")


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, as uint16, to nearest, half to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(x: np.ndarray) -> np.ndarray:
    """Any element type to float64; uint16 is bfloat16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(x) if dtype == "bfloat16" else x.astype(dtype)
