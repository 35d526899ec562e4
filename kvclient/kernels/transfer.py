"""Layers of blocks on their way from host memory to a GPU: layer by layer, on a stream of their own.

    memory = HostMemory()                 # what the device may read by itself
    moving = Transfer(memory, layers=32)
    moving.start(lambda layer: [(target, source), …])
    moving.wait(layer, stream)            # the stream's later work waits for that layer; the caller does not
    moving.close()

Owns registrations, the pinned ring and the order of copies. A shared map is registered with the device in
windows, as they are used, and copied from where it lies; what cannot be registered (a read-only map on a
device without the flag for it, memory that is no shared map) goes through a bounded ring of pinned slots,
filled by a thread. Never computes, knows no framework. Invariant: a layer's event is recorded behind its last
copy; no slot is written, and no window unregistered, before the copies out of it are done.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.errors import Closed, InvalidArgument
from kvclient.kernels import contract

WINDOW_BYTES = 64 << 20  # registered at once
MOST_REGISTERED_BYTES = 16 << 30
RING_SLOTS = 4
SLOT_BYTES = 8 << 20
Copy = tuple[int, np.ndarray]  # an address on the device, and the bytes that go there
Piece = tuple[int, int, int]  # address, bytes, start of the window they lie in


@dataclass(frozen=True)
class _Map:
    """A shared map of this process, as the kernel lists it."""

    low: int
    high: int
    read_only: bool
    file: str  # device, inode and offset: what it shows


@dataclass
class _Window:
    start: int
    length: int
    of: _Map
    users: int = 0


class HostMemory:
    """Which host memory the device reads by itself: at most `most_bytes`; the longest unused is given up."""

    def __init__(
        self, library: Any = None, window_bytes: int = WINDOW_BYTES, most_bytes: int = MOST_REGISTERED_BYTES
    ) -> None:
        self._library = library or contract.cuda()
        self._window_bytes, self._most_bytes = window_bytes, most_bytes
        self._lock = threading.Lock()
        self._maps: list[_Map] = []  # by address
        self._windows: OrderedDict[int, _Window] = OrderedDict()  # by start, the longest unused first
        self._refused: set[_Map] = set()
        self.why_not: str | None = None  # what the device said when it last refused one

    def look(self) -> None:
        """Learns what is mapped now. What is registered and no longer mapped is forgotten: at its address
        there may be other bytes.
        """
        with self._lock:
            self._maps = _shared_maps()
            mapped = set(self._maps)
            self._refused &= mapped
            for start, window in list(self._windows.items()):
                if window.of not in mapped and window.users == 0:
                    self._forget(start)

    def take(self, source: np.ndarray) -> list[Piece] | None:
        """The bytes of `source`, contiguous and of any shape, cut where registrations meet; None if they
        cannot be registered. They stay registered until give_back(). Whoever calls keeps them mapped since
        look().
        """
        start, length = extent(source)
        with self._lock:
            index = bisect_right(self._maps, start, key=lambda mapped: mapped.low) - 1
            if index < 0 or start + length > self._maps[index].high or self._maps[index] in self._refused:
                return None
            pieces: list[Piece] = []
            at = start
            while at < start + length:
                window = self._window(self._maps[index], at)
                if window is None:
                    self._release(pieces)
                    return None
                stop = min(start + length, window.start + window.length)
                pieces.append((at, stop - at, window.start))
                window.users += 1
                at = stop
            return pieces

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """What take() returned may be unregistered when room is needed."""
        with self._lock:
            self._release(pieces)

    def close(self) -> None:
        """Nobody copies any more."""
        with self._lock:
            for start in list(self._windows):
                self._forget(start)

    @property
    def registered_bytes(self) -> int:
        """How much is registered with the device now."""
        with self._lock:
            return sum(window.length for window in self._windows.values())

    def _window(self, of: _Map, at: int) -> _Window | None:
        start = of.low + (at - of.low) // self._window_bytes * self._window_bytes
        if (known := self._windows.get(start)) is not None:
            self._windows.move_to_end(start)
            return known if known.of == of else None  # the map before it is still copied from
        window = _Window(start, min(self._window_bytes, of.high - start), of)
        self._make_room(window.length)
        status = self._library.kvk_host_register(window.start, window.length, int(of.read_only))
        if status == contract.UNSUPPORTED:
            self.why_not = self._library.kvk_last_error().decode()
            self._refused.add(of)
            return None
        contract.check(status, self._library)
        self._windows[start] = window
        return window

    def _make_room(self, length: int) -> None:
        held = sum(window.length for window in self._windows.values())
        for start, window in list(self._windows.items()):
            if held + length <= self._most_bytes:
                return
            if window.users == 0:
                held -= window.length
                self._forget(start)

    def _release(self, pieces: Sequence[Piece]) -> None:
        for *_, start in pieces:
            self._windows[start].users -= 1

    def _forget(self, start: int) -> None:
        del self._windows[start]
        contract.check(self._library.kvk_host_unregister(start), self._library)


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

    def copy(self, target: int, source: np.ndarray, stream: int) -> None:
        """Queues the bytes of a contiguous array, of any shape, to the device's address `target`; they may be
        changed when this returns.
        """
        start, length = extent(source)
        for at in range(0, length, self._slot_bytes):
            count = min(self._slot_bytes, length - at)
            index, self._next = self._next, (self._next + 1) % len(self._slots)
            if self._busy[index]:
                self._check("kvk_event_synchronise", self._events[index])
            ctypes.memmove(self._slots[index], start + at, count)
            _queue(self._library, [(target + at, self._slots[index], count)], stream)
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
        self._held: list[Piece] = []
        self._failed: tuple[int, BaseException] | None = None  # the first layer that was not queued, and why
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.bounced_bytes = 0

    def start(
        self, copies: Callable[[int], Sequence[Copy]], after: int | None = None, patient: bool = False
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
            taken = [(target, source, self._memory.take(source)) for target, source in copies(layer)]
            if any(pieces is None for *_, pieces in taken):
                self._bounce_from(copies, layer, taken)
                return
            self._queue(layer, taken)

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
        self._memory.give_back(self._held)

    def _bounce_from(self, *arguments: Any) -> None:
        self._thread = threading.Thread(target=self._bounce, args=arguments, daemon=True)
        self._thread.start()

    def _bounce(
        self, copies: Callable[[int], Sequence[Copy]], first: int, taken: list[Any] | None
    ) -> None:
        layer = first
        try:
            for layer in range(first, len(self._events)):
                if self._stopped:
                    raise Closed("the transfer was closed before this layer's turn")
                if taken is None or layer > first:
                    taken = [(target, source, self._memory.take(source)) for target, source in copies(layer)]
                self._queue(layer, taken)
        except BaseException as error:
            self._failed = (layer, error)
            for left in self._queued[layer:]:
                left.set()

    def _queue(self, layer: int, copies: list[tuple[int, np.ndarray, list[Piece] | None]]) -> None:
        direct = []
        for target, source, pieces in copies:
            if pieces is None:
                self._ring = self._ring or Ring(self._library)
                self._ring.copy(target, source, self.stream)
                self.bounced_bytes += source.nbytes
                continue
            self._held += pieces
            begin = extent(source)[0]
            direct += [(target + at - begin, at, count) for at, count, _ in pieces]
        _queue(self._library, direct, self.stream)
        self._check("kvk_event_record", self._events[layer], self.stream)
        self._queued[layer].set()

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)


def extent(memory: np.ndarray) -> tuple[int, int]:
    """(address, bytes) of an array of any shape. Raises InvalidArgument for memory that is not contiguous."""
    if not memory.flags.c_contiguous:
        raise InvalidArgument(f"{list(memory.shape)} with strides {memory.strides} is not contiguous")
    return memory.ctypes.data, memory.nbytes


def _shared_maps() -> list[_Map]:
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
            if permissions[3] == "s":
                low, high = (int(part, 16) for part in place.split("-"))
                found.append(_Map(low, high, "w" not in permissions, f"{device} {inode} {offset}"))
    return found


def _queue(library: Any, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
    """(target, source, bytes) each."""
    if not copies:
        return
    count = len(copies)
    targets, sources, sizes = (
        kind(*column)
        for kind, column in zip(
            (c_void_p * count, c_void_p * count, c_uint64 * count), zip(*copies, strict=True), strict=True
        )
    )
    contract.check(library.kvk_copy(targets, sources, sizes, count, stream), library)


def _made(library: Any, name: str, *arguments: int) -> int:
    """What a function of the library creates."""
    out = c_void_p()
    contract.check(getattr(library, name)(*arguments, byref(out)), library)
    return out.value or 0
