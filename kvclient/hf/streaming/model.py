"""A causal model of which some layers lie on the disk: how it is put together, and what is known of it.

Owns from_pretrained(). Never reads a layer (streams.py does). Invariant: a
model that is returned has all weights that stay in memory, or raises where they are asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import device, frame
from kvclient.hf.streaming.device import DeviceStreams
from kvclient.hf.streaming.files.checkpoint import directory_of
from kvclient.hf.streaming.files.headers import tensors
from kvclient.hf.streaming.files.in_place import in_place
from kvclient.hf.streaming.files.index import Arrangement, Part, Table, check_same, sources, split
from kvclient.hf.streaming.files.rearrange import arrangement
from kvclient.hf.streaming.mover import DiskMover
from kvclient.hf.streaming.planner import asked
from kvclient.hf.streaming.planner.shape import Shape
from kvclient.hf.streaming.registry import belong, known
from kvclient.hf.streaming.residency import (
    PARTS,
    WORKING_BYTES,
    Plan,
    Promise,
    StreamingConfig,
    plan,
    promised,
)
from kvclient.hf.streaming.scheduler import Mover, Scheduler
from kvclient.hf.streaming.staying.loading import Loading
from kvclient.hf.streaming.streams import Streams, pieces_of
from kvclient.hf.streaming.trace import Trace
from kvclient.hf.streaming.weights.places import copies, kept, lies
from kvclient.hf.streaming.weights.vocabulary import numbered_tables

COPIES = 2  # of a layer's tensors in another type, at one time


class StreamingCausalLM:
    """from_pretrained() gives the stock model of transformers; its layers are read as they are asked for."""

    @staticmethod
    def from_pretrained(
        directory: str | Path, config: StreamingConfig | None = None, *, dtype: torch.dtype | None = None,
        mover: Callable[[Arrangement], Mover] | None = None,
        progress: Callable[[int, int], None] | None = None,
        loading: Callable[[int, int], None] | None = None,
    ) -> torch.nn.Module:  # fmt: skip
        """The model of a directory or hub id with safetensors, AWQ or plain, in eval mode, on the CPU or
        config.device. dtype: what it computes in; progress: told of bytes rearranged and of all, the first
        time; loading: of those that came to stay in memory, and of all that will, which are there then (else
        they may come while a model that streams is called). Raises InvalidArgument for a directory or a
        memory that will not do, StreamingFailed for a disk that refuses.
        """
        home = directory_of(directory)
        config = config or StreamingConfig()
        if config.device != "cpu":
            return _on_device(home, config, dtype, mover, loading)
        if config.residency == "auto" and config.memory is not None and config.memory < WORKING_BYTES:
            raise InvalidArgument(f"memory={config.memory}; a pass alone takes {WORKING_BYTES} to work with")
        model, group = frame.empty_model(home, dtype)
        was = sources(home)
        found = tensors(home, was)
        frame.check_words(model, found)
        names = frame.vocabulary_of(model, found) if config.rearrange else {}
        if config.rearrange:
            arranged = arrangement(home, tuple(dict.fromkeys(names.values())), progress)
        else:
            arranged = in_place(home)
        tables = {role: arranged.tables[name] for role, name in names.items()}
        others = {name: source for name, source in found.items() if split(name) is None}
        outside = sum(
            math.prod(tensor.shape) * model.dtype.itemsize
            for name, tensor in others.items()
            if name not in names.values()
        )
        layers = model.get_submodule(arranged.prefix)
        if len(layers) != len(arranged.layers):
            raise InvalidArgument(
                f"{home.name} has {len(arranged.layers)} layers, its configuration {len(layers)}"
            )
        rooms = asked.rooms(Shape.of(model, True, group is not None, found), config.room_tokens)
        with _promised(config, arranged, model.dtype, outside, tables, rooms) as chosen:
            stay = {name: source for name, source in others.items() if name not in names.values()}
            streamed = {role: tables[role] for role in chosen.vocabulary}
            moved = (mover or (lambda files: DiskMover(*files.paths)))(arranged)
            trace = Trace() if config.trace else None

            def scheduler() -> Scheduler | None:
                pieces = pieces_of(arranged, chosen, streamed)
                slots, ahead = config.n_staging_slots, config.ahead
                return Scheduler(moved, pieces, slots, ahead, trace) if pieces else None

            staying = _staying(arranged, chosen, tables)
            ahead = functools.partial(lies, dtype=model.dtype, copied=arranged.in_place)
            late = _late(chosen, staying, tables)
            with Loading(loading, stay, moved, staying, ahead, scheduler, late) as came:
                if all(getattr(torch, source.dtype) == model.dtype for source in stay.values()):
                    came.begin()
                rest = {name: came.read(source).to(model.dtype) for name, source in stay.items()}
                check_same(home, was)
                came.begin()  # a tensor that is copied takes its memory twice: not beside that
                for layer, parts in zip(layers, arranged.layers, strict=True):
                    frame.pack(layer, parts, group, model.dtype)
                frame.fill_outside(model, rest, arranged.prefix, home.name, set(names.values()))
                frame.keep_head_in_place(model)
                streams = Streams(model, layers, arranged, tables, chosen, config, moved, came, trace)
                belong(model, streams)
                if config.memory is not None:
                    asked.install(model, config.memory, config.auto_truncate)
                return _with_generation(model.eval(), home)


def _on_device(
    home: Path, config: StreamingConfig, dtype: torch.dtype | None, mover: Any, loading: Any
) -> torch.nn.Module:
    """Raises InvalidArgument."""
    if mover is not None:
        raise InvalidArgument(f"mover={mover!r}; a model on {config.device} has one of its own")

    def rooms(model: Any, packed: bool, found: Any) -> list[int]:
        return asked.rooms(Shape.of(model, True, packed, found), config.room_tokens)

    model, streams = device.load(home, config, dtype, loading, rooms)
    belong(model, streams)
    if config.memory is not None:
        asked.install(model, config.memory, config.auto_truncate)
    return _with_generation(model, home)


def _with_generation(model: Any, home: Path) -> torch.nn.Module:
    if (home / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(home, local_files_only=True)
    return model


def streaming_stats(model: torch.nn.Module) -> dict[str, Any]:
    """So far: bytes and loads, how often a layer was there already, per layer seconds waited for it and
    computed; the share of the time in which the link had something to do. Bytes a pass.
    """
    streams = known(model)
    limit = asked.asked_of(model)
    requests = {} if limit is None else {"requests": limit.report()}
    if isinstance(streams, DeviceStreams):
        return streams.stats() | requests
    found = {"bytes_held": streams.plan.bytes, "bytes_per_pass": streams.plan.moved, **requests}
    if (scheduler := streams.scheduler) is None:
        return found
    link = scheduler.link()
    return {
        **found, "bytes": scheduler.bytes, "loads": scheduler.loads, "hits": scheduler.hits,
        "retries": scheduler.retries, "filling_s": link["busy_s"], "waited_s": dict(scheduler.waited_s),
        "computed_s": dict(streams.computed_s), "elapsed_s": link["since_s"],
        "link_share": link["busy_s"] / link["since_s"] if link["since_s"] else 0.0,
        **({"placement": streams.placement.report()} if streams.placement is not None else {}),
    }  # fmt: skip


def close_streams(model: torch.nn.Module) -> None:
    """Ends the reading of a streamed model, and gives its slots and files back, as the end of its last layer
    does by itself. A call of it that reads raises Closed from then on. Twice is once. Raises KeyError for
    another model.
    """
    known(model).close()


def expected_s(model: torch.nn.Module) -> float | None:
    """Seconds of a pass of one row, out of the rate of the reads, of which one is made for it, and the
    products of one layer, both measured; None: nothing is streamed. Raises StreamingFailed.
    """
    streams = known(model)
    if isinstance(streams, DeviceStreams):
        return streams.expected_s()
    if streams.scheduler is None or not (moved := streams.moved()):
        return None
    rest = streams.plan.moved - sum(moved.values())
    rate = streams.scheduler.probed_rate()
    costs = replace(streams.measured((1,)), link=rate)
    return costs.expected_s([*moved.values(), rest], len(streams.computed_s))


def write_trace(model: torch.nn.Module, path: str | Path) -> None:
    """What was read, waited for and computed, for Perfetto. Raises InvalidArgument without trace=True."""
    if (trace := known(model).traced()) is None:
        raise InvalidArgument("nothing was traced; StreamingConfig(trace=True) does")
    trace.write(path)


def _promised(
    config: StreamingConfig, arranged: Arrangement, dtype: torch.dtype, outside: int,
    tables: dict[str, Table], rooms: Sequence[int],
) -> Promise:  # fmt: skip
    """The plan. outside: bytes in no layer and no table; rooms: that are left for requests. Raises
    InvalidArgument.
    """
    sizes = [{name: part.length for name, part in layer.items()} for layer in arranged.layers]
    held = [
        {name: kept(part, dtype, arranged.in_place) for name, part in layer.items()}
        for layer in arranged.layers
    ]
    working = max((_copied(layer, dtype) for layer in arranged.layers), default=0)
    made = functools.partial(plan, config, sizes, outside + working, frame.sizes(tables), held, rooms)
    return promised(made)


def _staying(arranged: Arrangement, chosen: Plan, tables: dict[str, Table]) -> dict[tuple[int, str], Part]:
    """Parts that are not streamed, by layer and name, in the order in which a pass asks for them: the
    embedding (or one that is the head, too), layers, the head. tables: by role.
    """
    layers = {
        (number, name): layer[name]
        for number, layer in enumerate(arranged.layers)
        for name in PARTS
        if name not in chosen.streamed[number]
    }
    rest = {role: table for role, table in tables.items() if role not in chosen.vocabulary}
    behind = numbered_tables(rest.values(), len(arranged.layers))
    found = {(number, name): part for number, parts in behind.items() for name, part in parts.items()}
    first = {
        key: part for key, part in found.items() if "embedding" in rest and key[1] == rest["embedding"].name
    }
    return first | layers | found


def _late(chosen: Plan, staying: dict[tuple[int, str], Part], tables: dict[str, Table]) -> set[int]:
    """Whole layers that stay, and a head that is no embedding, by number: the last ones, which have no more
    bytes together than a pass reads, for so many are read twice. staying, tables: as above.
    """
    first = tables["embedding"].name if tables else None
    sizes = dict.fromkeys(sorted({number for number, _ in staying}, reverse=True), 0)
    for (number, name), part in staying.items():
        sizes[number] += part.length
        if name == first or (number < len(chosen.streamed) and chosen.streamed[number]):
            sizes[number] += chosen.moved + 1  # never
    found: set[int] = set()
    for number, size in sizes.items():
        if sum(sizes[other] for other in found) + size <= chosen.moved:
            found.add(number)
    return found


def _copied(layer: dict[str, Part], dtype: torch.dtype) -> int:
    """Bytes of a layer's tensors that are copied to where a product wants them, while it computes: twice, for
    two threads compute or digest at one time. Or of what a part is read into until all of it is copied.
    """
    made = COPIES * sum(copies(part, dtype) for part in layer.values())
    return max([made, *(part.length for part in layer.values() if kept(part, dtype) == copies(part, dtype))])
