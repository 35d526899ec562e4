"""Which of a model's weights have memory for good, and which only while their layer computes.

Owns the model's parameters, by hooks round its layers. Never changes a module's class. Invariant: a streamed
weight is a tensor without memory (torch's "meta") whenever its layer does not compute, so that nobody reads
what another layer has put there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from kvclient.errors import InvalidArgument
from kvclient.hf.layers.twins import Twins
from kvclient.hf.streaming.files.index import Arrangement, Part, Table
from kvclient.hf.streaming.frame import name_of
from kvclient.hf.streaming.loading import Loading
from kvclient.hf.streaming.mover import Piece, pages
from kvclient.hf.streaming.placement.choice import Placement
from kvclient.hf.streaming.placement.costs import ROWS, Costs, products_s, with_threads
from kvclient.hf.streaming.residency import PARTS, Plan, StreamingConfig, taking
from kvclient.hf.streaming.scheduler import Mover
from kvclient.hf.streaming.slots import Slot
from kvclient.hf.streaming.trace import Trace
from kvclient.hf.streaming.weights.places import Place, Room, copies, kept, places, put, without
from kvclient.hf.streaming.weights.vocabulary import StreamedEmbedding, StreamedHead, digest, numbered

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


class Streams:
    """The streamed layers of one model: their slots, and whose weights point into which."""

    def __init__(
        self, model: Any, layers: Any, arranged: Arrangement, tables: dict[str, Table], chosen: Plan,
        config: StreamingConfig, mover: Mover, came: Loading, trace: Trace | None,
    ) -> None:  # fmt: skip
        """came: has begun to read."""
        self.plan, self._dtype, self._layers, self._prefix = chosen, model.dtype, layers, arranged.prefix
        self._mover, self._model = mover, weakref.ref(model)
        self.digests: list[Any] | None = None  # of the streamed weights, once somebody has computed them
        self._holding = threading.local()
        self._users: dict[int, int] = {}
        self._lock, self._closed = threading.Lock(), False
        self._streamed: dict[int, list[Part]] = {}
        self._rooms: list[Room] = []  # for copies, that no layer uses now
        self._taken: dict[int, Room] = {}
        self.trace = trace
        self.computed_s = dict.fromkeys(range(len(layers)), 0.0)
        self.scheduler, self._came, self._in_place = came.scheduler, came, arranged.in_place
        self._stay: dict[int, dict[str, Part]] = {}  # what is still to come of what stays
        self._keeping = threading.RLock()  # of that
        self._handles: dict[int, list[RemovableHandle]] = {}  # of hooks that wait for it
        self._away: dict[int, list[Place]] = {}  # what stands for weights outside of their turn
        twins = Twins(layers)
        for number, (layer, parts) in enumerate(zip(layers, arranged.layers, strict=True)):
            if streamed := [parts[name] for name in PARTS if name in chosen.streamed[number]]:
                self._streamed[number] = streamed
                self._away[number] = self._without(layer, streamed)
                put(self._away[number])
            stays = {name: part for name, part in parts.items() if name not in chosen.streamed[number]}
            if stays:
                self._stay[number] = stays
        self._tables = tables
        self.embedding = self._head = None
        if "embedding" in tables:
            embedding = model.get_input_embeddings()
            self.embedding = StreamedEmbedding(embedding, tables["embedding"], mover, len(layers))
        if "head" in tables:
            self._head = StreamedHead(model.get_output_embeddings(), tables["head"], len(layers))
        self.placement: Placement | None = None
        self._on_host: set[int] = set()  # layers whose weights point to the host's memory
        self._host_threads = config.host_threads
        try:
            self._load(twins)
            self._begin(list(pieces_of(arranged, chosen, tables)))
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
        for number, parts in list(self._stay.items()):
            if self.scheduler is None or not all(self._came.comes(number, name) for name in parts):
                self._keep(number)

    def settle(self) -> None:
        """Waits for what stays in memory: whoever looks at all weights finds it. Raises StreamingFailed."""
        for number in list(self._stay):
            self._keep(number)

    def _keep(self, number: int) -> None:
        """Waits for what stays of a layer, once; its tensors are ordinary ones, in whatever mode the model is
        called. Raises StreamingFailed; the next call then reads it anew.
        """
        with self._keeping, torch.inference_mode(False):
            left, layer = self._stay.get(number, {}), self._layers[number]
            for name, part in list(left.items()):
                held = self._came.part(number, name)
                put(places(layer, part, held, self._dtype, copied=self._in_place))
                del left[name]
            self._stay.pop(number, None)
            for handle in self._handles.pop(number, ()):
                handle.remove()

    def _begin(self, asked: list[int]) -> None:
        """asked: what a pass asks the scheduler for. Raises what _place() does."""
        if self._head is not None and self.scheduler is not None:
            self._head.follow(self.scheduler)
        for number, parts in self._stay.items():
            layer, keep = self._layers[number], functools.partial(self._keep, number)
            put(self._without(layer, parts.values()))
            for module in layer.modules():  # a part may be called by itself
                handle = module.register_forward_pre_hook(lambda *_, keep=keep: keep())
                self._handles.setdefault(number, []).append(handle)
                module.register_state_dict_pre_hook(lambda *_, keep=keep: keep())
        for number in self._streamed:
            self._layers[number].register_forward_pre_hook(self._before(number))
            self._layers[number].register_forward_hook(self._after(number), always_call=True)
        if self._host_threads is not None:
            self._place(asked)

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
        self._keep(number)
        if number not in self._streamed:
            yield layer
            return
        self._before(number, passing)(layer, ())
        try:
            yield layer
        finally:
            self._after(number, computed=False)(layer, (), None)

    def left(self) -> int:
        """Bytes of the plan that have no memory yet, and will."""
        if self._closed:
            return 0
        coming = sum(
            kept(part, self._dtype, self._in_place)
            for number, parts in self._stay.copy().items()
            for name, part in parts.copy().items()
            if not self._came.is_there(number, name)
        )
        slots = self.scheduler.slots if self.scheduler is not None else []
        if self._streamed and not self._rooms and not self._taken:
            coming += self._copied()  # the first room; a second is made only where two threads compute
        return coming + sum(len(slot.memory) for slot in slots if not slot.touched)

    def close(self) -> None:
        """Ends the reading; the model cannot be called any more."""
        self._closed = True
        self._came.end(self._mover if self.scheduler is None else self.scheduler)

    def moving(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Of each weight that has memory only while its layer computes, by its name: module and attribute.
        What stays is there from here on. Raises StreamingFailed.
        """
        self.settle()
        found = {}
        for number, parts in self._streamed.items():
            for stored in (stored for part in parts for stored in part.tensors):
                owner, _, attribute = stored.name.rpartition(".")
                module = self._layers[number].get_submodule(owner)
                found[f"{self._prefix}.{number}.{stored.name}"] = module, attribute
        model = self._model()
        for role in self._tables if model is not None else ():
            module = getattr(model, f"get_{ROLES[role]}_embeddings")()
            found[f"{name_of(model, module)}.weight"] = module, "weight"
        return found

    def digested_tables(self) -> Iterator[tuple[str, str, list[int], bytes]]:
        """Of each streamed matrix of the vocabulary its name, type, shape and the SHA-256 of its bytes."""
        digests: dict[str, bytes] = {}
        for role, table in self._tables.items():
            module = getattr(self._model(), f"get_{ROLES[role]}_embeddings")()
            if table.name not in digests:
                digests[table.name] = digest(table, self._mover, len(self._layers))
            name = f"{name_of(self._model(), module)}.weight"
            yield name, f"torch.{table.dtype}", list(table.shape), digests[table.name]

    def filled_layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each streamed layer in turn, with its name and its weights, until the next is asked for."""
        for number in self._streamed:
            with self._looked_at(number, passing=True) as layer:
                yield f"{self._prefix}.{number}", layer

    def _before(self, number: int, passing: bool = True) -> Callable[..., None]:
        def before(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
            assert self.scheduler is not None
            self._give_back_what_was_left()
            if self.placement is not None and args:
                rows = args[0].shape[:-1].numel()
                if self.placement.enter(number, rows) and self._to_host(number, layer):
                    return
            with contextlib.ExitStack() as stack:
                slot = stack.enter_context(self.scheduler.holding(number, passing))
                with self._lock:
                    if not self._users.get(number):
                        self._point(number, layer, self._parts_of(number, slot))
                    self._users[number] = self._users.get(number, 0) + 1
                self._holds(number).append(
                    (stack.pop_all(), time.monotonic())
                )  # else: the slot is free again

        return before

    def _holds(self, number: int) -> list[tuple[contextlib.ExitStack, float]]:
        """Of the calling thread: what is given back behind the layer, and when it began."""
        stacks: dict[int, list[Any]] = self._holding.__dict__.setdefault("stacks", {})
        return stacks.setdefault(number, [])

    def _give_back_what_was_left(self) -> None:
        """torch calls no hook behind a layer that Ctrl-C ends: what this thread still holds as it enters the
        next one is of such a layer.
        """
        for number, holds in self._holding.__dict__.get("stacks", {}).items():
            while holds:
                self._after(number, computed=False)(self._layers[number], (), None)

    def _to_host(self, number: int, layer: torch.nn.Module) -> bool:
        """The layer is computed where its weights lie, by the host's threads. False: another thread computes
        it out of a slot now, which only those who hold the slot may do. Raises StreamingFailed.
        """
        mover: Any = self._mover  # _place() has seen that it has lies()
        lies = [mover.lies(number, piece) for part in self._streamed[number] for piece in part.pieces]
        with self._lock:
            users = self._users.get(number, 0)
            if users and number not in self._on_host:
                return False
            if not users:
                self._on_host.add(number)
                self._point(number, layer, lies)
            self._users[number] = users + 1
        assert self.placement is not None and self._host_threads is not None
        self.placement.counted()
        with contextlib.ExitStack() as stack:
            stack.enter_context(with_threads(self._host_threads))
            self._holds(number).append((stack.pop_all(), time.monotonic()))
        return True

    def _after(self, number: int, computed: bool = True) -> Callable[..., None]:
        """Also after an exception in the layer. computed: else its weights were only looked at."""

        def after(layer: torch.nn.Module, _args: Any, _out: Any) -> None:
            stacks = self._holding.__dict__.get("stacks", {}).get(number)
            if not stacks:
                return  # the layer was never given its weights
            held, started = stacks.pop()
            ended = time.monotonic()
            if self.trace is not None and computed:
                self.trace.span("compute", number, started, ended)
            with self._lock:
                self.computed_s[number] += ended - started if computed else 0.0
                self._users[number] -= 1
                if not self._users[number]:
                    self._on_host.discard(number)
                    put(self._away[number])
                    self._rooms.append(self._taken.pop(number))
            held.close()

        return after

    def _parts_of(self, number: int, slot: Slot) -> Iterator[memoryview]:
        at = 0
        for part in self._streamed[number]:
            yield slot.memory[at : at + part.length]
            at += part.length

    def _point(self, number: int, layer: torch.nn.Module, memories: Iterable[memoryview]) -> None:
        """The layer's weights lie in these, a part in each; copies in a room until its last user leaves."""
        if number not in self._taken:  # else an earlier call failed here
            self._taken[number] = self._rooms.pop() if self._rooms else self._new_room()
        room = self._taken[number]
        room.empty()
        for part, memory in zip(self._streamed[number], memories, strict=True):
            put(places(layer, part, memory, self._dtype, room=room))

    def _without(self, layer: torch.nn.Module, parts: Iterable[Part]) -> list[Place]:
        return [place for part in parts for place in without(layer, part, self._dtype)]

    def _new_room(self) -> Room:
        return Room(pages(self._copied()))

    def _copied(self) -> int:
        """Bytes of a streamed layer's copies, at most."""
        return max(sum(copies(part, self._dtype) for part in parts) for parts in self._streamed.values())
