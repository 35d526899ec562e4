"""What of a model stays in memory, and what is read for each pass.

Owns the options and the arithmetic of bytes. Never reads a file of weights. Invariant: a plan's `bytes` count
all weights and slots that will be held at one time, and are no more than the memory that was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvclient.errors import InvalidArgument

RESIDENCIES = ("auto", "full_resident", "partial_resident", "ffn_only_stream", "full_stream")
WORKING_BYTES = 256 << 20  # of "auto": what a pass computes with besides weights, and its KV
LEAST_SLOTS, MOST_SLOTS = 2, 64
PARTS = ("attention", "ffn")  # of a layer, in the order in which they lie


@dataclass(frozen=True)
class StreamingConfig:
    """residency: "auto" keeps as many layers as `memory` holds. memory: bytes for weights, slots and the work
    of a pass; None: what the cgroup or the host has free. keep_first_k, keep_last_k: of "partial_resident".
    n_staging_slots: layers in memory at one time of those that are streamed. prefetch_layers_ahead: read
    before they are asked for, round the end; None: all slots but one.
    """

    residency: str = "auto"
    memory: int | None = None
    keep_first_k: int = 4
    keep_last_k: int = 4
    n_staging_slots: int = 2
    prefetch_layers_ahead: int | None = None

    def __post_init__(self) -> None:
        if self.residency not in RESIDENCIES:
            raise InvalidArgument(f"residency={self.residency!r}; it must be one of {', '.join(RESIDENCIES)}")
        if not LEAST_SLOTS <= self.n_staging_slots <= MOST_SLOTS:
            raise InvalidArgument(
                f"n_staging_slots={self.n_staging_slots}; from {LEAST_SLOTS} to {MOST_SLOTS}"
            )
        for name in ("keep_first_k", "keep_last_k", "memory", "prefetch_layers_ahead"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidArgument(f"{name}={value}; it must not be negative")

    @property
    def ahead(self) -> int:
        most = self.n_staging_slots - 1
        return most if self.prefetch_layers_ahead is None else min(most, self.prefetch_layers_ahead)


@dataclass(frozen=True)
class Plan:
    """streamed: per layer the parts that are read for each pass; bytes: held at one time; moved: per pass."""

    streamed: tuple[tuple[str, ...], ...]
    bytes: int
    moved: int


def plan(config: StreamingConfig, layers: Sequence[dict[str, int]], outside: int) -> Plan:
    """layers: bytes of each part; outside: of everything else. Raises InvalidArgument, with the numbers, for
    a memory that cannot hold what the residency wants.
    """
    count, memory = len(layers), config.memory
    if config.residency == "auto":
        memory = free_memory() if memory is None else memory
        kept = range(count, -1, -1)
        for first in kept:
            found = _plan(config, layers, outside, [()] * first + [PARTS] * (count - first))
            if found.bytes + WORKING_BYTES <= memory:
                return found
        raise InvalidArgument(
            f"memory={memory}; with every layer streamed the model needs {found.bytes + WORKING_BYTES} "
            f"bytes: {outside} outside of the layers, {found.bytes - outside} in {config.n_staging_slots} "
            f"slots, {WORKING_BYTES} to work with"
        )
    found = _plan(config, layers, outside, _parts(config, count))
    if memory is not None and found.bytes > memory:
        raise InvalidArgument(f"memory={memory}; {config.residency} needs {found.bytes} bytes for weights")
    return found


def _parts(config: StreamingConfig, count: int) -> list[tuple[str, ...]]:
    if config.residency == "full_resident":
        return [()] * count
    if config.residency == "ffn_only_stream":
        return [PARTS[1:]] * count
    if config.residency == "full_stream":
        return [PARTS] * count
    last = count - config.keep_last_k
    return [PARTS if config.keep_first_k <= i < last else () for i in range(count)]


def _plan(
    config: StreamingConfig, layers: Sequence[dict[str, int]], outside: int, streamed: list[tuple[str, ...]]
) -> Plan:
    moved = [sum(layer[part] for part in parts) for layer, parts in zip(layers, streamed, strict=True)]
    slots = min(config.n_staging_slots, sum(map(bool, streamed)))
    kept = sum(sum(layer.values()) for layer in layers) - sum(moved)
    return Plan(tuple(streamed), outside + kept + slots * max(moved, default=0), sum(moved))


def free_memory() -> int:
    """Bytes that this process may still take: of its cgroup if that has a limit, else of the host."""
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    try:
        own = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
        home = Path("/sys/fs/cgroup" + own)
        limit, used = (home / "memory.max").read_text().strip(), (home / "memory.current").read_text()
    except (OSError, IndexError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
