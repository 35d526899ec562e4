"""Which of a model's weights have memory for good, and which only while their layer computes.

Owns the model's parameters, by hooks round its layers. Never changes a module's class. Invariant: a streamed
weight is a tensor without memory (torch's "meta") whenever its layer does not compute, so that nobody reads
what another layer has put there.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.layers.twins import Twins
from kvclient.hf.streaming.files.index import Arrangement, Part, Table
from kvclient.hf.streaming.mover import Piece, pages
from kvclient.hf.streaming.placement.choice import Placement
from kvclient.hf.streaming.placement.costs import ROWS, Costs, products_s, with_threads
from kvclient.hf.streaming.residency import PARTS, Plan, StreamingConfig, taking
from kvclient.hf.streaming.scheduler import Mover
from kvclient.hf.streaming.slots import Slot
from kvclient.hf.streaming.staying.arriving import Slots, Staying
from kvclient.hf.streaming.staying.loading import Loading
from kvclient.hf.streaming.trace import Trace
from kvclient.hf.streaming.weights.places import (
    Place,
    Room,
    check,
    copies,
    forward_only,
    kept,
    places,
    put,
    without,
)
from kvclient.hf.streaming.weights.vocabulary import (
    StreamedEmbedding,
    StreamedHead,
    digest,
    numbered,
    numbered_tables,
)

ROLES = {"embedding": "input", "head": "output"}


def pieces_of(
    arranged: Arrangement, chosen: Plan, tables: dict[str, Table]
) -> dict[int, tuple[Piece, ...]]:  # fmt: skip
    """What a pass reads into slots, by layer and in its order; behind the layers come pieces of the head."""
    found = {
        number: tuple(piece for name in PARTS if name in parts for piece in layer[name].pieces)
        for number, (layer, parts) in enumerate(zip(arranged.layers, chosen.streamed, strict=True))
        if parts
    }
    return found | (numbered(tables["head"], len(arranged.layers)) if "head" in tables else {})


def _end_apart(came: Loading, mover: Mover) -> None:
    """Ends the reading from a thread of its own: Python may collect a model in one of those that end by it,
    or within a lock that they wait for.
    """
    ends = threading.Thread(
        target=lambda: came.end(mover if came.scheduler is None else came.scheduler),
        name="kvclient-closing", daemon=True,
    )  # fmt: skip
    with contextlib.suppress(RuntimeError):  # no thread to be had: they end with the process
        ends.start()


class Streams:
    """The streamed layers of one model: their slots, and whose weights point into which."""

    def __init__(
        self, model: Any, layers: Any, arranged: Arrangement, tables: dict[str, Table], chosen: Plan,
        config: StreamingConfig, mover: Mover, came: Loading, trace: Trace | None,
    ) -> None:  # fmt: skip
        """tables: by role, those that are streamed and those that stay; came: has begun to read."""
        self.plan, self._dtype = chosen, model.dtype
        # Whatever is done to the model's list; behind them embedding and head, if they stay.
        self._layers: list[Any] = list(layers)
        self._mover = mover
        self.digests: dict[tuple[int, str], Any] = {}  # of streamed weights, once somebody computed them
        self._holding = threading.local()
        self._users: dict[int, int] = {}
        self._lock, self._closed = threading.Lock(), False
        # Threads that read hold slots and files, not this: they end with the last layer that asks it.
        self._unheld = weakref.finalize(self, _end_apart, came, mover)
        self._unheld.atexit = False
        self._streamed: dict[int, list[Part]] = {}
        self._rooms: list[Room] = []  # for copies, that no layer uses now
        self._taken: dict[int, Room] = {}
        self.trace = trace
        self.computed_s = dict.fromkeys(range(len(layers)), 0.0)
        self.scheduler, self._came, self._in_place = came.scheduler, came, arranged.in_place
        self.staying = Staying(self._layers, model.dtype, arranged.in_place, came)
        self._away: dict[int, list[list[Place]]] = {}  # what stands for parts outside of their turn
        twins = Twins(layers)
        for number, (layer, parts) in enumerate(zip(layers, arranged.layers, strict=True)):
            if streamed := [parts[name] for name in PARTS if name in chosen.streamed[number]]:
                self._streamed[number] = streamed
                self._away[number] = [self._without(layer, part) for part in streamed]
            stays = {name: part for name, part in parts.items() if name not in chosen.streamed[number]}
            if stays:
                self.staying.left[number] = stays
        self._copied = 0  # bytes of the copies of a layer that is in a slot, at most
        for number, whole in enumerate(arranged.layers):
            in_slot = self._streamed.get(number, whole.values())
            self._copied = max(self._copied, sum(copies(part, self._dtype) for part in in_slot))
        modules = {role: getattr(model, f"get_{ROLES[role]}_embeddings")() for role in tables}
        self._tables = {role: table for role, table in tables.items() if role in chosen.vocabulary}
        self._vocabulary = {role: modules[role] for role in self._tables}
        stays = {role: table for role, table in tables.items() if role not in chosen.vocabulary}
        for number, parts in numbered_tables(stays.values(), len(layers)).items():
            first, *others = [modules[role] for role, table in stays.items() if table.name in parts]
            self.staying.left[number], self.staying.same[number] = dict(parts), others
            self._layers.append(first)
            if first is modules.get("head") and not others:
                self.staying.head = number, stays["head"], len(layers)
        self.embedding = self._head = None
        if "embedding" in self._tables:
            embedding = self._vocabulary["embedding"]
            self.embedding = StreamedEmbedding(embedding, tables["embedding"], mover, len(layers))
        if "head" in self._tables:
            self._head = StreamedHead(self._vocabulary["head"], tables["head"], len(layers))
        self.placement: Placement | None = None
        self._on_host: set[int] = set()  # layers whose weights point to the host's memory
        self._host_threads = config.host_threads
        try:
            self._load(twins)
            self._begin(list(pieces_of(arranged, chosen, self._tables)))
        except BaseException:
            self.close()  # else its threads wait for who never comes
            raise
        if self.scheduler is None and self.embedding is None:
            self.close()
        taking(self)

    def _load(self, twins: Twins) -> None:
        """What is proven of layers, and what stays in memory if nothing is streamed beside it, while both
        come. Raises StreamingFailed.
        """

        @contextlib.contextmanager
        def filled(number: int) -> Iterator[torch.nn.Module]:
            with self._looked_at(number) as layer:
                yield layer

        twins.install(filled)
        for number, parts in list(self.staying.left.items()):
            if self.scheduler is None or not all(self._came.comes(number, name) for name in parts):
                self.staying.keep(number)

    def settle(self) -> None:
        """Waits for what stays in memory: whoever looks at all weights finds it. Raises StreamingFailed."""
        self.staying.settle()

    def _begin(self, asked: list[int]) -> None:
        """asked: what a pass asks the scheduler for. Raises what _place() does."""
        if self._head is not None and self.scheduler is not None:
            self._head.follow(self.scheduler)
        self.staying.wait(self._slots(asked))
        for number in self._streamed:
            self._layers[number].register_forward_pre_hook(self._before(number))
            self._layers[number].register_forward_hook(self._after(number), always_call=True)
        if self._host_threads is not None:
            self._place(asked)

    def _slots(self, asked: list[int]) -> Slots | None:
        """Where what stays may be computed before it is there. None: passes follow more than one order."""
        if self.scheduler is None or self._host_threads is not None:
            return None
        return Slots(
            self.scheduler, asked, self._before, self._after,
            lambda number: bool(self._holds(number)), self._users, self._lock,
        )  # fmt: skip

    def _place(self, asked: list[int]) -> None:
        """Raises InvalidArgument for a mover whose weights do not lie in memory, StreamingFailed."""
        if not hasattr(self._mover, "lies"):
            raise InvalidArgument(
                f"host_threads={self._host_threads}; the host computes what lies in its memory: "
                "from_pretrained(..., mover=host_memory)"
            )
        if self.scheduler is not None and self._streamed:
            moved = self.moved()
            behind = [number for number in asked if number not in moved]
            self.placement = Placement(self.measured(ROWS), moved, behind, self.scheduler)

    def moved(self) -> dict[int, int]:
        """Bytes of each streamed layer."""
        return {number: sum(part.length for part in parts) for number, parts in self._streamed.items()}

    def measured(self, rows: Sequence[int]) -> Costs:
        """By the first streamed layer. Raises StreamingFailed."""
        assert self.scheduler is not None
        with self._looked_at(next(iter(self._streamed))) as layer:
            device = products_s(layer, torch.get_num_threads(), rows)
            host = products_s(layer, self._host_threads, rows) if self._host_threads is not None else None
            return Costs(self.scheduler.rate(), device, host)

    @contextlib.contextmanager
    def _looked_at(self, number: int, passing: bool = False) -> Iterator[torch.nn.Module]:
        """A layer with its weights. passing: others follow it, as in a pass. Raises StreamingFailed."""
        layer = self._layers[number]
        self.staying.keep(number)
        if number not in self._streamed:
            yield layer
            return
        self._before(number, passing)(layer, ())
        try:
            yield layer
        finally:
            self._after(number, computed=False)(layer, (), None)

    def traced(self) -> Trace | None:
        """None: nothing is traced."""
        return self.trace

    def left(self) -> int:
        """Bytes of the plan that have no memory yet, and will."""
        if self._closed:
            return 0
        coming = sum(
            kept(part, self._dtype, self._in_place)
            for number, parts in self.staying.left.copy().items()
            for name, part in parts.copy().items()
            if not self._came.is_there(number, name)
        )
        slots = self.scheduler.slots if self.scheduler is not None else []
        if self._streamed and not self._rooms and not self._taken:
            coming += self._copied  # the first room; a second is made only where two threads compute
        return coming + sum(len(slot.memory) for slot in slots if not slot.touched)

    def close(self) -> None:
        """Ends the reading; the model cannot be called any more."""
        self._closed = True
        self._unheld.detach()
        self._came.end(self._mover if self.scheduler is None else self.scheduler)

    def moving(self) -> list[tuple[torch.nn.Module, str]]:
        """Module and attribute of each weight that has memory only while its layer computes. What stays is
        there from here on. Raises StreamingFailed.
        """
        self.settle()
        places = [place for number in self._streamed for where in self._away[number] for place in where]
        tables = [(module, "weight") for module in self._vocabulary.values()]
        return [*((module, attribute) for module, attribute, _ in places), *tables]

    def digested_tables(self) -> Iterator[tuple[torch.nn.Module, str, list[int], bytes]]:
        """Of each streamed matrix of the vocabulary its module, type, shape and the SHA-256 of its bytes."""
        digests: dict[str, bytes] = {}
        for role, table in self._tables.items():
            if table.name not in digests:
                digests[table.name] = digest(table, self._mover, len(self._layers))
            yield self._vocabulary[role], f"torch.{table.dtype}", list(table.shape), digests[table.name]

    def filled_layers(self) -> Iterator[torch.nn.Module]:
        """Each streamed layer in turn, with its weights, until the next is asked for."""
        for number in self._streamed:
            with self._looked_at(number, passing=True) as layer:
                yield layer

    def _before(self, number: int, passing: bool = True) -> Callable[..., None]:
        def before(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
            assert self.scheduler is not None
            if layer is not self._layers[number]:
                raise InvalidArgument("a copy of a streamed layer has no weights; load the model once more")
            self._give_back_what_was_left(number)
            if args:
                self.staying.begin()
            if self.placement is not None and args:
                rows = args[0].shape[:-1].numel()
                if self.placement.enter(number, rows) and self._to_host(number):
                    return
            with contextlib.ExitStack() as stack:
                slot = stack.enter_context(self.scheduler.holding(number, passing))
                with self._lock:
                    if number not in self._streamed and number not in self.staying.late:
                        return  # it has come to stay meanwhile
                    if not self._users.get(number):
                        self._point(number, self._parts_of(number, slot))
                    self._users[number] = self._users.get(number, 0) + 1
                self._holds(number).append(
                    (stack.pop_all(), time.monotonic())
                )  # else: the slot is free again

        return before

    def _holds(self, number: int) -> list[tuple[contextlib.ExitStack, float]]:
        """Of the calling thread: what is given back behind the layer, and when it began."""
        stacks: dict[int, list[Any]] = self._holding.__dict__.setdefault("stacks", {})
        return stacks.setdefault(number, [])

    def _give_back_what_was_left(self, entered: int) -> None:
        """torch calls no hook behind a layer that Ctrl-C ends: what this thread still holds as it enters the
        next one is of such a layer. What it holds of the one it enters may be of a call around this one,
        whose other hooks ask the layer for K and V before it is computed.
        """
        for number, holds in self._holding.__dict__.get("stacks", {}).items():
            while number != entered and holds:
                self._after(number, computed=False)(self._layers[number], (), None)

    def _to_host(self, number: int) -> bool:
        """The layer is computed where its weights lie, by the host's threads. False: another thread computes
        it out of a slot now, which only those who hold the slot may do. Raises StreamingFailed, and what
        _point() does.
        """
        mover: Any = self._mover  # _place() has seen that it has lies()
        lies = [mover.lies(number, piece) for part in self._streamed[number] for piece in part.pieces]
        with self._lock:
            users = self._users.get(number, 0)
            if users and number not in self._on_host:
                return False
            if not users:
                self._point(number, lies)
                self._on_host.add(number)
            self._users[number] = users + 1
        assert self.placement is not None and self._host_threads is not None
        self.placement.counted()
        with contextlib.ExitStack() as stack:
            stack.enter_context(with_threads(self._host_threads))
            self._holds(number).append((stack.pop_all(), time.monotonic()))
        return True

    def _after(self, number: int, computed: bool = True) -> Callable[..., Any]:
        """Also after an exception in the layer. computed: else its weights were only looked at."""

        def after(layer: torch.nn.Module, _args: Any, out: Any) -> Any:
            stacks = self._holding.__dict__.get("stacks", {}).get(number)
            if not stacks:
                return out  # the layer was never given its weights
            held, started = stacks.pop()
            ended = time.monotonic()
            if self.trace is not None and computed:
                self.trace.span("compute", number, started, ended)
            with self._lock:
                self.computed_s[number] += ended - started if computed else 0.0
                in_slot = number not in self._on_host
                self._users[number] -= 1
                if not self._users[number]:
                    self._on_host.discard(number)
                    self._unpoint(number)
                    self._rooms.append(self._taken.pop(number))
            held.close()
            return forward_only(out, f"layer {number}") if in_slot else out

        return after

    def _parts_of(self, number: int, slot: Slot) -> Iterator[memoryview]:
        at = 0
        for part in self._read(number):
            yield slot.memory[at : at + part.length]
            at += part.length

    def _point(self, number: int, memories: Iterable[memoryview]) -> None:
        """The layer's weights lie in these, a part in each; copies in a room until its last user leaves.
        Raises InvalidArgument for a weight that somebody has changed.
        """
        if number not in self._taken:  # else an earlier call failed here
            self._taken[number] = self._rooms.pop() if self._rooms else self._new_room()
        room = self._taken[number]
        room.empty()
        away = self._away[number] if number in self._streamed else self.staying.away(number)
        parts = list(zip(away, self._read(number), memories, strict=True))
        for where, part, _ in parts:
            check(where, part, self._dtype)
        try:
            for where, part, memory in parts:
                put(places(where, part, memory, self._dtype, room=room))
        except BaseException:
            self._unpoint(number)
            raise

    def _read(self, number: int) -> list[Part]:
        """What its slot holds, one behind the other."""
        return self._streamed.get(number) or self.staying.late[number]

    def _unpoint(self, number: int) -> None:
        if number in self._streamed:
            put(place for where in self._away[number] for place in where)
        else:
            put(self.staying.still(number))

    def _without(self, layer: torch.nn.Module, part: Part) -> list[Place]:
        """What stands for the part's weights from here on."""
        found = list(without(layer, part, self._dtype))
        put(found)
        return found

    def _new_room(self) -> Room:
        return Room(pages(self._copied))
