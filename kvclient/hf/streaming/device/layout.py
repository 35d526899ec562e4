"""Where a layer's tensors lie, on the device and in the host's memory, and how they come there.

Owns the order of the words: a kernel's, who computes the layer. Never chooses where a part stays. Invariant:
a part lies the same way wherever it lies, so what a product reads has the same address modulo ALIGNMENT.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import kvclient
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.awq.packing import LANES_INPUTS, LANES_OUTPUTS
from kvclient.hf.streaming.device.runtime import ALIGNMENT, Runtime
from kvclient.hf.streaming.files.headers import Source
from kvclient.hf.streaming.files.index import Part, Stored, part_of
from kvclient.hf.streaming.files.rearrange import check_finite
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.residency import PARTS
from kvclient.hf.streaming.weights.places import away
from kvclient.kernels import cuda

HALVES = (torch.float16, torch.bfloat16)  # what the kernels compute of packed words

Attribute = tuple[dict[str, Any], str]  # a module's parameters or buffers, and a name among them


def parts_of(layer: Mapping[str, Source], dtype: torch.dtype) -> dict[str, Part]:
    """A layer's parts as they will lie, each from offset 0 of a stretch of its own."""
    found = {}
    for part in PARTS:
        stored, at = [], 0
        for name in sorted(name for name in layer if part_of(name) == part):
            source = layer[name]
            kind = kind_of(source, dtype)
            length = math.prod(source.shape) * kind.itemsize
            said = str(kind).removeprefix("torch.")
            stored.append(Stored(name, said, source.shape, at, length))
            at += -(-length // ALIGNMENT) * ALIGNMENT
        found[part] = Part((Piece(0, at, None),), tuple(stored))
    return found


def kind_of(source: Source, dtype: torch.dtype) -> torch.dtype:
    """What it is computed in; packed words and their scales stay as they are."""
    written: torch.dtype = getattr(torch, source.dtype)
    computed = written.is_floating_point and source.name.rpartition(".")[2] != "scales"
    return dtype if computed else written


def fits_lanes(linear: AwqLinear) -> bool:
    """Whether the device's kernels take its shape."""
    return linear.group % LANES_INPUTS == 0 and linear.out_features % LANES_OUTPUTS == 0


@dataclass(frozen=True)
class Desk:
    """Where tensors are read before they go to their place: pinned, as long as the longest. turn: held by
    who has words on the device that are being ordered. checksums: gets the CRC32C of packed words, by the id
    of their source; None: nobody reads them again.
    """

    memory: torch.Tensor
    runtime: Runtime
    turn: threading.Lock
    checksums: dict[int, int] | None = None

    def fill(
        self, module: torch.nn.Module, part: Part, sources: Mapping[str, Source], into: torch.Tensor
    ) -> int:
        """Reads a part's tensors; into: uint8 [bytes], of the device or the host. The bytes read. Raises
        InvalidArgument for what does not fit, OSError.
        """
        read = 0
        for stored in part.tensors:
            source = sources[stored.name]
            held = self.memory[: source.length]
            if source.length:
                source.read_into(memoryview(held.numpy()))
            read += source.length
            if stored.name.endswith(".scales"):
                check_finite(source, bytearray(memoryview(held.numpy())))
            if self.checksums is not None and stored.name.endswith(".qweight"):
                self.checksums[id(source)] = kvclient.crc32c(memoryview(held.numpy()))
            found = held.view(getattr(torch, source.dtype)).view(source.shape)
            with self.turn:
                tensor_of(stored, into).copy_(self._ordered(module, stored, found))
        return read

    def _ordered(self, module: torch.nn.Module, stored: Stored, found: torch.Tensor) -> torch.Tensor:
        if not stored.name.endswith(".qweight"):
            return found
        linear: Any = module.get_submodule(stored.name.rpartition(".")[0])
        if not linear._in_lanes:
            return found
        return cuda.awq_repack(found.to(self.runtime.device), linear.group)


def tensor_of(stored: Stored, stretch: torch.Tensor) -> torch.Tensor:
    """The tensor [its shape] where it lies in its part's stretch, uint8 [bytes]."""
    kind = getattr(torch, stored.dtype)
    return stretch[stored.offset : stored.offset + stored.length].view(kind).view(stored.shape)


def attributes(
    layer: torch.nn.Module, part: Part, stretch: torch.Tensor | None
) -> list[tuple[Attribute, Any]]:
    """Each of a part's tensors for its module's attribute; stretch: uint8 [bytes]; None: they have no
    memory.
    """
    found = []
    for stored in part.tensors:
        owner, _, name = stored.name.rpartition(".")
        module = layer.get_submodule(owner)
        held: Any = module._buffers if name in module._buffers else module._parameters
        if stretch is None:
            value: Any = away(stored.shape, getattr(torch, stored.dtype), held is module._parameters)
        else:
            value = tensor_of(stored, stretch)
            if held is module._parameters:
                value = torch.nn.Parameter(value, requires_grad=False)
        found.append(((held, name), value))
    return found


def put(values: list[tuple[Attribute, Any]]) -> None:
    """Each in its module's attribute."""
    for (held, name), value in values:
        held[name] = value


@dataclass(frozen=True)
class Moving:
    """A layer whose parts come and go, one behind the other in the host's image from `offset` on. fixed:
    names of tensors that do not, though their bytes do.
    """

    number: int
    module: torch.nn.Module
    parts: tuple[Part, ...]
    offset: int
    fixed: frozenset[str] = frozenset()

    @property
    def length(self) -> int:
        """Bytes of its parts."""
        return sum(part.length for part in self.parts)

    def places(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Of each of its tensors the module, and its name there."""
        for stored in (stored for part in self.parts for stored in part.tensors):
            owner, _, name = stored.name.rpartition(".")
            yield self.module.get_submodule(owner), name

    def stretches(self, memory: torch.Tensor, at: int = 0) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its bytes; memory: uint8 [bytes], holds them from `at` on."""
        for part in self.parts:
            yield part, memory[at : at + part.length]
            at += part.length

    def attributes(self, memory: torch.Tensor | None, at: int = 0) -> list[tuple[Attribute, Any]]:
        """Of what comes and goes, as layout.attributes(); memory: uint8 [bytes], or None."""
        return self._attributes(memory, at, lambda stored: stored.name not in self.fixed)

    def fixed_attributes(self, image: torch.Tensor) -> list[tuple[Attribute, Any]]:
        """Of what does not. image: uint8 [bytes], the host's, as the device sees it."""
        return self._attributes(image, self.offset, lambda stored: stored.name in self.fixed)

    def _attributes(
        self, memory: torch.Tensor | None, at: int, wanted: Callable[[Stored], bool]
    ) -> list[tuple[Attribute, Any]]:
        found = []
        for part in self.parts:
            some = replace(part, tensors=tuple(filter(wanted, part.tensors)))
            stretch = None if memory is None else memory[at : at + part.length]
            found += attributes(self.module, some, stretch)
            at += part.length
        return found
