"""Quantising, dequantising and rotating K and V of one layer of one block, natively.

Owns the shapes and types that users see: arrays [heads, tokens, head_dim] in float32, float16, or bfloat16 as
uint16, strided as they like along the first two axes. Never copies an operand. Invariant: what quantise()
writes, dequantise() brings back within scale / 2 of each element (native/kernels.h has the arithmetic).
"""

from __future__ import annotations

from ctypes import byref, sizeof
from dataclasses import dataclass

import numpy as np

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

# bfloat16 is that of ml_dtypes, or uint16, its bits.
ELEMENTS = {
    "float32": contract.F32,
    "float16": contract.F16,
    "uint16": contract.BF16,
    "bfloat16": contract.BF16,
}
CODECS = {8: contract.INT8, 4: contract.INT4}
MOST_WORK = 1000  # of NumPy, to tell apart what only lies in between: behind it, they overlap
ROPES = {"half": contract.ROPE_HALF, "interleaved": contract.ROPE_INTERLEAVED}


@dataclass(frozen=True)
class Quantised:
    """K (group: tokens per scale) or V (group 0: one scale a token) of one layer.

    codes: uint8 [heads, tokens, head_dim], or head_dim / 2 at 4 bits, the even element in the low half of
    the byte. scale, zero: float16 [heads, groups, head_dim] for K, [heads, tokens] for V.
    x = code * scale + zero.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    bits: int
    group: int

    @property
    def tokens(self) -> int:
        """How many tokens its codes are of."""
        return self.codes.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of a head; two 4-bit codes share a byte."""
        return self.codes.shape[2] * (2 if self.bits == 4 else 1)


def empty(heads: int, tokens: int, head_dim: int, bits: int, group: int) -> Quantised:
    """Arrays to quantise into. Raises InvalidArgument for bits or groups that the kernels have not."""
    if type(bits) is not int or bits not in CODECS:
        raise InvalidArgument(f"bits={bits!r}; it must be 8 or 4")
    if type(group) is not int or group not in (0, *contract.GROUPS):
        raise InvalidArgument(f"group={group!r}; it must be 0 (V) or one of {contract.GROUPS} (K)")
    scales = (heads, -(-tokens // group), head_dim) if group else (heads, tokens)
    codes = np.empty((heads, tokens, head_dim * bits // 8), np.uint8)
    return Quantised(codes, np.empty(scales, np.float16), np.empty(scales, np.float16), bits, group)


def quantise(
    elements: np.ndarray, bits: int, group: int, out: Quantised | None = None, path: str = "auto"
) -> Quantised:
    """[heads, tokens, head_dim] of K with group 32, 64 or 128, of V with group 0. Into `out`, or into arrays
    made here.

    Raises NotQuantisable if a value is not finite or beyond 65504; `out` is then of no use.
    InvalidArgument if `out` is for other bits or groups.
    """
    elements_shape(elements)
    if out is None:
        out = empty(*elements.shape, bits, group)
    elif (out.bits, out.group) != (bits, group):
        raise InvalidArgument(f"out is for {out.bits} bits, group {out.group}; asked for {bits}, {group}")
    for array in (out.codes, out.scale, out.zero):
        writeable(array)
    contract.check(contract.cpu().kvk_quantise(byref(_conversion(elements, out, path))))
    return out


def dequantise(quantised: Quantised, out: np.ndarray, path: str = "auto") -> np.ndarray:
    """Writes the elements [heads, tokens, head_dim] into `out`, in its type, and returns it."""
    elements_shape(out)
    writeable(out)
    contract.check(contract.cpu().kvk_dequantise(byref(_conversion(out, quantised, path))))
    return out


def turn(inv_freq: np.ndarray, delta: int) -> np.ndarray:
    """cos, then sin, of delta * inv_freq: float32 [2, rotary_dim / 2]. For rotate(), and for segments."""
    frequencies = np.ascontiguousarray(inv_freq, np.float32)
    check_bounds("delta", delta, -(1 << 63), (1 << 63) - 1)
    table = np.empty((2, frequencies.size), np.float32)
    contract.cpu().kvk_turn(frequencies.ctypes.data, frequencies.size, int(delta), table.ctypes.data)
    return table


def rotate(
    keys: np.ndarray,
    turned: np.ndarray,
    rope: str = "half",
    out: np.ndarray | None = None,
    path: str = "auto",
) -> np.ndarray:
    """K turned by turn(inv_freq, new position - old position); in place unless `out` is given.

    rope: "half" pairs element i with i + r/2, "interleaved" 2i with 2i + 1, of the first
    r = 2 * len(inv_freq); what lies behind is copied.
    Raises InvalidArgument for an `out` of another shape or dtype.
    """
    out = keys if out is None else out
    elements_shape(keys)
    elements_shape(out)
    writeable(out)
    if out.shape != keys.shape or out.dtype != keys.dtype:
        raise InvalidArgument(f"out is {out.dtype}{list(out.shape)}; keys are {keys.dtype}{list(keys.shape)}")
    apart(keys, out)
    table_shape(turned)
    heads, tokens, head_dim = keys.shape
    args = contract.Rotation(
        sizeof(contract.Rotation), contract.ABI, heads, tokens, head_dim, ELEMENTS[keys.dtype.name],
        rope_number(rope), 2 * turned.shape[1], keys.ctypes.data, *keys.strides[:2], out.ctypes.data,
        *out.strides[:2], turned.ctypes.data, contract.path_number(path),
    )  # fmt: skip
    contract.check(contract.cpu().kvk_rotate(byref(args)))
    return out


def elements_shape(array: np.ndarray) -> tuple[int, int, int]:
    """[heads, tokens, head_dim] of elements. Raises InvalidArgument for anything the kernels cannot read."""
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"a {type(array).__name__}; expected a NumPy array [heads, tokens, head_dim]")
    if array.ndim != 3 or element_code(array.dtype) is None:
        wanted = f"[heads, tokens, head_dim] of {', '.join(ELEMENTS)} in native byte order"
        raise InvalidArgument(f"{array.dtype}{list(array.shape)}; expected {wanted}")
    if array.size and array.shape[2] > 1 and array.strides[2] != array.itemsize:
        raise InvalidArgument(f"the elements of a head lie {array.strides[2]} bytes apart")
    return array.shape


def element_code(dtype: np.dtype) -> int | None:
    """The contract's number for these elements. A name says nothing of the order of bytes."""
    return ELEMENTS.get(dtype.name) if dtype.isnative else None


def writeable(array: np.ndarray) -> None:
    """Raises InvalidArgument if an array, of any shape, is read-only."""
    if not array.flags.writeable:
        raise InvalidArgument("out is read-only")


def apart(source: np.ndarray, out: np.ndarray) -> None:
    """Raises InvalidArgument if rows of `out` would be written over rows that are not read yet; both of one
    shape.
    """
    same = out.ctypes.data == source.ctypes.data and out.strides == source.strides
    if not same and np.may_share_memory(source, out, MOST_WORK):
        raise InvalidArgument("out overlaps what is read; it must be the same array, or another")


def table_shape(turned: np.ndarray) -> int:
    """The rotary_dim of what turn() made: float32 [2, rotary_dim / 2]. Raises InvalidArgument for anything
    else.
    """
    contiguous = turned.flags.c_contiguous
    if turned.dtype != np.float32 or turned.ndim != 2 or turned.shape[0] != 2 or not contiguous:
        wanted = "expected float32 [2, rotary_dim / 2], as turn() makes it"
        raise InvalidArgument(f"turned is {turned.dtype}{list(turned.shape)}; {wanted}")
    return 2 * turned.shape[1]


def rope_number(rope: str) -> int:
    """The number of a rope by its name. Raises InvalidArgument for another name."""
    if rope not in ROPES:
        raise InvalidArgument(f"rope={rope!r}; it must be one of {', '.join(ROPES)}")
    return ROPES[rope]


def check_quantised(coded: Quantised, heads: int, tokens: int, head_dim: int) -> None:
    """Raises InvalidArgument if the kernels would read or write anything but its own arrays."""
    codes, scale, zero = coded.codes, coded.scale, coded.zero
    groups = (-(-tokens // coded.group), head_dim) if coded.group else (tokens,)
    fits = (
        coded.bits in CODECS
        and codes.shape == (heads, tokens, head_dim * coded.bits // 8)
        and codes.dtype == np.uint8
        and (not codes.size or codes.strides[2] == 1)
        and scale.shape == zero.shape == (heads, *groups)
        and scale.dtype == zero.dtype == np.float16
        and scale.strides == zero.strides
        and (not heads or (scale[0].flags.c_contiguous and zero[0].flags.c_contiguous))
    )
    if not fits:
        shapes = f"codes {codes.dtype}{list(codes.shape)}, scale {scale.dtype}{list(scale.shape)}"
        room = f"{[heads, tokens, head_dim]} in {coded.bits} bits, group {coded.group}"
        raise InvalidArgument(f"{shapes}, zero {list(zero.shape)} do not hold {room}")


def _conversion(elements: np.ndarray, quantised: Quantised, path: str) -> contract.Conversion:
    heads, tokens, head_dim = elements.shape
    check_quantised(quantised, heads, tokens, head_dim)
    return contract.Conversion(
        sizeof(contract.Conversion), contract.ABI, heads, tokens, head_dim, ELEMENTS[elements.dtype.name],
        CODECS[quantised.bits], quantised.group, elements.ctypes.data, *elements.strides[:2],
        quantised.codes.ctypes.data, *quantised.codes.strides[:2], quantised.scale.ctypes.data,
        quantised.zero.ctypes.data, quantised.scale.strides[0], contract.path_number(path),
    )  # fmt: skip
