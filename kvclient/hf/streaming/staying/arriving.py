"""What stays of a model's weights, until it is there: layers or parts of them, and behind the layers the
embedding and the head.

What is late comes through the slots in the first pass, and is read into its place behind it: memory that a
virtual machine touches for the first time comes slower than the disk's bytes.

Owns the hooks that wait for what stays, and what is put off so. Never reads. Invariant: a weight that has not
come is a tensor without memory, but for who computes its layer out of a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from kvclient.hf.layers import forwards
from kvclient.hf.streaming.files.index import Part, Table
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.residency import PARTS
from kvclient.hf.streaming.scheduler import Scheduler
from kvclient.hf.streaming.staying.loading import Loading
from kvclient.hf.streaming.weights.places import Place, check, places, put, without
from kvclient.hf.streaming.weights.vocabulary import in_pieces, numbered


@dataclass(frozen=True)
class Slots:
    """How a layer is computed out of a slot. order: what a pass asks the scheduler for. before, after: the
    hooks of a layer by its number. holds: whether the calling thread computes a layer so, users: how many
    threads do; locked: nobody begins or ends to, within it.
    """

    scheduler: Scheduler
    order: Sequence[int]
    before: Callable[[int], Callable[..., Any]]
    after: Callable[[int], Callable[..., Any]]
    holds: Callable[[int], bool]
    users: dict[int, int]
    locked: threading.Lock


class Staying:
    """left: what is still to come, by layer and name."""

    def __init__(self, layers: list[Any], dtype: torch.dtype, in_place: bool, came: Loading) -> None:
        """layers: the model's; who adds an embedding or a head to `left` adds it there."""
        self.left: dict[int, dict[str, Part]] = {}
        self.same: dict[int, list[torch.nn.Module]] = {}  # modules that share the weight of one that stays
        self.late: dict[int, list[Part]] = {}  # what the first pass takes out of slots, until it came
        self.head: tuple[int, Table, int] | None = None  # that stays alone: its number, and its first piece's
        self._layers, self._dtype, self._in_place, self._came = layers, dtype, in_place, came
        self._keeping = threading.RLock()
        self._handles: dict[int, list[RemovableHandle]] = {}  # of hooks that wait for it,
        self._watching: dict[int, list[RemovableHandle]] = {}  # and of those of what lies in it
        self._yet: dict[tuple[int, str], list[Place]] = {}  # what stands for it
        self._slots: Slots | None = None
        self._began = self._ended = False  # the first pass
        self._seen: set[int] = set()  # by it, of what is late

    def settle(self) -> None:
        """Waits for all of it. Raises StreamingFailed."""
        for number in list(self.left):
            self.keep(number)

    def keep(self, number: int) -> None:
        """Waits for what stays of a layer, once; its tensors are ordinary ones, in whatever mode the model is
        called. Raises StreamingFailed; the next call then reads it anew.
        """
        if number not in self.left:
            if number in self._handles:  # somebody computed it out of a slot as the last of it came
                self._forget(number)
            return
        with self._keeping, torch.inference_mode(False):
            if number in self.late:
                self._seen.add(number)  # never out of a slot again, of which a part may be there
                self._end()
            left, layer = self.left.get(number, {}), self._layers[number]
            for name, part in list(left.items()):
                if (where := self._yet.get((number, name))) is None:
                    where = list(without(layer, part, self._dtype))
                with self._locked():
                    if (number, name) in self._yet and not self._computing(number):
                        self._check(number, part, where)
                held = self._came.part(number, name)
                self._put(number, name, list(places(where, part, held, self._dtype, copied=self._in_place)))
            self.left.pop(number, None)
            self._forget(number)

    def _computing(self, number: int) -> bool:
        """Whether a thread computes it out of a slot, in whose memory its weights lie."""
        return self._slots is not None and bool(self._slots.users.get(number))

    def _check(self, number: int, part: Part, where: list[Place]) -> None:
        check(where, part, self._dtype)
        for other in self.same.get(number, ()):
            check([(other, "weight", where[0][2])], part, self._dtype)

    def _put(self, number: int, name: str, found: list[Place]) -> None:
        with self._locked():
            put(found)
            for other in self.same.get(number, ()):
                other._parameters["weight"] = self._layers[number]._parameters["weight"]
            self._yet.pop((number, name), None)
            self.late.pop(number, None)  # no slot has the whole of it any more
            del self.left[number][name]

    def _locked(self) -> Any:
        return threading.Lock() if self._slots is None else self._slots.locked

    def _forget(self, number: int) -> None:
        """All of it is there: its hooks go, but where a thread still computes it out of a slot."""
        with self._locked():
            if self._computing(number):
                return
        if self.head is not None and number == self.head[0]:
            forwards.take_away(self._layers[number])
        for handle in self._handles.pop(number, ()):
            handle.remove()
        self._leave_parts(number)

    # ---------------------------------------------------------------- hooks

    def wait(self, slots: Slots | None) -> None:
        """From here on who calls what is left, or asks for its state, waits for it. slots: None where nothing
        is read into any.
        """
        self._slots = slots
        if slots is None:
            self._came.resume()
        for number, parts in self.left.items():
            layer = self._layers[number]
            for name, part in parts.items():
                self._yet[number, name] = found = list(without(layer, part, self._dtype))
                put(found)
            for other in self.same.get(number, ()):
                other._parameters["weight"] = layer._parameters["weight"]

            def enter(layer: torch.nn.Module, args: tuple[Any, ...], number: int = number) -> None:
                self._enter(number, layer, args)

            self._handles[number] = [layer.register_forward_pre_hook(enter)]
            for module in [*layer.modules(), *self.same.get(number, ())]:
                module.register_state_dict_pre_hook(self._keeps(number))
            self._watch_parts(number)

    def _keeps(self, number: int) -> Callable[..., None]:
        def keep(*_: Any) -> None:  # a function: a copy of the model has the same
            self._part(number)

        return keep

    def _watch_parts(self, number: int) -> None:
        """A part of a layer may be called by itself."""
        with self._keeping:
            if number not in self.left or number in self._watching:
                return
            layer = self._layers[number]
            parts = [module for module in layer.modules() if module is not layer]
            self._watching[number] = [
                module.register_forward_pre_hook(self._keeps(number))
                for module in [*parts, *self.same.get(number, ())]
            ]

    def _leave_parts(self, number: int) -> None:
        """While a layer is computed out of a slot: what is computed as one is so only where no hook sees what
        goes through its parts, and one by one its numbers would have other bits.
        """
        for handle in self._watching.pop(number, ()):
            handle.remove()

    def _part(self, number: int) -> None:
        if self._slots is None or not self._slots.holds(number):
            self.keep(number)

    def _enter(self, number: int, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self._slots is None:
            return self.keep(number)
        if args:
            self.begin()
        with self._keeping:
            # A backward would find another layer in the slot.
            through = number in self.late and number not in self._seen and not torch.is_grad_enabled()
            if through:
                self._seen.add(number)
                for name, part in self.left[number].items():
                    self._check(number, part, self._yet[number, name])
        if not through:
            self._part(number)
        elif self.head is None or number != self.head[0]:
            self._slots.before(number)(layer, args)
            if self._slots.holds(number):
                self._leave_parts(number)
            else:  # another thread has asked for it meanwhile, and has maybe put a part of it only
                self.keep(number)
        return None

    # ---------------------------------------------------------------- the first pass

    def begin(self) -> None:
        """A pass begins. What is read ahead for nobody until then comes through slots, where that can be."""
        if self._slots is not None and not self._began:
            self._begin(self._slots)

    def _begin(self, slots: Slots) -> None:
        with self._keeping:
            if self._began:
                return
            self._began = True
            if torch.is_grad_enabled():
                self._came.resume()
                return
            pieces = {number: found for number in self.left if (found := self._pieces(number))}
            room = min(len(slot.memory) for slot in slots.scheduler.slots)
            fit = [
                number
                for number, each in pieces.items()
                if max(sum(piece.length for piece in unit) for unit in each.values()) <= room
            ]
            late = sorted(self._came.put_off(fit))
            units = {unit: found for number in late for unit, found in pieces[number].items()}
            if units:
                slots.scheduler.follow(sorted({*slots.order, *units}), units)
            for number in late:
                self.late[number] = [self.left[number][name] for name in self._names(number)]
                self._come_through_slots(number, slots, number == late[-1])

    def _come_through_slots(self, number: int, slots: Slots, is_last: bool) -> None:
        layer = self._layers[number]
        if self.head is not None and number == self.head[0]:
            forwards.put(layer, in_pieces(layer, *self.head[1:], slots.scheduler, self._end))
            return
        for behind in (slots.after(number), lambda *_: self._watch_parts(number)):
            self._handles[number].append(layer.register_forward_hook(behind, always_call=True))
        if is_last:
            self._handles[number].append(layer.register_forward_hook(lambda *_: self._end()))

    def _names(self, number: int) -> list[str]:
        return [name for name in PARTS if name in self.left[number]] or list(self.left[number])

    def _pieces(self, number: int) -> dict[int, tuple[Piece, ...]]:
        """What the scheduler would read for it, by its numbers; none for what cannot be late."""
        parts = self.left[number]
        if not all(self._came.comes(number, name) for name in parts):
            return {}
        if self.head is not None and number == self.head[0]:
            return {} if "forward" in self._layers[number].__dict__ else numbered(*self.head[1:])
        if set(parts) != set(PARTS):
            return {}  # some of it is streamed, or it is an embedding
        return {number: tuple(piece for name in PARTS for piece in parts[name].pieces)}

    def _end(self) -> None:
        """The first pass is over, or somebody wants what is late to come now."""
        with self._keeping:
            if self._ended or self._slots is None:
                return
            self._ended = True
            self._slots.scheduler.follow(self._slots.order)
            self._came.resume()

    def away(self, number: int) -> list[list[Place]]:
        """What stands for each part of a layer that is late."""
        return [self._yet[number, name] for name in self._names(number)]

    def still(self, number: int) -> list[Place]:
        """What stands for what has not come of a layer; only while nobody begins or ends to compute one."""
        return [place for name in self.left.get(number, ()) for place in self._yet[number, name]]
