"""AWQ checkpoints ("gemm" version, 4 bits) straight from safetensors, without any AWQ package.

    model = kvclient.hf.awq.from_pretrained(directory)

On a CUDA device the layers multiply with the kernels of native/cuda; fallbacks() counts the calls there that
torch answered instead, by reason.

Owns the packing of words, AwqLinear, and the loading. Never changes a transformers class: the model is built
from its configuration without the quantisation, and the linear layers that the checkpoint quantises are
replaced. Never guesses: another version, other bits or a tensor without a place is an error that names it.
Invariant: a weight is (q - z) * s, whatever computes with it.

A checkpoint's words: qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales fp16
[in / group, out]; nibble i of word j is column 8j + ORDER[i].
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.kernels import contract, cuda

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4
LEVELS = 15
LARGEST_SCALE = 65504.0  # of fp16
LANES_INPUTS, LANES_OUTPUTS = 64, 16  # of a tile of the kernels' order
ROWS_AT_ONCE = 64  # of the input: above it a layer's weights are dequantised once and multiplied whole
STRIPE_BYTES = 8 << 20  # of dequantised weights at one time, for few rows


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n / 8] to uint8 [rows, n], the columns in order."""
    shifts = torch.arange(0, 32, BITS, device=words.device, dtype=torch.int32)
    nibbles = (words[:, :, None] >> shifts) & LEVELS
    places = torch.tensor(ORDER, device=words.device).argsort()
    return nibbles[:, :, places].reshape(words.shape[0], -1).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of unpack(): integers 0..15 [rows, n] to int32 [rows, n / 8]."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[:, :, list(ORDER)].to(torch.int64)
    words = (nibbles << torch.arange(0, 32, BITS, device=codes.device)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantise(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qweight, qzeros, scales) of a linear layer's weight [out, in], to nearest, in groups of its inputs.

    Raises InvalidArgument for a shape without such words, and for weights that fp16 scales cannot hold.
    """
    _check_shape(weight.shape[1], weight.shape[0], group)
    rows = weight.t().float().reshape(-1, group, weight.shape[0])  # [groups, group, out]
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    steps = ((high - low) / LEVELS).clamp(min=1e-6)
    if not bool((steps <= LARGEST_SCALE).all()):  # nor is a NaN
        wrong = float(steps[~(steps <= LARGEST_SCALE)][0])
        raise InvalidArgument(f"weights that need a scale of {wrong:g}; fp16 holds {LARGEST_SCALE:g} at most")
    scales = steps.to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(0, LEVELS)
    codes = (rows / scales.float()[:, None] + zeros[:, None]).round().clamp(0, LEVELS)
    return pack(codes.reshape(-1, weight.shape[0])), pack(zeros), scales


def _check_shape(inputs: int, outputs: int, group: int) -> None:
    if group < 1 or inputs % group or outputs % 8:
        raise InvalidArgument(f"[{inputs}, {outputs}] fits no groups of {group} and words of 8 columns")


_fallbacks: Counter[str] = Counter()
_reordering = threading.Lock()  # of the words of any layer


def fallbacks() -> dict[str, int]:
    """Calls on a CUDA device that torch answered although there are kernels, by reason."""
    return dict(_fallbacks)


class AwqLinear(torch.nn.Module):
    """In the place of an nn.Linear. Its weights stay packed; each call dequantises what it multiplies.

    On a CUDA device the first call puts `qweight` into the kernels' order; state_dict() is always the
    checkpoint's.
    """

    def __init__(self, inputs: int, outputs: int, group: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        _check_shape(inputs, outputs, group)
        self.in_features, self.out_features, self.group = inputs, outputs, group
        self.register_buffer("qweight", torch.zeros((inputs, outputs // 8), dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros((inputs // group, outputs // 8), dtype=torch.int32))
        self.register_buffer("scales", torch.zeros((inputs // group, outputs), dtype=torch.float16))
        own = torch.nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False)
        self.bias = own if bias else None
        self._in_lanes, self._done = False, _flag(False)

    def weights(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Columns start..stop, multiples of 8, as [in, stop - start]."""
        words = slice(start // 8, stop // 8)
        codes = unpack(self._words()[:, words]).reshape(-1, self.group, stop - start)
        zeros, scales = unpack(self.qzeros[:, words]), self.scales[:, start:stop]
        centred = codes.to(torch.int16) - zeros[:, None].to(torch.int16)
        return (centred * scales[:, None].float()).to(dtype).reshape(-1, stop - start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():  # weights of that type would be whole numbers
            raise InvalidArgument(f"x is {x.dtype}; expected a floating point type")
        if x.device.type in cuda.DEVICES:
            if (reason := self._unfit(x)) is None:
                return self._by_kernels(x)
            _fallbacks[reason] += 1
        return self._by_torch(x)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // max(1, self.in_features)
        step = self.out_features
        if rows <= ROWS_AT_ONCE:
            step = max(8, min(step, STRIPE_BYTES // (4 * self.in_features) // 8 * 8))
        parts = [
            x @ self.weights(start, min(start + step, self.out_features), x.dtype)
            for start in range(0, self.out_features, step)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out + self._bias(out.dtype)

    def _bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    def _unfit(self, x: torch.Tensor) -> str | None:
        """Why the kernels cannot take this layer on this x, as a word for counting."""
        if os.environ.get(ENVIRONMENT) == "torch":
            return "torch"
        if (reason := _no_kernels(x.device.index or 0)) is not None:
            return reason
        if x.dtype not in (torch.float16, torch.bfloat16):
            return "dtype"
        if x.dtype == torch.bfloat16 and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
            return "dtype"
        if self.group % LANES_INPUTS or self.out_features % LANES_OUTPUTS:
            return "shape"
        return "training" if torch.is_grad_enabled() and x.requires_grad else None

    def _by_kernels(self, x: torch.Tensor) -> torch.Tensor:
        compiling = torch.compiler.is_compiling()
        if not self._in_lanes:
            self._reorder(x.device, compiling)
        packed = (self.qweight, self.qzeros, self.scales)
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] > cuda.AWQ_ROWS:
            dequantise = cuda.awq_dequantise_op if compiling else cuda.awq_dequantise
            weights = dequantise(*packed, self.group, x.dtype)
            return torch.nn.functional.linear(x, weights, self._bias(x.dtype))
        multiply = cuda.awq_multiply_op if compiling else cuda.awq_multiply
        out = multiply(rows, *packed, self._bias(x.dtype), self.group)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _reorder(self, device: torch.device, compiling: bool) -> None:
        """Once, whatever threads call. Into other memory: a state_dict() taken before keeps the checkpoint's
        words. A compiled graph writes in place, as its own memory may be that of the next replay; and asks
        again as it runs, for two threads may be in it before one has changed `_in_lanes`.
        """
        if compiling:
            _reorder_in_place(self.qweight, self._done, self.group)
            self._in_lanes = True
            return
        with _reordering:
            if self._in_lanes:
                return
            if not self._done:
                if _capturing(device):
                    raise InvalidArgument(
                        "the first call of an AwqLinear puts its words into the kernels' order, which each "
                        "replay of a CUDA graph would do again: call the model once before the capture"
                    )
                self.qweight, self._done = _settled(cuda.awq_repack(self.qweight, self.group)), _flag(True)
            self._in_lanes = True

    def _apply(self, fn: Any, recurse: bool = True) -> AwqLinear:
        """Moved as any module; but .to(dtype) is about what is computed in: the scales stay fp16."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def _words(self) -> torch.Tensor:
        return from_lanes(self.qweight) if self._in_lanes else self.qweight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "qweight"] = self._words()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        words, in_lanes = self.qweight, self._in_lanes
        if in_lanes:
            words.copy_(self._words())
            self._in_lanes, self._done = False, _flag(False)
        super()._load_from_state_dict(*args, **kwargs)
        if in_lanes and self.qweight is words:  # a graph that was captured reads it there, in that order
            words.copy_(to_lanes(words))
            self._in_lanes, self._done = True, _flag(True)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


def _flag(done: bool) -> torch.Tensor:
    """Whether the words beside it are in the kernels' order, as a compiled graph can read and write it."""
    return torch.full((), done, device="cpu")


def _settled(words: torch.Tensor) -> torch.Tensor:
    if words.is_cuda and not _capturing(words.device):  # other streams read it too
        torch.cuda.current_stream(words.device).synchronize()
    return words


@torch.library.custom_op("kvclient::awq_reorder", mutates_args=("words", "done"))
def _reorder_in_place(words: torch.Tensor, done: torch.Tensor, group: int) -> None:
    with _reordering:
        if not done:
            _settled(words.copy_(cuda.awq_repack(words, group)))
            done.fill_(True)


@_reorder_in_place.register_fake
def _(words: torch.Tensor, done: torch.Tensor, group: int) -> None:
    return None


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _no_kernels(device: int) -> str | None:
    return None if contract.cuda_lacks(device) is None else "kernels"


def to_lanes(words: torch.Tensor) -> torch.Tensor:
    """A checkpoint's words in the order the kernels read (native/cuda/awq_tile.h), in the same shape."""
    codes = unpack(words)
    inputs, outputs = codes.shape
    # Input 64a + 16t + 4s + 2h + e, output 16b + 8i + g: word [b, a, lane 4g + t, s], nibble 4e + 2h + i.
    parts = codes.reshape(inputs // LANES_INPUTS, 4, 4, 2, 2, outputs // LANES_OUTPUTS, 2, 8)
    nibbles = parts.permute(5, 0, 7, 1, 2, 4, 3, 6).reshape(-1, 8).to(torch.int64)
    packed = (nibbles << torch.arange(0, 32, BITS, device=words.device)).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).reshape(words.shape)


def from_lanes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of to_lanes()."""
    inputs, outputs = words.shape[0], words.shape[1] * 8
    shifts = torch.arange(0, 32, BITS, device=words.device, dtype=torch.int32)
    size = (outputs // LANES_OUTPUTS, inputs // LANES_INPUTS, 8, 4, 4, 2, 2, 2)
    nibbles = ((words.reshape(-1, 1) >> shifts) & LEVELS).reshape(size)
    return pack(nibbles.permute(1, 3, 4, 6, 5, 0, 7, 2).reshape(inputs, outputs))


def from_pretrained(directory: str | Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The causal model of an AWQ checkpoint in eval mode, on the CPU. Raises InvalidArgument with what is
    wrong with it. dtype: what it computes in; default: the configuration's.
    """
    home = Path(directory)
    if not (home / "config.json").is_file():
        raise InvalidArgument(f"{home} is no directory with a config.json")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgument(f"dtype={dtype!r}; it must be a floating point torch.dtype")
    config = AutoConfig.from_pretrained(home, local_files_only=True)
    quantisation = getattr(config, "quantization_config", None)
    group = _group_of(quantisation)
    del config.quantization_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    tensors = _tensors(home)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.quantization_config = quantisation  # save_pretrained() then writes such a checkpoint again
    _replace(model, tensors, group, dtype)
    _check_places(model, tensors)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    own = model.state_dict(keep_vars=True)
    filled = {own[name].data_ptr() for name in tensors if name in own}
    tied = {name for name in missing if own[name].data_ptr() in filled}  # the checkpoint has it elsewhere
    if lost := sorted(set(missing) - tied) + sorted(unexpected):
        raise InvalidArgument(f"{home.name}: tensors without a counterpart: {', '.join(lost[:5])}")
    if (home / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(home, local_files_only=True)
    return model.eval()


def _group_of(quantisation: Any) -> int:
    found = quantisation if isinstance(quantisation, dict) else getattr(quantisation, "to_dict", dict)()
    method, version = found.get("quant_method"), str(found.get("version", "gemm")).lower()
    if str(method).lower().rpartition(".")[2] != "awq":
        raise InvalidArgument(f"quant_method={method!r}; this reads awq")
    if version != "gemm" or found.get("bits") != BITS or not found.get("zero_point", True):
        kind = f"version={version!r}, bits={found.get('bits')!r}, zero_point={found.get('zero_point')!r}"
        raise InvalidArgument(f"AWQ {kind}; this reads version 'gemm', 4 bits, with zero points")
    group = found.get("group_size")
    if not isinstance(group, int) or group <= 0:
        raise InvalidArgument(f"group_size={group!r}; it must be a positive number")
    return group


def _tensors(home: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, names = home / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{index.name} is no index of a checkpoint: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise InvalidArgument(f"{index.name} names a file outside of the checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(home / name))
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{name} cannot be read: {error}") from error
    return tensors


def _check_places(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Raises InvalidArgument for a tensor that its place in the model cannot hold: another shape, or whole
    numbers for fractions, which loading would convert.
    """
    for name, place in model.state_dict().items():
        found = tensors.get(name)
        if found is None:
            continue
        if found.shape != place.shape or found.is_floating_point() != place.is_floating_point():
            what = f"{found.dtype}{list(found.shape)}"
            raise InvalidArgument(f"{name} is {what}; expected {place.dtype}{list(place.shape)}")


def _replace(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], group: int, dtype: torch.dtype
) -> None:
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        owner, _, attribute = name.rpartition(".")
        try:
            parent = model.get_submodule(owner)
            linear = getattr(parent, attribute)
        except AttributeError:
            raise InvalidArgument(f"the checkpoint quantises {name}, which the model has not") from None
        if not isinstance(linear, torch.nn.Linear):
            raise InvalidArgument(f"the checkpoint quantises {name}, a {type(linear).__name__}")
        packed = AwqLinear(linear.in_features, linear.out_features, group, linear.bias is not None, dtype)
        for part in ("qweight", "qzeros", "scales"):
            found, wanted = tensors.get(f"{name}.{part}"), getattr(packed, part)
            if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
                what = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
                raise InvalidArgument(f"{name}.{part} is {what}; expected {wanted.dtype}{list(wanted.shape)}")
        if not bool((scales := tensors[f"{name}.scales"]).isfinite().all()):
            wrong = float(scales[~scales.isfinite()][0])
            raise InvalidArgument(f"{name}.scales has {wrong}; all must be finite")
        setattr(parent, attribute, packed)

