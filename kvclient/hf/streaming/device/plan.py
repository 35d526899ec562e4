"""What of a model stays on the device, what lies in the host's memory, and which of that the host computes.

Owns the arithmetic of the device's bytes. Never asks for memory. Invariant: a plan's `bytes` count all
weights, slots and rooms that are on the device at one time, and are no more than the memory that was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming.residency import (
    PARTS,
    WORKING_BYTES,
    Plan,
    StreamingConfig,
    parts_streamed,
    spread,
)


@dataclass(frozen=True)
class Outside:
    """Bytes in no layer. embedding: may lie in the host's memory; rest: on the device. working: of a pass,
    beside WORKING_BYTES: the largest matrix that is unpacked to be multiplied.
    """

    embedding: int
    rest: int
    working: int = 0


def device_plan(
    config: StreamingConfig, layers: Sequence[dict[str, int]], outside: Outside, free: int,
    rooms: Sequence[int] = (WORKING_BYTES,),
) -> Plan:  # fmt: skip
    """layers: bytes of each part; free: of the device, where the configuration says no memory. rooms: bytes
    that "auto" leaves for requests: the first of them that any plan leaves. Raises InvalidArgument, with the
    numbers, for a memory that cannot hold what the residency wants.
    """
    count, memory = len(layers), config.memory if config.memory is not None else free
    work = min(rooms) + outside.working
    if config.residency != "auto":
        only = _plan(config, layers, parts_streamed(config, count), outside)
        if only.bytes + work > memory:
            raise InvalidArgument(
                f"memory={memory}; {config.residency} needs {only.bytes + work} bytes of the device: "
                f"{only.bytes} for weights and slots, {work} to work with"
            )
        return only
    found = [
        _plan(config, layers, [PARTS if moves else () for moves in spread(count, streamed)], outside)
        for streamed in range(count + 1)
    ]
    for room in rooms:
        if fit := [plan for plan in found if plan.bytes + room + outside.working <= memory]:
            return fit[0]
    least = found[-1]
    raise InvalidArgument(
        f"memory={memory}; with every layer streamed the model needs {least.bytes + work} bytes of the "
        f"device: {least.bytes} for what is outside of the layers and {config.n_staging_slots} slots, {work} "
        "to work with"
    )


def _plan(
    config: StreamingConfig, layers: Sequence[dict[str, int]], streamed: Sequence[tuple[str, ...]],
    outside: Outside,
) -> Plan:  # fmt: skip
    moved = [sum(layer[part] for part in parts) for layer, parts in zip(layers, streamed, strict=True)]
    whole = sum(sum(layer.values()) for layer in layers) - sum(moved)
    units = [unit for unit in moved if unit]
    slots = min(config.n_staging_slots, len(units)) * max(units, default=0)
    embedding, vocabulary = (0, ("embedding",)) if units and outside.embedding else (outside.embedding, ())
    return Plan(tuple(streamed), outside.rest + embedding + whole + slots, sum(moved), vocabulary)
