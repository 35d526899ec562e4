"""The store's blocks of one prompt on their way into a GPU's memory, as they lie: quantised ones too.

Owns the device memory that they come to and the transfer, which runs beside the model, layer by layer, in the
order in which the model asks for them. Never dequantises or turns anything. Invariant: a layer's segments are
handed out when the stream that asks waits for their bytes; blocks stay pinned until close().
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from kvclient import kernels
from kvclient.hf.call import loads
from kvclient.kernels import contract
from kvclient.kernels.host_memory import HostMemory
from kvclient.kernels.transfer import Copies, Transfer

ALIGN = 256
POINTERS = ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero")


class Blocks(Protocol):
    largest: int  # the layer whose blocks take the most bytes

    def arrays(self, layer: int) -> list[tuple[int, int, Any, int, int]]:
        """What there is of a layer, in order of columns, as PrefixSource.arrays() has it."""

    def offsets(self, layer: int) -> np.ndarray | None:
        """Where in its block each of these begins, int64 [blocks], as PrefixSource.offsets() has it."""


@cache
def host_memory() -> HostMemory:
    """What of this process's maps the devices read by themselves."""
    return HostMemory()


def own_stream(device: torch.device) -> int:
    """The handle of the current stream; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Staged:
    """One prompt's blocks. close() it when all layers were asked for, or nobody will."""

    def __init__(self, blocks: Blocks, layers: int, device: torch.device, patient: bool) -> None:
        """patient: blocks are still being written, so that asking for a layer may wait for them."""
        self._blocks, self._layers, self._device, self._patient = blocks, layers, device, patient
        self._memory: list[torch.Tensor | None] = [None] * layers
        self._segments: list[list[tuple[int, Any]]] = [[] for _ in range(layers)]
        self._alive: list[Any] = []  # what pins the blocks
        self._moving: Transfer | None = None

    @loads
    def layer(self, index: int) -> tuple[list[tuple[int, Any]], torch.Tensor | None]:
        """(row, segment of the device's memory) in order of columns, and that memory, uint8 [bytes]; the
        current stream waits for it.
        """
        if self._moving is None:
            self._start()
        assert self._moving is not None
        self._moving.wait(index, own_stream(self._device))
        return self._segments[index], self._memory[index]

    def close(self) -> None:
        """Waits for the copies under way. Idempotent; what layer() gave stays."""
        if self._moving is not None:
            self._moving.close()
        self._alive.clear()

    @property
    def bounced_bytes(self) -> int:
        """Of what was sent, what the device could not read where it lies."""
        return 0 if self._moving is None else self._moving.bounced_bytes

    def _start(self) -> None:
        largest = self._blocks.largest
        first = self._blocks.arrays(largest)
        size = sum(-(-length // ALIGN) * ALIGN for _, length in _spans(first))
        whole = torch.empty((self._layers, max(size, 1)), dtype=torch.uint8, device=self._device)
        self._memory = list(whole.unbind(0))
        copies = self._each(first, largest)
        if not self._patient and largest == 0 and (offsets := self._blocks.offsets(0)) is not None:
            copies = self._like_the_first(copies(0), offsets)
        self._moving = Transfer(host_memory(), self._layers)
        self._moving.start(copies, after=own_stream(self._device), patient=self._patient)

    def _each(self, first: list[Any], largest: int) -> Callable[[int], Copies]:
        return lambda layer: self._copies(layer, first if layer == largest else self._blocks.arrays(layer))

    def _like_the_first(self, first: Copies, begins: np.ndarray) -> Callable[[int], Copies]:
        """What _each() gives, where all layers lie in their blocks as the first does: by sums over what it
        has. A prompt of 32k tokens has thousands of blocks of layers.
        """
        parts, found = self._alive[0], self._segments[0]
        lows = [_span(block)[0] for _, _, block, *_ in parts]
        at = [lows.index(low) for low in dict.fromkeys(lows)]  # the first part of each block
        rows = [row for row, _ in found]
        structs = (contract.Segment * len(found))(*(struct for _, struct in found))
        words = np.frombuffer(structs, np.int64).reshape(len(found), -1)
        pointers = np.zeros(words.shape, bool)
        columns = [getattr(contract.Segment, name).offset // words.itemsize for name in POINTERS]
        pointers[:, columns] = words[:, columns] != 0

        def copies(layer: int) -> Copies:
            if layer == 0:
                return first
            offsets, memory, base = self._blocks.offsets(layer), self._memory[layer], self._memory[0]
            assert offsets is not None and memory is not None and base is not None
            further = memory.data_ptr() - base.data_ptr()
            made = (contract.Segment * len(found)).from_buffer(words + further * pointers)
            self._segments[layer] = list(zip(rows, made, strict=True))
            return Copies(first.targets + further, first.sources + (offsets - begins)[at], first.sizes)

        return copies

    def _copies(self, layer: int, parts: list[Any]) -> Copies:
        memory = self._memory[layer]
        assert memory is not None
        self._alive.append(parts)
        places, at, copies = {}, memory.data_ptr(), []
        for low, length in _spans(parts):
            places[low] = at
            copies.append((at, low, length))
            at += -(-length // ALIGN) * ALIGN
        if at > memory.data_ptr() + memory.numel():
            raise RuntimeError(f"layer {layer} of these blocks is larger than all others")
        for row, start, (keys, values), count, first in parts:
            struct = kernels.segment(keys, values, start, first=first, tokens=count).struct
            low = _span((keys, values))[0]
            for name in POINTERS:
                if (address := getattr(struct, name)) is not None:
                    setattr(struct, name, c_void_p(address - low + places[low]))
            self._segments[layer].append((row, struct))
        return Copies(*np.array(copies, np.int64).reshape(-1, 3).T)


def _span(block: tuple[Any, Any]) -> tuple[int, int]:
    """Address and bytes of one layer of one block: its arrays lie one behind the other."""
    arrays: list[np.ndarray] = []
    for side in block:
        arrays += [side.codes, side.scale, side.zero] if isinstance(side, kernels.Quantised) else [side]
    low = min(array.ctypes.data for array in arrays)
    return low, max(array.ctypes.data + array.nbytes for array in arrays) - low


def _spans(parts: list[tuple[int, int, Any, int, int]]) -> list[tuple[int, int]]:
    """Of all blocks, each once: rows share them."""
    return list(dict(_span(block) for _, _, block, *_ in parts).items())


def segments_of_rows(found: list[tuple[int, Any]], rows: int) -> list[list[contract.Segment]]:
    """The segments of each of `rows` rows, in order."""
    lists: list[list[Any]] = [[] for _ in range(rows)]
    for row, struct in found:
        lists[row].append(struct)
    return lists
