"""The kernels over torch tensors on a GPU, as operators that torch.compile knows.

Owns the translation of tensors into the structs of native/kernels.h, with the device's current stream. The
operators that the CPU library has too (quantise, dequantise, rotate) take CPU tensors as well. Never waits
for the device: what a kernel finds out (`unfit` of quantise) is a tensor. Invariant: an operator allocates
its results by torch, and hands out no tensor that its kernel does not fill.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, sizeof
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract

DTYPES = {torch.float32: contract.F32, torch.float16: contract.F16, torch.bfloat16: contract.BF16}
CODECS = {8: contract.INT8, 4: contract.INT4}
FAST, NAIVE = 0, 1  # `path`: the naive kernel is there to compare with
AWQ_ROWS = 64  # KVK_AWQ_ROWS
BOTH = ("cpu", "cuda")
DEVICES = ("cuda",)  # whose tensors are better served where they lie


def library_for(device: torch.device) -> Any:
    """The loaded kernels for tensors of this device. Raises what contract.cuda() raises without them."""
    return contract.cuda() if device.type == "cuda" else contract.cpu()


def run(name: str, args: Any, like: torch.Tensor) -> None:
    """One call of the library for the device of `like`, of any shape, on its current stream. Raises
    Unsupported for a kernel that the library has not.
    """
    library = library_for(like.device)
    if like.device.type != "cuda":
        if not hasattr(library, name):
            raise contract.Unsupported(f"{name} is a kernel of the CUDA library; the tensors are on a CPU")
        contract.check(getattr(library, name)(byref(args)), library)
        return
    with torch.cuda.device(like.device):
        args.stream = torch.cuda.current_stream(like.device).cuda_stream
        contract.check(getattr(library, name)(byref(args)), library)


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """In bytes, of heads and tokens. Raises InvalidArgument if the elements of a head lie apart."""
    if tensor.ndim != 3 or (tensor.shape[2] > 1 and tensor.stride(2) != 1):
        raise InvalidArgument(f"{list(tensor.shape)}, strides {tensor.stride()}; expected rows of elements")
    return tensor.stride(0) * tensor.element_size(), tensor.stride(1) * tensor.element_size()


def _conversion(
    elements: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int,
    group: int, path: int,
) -> Any:  # fmt: skip
    if bits not in CODECS or elements.dtype not in DTYPES:
        raise InvalidArgument(f"bits={bits}, {elements.dtype}; 8 or 4, of {', '.join(map(str, DTYPES))}")
    heads, tokens, head_dim = elements.shape
    _check_scales((scale, zero), _scales(heads, tokens, head_dim, group))
    if codes.shape != (heads, tokens, head_dim * bits // 8) or codes.dtype != torch.uint8:
        wanted = f"uint8{[heads, tokens, head_dim * bits // 8]}"
        raise InvalidArgument(f"codes {codes.dtype}{list(codes.shape)}; expected {wanted}")
    return contract.Conversion(
        sizeof(contract.Conversion), contract.ABI, heads, tokens, head_dim, DTYPES[elements.dtype],
        CODECS[bits], group, elements.data_ptr(), *_strides(elements), codes.data_ptr(), *_strides(codes),
        scale.data_ptr(), zero.data_ptr(), scale.stride(0) * 2, path,
    )  # fmt: skip


def _scales(heads: int, tokens: int, head_dim: int, group: int) -> tuple[int, ...]:
    return (heads, -(-tokens // group), head_dim) if group else (heads, tokens)


def _check_scales(scales: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
    for tensor in scales:
        if tensor.dtype != torch.float16 or tensor.shape != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype}{list(tensor.shape)}, strides {tensor.stride()}"
            raise InvalidArgument(f"scale or zero {found}; expected contiguous float16{list(shape)}")


@torch.library.custom_op("kvclient::quantise", mutates_args=(), device_types=BOTH)
def quantise(
    elements: torch.Tensor, bits: int, group: int, path: int = FAST
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, zero, unfit) of [heads, tokens, head_dim]: K with a group, V with group 0.

    unfit: int32 [1], not 0 if a value is not finite or beyond 65504; on a CPU that raises NotQuantisable.
    """
    codes, scale, zero, unfit = _quantised(elements, bits, group)
    args = _conversion(elements, codes, scale, zero, bits, group, path)
    args.status = unfit.data_ptr()
    run("kvk_quantise", args, elements)
    return codes, scale, zero, unfit


@quantise.register_fake
def _quantised(elements, bits, group, path=FAST):
    heads, tokens, head_dim = elements.shape
    scales = _scales(heads, tokens, head_dim, group)
    return (
        elements.new_empty((heads, tokens, head_dim * bits // 8), dtype=torch.uint8),
        elements.new_empty(scales, dtype=torch.float16),
        elements.new_empty(scales, dtype=torch.float16),
        elements.new_zeros(1, dtype=torch.int32),
    )


def quantise_into(elements: torch.Tensor, parts: Sequence[Any]) -> None:
    """K and V [2, heads, tokens, head_dim], quantised where they lie, into two kernels.Quantised of host
    memory: what crosses the bus is the codes. Raises NotQuantisable.
    """
    made = [quantise(side, part.bits, part.group) for side, part in zip(elements, parts, strict=True)]
    if any(int(unfit) for *_, unfit in made):
        raise contract.NotQuantisable("a value that is not finite or beyond 65504, which fp16 cannot hold")
    for (codes, scale, zero, _), part in zip(made, parts, strict=True):
        for tensor, array in ((codes, part.codes), (scale, part.scale), (zero, part.zero)):
            torch.from_numpy(array).copy_(tensor)


@torch.library.custom_op("kvclient::dequantise", mutates_args=("out",), device_types=BOTH)
def dequantise(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, group: int, out: torch.Tensor,
    path: int = FAST,
) -> None:  # fmt: skip
    """Writes the elements into `out` [heads, tokens, head_dim], in its type."""
    run("kvk_dequantise", _conversion(out, codes, scale, zero, bits, group, path), codes)


@torch.library.custom_op("kvclient::rotate", mutates_args=(), device_types=BOTH)
def rotate(keys: torch.Tensor, turn: torch.Tensor, interleaved: bool, path: int = FAST) -> torch.Tensor:
    """Keys [heads, tokens, head_dim] turned by what kernels.turn() makes: float32 [2, rotary_dim / 2]. Raises
    InvalidArgument for a `turn` of another shape or dtype.
    """
    if turn.dtype != torch.float32 or turn.ndim != 2 or not turn.is_contiguous() or keys.dtype not in DTYPES:
        raise InvalidArgument(f"turn {turn.dtype}{list(turn.shape)} of keys in {keys.dtype}")
    out = torch.empty_like(keys, memory_format=torch.contiguous_format)
    args = contract.Rotation(
        sizeof(contract.Rotation), contract.ABI, *keys.shape, DTYPES[keys.dtype], int(interleaved),
        2 * turn.shape[1], keys.data_ptr(), *_strides(keys), out.data_ptr(), *_strides(out), turn.data_ptr(),
        path,
    )  # fmt: skip
    run("kvk_rotate", args, keys)
    return out


@rotate.register_fake
def _(keys, turn, interleaved, path=FAST):
    return torch.empty_like(keys, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- segments


def segment(
    keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], group: int = 0, first: int = 0,
    tokens: int | None = None, turn: torch.Tensor | None = None, bits: int = 0, position: int = 0,
    moved: int = 0,
) -> Any:  # fmt: skip
    """What a kernel reads of one block: (elements,) or (codes, scale, zero), each of keys and of values, all
    [heads, tokens or groups, …].

    `first` tokens of the block are passed over; turn: as for rotate(). The first token used stands at
    `position`, for which its key was rotated but for `moved`. The tensors must outlive its use.
    Raises InvalidArgument where keys and values are unlike, or the tokens are not in the block.
    """
    k, v = keys[0], values[0]
    if k.dtype != v.dtype or k.shape != v.shape:
        raise InvalidArgument(f"keys {k.dtype}{list(k.shape)}, values {v.dtype}{list(v.shape)}; one of each")
    (k_head, k_token), (v_head, v_token) = _strides(k), _strides(v)
    tokens = k.shape[1] - first if tokens is None else tokens
    if not 0 <= first <= first + tokens <= k.shape[1]:
        raise InvalidArgument(f"first={first}, tokens={tokens} of a block of {k.shape[1]}")
    struct = contract.Segment(
        k.data_ptr(), v.data_ptr(), k_head, k_token, v_head, v_token, first=first, tokens=tokens,
        codec=CODECS[bits] if bits else DTYPES[k.dtype], turn=None if turn is None else turn.data_ptr(),
        base_position=position - moved, new_position=position,
    )  # fmt: skip
    if bits:
        heads, held, width = k.shape
        for (_, *scales), tokens_a_scale in ((keys, group), (values, 0)):
            _check_scales(scales, _scales(heads, held, width * 8 // bits, tokens_a_scale))
        struct.k_scale, struct.k_zero = keys[1].data_ptr(), keys[2].data_ptr()
        struct.v_scale, struct.v_zero = values[1].data_ptr(), values[2].data_ptr()
        struct.k_scale_head_stride = keys[1].stride(0) * 2
        struct.v_scale_head_stride = values[1].stride(0) * 2
        struct.k_group = group
    return struct


def table(structs: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Segments as the device reads them: uint8 [count, size]."""
    array = (contract.Segment * len(structs))(*structs)
    flat = torch.frombuffer(bytearray(ctypes.string_at(array, sizeof(array))), dtype=torch.uint8)
    return flat.reshape(len(structs), -1).to(device)


def addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Where they lie, as the device reads it: int64 [tensors]; host tensors must be registered with it."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(device)


@torch.library.custom_op("kvclient::load", mutates_args=("keys", "values"), device_types=BOTH)
def load(
    keys: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, places: torch.Tensor, most_tokens: int,
    rotary_dim: int, interleaved: bool, path: int = FAST,
) -> None:  # fmt: skip
    """Brings the segments (table()) of one layer into a dense cache, dequantised and turned: one launch.

    keys, values: [heads, tokens, head_dim], of the same strides, a row of a batch; places: int64, per
    segment the bytes to its first token (column * token stride).
    Raises InvalidArgument where keys and values are unlike.
    """
    if _strides(keys) != _strides(values) or keys.shape != values.shape or keys.dtype not in DTYPES:
        raise InvalidArgument(f"keys {list(keys.shape)} and values {list(values.shape)}: unlike, or no cache")
    args = contract.Loading(
        sizeof(contract.Loading), contract.ABI, keys.shape[0], keys.shape[2], DTYPES[keys.dtype],
        int(interleaved), rotary_dim, segments.shape[0], most_tokens, path, segments.data_ptr(),
        places.data_ptr(), keys.data_ptr(), values.data_ptr(), *_strides(keys),
    )  # fmt: skip
    run("kvk_load", args, keys)


@torch.library.custom_op("kvclient::score", mutates_args=(), device_types=BOTH)
def score(
    keys: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, columns: torch.Tensor, most_tokens: int,
    rotary_dim: int, interleaved: bool, path: int = FAST,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(square, norm), float32 [2, tokens]: of K and V, per token over heads and elements, the sum of
    (stored - computed)^2 and that of computed^2; 0 for tokens of no segment. columns: int64, of each
    segment's first.
    """
    square, norm = _scored(keys, values, segments, columns, most_tokens, rotary_dim, interleaved)
    args = contract.Scoring(
        sizeof(contract.Scoring), contract.ABI, keys.shape[0], keys.shape[2], DTYPES[keys.dtype],
        int(interleaved), rotary_dim, segments.shape[0], most_tokens, path, segments.data_ptr(),
        columns.data_ptr(), keys.data_ptr(), values.data_ptr(), *_strides(keys), square.data_ptr(),
        norm.data_ptr(), keys.shape[1],
    )  # fmt: skip
    run("kvk_score", args, keys)
    return square, norm


@score.register_fake
def _scored(keys, values, segments, columns, most_tokens, rotary_dim, interleaved, path=FAST):
    size = (2, keys.shape[1])
    return keys.new_zeros(size, dtype=torch.float32), keys.new_zeros(size, dtype=torch.float32)


@torch.library.custom_op("kvclient::copy_pages", mutates_args=("like",), device_types=BOTH)
def copy_pages(
    to: torch.Tensor, from_: torch.Tensor, heads: int, tokens: int, row_bytes: int, strides: Sequence[int],
    like: torch.Tensor, blocks: int = 0, path: int = FAST,
) -> None:  # fmt: skip
    """Pages of [heads, tokens] rows from addresses to addresses (addresses()), in one launch, either way.

    strides: four, bytes between heads and between tokens, of the source, then of the target. like: the
    device's side, which counts as written whichever it is.
    """
    args = contract.Pages(
        sizeof(contract.Pages), contract.ABI, from_.numel(), heads, tokens, row_bytes, blocks, path,
        from_.data_ptr(), to.data_ptr(), *strides,
    )  # fmt: skip
    run("kvk_copy_pages", args, like)


# ---------------------------------------------------------------- AWQ


def _check_awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    """Raises InvalidArgument if these are not the tensors of one layer: the kernels read by the numbers."""
    inputs, outputs = words.shape[0], 8 * words.shape[1]
    groups = inputs // group if group > 0 else 0
    wanted = (torch.int32, torch.int32, torch.float16), ((groups, outputs // 8), (groups, outputs))
    if (words.dtype, zeros.dtype, scales.dtype) != wanted[0] or (zeros.shape, scales.shape) != wanted[1]:
        raise InvalidArgument(
            f"words {words.dtype}{list(words.shape)}, zeros {zeros.dtype}{list(zeros.shape)}, scales "
            f"{scales.dtype}{list(scales.shape)} in groups of {group} are not those of one layer"
        )
    if not (words.is_contiguous() and zeros.is_contiguous() and scales.is_contiguous()):
        raise InvalidArgument("words, zeros or scales are strided; expected contiguous memory")


def _awq(
    inputs: int, outputs: int, group: int, dtype: torch.dtype, path: int, rows: int, **pointers: Any
) -> Any:
    args = contract.Awq(
        sizeof(contract.Awq), contract.ABI, inputs, outputs, group, DTYPES.get(dtype, 99), path, rows
    )
    for name, value in pointers.items():
        setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return args


@torch.library.custom_op("kvclient::awq_repack", mutates_args=(), device_types=BOTH)
def awq_repack(words: torch.Tensor, group: int) -> torch.Tensor:
    """A checkpoint's qweight, int32 [inputs, outputs / 8], in the order the kernels read: the same shape.
    Raises InvalidArgument for another shape or dtype.
    """
    if words.dtype != torch.int32 or words.ndim != 2:
        raise InvalidArgument(f"words {words.dtype}{list(words.shape)}; expected int32 of two dimensions")
    words = words.contiguous()
    out = torch.empty_like(words)
    inputs, outputs = words.shape[0], words.shape[1] * 8
    args = _awq(inputs, outputs, group, torch.float16, FAST, 0, words=words, out=out)
    run("kvk_awq_repack", args, words)
    return out


@awq_repack.register_fake
def _(words, group):
    return torch.empty_like(words, memory_format=torch.contiguous_format)


def awq_multiply(
    x: torch.Tensor, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, group: int, path: int = FAST,
) -> torch.Tensor:  # fmt: skip
    """x [rows, inputs] times the weights, up to 64 rows; the `_op` below is the same for torch.compile.

    words: repacked; with path NAIVE the checkpoint's.
    Raises InvalidArgument where x, words and bias do not match.
    """
    _check_awq(words, zeros, scales, group)
    outputs = scales.shape[1]
    if x.ndim != 2 or x.shape[1] != words.shape[0]:
        raise InvalidArgument(f"x {list(x.shape)}; expected rows of {words.shape[0]} inputs")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise InvalidArgument(f"bias {bias.dtype}{list(bias.shape)}; expected {x.dtype}[{outputs}]")
    x, out = x.contiguous(), _multiplied(x, words, zeros, scales, bias, group)
    args = _awq(
        x.shape[1], scales.shape[1], group, x.dtype, path, x.shape[0], words=words, zeros=zeros,
        scales=scales, x=x, bias=bias, out=out, x_row_stride=2 * x.shape[1], out_row_stride=2 * out.shape[1],
    )  # fmt: skip
    run("kvk_awq_multiply", args, x)
    return out


awq_multiply_op = torch.library.custom_op(
    "kvclient::awq_multiply", awq_multiply, mutates_args=(), device_types=BOTH
)


@awq_multiply_op.register_fake
def _multiplied(x, words, zeros, scales, bias, group, path=FAST):
    return x.new_empty((x.shape[0], scales.shape[1]))


def awq_dequantise(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype,
    path: int = FAST,
) -> torch.Tensor:  # fmt: skip
    """The weights as nn.Linear holds them: [outputs, inputs]."""
    _check_awq(words, zeros, scales, group)
    out = _dequantised(words, zeros, scales, group, dtype)
    args = _awq(
        out.shape[1], out.shape[0], group, dtype, path, 0, words=words, zeros=zeros, scales=scales, out=out,
        out_row_stride=2 * out.shape[1],
    )  # fmt: skip
    run("kvk_awq_dequantise", args, words)
    return out


awq_dequantise_op = torch.library.custom_op(
    "kvclient::awq_dequantise", awq_dequantise, mutates_args=(), device_types=BOTH
)


@awq_dequantise_op.register_fake
def _dequantised(words, zeros, scales, group, dtype, path=FAST):
    return words.new_empty((scales.shape[1], words.shape[0]), dtype=dtype)
