"""Which host memory a GPU reads by itself: windows of shared maps, registered as they are used.

Owns its registrations and, for each, a map of its own of the same pages: whoever unmaps the first one, as a
client that is closed does, takes nothing from the device, and what is mapped there afterwards is not taken
for the old pages. Never copies. Invariant: a window is unregistered, and then unmapped, when nobody copies
from it or to it; never more than `most_bytes` are registered, but for those in use.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvclient.kernels import contract

WINDOW_BYTES = 64 << 20  # registered at once
MOST_REGISTERED_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
MREMAP_MAYMOVE = 1
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class _Map:
    """A shared map of this process, as the kernel lists it."""

    low: int
    high: int
    read_only: bool
    file: str  # device, inode and offset: what it shows


@dataclass
class _Window:
    """length bytes of a map from `start` on; `address`: where the same pages are registered."""

    start: int
    length: int
    of: _Map
    address: int
    users: int = 0


class Taken(NamedTuple):
    """Pieces of what was asked for, cut where registrations meet: piece i is `sizes[i]` bytes of item
    `items[i]` from byte `offsets[i]` on, and the device knows it at `addresses[i]`. int64 [pieces] each.
    """

    items: np.ndarray
    offsets: np.ndarray
    addresses: np.ndarray
    sizes: np.ndarray
    windows: Sequence[_Window]


class HostMemory:
    """Registers at most `most_bytes`; the longest unused is given up."""

    def __init__(
        self, library: Any = None, window_bytes: int = WINDOW_BYTES, most_bytes: int = MOST_REGISTERED_BYTES
    ) -> None:
        self._library = library or contract.cuda()
        self._window_bytes, self._most_bytes = window_bytes, most_bytes
        self._lock = threading.Lock()
        self._maps: list[_Map] = []  # by address
        self._lows = np.zeros(0, np.int64)
        self._windows: OrderedDict[int, _Window] = OrderedDict()  # by start, the longest unused first
        self._refused: set[_Map] = set()
        self.why_not: str | None = None  # what the device or the system said when one was last refused

    def look(self) -> None:
        """Learns what is mapped now. What is registered and was unmapped by its owner is given up."""
        with self._lock:
            self._maps = _shared_maps()
            self._lows = np.array([mapped.low for mapped in self._maps], np.int64)
            mapped = set(self._maps)
            self._refused &= mapped
            for start, window in list(self._windows.items()):
                if window.of not in mapped and window.users == 0:
                    self._forget(start)

    def take(self, starts: np.ndarray, sizes: np.ndarray) -> Taken | None:
        """starts, sizes: int64 [items], addresses of this process and bytes. None if some of it cannot be
        registered. All stays registered until give_back(). Whoever calls keeps it mapped since look().
        """
        with self._lock:
            of = np.searchsorted(self._lows, starts, "right") - 1
            if (len(of) and of.min() < 0) or not self._inside(of, starts + sizes):
                return None
            windows: list[_Window] = []
            parts: list[tuple[np.ndarray, ...]] = []
            try:
                for index in np.unique(of).tolist():
                    items = np.flatnonzero(of == index)
                    found = self._of_map(self._maps[index], items, starts, sizes, windows)
                    if found is None:
                        self._release(windows)
                        return None
                    parts += found
            except BaseException:
                self._release(windows)
                raise
            columns = zip(*parts, strict=True) if parts else [[np.zeros(0, np.int64)]] * 4
            return Taken(*map(np.concatenate, columns), windows)

    def give_back(self, taken: Taken) -> None:
        """What take() returned may be unregistered when room is needed."""
        with self._lock:
            self._release(taken.windows)

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

    def _inside(self, of: np.ndarray, ends: np.ndarray) -> bool:
        """Whether each lies in its map as a whole, and none of these was refused."""
        used = [self._maps[index] for index in np.unique(of).tolist()]
        if not self._refused.isdisjoint(used):
            return False
        highs = np.array([mapped.high for mapped in self._maps], np.int64)
        return bool((ends <= highs[of]).all()) if len(of) else True

    def _of_map(
        self, of: _Map, items: np.ndarray, starts: np.ndarray, sizes: np.ndarray, windows: list[_Window]
    ) -> list[tuple[np.ndarray, ...]] | None:
        """(items, offsets, addresses, sizes) window by window; adds the windows, which then have a user."""
        items = items[sizes[items] > 0]
        low, high = starts[items] - of.low, starts[items] + sizes[items] - of.low
        parts = []
        first, last = low // self._window_bytes, (high - 1) // self._window_bytes
        numbers = np.unique(np.concatenate([first, last])).tolist()
        if numbers and (last > first + 1).any():  # longer than a window
            numbers = list(range(numbers[0], numbers[-1] + 1))
        for number in numbers:
            here = np.flatnonzero((first <= number) & (number <= last))
            if not len(here):
                continue
            if (window := self._window(of, of.low + number * self._window_bytes)) is None:
                return None
            window.users += 1
            windows.append(window)
            begin = window.start - of.low
            start, stop = np.maximum(low[here], begin), np.minimum(high[here], begin + window.length)
            parts.append((items[here], start - low[here], window.address + start - begin, stop - start))
        return parts

    def _window(self, of: _Map, start: int) -> _Window | None:
        if (known := self._windows.get(start)) is not None:
            self._windows.move_to_end(start)
            return known if known.of == of else None  # the map before it is still copied from
        length = min(self._window_bytes, of.high - start)
        self._make_room(length)
        address = _libc.mremap(start, 0, length, MREMAP_MAYMOVE)  # of a shared map: the same pages once more
        if address in (None, FAILED):
            self._refuse(of, f"mapping it once more: errno {ctypes.get_errno()}")
            return None
        status = self._library.kvk_host_register(address, length, int(of.read_only))
        if status != contract.OK:
            _libc.munmap(address, length)
        if status == contract.UNSUPPORTED:
            self._refuse(of, self._library.kvk_last_error().decode())
            return None
        contract.check(status, self._library)
        self._windows[start] = window = _Window(start, length, of, address)
        return window

    def _refuse(self, of: _Map, why: str) -> None:
        self.why_not = why
        self._refused.add(of)

    def _make_room(self, length: int) -> None:
        held = sum(window.length for window in self._windows.values())
        for start, window in list(self._windows.items()):
            if held + length <= self._most_bytes:
                return
            if window.users == 0:
                held -= window.length
                self._forget(start)

    def _release(self, windows: Sequence[_Window]) -> None:
        for window in windows:
            window.users -= 1

    def _forget(self, start: int) -> None:
        window = self._windows.pop(start)
        contract.check(self._library.kvk_host_unregister(window.address), self._library)
        _libc.munmap(window.address, window.length)


def _shared_maps() -> list[_Map]:
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
            if permissions[3] == "s":
                low, high = (int(part, 16) for part in place.split("-"))
                found.append(_Map(low, high, "w" not in permissions, f"{device} {inode} {offset}"))
    return found
