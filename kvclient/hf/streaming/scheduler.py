"""The scheduler: which layer is in which slot, and which is read next.

Owns the slots, who computes from them, and the one thread that fills them. Never looks at weights. Invariant:
a slot is filled only while nobody computes from it, and handed out only when it is full.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvclient.errors import Closed
from kvclient.hf.streaming.mover import Piece, StreamingFailed, pages

TRIES = 2  # of a read, before whoever asked for it is told


class Mover(Protocol):
    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None: ...

    def close(self) -> None: ...


@dataclass
class Slot:
    number: int
    memory: memoryview
    layer: int | None = None  # that it holds or is being filled with
    ready: bool = False
    users: int = 0

    def free(self) -> bool:
        return self.users == 0 and (self.ready or self.layer is None)


class Scheduler:
    """For any number of threads, as each computes one layer at a time."""

    def __init__(self, mover: Mover, layers: dict[int, tuple[Piece, ...]], slots: int, ahead: int) -> None:
        """layers: by number, in the order in which a pass asks for them."""
        most = max(sum(piece.length for piece in pieces) for pieces in layers.values())
        count = min(slots, len(layers))
        self.slots = [Slot(number, pages(most)) for number in range(count)]
        self._mover, self._layers, self._order = mover, layers, list(layers)
        self._ahead = min(ahead, count - 1)
        self._changed = threading.Condition()
        self._asked: Counter[int] = Counter()  # layers that threads wait for
        self._soon: OrderedDict[int, None] = OrderedDict()  # to be read before they are asked for
        self._failed: dict[int, BaseException] = {}
        self._closed = False
        self.loads = self.hits = self.retries = self.bytes = 0
        self.filling_s, self.waited_s = 0.0, dict.fromkeys(layers, 0.0)
        self._thread = threading.Thread(target=self._run, name="kvclient-streaming", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def holding(self, layer: int) -> Iterator[Slot]:
        """The layer's slot, full, for as long as the block runs. Raises StreamingFailed, and Closed."""
        slot = self._acquire(layer)
        try:
            yield slot
        finally:
            with self._changed:
                slot.users -= 1
                self._changed.notify_all()

    def _acquire(self, layer: int) -> Slot:
        started = time.monotonic()
        with self._changed:
            self._failed.pop(layer, None)
            slot = self._holder(layer)
            self.hits += slot is not None and slot.ready
            self._asked[layer] += 1
            try:
                while slot is None or not slot.ready:
                    self._changed.notify_all()
                    self._changed.wait()
                    if self._closed:
                        raise Closed("the model's streams were closed")
                    if (error := self._failed.get(layer)) is not None:
                        raise error
                    slot = self._holder(layer)
                slot.users += 1
            finally:
                self._asked[layer] -= 1
                self._asked += Counter()  # drops what is 0
            self.waited_s[layer] += time.monotonic() - started
            at = self._order.index(layer)
            coming = [self._order[(at + i) % len(self._order)] for i in range(1, self._ahead + 1)]
            self._soon = OrderedDict.fromkeys(other for other in coming if other != layer)
            self._changed.notify_all()
            return slot

    def _holder(self, layer: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.layer == layer), None)

    def _next(self) -> tuple[int, Slot] | None:
        """What to read now, and into which slot: what is waited for first."""
        asked = [layer for layer in self._asked if self._holder(layer) is None and layer not in self._failed]
        for layer in [*asked, *(one for one in self._soon if self._holder(one) is None)]:
            kept = set(self._asked) | (set() if layer in asked else set(self._soon))
            if (slot := next((s for s in self.slots if s.free() and s.layer not in kept), None)) is not None:
                return layer, slot
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (found := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                layer, slot = found
                slot.layer, slot.ready = layer, False
            error = self._fill(layer, slot)
            with self._changed:
                slot.ready = error is None
                if error is not None:
                    slot.layer = None
                    self._failed[layer] = error
                    self._soon.pop(layer, None)
                self._changed.notify_all()

    def _fill(self, layer: int, slot: Slot) -> BaseException | None:
        pieces = self._layers[layer]
        for again in range(TRIES):
            started = time.monotonic()
            try:
                self._mover.fill(layer, pieces, slot.memory)
            except StreamingFailed as error:
                self.retries += again + 1 < TRIES
                failure: BaseException = error
            except Exception as error:  # whoever waits for the layer gets it
                return error
            else:
                self.loads += 1
                self.bytes += sum(piece.length for piece in pieces)
                self.filling_s += time.monotonic() - started
                return None
        return failure

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._mover.close()
