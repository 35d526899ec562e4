"""AwqLinear: a linear layer whose weights stay packed in four bits.

On a CUDA device it multiplies with the kernels of native/cuda; fallbacks() counts the calls there that torch
answered instead, by reason. On the CPU rows are multiplied by native/cpu, as the words lie, in panels
(packing.py) or as in the checkpoint; many rows of bf16 by torch, if it has products of them for this
processor: some columns at a time become numbers. Owns the layer and the moment its words change their order.
Invariant: a weight is (q - z) * s, whatever computes.

A checkpoint's words: qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales fp16
[in / group, out]; nibble i of word j is column 8j + ORDER[i].
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.hf.awq.packing import (
    LANES_INPUTS,
    LANES_OUTPUTS,
    _check_shape,
    fits_panels,
    from_lanes,
    from_panels,
    in_panels,
    to_lanes,
    to_panels,
    unpack,
)
from kvclient.hf.awq.spinning import stand_for
from kvclient.kernels import awq, contract, cuda

ROWS_PACKED = 128  # of a bf16 input: above it torch's product of numbers is faster than that of packed words
TILE_BYTES = 8 << 20
ROWS_AT_ONCE = 64  # of the input: above it a layer's weights are dequantised once and multiplied whole
STRIPE_BYTES = 8 << 20  # of dequantised weights at one time, for few rows
HELD = ("qweight", torch.int32), ("qzeros", torch.int32), ("scales", torch.float16), ("bias", torch.float32)


_fallbacks: Counter[str] = Counter()
_reordering = threading.Lock()  # of the words of any layer
_saving = threading.local()  # how state_dict() gives words in panels


@cache
def torch_multiplies_bf16() -> bool:
    """Whether torch has products of bf16 for this processor; where it has none (AVX2 and no more) it adds up
    number by number, seventy times slower than the kernels.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fallbacks() -> dict[str, int]:
    """Calls on a CUDA device that torch answered although there are kernels, by reason."""
    return dict(_fallbacks)


class AwqLinear(torch.nn.Module):
    """In the place of an nn.Linear. Its weights stay packed; each call dequantises what it multiplies.

    On a CUDA device the first call puts `qweight` into the kernels' order, on a CPU into_panels() does;
    state_dict() is always the checkpoint's.
    """

    def __init__(self, inputs: int, outputs: int, group: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        _check_shape(inputs, outputs, group)
        self.in_features, self.out_features, self.group = inputs, outputs, group
        self.register_buffer("qweight", torch.zeros((inputs, outputs // 8), dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros((inputs // group, outputs // 8), dtype=torch.int32))
        self.register_buffer("scales", torch.zeros((inputs // group, outputs), dtype=torch.float16))
        zeros = torch.nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False)
        self.bias = zeros if bias else None
        self._in_lanes, self._done = False, _flag(False)

    def weights(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Columns start..stop, multiples of 8, as [in, stop - start]."""
        words = slice(start // 8, stop // 8)
        codes = unpack(self._columns(words)).reshape(-1, self.group, stop - start)
        zeros, scales = unpack(self.qzeros[:, words]), self.scales[:, start:stop]
        centred = codes.to(torch.int16) - zeros[:, None].to(torch.int16)
        return (centred * scales[:, None].float()).to(dtype).reshape(-1, stop - start)

    def into_panels(self) -> None:
        """Of a CPU: the words are read in their order from here on, where there are kernels for it. Into
        other memory, before anybody watches the model.
        """
        fits = self.qweight.is_cpu and fits_panels(self.group) and cpu_kernels()
        if fits and not self._in_lanes and not in_panels(self.qweight):
            self.qweight = to_panels(self.qweight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] times the weights. Raises InvalidArgument for an x of whole numbers."""
        if not x.is_floating_point():  # weights of that type would be whole numbers
            raise InvalidArgument(f"x is {x.dtype}; expected a floating point type")
        if x.device.type in cuda.DEVICES:
            if (reason := self._unfit(x)) is None:
                return self._by_kernels(x)
            _fallbacks[reason] += 1
            return self._by_torch(x)
        return self.on_cpu(x)

    def on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """forward() of an x [..., inputs] and of weights that lie on the CPU."""
        if not self._fits_cpu(x):
            return self._by_torch(x)
        many = x.dtype == torch.bfloat16 and x.numel() > ROWS_PACKED * self.in_features
        return self._by_tiles(x) if many and torch_multiplies_bf16() else self._by_cpu(x)

    def _fits_cpu(self, x: torch.Tensor) -> bool:
        """Whether native/cpu takes this x: of a type that fp32 holds, and nothing to be traced."""
        return (
            x.is_cpu
            and self.qweight.is_cpu  # not a streamed one outside of its turn
            and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and x.numel() > 0
            and not self._in_lanes
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not torch.is_autocast_enabled("cpu")
            and os.environ.get(ENVIRONMENT) != "torch"
            and cpu_kernels()
        )

    def _by_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Out of fp32, whatever the type of x. A row's bits do not depend on the rows beside it."""
        if x.shape[-1] != self.in_features:
            raise InvalidArgument(f"x is {list(x.shape)}; expected rows of {self.in_features}")
        rows = x.detach().resolve_neg().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty((len(rows), self.out_features), dtype=torch.float32, device="cpu")
        self.multiply(rows, out, x.dtype == torch.bfloat16, torch.get_num_threads())
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, bf16: bool, threads: int) -> None:
        """What forward() rounds to the type of its x: rows [n, inputs] times the weights, into out [n,
        outputs], by native/cpu. Both are fp32, contiguous, of the CPU. bf16: rows hold values of that type.
        Raises InvalidArgument for weights that are not those of this layer.
        """
        bias = None if self.bias is None else self.bias.detach().float().contiguous()
        held = (self.qweight, self.qzeros, self.scales, bias)
        self._check_held(*held)
        lie = [None if tensor is None else tensor.data_ptr() for tensor in held]
        shape, lies = (self.in_features, self.out_features, self.group), in_panels(self.qweight)
        stand_for(threads)
        at = rows.data_ptr(), out.data_ptr()
        awq.multiply_at(*at, len(rows), shape, lie, threads, bf16=bf16, panels=lies)

    def _check_held(self, *held: torch.Tensor | None) -> None:
        """Raises InvalidArgument for words, zeros, scales or a bias of another shape or type: somebody has
        put them there.
        """
        groups, outputs = self.in_features // self.group, self.out_features
        words = (1,) * in_panels(self.qweight) + (self.in_features, outputs // 8)
        shapes = words, (groups, outputs // 8), (groups, outputs), (outputs,)
        for tensor, (name, kind), shape in zip(held, HELD, shapes, strict=True):
            if tensor is None and name == "bias":
                continue
            right = tensor is not None and tensor.dtype == kind and tensor.shape == shape
            if not right or not tensor.is_cpu or not tensor.is_contiguous() or not tensor.data_ptr():
                found = "nothing"
                if tensor is not None:
                    found = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
                raise InvalidArgument(f"{name} is {found}; expected {kind}{list(shape)}, contiguous")

    def _by_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Many rows of bf16: some columns at a time become numbers, which torch multiplies."""
        if x.shape[-1] != self.in_features:
            raise InvalidArgument(f"x is {list(x.shape)}; expected rows of {self.in_features}")
        rows = x.detach().reshape(-1, self.in_features)
        panels = in_panels(self.qweight)
        words = self.qweight[0] if panels else self.qweight
        packed = (words.numpy(), self.qzeros.numpy(), self.scales.numpy())
        step = max(8, TILE_BYTES // (x.dtype.itemsize * self.in_features) // 8 * 8)
        threads = torch.get_num_threads()
        stand_for(threads)  # torch's would spin behind each tile's product, where the next is unpacked
        out = rows.new_empty((len(rows), self.out_features))
        for start in range(0, self.out_features, step):
            width = min(step, self.out_features - start)
            tile = torch.empty((self.in_features, width), dtype=x.dtype)
            bits = tile.view(torch.int16).numpy().view("uint16")
            awq.dequantise(bits, start, *packed, self.group, threads, panels=panels)
            out[:, start : start + width] = rows @ tile
        out = out if self.bias is None else out + self._bias(x.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)

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
            if in_panels(self.qweight):
                self.qweight = from_panels(self.qweight)
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
        """Moved as any module; but .to(dtype) is about what is computed in: the scales stay fp16. Words that
        came into other memory are the checkpoint's there.
        """
        scales, words = self.scales, self.qweight
        super()._apply(fn, recurse)
        if in_panels(words) and self.qweight is not words:
            self.qweight = from_panels(self.qweight)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def _words(self) -> torch.Tensor:
        if self._in_lanes:
            return from_lanes(self.qweight)
        return from_panels(self.qweight) if in_panels(self.qweight) else self.qweight

    def _columns(self, words: slice) -> torch.Tensor:
        if not self._in_lanes and in_panels(self.qweight):
            return from_panels(self.qweight, words.start, words.stop)
        return self._words()[:, words]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        lying = getattr(_saving, "lying", None)
        if lying is not None and in_panels(self.qweight):
            lying.add(id(self.qweight))
        else:
            destination[prefix + "qweight"] = self._words()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        words, in_lanes, panels = self.qweight, self._in_lanes, in_panels(self.qweight)
        if in_lanes:
            words.copy_(self._words())
            self._in_lanes, self._done = False, _flag(False)
        if panels:
            self.qweight = held = from_panels(words)
        super()._load_from_state_dict(*args, **kwargs)
        if in_lanes and self.qweight is words:  # a graph that was captured reads it there, in that order
            words.copy_(to_lanes(words))
            self._in_lanes, self._done = True, _flag(True)
        if panels and self.qweight is held:
            words.copy_(to_panels(held))
            self.qweight = words

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


@contextlib.contextmanager
def as_they_lie() -> Iterator[set[int]]:
    """Of this thread: state_dict(keep_vars=True) gives words in panels as they are, not in the checkpoint's
    order, and this their ids: of all layers at one time that would be a second copy of the model.
    """
    before, _saving.lying = getattr(_saving, "lying", None), set()
    try:
        yield _saving.lying
    finally:
        _saving.lying = before


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
def cpu_kernels() -> bool:
    """Whether native/cpu was built, and runs on this machine."""
    return contract.built("_cpu.so") and contract.lacks("auto") is None


@cache
def _no_kernels(device: int) -> str | None:
    return None if contract.cuda_lacks(device) is None else "kernels"
