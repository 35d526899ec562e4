"""Layers of blocks on their way from host memory to a GPU: layer by layer, on a stream of their own.

    memory = HostMemory()                 # what the device may read by itself
    moving = Transfer(memory, layers=32)
    moving.start(lambda layer: Copies(targets, sources, sizes))
    moving.wait(layer, stream)            # the stream's later work waits for that layer; the caller does not
    moving.close()

Owns the pinned ring and the order of copies. A shared map is copied from where it lies (host_memory.py); what
cannot be registered (a read-only map on a device without the flag for it, memory that is no shared map) goes
through a bounded ring of pinned slots, filled by a thread. Never computes, knows no framework. Invariant: a
layer's event is recorded behind its last copy; no slot is written, and no window given back, before the
copies out of it are done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

import numpy as np

from kvclient.errors import Closed, InvalidArgument
from kvclient.kernels import contract
from kvclient.kernels.host_memory import HostMemory, Taken

RING_SLOTS = 4
SLOT_BYTES = 8 << 20


class Copies(NamedTuple):
    """Between the host and the device, one behind the other: addresses, and bytes. int64 [copies] each."""

    targets: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray


def copies_of(pairs: Sequence[tuple[int, np.ndarray]]) -> Copies:
    """Of an address on the device, and the contiguous array of any shape that goes there. Raises
    InvalidArgument for an array that is not contiguous.
    """
    rows = [(target, *extent(source)) for target, source in pairs]
    return Copies(*np.array(rows, np.int64).reshape(-1, 3).T)


class Ring:
    """Pinned slots between memory that the device cannot read and the device. For one thread at a time."""

    def __init__(self, library: Any = None, slots: int = RING_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._library = library or contract.cuda()
        self._slot_bytes, self._next = slot_bytes, 0
        self._slots: list[int] = []
        self._events: list[int] = []
        self._busy = [False] * slots
        for _ in range(slots):
            self._slots.append(_made(self._library, "kvk_host_allocate", slot_bytes))
            self._events.append(_made(self._library, "kvk_event_create"))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queues so many bytes of this process's memory to the device's address `target`; they may be changed
        when this returns.
        """
        for at in range(0, size, self._slot_bytes):
            count = min(self._slot_bytes, size - at)
            index, self._next = self._next, (self._next + 1) % len(self._slots)
            if self._busy[index]:
                self._check("kvk_event_synchronise", self._events[index])
            ctypes.memmove(self._slots[index], source + at, count)
            place = Copies(*(np.array([x], np.int64) for x in (target + at, self._slots[index], count)))
            queue(self._library, place, stream)
            self._check("kvk_event_record", self._events[index], stream)
            self._busy[index] = True

    def close(self) -> None:
        """Waits for the copies under way."""
        for busy, event in zip(self._busy, self._events, strict=True):
            if busy:
                self._check("kvk_event_synchronise", event)
        while self._events:
            self._check("kvk_event_destroy", self._events.pop())
            self._check("kvk_host_free", self._slots.pop())

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)


class Transfer:
    """The layers of one request: start() once, wait() for each layer in any order, close() at the end."""

    def __init__(self, memory: HostMemory, layers: int, library: Any = None) -> None:
        self._memory = memory
        self._library = library or contract.cuda()
        self._ring: Ring | None = None
        self.stream = _made(self._library, "kvk_stream_create")
        self._events = [_made(self._library, "kvk_event_create") for _ in range(layers)]
        self._queued = [threading.Event() for _ in range(layers)]
        self._held: list[Taken] = []
        self._failed: tuple[int, BaseException] | None = None  # the first layer that was not queued, and why
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.bounced_bytes = 0

    def start(
        self, copies: Callable[[int], Copies], after: int | None = None, patient: bool = False
    ) -> None:
        """Queues all layers in order: at once as long as the device reads the sources by itself, from the
        first that it cannot on by a thread, which fills the ring. copies(layer) is asked when that layer's
        turn comes; the sources stay mapped until close().

        after: a stream whose work so far the copies wait for; patient: copies() may take its time, so all is
        left to the thread.
        """
        self._memory.look()
        if after is not None:
            self._check("kvk_event_record", self._events[0], after)
            self._check("kvk_event_wait", self._events[0], self.stream)
        if patient:
            self._bounce_from(copies, 0, None)
            return
        for layer in range(len(self._events)):
            try:
                asked = copies(layer)
                taken = self._memory.take(asked.sources, asked.sizes)
                if taken is not None:
                    self._queue(layer, asked, taken)
            except BaseException as error:
                self._fail(layer, error)
                raise
            if taken is None:
                self._bounce_from(copies, layer, asked)
                return

    def wait(self, layer: int, stream: int) -> None:
        """The later work of `stream` waits for that layer. Raises what its copies raised."""
        self._queued[layer].wait()
        if self._failed is not None and layer >= self._failed[0]:
            raise self._failed[1]
        self._check("kvk_event_wait", self._events[layer], stream)

    def close(self) -> None:
        """Stops what was not queued, waits for what was. Idempotent."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        if not self.stream:
            return
        last = _made(self._library, "kvk_event_create")
        self._check("kvk_event_record", last, self.stream)
        self._check("kvk_event_synchronise", last)
        if self._ring is not None:
            self._ring.close()
        for event in (*self._events, last):
            self._check("kvk_event_destroy", event)
        self._check("kvk_stream_destroy", self.stream)
        self._events, self.stream = [], 0
        while self._held:
            self._memory.give_back(self._held.pop())

    def _bounce_from(self, *arguments: Any) -> None:
        self._thread = threading.Thread(target=self._bounce, args=arguments, daemon=True)
        self._thread.start()

    def _bounce(self, copies: Callable[[int], Copies], first: int, asked: Copies | None) -> None:
        layer = first
        try:
            for layer in range(first, len(self._events)):
                if self._stopped:
                    raise Closed("the transfer was closed before this layer's turn")
                if asked is None or layer > first:
                    asked = copies(layer)
                    self._memory.look()  # that may have taken its time
                self._queue(layer, asked, self._memory.take(asked.sources, asked.sizes))
        except BaseException as error:
            self._fail(layer, error)

    def _fail(self, layer: int, error: BaseException) -> None:
        self._failed = (layer, error)
        for left in self._queued[layer:]:
            left.set()

    def _queue(self, layer: int, asked: Copies, taken: Taken | None) -> None:
        if taken is not None:
            self._held.append(taken)
            targets = asked.targets[taken.items] + taken.offsets
            queue(self._library, Copies(targets, taken.addresses, taken.sizes), self.stream)
        else:
            self._ring = self._ring or Ring(self._library)
            for target, source, size in zip(*(column.tolist() for column in asked), strict=True):
                self._ring.copy(target, source, size, self.stream)
            self.bounced_bytes += int(asked.sizes.sum())
        self._check("kvk_event_record", self._events[layer], self.stream)
        self._queued[layer].set()

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)


def extent(memory: np.ndarray) -> tuple[int, int]:
    """(address, bytes) of an array of any shape. Raises InvalidArgument for memory that is not contiguous."""
    if not memory.flags.c_contiguous:
        raise InvalidArgument(f"{list(memory.shape)} with strides {memory.strides} is not contiguous")
    return memory.ctypes.data, memory.nbytes


def queue(library: Any, copies: Copies, stream: int) -> None:
    """Queues them on a stream, those of one call in any order; host memory of either side must be registered.
    """
    columns = [np.ascontiguousarray(column) for column in copies]
    addresses = (column.ctypes.data for column in columns)
    if len(copies.sizes):
        contract.check(library.kvk_copy(*addresses, len(copies.sizes), stream), library)


def _made(library: Any, name: str, *arguments: int) -> int:
    """What a function of the library creates."""
    out = c_void_p()
    contract.check(getattr(library, name)(*arguments, byref(out)), library)
    return out.value or 0
