"""The scheduler: the threads between a table of slots and a mover.

Owns the lock around the table, and the threads that fill. Never looks at weights, never decides which slot is
filled (slots.py does). Invariant: what a reader holds is full, and stays so until it is given back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvclient.errors import Closed
from kvclient.hf.streaming.mover import Piece, StreamingFailed, give_back, pages
from kvclient.hf.streaming.slots import Slot, SlotTable
from kvclient.hf.streaming.trace import Trace

TRIES = 2  # of a read, before whoever asked for it is told
MOST_FILLING = 3  # layers at one time: the next one's reads stand behind this one's, and the disk never waits


def _nothing(_memory: Any) -> None:
    """Of a mover whose fill() returns when the slot is full."""


class Mover(Protocol):
    """Called by several threads at one time. One whose copies are still to come as fill() returns also has
    memory(length), which makes a slot, and taken(slot) and given_back(slot), called by who computes from it.
    """

    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None:
        """Brings a layer's pieces into the slot, one behind the other."""

    def close(self) -> None:
        """Ends what runs."""


class Scheduler:
    """For any number of threads, as each computes one layer at a time."""

    def __init__(
        self, mover: Mover, layers: dict[int, tuple[Piece, ...]], slots: int, ahead: int,
        trace: Trace | None = None,
    ) -> None:  # fmt: skip
        """layers: by number, in the order in which a pass asks for them."""
        most = max(sum(piece.length for piece in pieces) for pieces in layers.values())
        memory = getattr(mover, "memory", pages)
        made = [Slot(number, memory(most)) for number in range(min(slots, len(layers)))]
        self._ours = memory is pages
        self._taken, self._given_back = (getattr(mover, name, _nothing) for name in ("taken", "given_back"))
        self._mover, self._layers, self._trace = mover, layers, trace
        self._table = SlotTable(made, list(layers), ahead)
        self._changed = threading.Condition()
        self._closed = False
        self._filling, self._since = 0, 0.0  # layers at this time, and since when it is more than none
        self.loads = self.hits = self.retries = self.bytes = 0
        self.filling_s, self.waited_s = 0.0, dict.fromkeys(layers, 0.0)
        self.first_s: float | None = None  # when the first layer was asked for
        self._early_s = 0.0  # that the link had been busy until then
        # Copies that are only asked for are asked for by who computes: another thread would have to wait for
        # the interpreter, milliseconds in which the link has nothing to do.
        self._asks = hasattr(mover, "given_back")
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"kvclient-streaming-{i}", daemon=True)
            for i in range(0 if self._asks else min(MOST_FILLING, len(made)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> list[Slot]:
        """The memory that layers are read into."""
        return self._table.slots

    def follow(self, layers: Sequence[int], more: Mapping[int, tuple[Piece, ...]] | None = None) -> None:
        """From here on a pass asks for these, in this order. more: what it has not heard of before, none
        larger than a slot.
        """
        with self._changed:
            if more:
                self._layers = {**self._layers, **more}
                self.waited_s = dict.fromkeys(more, 0.0) | self.waited_s
            self._table.follow(layers)
            self._tell()

    @contextlib.contextmanager
    def holding(self, layer: int, passing: bool = True) -> Iterator[Slot]:
        """The layer's slot, full, for as long as the block runs. passing: of a pass; else it is only looked
        at: nothing is counted, and what the next pass begins with stays. Raises StreamingFailed, and Closed.
        """
        slot = self._acquire(layer, passing)
        try:
            self._taken(slot.memory)
            yield slot
        finally:
            try:
                self._given_back(slot.memory)
            finally:
                with self._changed:
                    self._table.release(slot, passing)
                    self._tell()
                    if self._closed:
                        self._let_go(slot)

    def _acquire(self, layer: int, passing: bool) -> Slot:
        started = time.monotonic()
        with self._changed:
            if passing and self.first_s is None:
                self.first_s, self._early_s = started, self._busy(started)
            there = self._table.ask(layer)
            try:
                self._tell()
                while True:
                    if self._closed:
                        raise Closed("the model's streams were closed")
                    if (slot := self._table.take(layer, passing)) is not None:
                        break
                    self._changed.wait()
            finally:
                self._table.leave(layer)
            ended = time.monotonic()
            if passing:
                self.hits += there
                self.waited_s[layer] += ended - started
            self._tell()
        if self._trace is not None:
            self._trace.span("wait", layer, started, ended)
        return slot

    def _tell(self) -> None:
        """Of a table that has changed, with the lock: whoever waits, and the mover, where that is all it
        needs."""
        while self._asks and not self._closed and (found := self._table.begin()) is not None:
            self._begun()
            error: BaseException | None = StreamingFailed("memory", found[0], 0, "interrupted")  # by Ctrl-C
            try:
                error = self._fill(*found)
            finally:
                self._ended(*found, error)
        self._changed.notify_all()

    def _run(self, thread: int) -> None:
        while True:
            with self._changed:
                while not self._closed and (found := self._table.begin()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                started = self._begun()
            error = self._fill(*found)
            with self._changed:
                ended = self._ended(*found, error)
                self._changed.notify_all()
            if self._trace is not None:
                self._trace.span(f"read {thread}", found[0], started, ended)

    def _begun(self) -> float:
        started = time.monotonic()
        if not self._filling:
            self._since = started
        self._filling += 1
        return started

    def _ended(self, layer: int, slot: Slot, error: BaseException | None) -> float:
        ended = time.monotonic()
        self._filling -= 1
        if not self._filling:
            self.filling_s += ended - self._since
        if error is None:
            self.loads += 1
            self.bytes += sum(piece.length for piece in self._layers[layer])
        self._table.filled(slot, error)
        return ended

    def _fill(self, layer: int, slot: Slot) -> BaseException | None:
        for again in range(TRIES):
            try:
                self._mover.fill(layer, self._layers[layer], slot.memory)
            except StreamingFailed as error:
                self.retries += again + 1 < TRIES
                failure: BaseException = error
            except Exception as error:  # whoever waits for the layer gets it
                return error
            else:
                return None
        return failure

    def link(self) -> dict[str, float]:
        """Seconds in which the link had something to do, and all since the first layer was asked for."""
        now = time.monotonic()
        with self._changed:
            busy = self._busy(now) - self._early_s
            return {"busy_s": busy, "since_s": now - self.first_s if self.first_s is not None else 0.0}

    def rate(self) -> float:
        """Bytes a second, while something was read."""
        with self._changed:
            return self.bytes / max(self._busy(time.monotonic()), 1e-9)

    def probed_rate(self) -> float:
        """The same, and of a layer that is read for it, if that was faster: what came before went into memory
        that was touched for the first time, beside all of loading. Raises StreamingFailed, and Closed.
        """
        with self._changed:
            held = {slot.layer for slot in self.slots}
            left = [layer for layer in self._layers if layer not in held]
        if not left or self._asks:
            return self.rate()
        began = time.monotonic()
        with self.holding(left[-1], passing=False):
            took = time.monotonic() - began
        length = sum(piece.length for piece in self._layers[left[-1]])
        return max(self.rate(), length / max(took, 1e-9))

    def _busy(self, now: float) -> float:
        return self.filling_s + (now - self._since if self._filling else 0.0)

    def _let_go(self, slot: Slot) -> None:
        """Of slots that are closed, with the lock: their pages, though tensors and errors may still see them.
        """
        if self._ours and not slot.users:
            give_back(slot.memory)

    def close(self) -> None:
        """Ends reads and threads; who waits gets an error. Slots give their pages back, one that is computed
        from behind its layer. Twice is once.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._mover.close()  # ends reads that run
        for thread in self._threads:
            thread.join()
        with self._changed:
            for slot in self.slots:
                self._let_go(slot)
