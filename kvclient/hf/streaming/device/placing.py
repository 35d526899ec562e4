"""What a layer costs on a device and on the host beside it, and which layers the host therefore gets.

Owns the measurement, at start, and the host's memory that is spent on it. Never runs a layer afterwards.
Invariant: what is measured is a whole layer as a pass calls it, on the host while the link is busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.linear import cpu_kernels
from kvclient.hf.streaming.device.exchange import Exchange
from kvclient.hf.streaming.device.host import HostLayers, Words, is_packed, owner_of, packed_of
from kvclient.hf.streaming.device.plan import spread
from kvclient.hf.streaming.device.shares import MOST_ROWS, Shares
from kvclient.hf.streaming.device.streams import DeviceStreams
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.placement.costs import ROUNDS, ROWS
from kvclient.hf.streaming.residency import WORKING_BYTES, free_memory

BUSY_BYTES = 64 << 20  # of the device, that copies go to while the host is measured
MOST_COPIES = 64


def share(model: Any, streams: DeviceStreams, image: torch.Tensor, threads: int, words: Words) -> None:
    """Measures, and from here on the host computes what it is worth. image: the host's, uint8 [bytes].
    Raises InvalidArgument where there is nothing that it can compute, and what words() does.
    """
    able = [number for number, layer in streams.layers.items() if is_packed(layer)]
    if not able or not cpu_kernels():
        why = "the CPU's kernels do not run here" if able else "no streamed layer is packed"
        raise InvalidArgument(f"host_threads={threads}; the host computes packed layers, and {why}")
    linears = [linear for number in able for linear in packed_of(streams.layers[number]).values()]
    inputs, outputs = max(each.in_features for each in linears), max(each.out_features for each in linears)
    hosts = HostLayers(Exchange(streams.runtime, MOST_ROWS, inputs, outputs), threads)
    seen = streams.runtime.mapped(image.view(torch.int32)).view(torch.uint8)

    def give(number: int) -> None:
        layer = streams.layers[number]
        hosts.add(layer, image, words)
        stored = [tensor.name for part in layer.parts for tensor in part.tensors]
        streams.fix(number, frozenset(name for name in stored if owner_of(layer, name) is None), seen)

    tried = able[-1]  # which is among any number of them that are spread
    give(tried)
    costs = _measured(model, streams, hosts, tried)
    most = max(costs.on_host(streams.moved(), rows, len(able)) for rows in ROWS)
    room = max(0, free_memory() - WORKING_BYTES) // hosts.bytes + 1
    chosen = spread(len(able), min(most, room))
    found = tuple(number for number, picked in zip(able, chosen, strict=True) if picked)
    for number in found:
        if number != tried:
            give(number)
    if not found:
        hosts.drop(tried)
        streams.fix(tried, frozenset(), seen)
    streams.share(replace(costs, able=found), hosts)


@torch.no_grad()
def _measured(model: Any, streams: DeviceStreams, hosts: HostLayers, number: int) -> Shares:
    """By one layer."""
    device: dict[int, float] = {}
    host: dict[int, float] = {}
    for rows in ROWS:
        call = _call_of(model, streams, number, rows)
        with streams.looked_at(number):
            device[rows] = _least_s(call, streams)
        with hosts.computing(number):
            alone = _least_s(call, streams)
            host[rows] = _least_s(call, streams, _copies(streams, number, 2 * alone))
    assert streams.link is not None
    return Shares(streams.link, device, host, layers=len(streams.plan.streamed))


def _call_of(model: Any, streams: DeviceStreams, number: int, rows: int) -> Callable[[], object]:
    """The layer's forward, with what a pass of so many tokens calls it with."""
    layer, asked = streams.layers[number].module, []
    hook = layer.register_forward_pre_hook(lambda _, *call: asked.append(call), with_kwargs=True)
    try:
        ids = torch.zeros((1, rows), dtype=torch.long, device=streams.runtime.device)
        model(ids, use_cache=False)
    finally:
        hook.remove()
    args, kwargs = asked[0]
    return lambda: layer.forward(*args, **kwargs)


def _copies(streams: DeviceStreams, number: int, seconds: float) -> Callable[[], None]:
    """Asks for copies of about so long, to where nobody reads."""
    layer, mover = streams.layers[number], streams.mover
    assert mover is not None and streams.link is not None
    length = min(layer.length, BUSY_BYTES)
    pieces, memory = (Piece(layer.offset, length, None),), mover.memory(length)
    count = min(MOST_COPIES, math.ceil(seconds * streams.link / length))

    def ask() -> None:
        for _ in range(count):
            mover.fill(number, pieces, memory)

    return ask


def _least_s(
    call: Callable[[], object], streams: DeviceStreams, before: Callable[[], None] = lambda: None
) -> float:
    """Seconds until the device has done it; before: asked for in each round. Others only add."""
    runtime, took = streams.runtime, []
    for _ in range(ROUNDS):
        before()
        began = time.perf_counter()
        call()
        runtime.wait(runtime.current_stream().record_event(runtime.event()))
        took.append(time.perf_counter() - began)
        runtime.settle()
    return min(took)
