"""Which layer is in which slot, and which is read next: the scheduler's state, without threads or clocks.

Owns the slots and the rules by which they are given away. Never waits, never reads. Each operation runs to
its end; whoever has several threads holds a lock around each. Invariant: a slot is filled only while nobody
computes from it, and handed out only when it is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Slot:
    number: int
    memory: memoryview
    layer: int | None = None  # that it holds or is being filled with
    ready: bool = False
    users: int = 0
    touched: bool = False  # was full once, so all its pages are there

    def free(self) -> bool:
        """Whether another layer may be read into it."""
        return self.users == 0 and (self.ready or self.layer is None)


class SlotTable:
    """order: layers as a pass asks for them; ahead: of them are read before they are asked for."""

    def __init__(self, slots: Sequence[Slot], order: Sequence[int], ahead: int) -> None:
        self.slots = list(slots)
        self._ahead = min(ahead, len(self.slots) - 1)
        self._order: list[int] = []
        self._soon: tuple[int, ...] = ()
        self._asked: Counter[int] = Counter()  # layers that are waited for
        self._failed: dict[int, BaseException] = {}
        self.follow(order)

    def follow(self, order: Sequence[int]) -> None:
        """From here on a pass asks for these layers, in this order. Its first ones are read now; what was
        to be read before it was asked for, and is not among them, no more.
        """
        self._order = list(order)
        self._at = {layer: i for i, layer in enumerate(self._order)}
        self._soon = tuple(self._order[: self._ahead + 1]) if self._ahead else ()

    def ask(self, layer: int) -> bool:
        """From here on it is waited for, until take() has it or leave(). Whether it is there already."""
        self._failed.pop(layer, None)
        self._asked[layer] += 1
        slot = self._holder(layer)
        return slot is not None and slot.ready

    def take(self, layer: int, passing: bool = True) -> Slot | None:
        """The layer's slot, with one user more; None: not yet. passing: a pass is here, and what follows is
        read next; else whoever asks only looks. Raises what its read failed with.
        """
        if (error := self._failed.get(layer)) is not None:
            raise error
        slot = self._holder(layer)
        if slot is None or not slot.ready:
            return None
        slot.users += 1
        if passing:
            self._soon = self._behind(layer, self._ahead)
        return slot

    def leave(self, layer: int) -> None:
        """Of each ask() once, with the layer or without."""
        assert self._asked[layer] > 0, layer
        self._asked[layer] -= 1
        self._asked += Counter()  # drops what is 0

    def release(self, slot: Slot, passing: bool = True) -> None:
        """Of each take() once. The last user's slot may be filled with what is asked for after the next, if a
        pass has left it.
        """
        assert slot.users > 0 and slot.ready and slot.layer is not None
        slot.users -= 1
        if passing and not slot.users and self._ahead:
            self._soon = self._behind(slot.layer, self._ahead + 1)

    def begin(self) -> tuple[int, Slot] | None:
        """What to read now, and into which slot: what is waited for first. Until filled() it is nobody's."""
        asked = [layer for layer in self._asked if self._holder(layer) is None and layer not in self._failed]
        soon = [layer for layer in self._soon if self._holder(layer) is None and layer not in self._failed]
        for layer in [*asked, *soon]:
            kept = set(self._asked) | (set() if layer in asked else set(self._soon))
            slot = next((slot for slot in self.slots if slot.free() and slot.layer not in kept), None)
            if slot is not None:
                slot.layer, slot.ready = layer, False
                return layer, slot
        return None

    def filled(self, slot: Slot, error: BaseException | None) -> None:
        """The slot's read ended: its layer may be used, or `error` is kept for who asks for it."""
        assert slot.layer is not None and not slot.ready and not slot.users
        slot.ready = error is None
        slot.touched = slot.touched or slot.ready
        if error is not None:
            self._failed[slot.layer] = error
            slot.layer = None

    def _behind(self, layer: int, count: int) -> tuple[int, ...]:
        """What follows it; behind the last comes the first of the next token."""
        if layer not in self._at:  # of a pass that follows another order
            return self._soon
        at, whole = self._at[layer], len(self._order)
        return tuple(self._order[(at + i) % whole] for i in range(1, min(count, whole - 1) + 1))

    def _holder(self, layer: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.layer == layer), None)
