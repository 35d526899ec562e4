"""What of a model stays in memory, and what is read for each pass.

Owns the options and the arithmetic of bytes. Never reads a file of weights. Invariant: a plan's `bytes` count
all weights and slots that will be held at one time, and are no more than the memory that was given.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

RESIDENCIES = ("auto", "full_resident", "partial_resident", "ffn_only_stream", "full_stream")
WORKING_BYTES = 256 << 20  # of "auto", at least: what a request computes with besides weights, and its KV
ROOM_TOKENS = 384  # of the request that "auto" leaves room for: of a prompt and its answer
DEVICES = ("cpu", "cuda")
LEAST_SLOTS, MOST_SLOTS = 2, 64
MOST = (1 << 63) - 1
NUMBERS = {  # of a configuration: the least and the most that each may be
    "n_staging_slots": (LEAST_SLOTS, MOST_SLOTS), "host_threads": (1, MOST), "room_tokens": (1, MOST),
    "keep_first_k": (0, MOST), "keep_last_k": (0, MOST), "memory": (0, MOST),
    "prefetch_layers_ahead": (0, MOST),
}  # fmt: skip
OPTIONAL = ("host_threads", "memory", "prefetch_layers_ahead")  # None says something of its own
CGROUPS = Path("/sys/fs/cgroup")
PARTS = ("attention", "ffn")  # of a layer, in the order in which they lie


@dataclass(frozen=True)
class StreamingConfig:
    """residency: "auto" keeps as many layers as `memory` holds beside a request of room_tokens. memory: bytes
    for weights, slots and requests; a call of generate() that would take more is refused, or with
    auto_truncate loses the first of its tokens; None: what the cgroup or the host has free, and no call is
    asked about. keep_first_k, keep_last_k: of "partial_resident". n_staging_slots: layers in memory at one
    time of those that are streamed. prefetch_layers_ahead: read before they are asked for, round the end;
    None, and at most: all slots but one. rearrange: the checkpoint is written once more, as it is read the
    fastest; else it is read where it lies. trace: write_trace() has what was read and computed when.
    host_threads: of a model whose weights lie in the host's memory, layers that the host computes sooner than
    they are brought are computed there, by so many threads. device: "cuda" computes on a GPU (or "cuda:1");
    `memory` is then its memory, and what is streamed lies in the host's. Raises InvalidArgument for a value
    that is none of these.
    """

    residency: str = "auto"
    memory: int | None = None
    keep_first_k: int = 4
    keep_last_k: int = 4
    n_staging_slots: int = 2
    prefetch_layers_ahead: int | None = None
    rearrange: bool = True
    trace: bool = False
    host_threads: int | None = None
    device: str = "cpu"
    room_tokens: int = ROOM_TOKENS
    auto_truncate: bool = False

    def __post_init__(self) -> None:
        if self.residency not in RESIDENCIES:
            raise InvalidArgument(f"residency={self.residency!r}; it must be one of {', '.join(RESIDENCIES)}")
        if not isinstance(self.device, str) or self.device.partition(":")[0] not in DEVICES:
            raise InvalidArgument(f"device={self.device!r}; it must be one of {', '.join(DEVICES)}")
        for name, (least, most) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                check_bounds(name, value, least, most)

    @property
    def ahead(self) -> int:
        """How many layers are read before they are needed."""
        most = self.n_staging_slots - 1
        return most if self.prefetch_layers_ahead is None else min(most, self.prefetch_layers_ahead)


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of the matrices with a row a token. tied: they are one. piece: of the head, at one time; rows: of
    the embedding, at most, if it is streamed.
    """

    embedding: int = 0
    head: int = 0
    tied: bool = False
    piece: int = 0
    rows: int = 0

    def ways(self) -> list[tuple[str, ...]]:
        """What of it may be streamed, the least first."""
        if not self.embedding:
            return [()]
        return [(), ("embedding", "head")] if self.tied else [(), ("embedding",), ("embedding", "head")]

    def held(self, streamed: tuple[str, ...]) -> int:
        """Bytes that stay in memory if the named tables are streamed."""
        if not streamed:
            return self.embedding + (0 if self.tied else self.head)
        return min(self.rows, self.embedding) + (0 if "head" in streamed else self.head)


NO_VOCABULARY = Vocabulary()


@dataclass(frozen=True)
class Plan:
    """streamed: per layer the parts that are read for each pass; bytes: held at one time; moved: per pass.
    vocabulary: what of it is read.
    """

    streamed: tuple[tuple[str, ...], ...]
    bytes: int
    moved: int
    vocabulary: tuple[str, ...] = ()


def plan(
    config: StreamingConfig, layers: Sequence[dict[str, int]], outside: int,
    vocabulary: Vocabulary = NO_VOCABULARY, held: Sequence[dict[str, int]] | None = None,
    rooms: Sequence[int] = (WORKING_BYTES,),
) -> Plan:  # fmt: skip
    """layers: bytes of each part as it is read; held: as it stays in memory, if that is not the same;
    outside: of what is in no layer and not the vocabulary's. rooms: bytes that "auto" leaves for requests:
    the first of them that any plan leaves. Raises InvalidArgument, with the numbers, for a memory that cannot
    hold what the residency wants.
    """
    count, memory, held = len(layers), config.memory, layers if held is None else held
    if config.residency == "auto":
        memory = free_memory() if memory is None else memory
        down = range(count, -1, -1)
        found = [
            _plan(config, layers, held, outside, streamed, vocabulary, way)
            for way in vocabulary.ways()
            for streamed in ([() if stays else PARTS for stays in spread(count, stay)] for stay in down)
        ]
        for room in rooms:
            if fit := [plan for plan in found if plan.bytes + room <= memory]:
                return min(fit, key=lambda plan: plan.moved)  # the first of equals: it streams the least
        least, room = min(found, key=lambda plan: plan.bytes), min(rooms)
        raise InvalidArgument(
            f"memory={memory}; with every layer streamed the model needs {least.bytes + room} bytes: "
            f"{least.bytes} for what is held and {config.n_staging_slots} slots, {room} to work with"
        )
    ways = vocabulary.ways()[: 1 if config.residency == "full_resident" else None]
    streamed = parts_streamed(config, count)
    found = [_plan(config, layers, held, outside, streamed, vocabulary, way) for way in ways]
    for choice in found:
        if memory is None or choice.bytes <= memory:
            return choice
    least = min(choice.bytes for choice in found)
    raise InvalidArgument(f"memory={memory}; {config.residency} needs {least} bytes for weights")


def spread(count: int, chosen: int) -> list[bool]:
    """Of `count` layers, which `chosen` of them are: at even distances, the last one among them. While those
    that stay compute, or come to stay, the link brings the next of the others.
    """
    return [(i + 1) * chosen // count > i * chosen // count for i in range(count)]


def parts_streamed(config: StreamingConfig, count: int) -> list[tuple[str, ...]]:
    """Of each layer, by a residency that says so by itself."""
    if config.residency == "full_resident":
        return [()] * count
    if config.residency == "ffn_only_stream":
        return [PARTS[1:]] * count
    if config.residency == "full_stream":
        return [PARTS] * count
    last = count - config.keep_last_k
    return [PARTS if config.keep_first_k <= i < last else () for i in range(count)]


def _plan(
    config: StreamingConfig, layers: Sequence[dict[str, int]], held: Sequence[dict[str, int]], outside: int,
    streamed: list[tuple[str, ...]], vocabulary: Vocabulary, way: tuple[str, ...],
) -> Plan:  # fmt: skip
    moved = [sum(layer[part] for part in parts) for layer, parts in zip(layers, streamed, strict=True)]
    kept = sum(
        count
        for layer, parts in zip(held, streamed, strict=True)
        for name, count in layer.items()
        if name not in parts
    )
    units = [unit for unit in moved if unit]
    if "head" in way:
        units += [vocabulary.piece] * -(-vocabulary.head // max(1, vocabulary.piece))
    slots = min(config.n_staging_slots, len(units)) * max(units, default=0)
    whole = sum(moved) + (vocabulary.head if "head" in way else 0)
    return Plan(tuple(streamed), outside + vocabulary.held(way) + kept + slots, whole, way)


class Taker(Protocol):
    """Whoever holds a plan of which some memory is not taken yet."""

    def left(self) -> int:
        """So many bytes."""


class Promise:
    """A plan, all of which is still to be taken within its block; behind it by who has called taking()."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def left(self) -> int:
        """All its bytes."""
        return self.plan.bytes

    def __enter__(self) -> Plan:
        return self.plan

    def __exit__(self, *_: object) -> None:
        with _planning:
            _takers.discard(self)


_takers: weakref.WeakSet[Taker] = weakref.WeakSet()
_planning = threading.RLock()


def promised(make: Callable[[], Plan]) -> Promise:
    """A plan by make(), with whose memory nobody else of this process plans from now on. Raises what that
    does.
    """
    with _planning:
        promise = Promise(make())
        _takers.add(promise)
        return promise


def taking(taker: Taker) -> None:
    """What it has left is nobody else's, for as long as it is there."""
    with _planning:
        _takers.add(taker)


def free_memory() -> int:
    """Bytes that this process may still take: of its cgroup if that has a limit, else of the host; less what
    models of this process were promised and have not taken yet.
    """
    with _planning:
        return max(0, _free() - sum(taker.left() for taker in _takers))


def _free() -> int:
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    left = [room for room in (_left_of(Path("/proc/self/cgroup").read_text())) if room is not None]
    return min([free, *left])


def _left_of(groups: str) -> list[int | None]:
    """What each memory controller leaves a process, by its group and those round it. groups:
    /proc/self/cgroup.
    """
    found: list[int | None] = []
    for line in groups.splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            root, names = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        home = root / group.lstrip("/")
        home = home if home.is_dir() else root  # a container sees its own there
        # A group has no more than each one that it lies in: systemd limits a slice, and services in it.
        while True:
            found.append(_left(home, *names))
            if home == root or root not in home.parents:
                break
            home = home.parent
    return found


def _left(home: Path, limit: str, used: str) -> int | None:
    """None: no limit. Pages of files can be had back, and do not count as used."""
    try:
        most = (home / limit).read_text().strip()
        held = int((home / used).read_text())
        lines = (line.split() for line in (home / "memory.stat").read_text().splitlines())
        files = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    return int(most) - max(0, held - files.get("total_inactive_file", files.get("inactive_file", 0)))
