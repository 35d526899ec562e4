"""A checkpoint as a model on a device: what stays there, and what lies in the host's memory.

Owns the order of loading. Never writes a file; each weight is read once, and the words of what the host
computes once more. Invariant: the device holds no more than the plan says, but for one matrix's words on
their way.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf.awq.linear import AwqLinear, _flag
from kvclient.hf.streaming import frame
from kvclient.hf.streaming.device import placing
from kvclient.hf.streaming.device.layout import HALVES, Desk, attributes, fits_lanes, parts_of, put
from kvclient.hf.streaming.device.mover import DeviceMover
from kvclient.hf.streaming.device.plan import Outside, device_plan
from kvclient.hf.streaming.device.runtime import Cuda, Runtime
from kvclient.hf.streaming.device.streams import DeviceStreams, Moving
from kvclient.hf.streaming.files.headers import Source, tensors
from kvclient.hf.streaming.files.index import Part, check_same, sources, split
from kvclient.hf.streaming.files.rearrange import layers_of
from kvclient.hf.streaming.mover import StreamingFailed
from kvclient.hf.streaming.residency import PARTS, WORKING_BYTES, Plan, StreamingConfig, free_memory

READERS = 4  # layers that are read at one time
Told = Callable[[int, int], None]
Rooms = Callable[[Any, bool, Mapping[str, Source]], Sequence[int]]  # model, whether it is packed, tensors


def load(
    home: Path, config: StreamingConfig, dtype: torch.dtype | None, told: Told | None = None,
    rooms: Rooms | None = None,
) -> tuple[Any, DeviceStreams]:  # fmt: skip
    """The model of a directory. rooms: as device_plan() takes them. Raises InvalidArgument for a checkpoint,
    a device or a memory that will not do, StreamingFailed for one that was replaced meanwhile.
    """
    runtime = Cuda(torch.device(config.device))
    model, group = frame.empty_model(home, dtype)
    was = sources(home)
    found = tensors(home, was)
    frame.check_words(model, found)
    prefix, layers = layers_of(home, found)
    rest = {name: source for name, source in found.items() if split(name) is None}
    left = (WORKING_BYTES,) if rooms is None else rooms(model, group is not None, found)
    made, streams = assemble(model, group, prefix, layers, rest, config, runtime, told, left)
    try:
        check_same(home, was)
    except BaseException:
        streams.close()
        raise
    return made, streams


def assemble(
    model: Any, group: int | None, prefix: str, layers: Sequence[Mapping[str, Source]],
    rest: Mapping[str, Source], config: StreamingConfig, runtime: Runtime, told: Told | None = None,
    rooms: Sequence[int] = (WORKING_BYTES,),
) -> tuple[Any, DeviceStreams]:  # fmt: skip
    """The model, whose parameters have no memory yet, filled. layers: each one's tensors by their names in
    it; rest: those outside; rooms: as device_plan() takes them. Raises InvalidArgument.
    """
    modules = model.get_submodule(prefix)
    if len(modules) != len(layers):
        raise InvalidArgument(f"the checkpoint has {len(layers)} layers, its configuration {len(modules)}")
    _check_kernels(group, model.dtype, runtime)
    parts = [parts_of(layer, model.dtype) for layer in layers]
    for module, of in zip(modules, parts, strict=True):
        frame.pack(module, of, group, model.dtype)
        for linear in module.modules():
            if isinstance(linear, AwqLinear) and fits_lanes(linear):
                linear._in_lanes, linear._done = True, _flag(True)
    embedding = f"{frame.name_of(model, model.get_input_embeddings())}.weight"
    outside = _outside(model, rest, embedding, parts)
    sizes = [{name: part.length for name, part in of.items()} for of in parts]
    plan = device_plan(config, sizes, outside, runtime.free(), rooms)
    _check_host(plan, outside)
    filling = _Filling(model, prefix, layers, parts, plan, runtime, told, config.host_threads is not None)
    filling.outside(rest, embedding)
    moving, image = filling.layers()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(runtime.device)
    mover = DeviceMover(image, runtime.memory, runtime) if moving else None
    streams = DeviceStreams(moving, plan, config, mover, runtime)
    streams.unpacked = outside.working
    if config.host_threads is not None and image is not None:
        try:
            placing.share(model.eval(), streams, image, config.host_threads, filling.words)
        except BaseException:
            streams.close()
            raise
    return model.eval(), streams


def _check_kernels(group: int | None, dtype: torch.dtype, runtime: Runtime) -> None:
    if group is None:
        return
    if lacks := runtime.lacks():
        raise InvalidArgument(
            f"{lacks}; a packed model computes by the CUDA kernels: `make cuda` builds them, with nvcc"
        )
    if dtype not in HALVES:
        raise InvalidArgument(f"{dtype}; the kernels compute float16 and bfloat16: pass dtype=")


def _outside(
    model: Any, rest: Mapping[str, Source], embedding: str, parts: Sequence[dict[str, Part]]
) -> Outside:
    item = model.dtype.itemsize
    sizes = {name: math.prod(source.shape) * item for name, source in rest.items()}
    tied = getattr(model.config, "tie_word_embeddings", False)
    apart = 0 if tied else sizes.pop(embedding, 0)
    packed = [
        math.prod(stored.shape) * 8 * item
        for of in parts
        for part in of.values()
        for stored in part.tensors
        if stored.name.endswith(".qweight")
    ]
    return Outside(apart, sum(sizes.values()), max(packed, default=0))


def _check_host(plan: Plan, outside: Outside) -> None:
    """Raises InvalidArgument where the host cannot hold what does not stay on the device."""
    wanted = plan.moved + (outside.embedding if plan.vocabulary else 0)
    if wanted > (free := free_memory()):
        raise InvalidArgument(
            f"{wanted} bytes of the model do not fit on the device and must lie in the host's memory, which "
            f"has {free} free"
        )


class _Filling:
    """Reads what the plan puts where."""

    def __init__(
        self, model: Any, prefix: str, layers: Sequence[Mapping[str, Source]],
        parts: Sequence[dict[str, Part]], plan: Plan, runtime: Runtime, told: Told | None, twice: bool,
    ) -> None:  # fmt: skip
        """twice: words() is called for some that were read."""
        self._model, self._prefix, self._layers, self._parts = model, prefix, layers, parts
        self._plan, self._runtime, self._told = plan, runtime, told
        self._whole = sum(source.length for layer in layers for source in layer.values())
        self._done, self._lock = 0, threading.Lock()
        self._checksums: dict[int, int] | None = {} if twice else None

    def outside(self, rest: Mapping[str, Source], embedding: str) -> None:
        """What is in no layer. Raises InvalidArgument."""
        found, kind = {}, self._model.dtype
        for name, source in rest.items():
            tensor = frame.read(source).to(kind)
            if name == embedding and self._plan.vocabulary:
                held = self._runtime.pinned(tensor.nbytes).view(kind).view(tensor.shape)
                found[name] = self._runtime.mapped(held.copy_(tensor))
            else:
                found[name] = tensor.to(self._runtime.device)
        frame.fill_outside(self._model, found, self._prefix, "the checkpoint", set())

    def layers(self) -> tuple[dict[int, Moving], torch.Tensor | None]:
        """The layers that come and go, and the host's memory that they lie in."""
        moving, at = {}, 0
        modules = self._model.get_submodule(self._prefix)
        for number, (module, of) in enumerate(zip(modules, self._parts, strict=True)):
            streamed = tuple(of[name] for name in PARTS if name in self._plan.streamed[number])
            if streamed and any(part.tensors for part in streamed):
                moving[number] = Moving(number, module, streamed, at)
                at += moving[number].length
        image = self._runtime.pinned(at) if moving else None
        longest = max((source.length for layer in self._layers for source in layer.values()), default=1)
        desks, turn = threading.local(), threading.Lock()

        def fill(number: int) -> None:
            if not hasattr(desks, "desk"):
                desks.desk = Desk(self._runtime.pinned(longest), self._runtime, turn, self._checksums)
            self._layer(number, modules[number], moving.get(number), image, desks.desk)

        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "kvclient-loading") as threads:
            for _ in threads.map(fill, range(len(self._layers))):
                pass
        return moving, image

    def _layer(
        self, number: int, module: torch.nn.Module, moves: Moving | None, image: torch.Tensor | None,
        desk: Desk,
    ) -> None:  # fmt: skip
        sources = self._layers[number]
        for name in PARTS:
            part = self._parts[number][name]
            if name not in self._plan.streamed[number] and part.tensors:
                held = self._runtime.memory(part.length)
                self._tell(desk.fill(module, part, sources, held))
                put(attributes(module, part, held))
        if moves is not None and image is not None:
            for part, stretch in moves.stretches(image, moves.offset):
                self._tell(desk.fill(module, part, sources, stretch))

    def words(self, number: int, name: str) -> torch.Tensor:
        """Of a layer's packed tensor that was read, int32 [its shape], in the checkpoint's order once more.
        Raises StreamingFailed if they are others now, OSError.
        """
        source = self._layers[number][name]
        found = frame.read(source)
        crc = kvclient.crc32c(memoryview(found.view(-1).view(torch.uint8).numpy()))
        if self._checksums is None or crc != self._checksums[id(source)]:
            why = f"{name} has other bytes than at the first read; load the checkpoint again"
            raise StreamingFailed(source.path, number, source.offset, why)
        return found

    def _tell(self, length: int) -> None:
        with self._lock:
            self._done += length
            if self._told is not None:
                self._told(self._done, self._whole)
