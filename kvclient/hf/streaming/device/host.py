"""Packed layers that the host computes for a device, by native/cpu.

Owns their words in the host's order, and what stands in their products' forward. Never chooses when. Whether
the host computes a module is said for the calling thread alone, so two threads may compute one layer, each on
a side of its own. Invariant: a product here has the bits of native/cpu's for the same rows in the host's
memory, rounded once to the type of its x.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.awq.packing import fits_panels, in_panels, to_panels
from kvclient.hf.layers import forwards
from kvclient.hf.streaming.device.exchange import Exchange
from kvclient.hf.streaming.device.layout import HALVES, Moving, tensor_of
from kvclient.hf.streaming.files.index import ALIGNMENT
from kvclient.hf.streaming.mover import pages
from kvclient.hf.streaming.trace import Trace

PACKED = 0.9  # of a layer's bytes, so that the host computes it: the device reads the others over the link
Words = Callable[[int, str], torch.Tensor]  # a layer's number and a tensor's name to the checkpoint's words


def is_packed(layer: Moving) -> bool:
    """Whether nearly all that comes and goes of a layer is what the host can multiply."""
    stored = [tensor for part in layer.parts for tensor in part.tensors]
    packed = sum(tensor.length for tensor in stored if owner_of(layer, tensor.name) is not None)
    return packed >= PACKED * layer.length


def owner_of(layer: Moving, name: str) -> AwqLinear | None:
    """The packed linear layer that a tensor belongs to; None: it is no such layer's."""
    module = layer.module.get_submodule(name.rpartition(".")[0])
    return module if isinstance(module, AwqLinear) else None


def packed_of(layer: Moving) -> dict[str, AwqLinear]:
    """Its packed linear layers that come and go, by name."""
    names = {tensor.name.rpartition(".")[0] for part in layer.parts for tensor in part.tensors}
    found = {name: owner_of(layer, f"{name}.qweight") for name in sorted(names)}
    return {name: linear for name, linear in found.items() if linear is not None}


class HostLayers:
    """threads: of native/cpu's products."""

    def __init__(self, exchange: Exchange, threads: int) -> None:
        self._exchange, self._threads = exchange, threads
        self._here, self._lock = threading.local(), threading.Lock()
        self._layers: dict[int, list[AwqLinear]] = {}
        self._bytes: dict[int, int] = {}
        self.computed_s: dict[int, float] = {}  # by layer, so far
        self.trace: Trace | None = None

    @property
    def bytes(self) -> int:
        """Of the host's memory, for words in its order."""
        return sum(self._bytes.values())

    def add(self, layer: Moving, image: torch.Tensor, words: Words) -> None:
        """The host can compute this one from now on. image: uint8 [bytes], where its other tensors lie.
        Raises what words() does.
        """
        held: dict[str, dict[str, torch.Tensor]] = {}
        for part, stretch in layer.stretches(image, layer.offset):
            for stored in part.tensors:
                owner, _, name = stored.name.rpartition(".")
                held.setdefault(owner, {})[name] = tensor_of(stored, stretch)
        linears = packed_of(layer)
        memory = pages(sum(_room(linear) for linear in linears.values()))
        at = 0
        for name, linear in linears.items():
            found = words(layer.number, f"{name}.qweight")
            lie = to_panels(found) if fits_panels(linear.group) else found
            place = torch.frombuffer(memory, dtype=torch.int32, count=lie.numel(), offset=at)
            tensors = held[name] | {"qweight": place.view(lie.shape).copy_(lie)}
            at += _room(linear)
            forwards.put(linear, self._forward(layer.number, linear, _twin(linear, tensors)))
        self._layers[layer.number], self._bytes[layer.number] = list(linears.values()), len(memory)
        self.computed_s[layer.number] = 0.0

    def drop(self, number: int) -> None:
        """The host can compute this one no more; nobody computes."""
        for linear in self._layers.pop(number):
            del linear.__dict__["forward"], linear.__dict__["__getstate__"]
        del self._bytes[number], self.computed_s[number]

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """The calling thread's products of this layer are the host's until then."""
        before, self._here.number = getattr(self._here, "number", None), number
        began = time.monotonic()
        try:
            yield
        finally:
            self._here.number, ended = before, time.monotonic()
            with self._lock:
                self.computed_s[number] += ended - began
            if self.trace is not None:
                self.trace.span("host computes", number, began, ended)

    def _forward(self, number: int, linear: AwqLinear, twin: AwqLinear) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if getattr(self._here, "number", None) != number:
                return AwqLinear.forward(linear, x)
            if not self._fits(x, twin):
                return twin.on_cpu(x.to("cpu")).to(x.device)
            bf16 = x.dtype == torch.bfloat16
            return self._exchange.multiplied(
                x, twin.out_features, lambda rows, out: twin.multiply(rows, out, bf16, self._threads)
            )

        return forward

    def _fits(self, x: torch.Tensor, twin: AwqLinear) -> bool:
        """Whether x is as the exchange takes it, and nobody wants its gradient."""
        width = twin.in_features
        return (
            x.dtype in HALVES
            and x.shape[-1] == width
            and 0 < x.numel() <= self._exchange.most * width
            and not (torch.is_grad_enabled() and x.requires_grad)
            and os.environ.get(ENVIRONMENT) != "torch"
        )


def _room(linear: AwqLinear) -> int:
    return -(-linear.in_features * linear.out_features // 2 // ALIGNMENT) * ALIGNMENT


def _twin(linear: AwqLinear, tensors: dict[str, torch.Tensor]) -> AwqLinear:
    """The same layer of the host: tensors that were stored; zeros that were not, as the device has them."""
    bias = tensors.pop("bias", None)
    if "qzeros" not in tensors:
        tensors["qzeros"] = linear.qzeros.to("cpu")
    with torch.device("meta"):
        twin = AwqLinear(linear.in_features, linear.out_features, linear.group, False, torch.float16)
    twin._buffers.update(tensors)
    if bias is not None:
        twin.bias = torch.nn.Parameter(bias, requires_grad=False)
    assert in_panels(twin.qweight) == fits_panels(linear.group)
    return twin.eval()

