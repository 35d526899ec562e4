"""Pins that stand between "it is there" and the load that follows: an engine asks first and loads later.

Owns the pins and their time; never looks at a block. Invariants: what was answered as there stays in memory
until it was loaded, or `lease_s` have passed, whatever other readers of the same blocks do; no more than
`max_blocks` are held, the oldest go first; none is held after close().
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any


class Lease:
    """Pins of one call."""

    __slots__ = ("blocks", "keys", "until")

    def __init__(self, blocks: Any, keys: set[bytes], until: float) -> None:
        self.blocks, self.keys, self.until = blocks, keys, until


class Leases:
    """Thread-safe. A timer runs while something is held, and once more at the most."""

    def __init__(self, lease_s: float, max_blocks: int) -> None:
        self._lease_s, self._max_blocks = lease_s, max_blocks
        self._lock = threading.Lock()
        self._held: deque[Lease] = deque()  # oldest first
        self._over: deque[Lease] = deque()  # older: without pins, and their readers may still come
        self._timer: threading.Timer | None = None
        self._closed = False

    def hold(self, keys: Iterable[bytes], blocks: Any) -> Lease:
        """Takes the pins over. What it returns is for end()."""
        made = Lease(blocks, set(keys), time.monotonic() + self._lease_s)
        with self._lock:
            if self._closed or not made.keys:
                blocks.release()
                return made
            self._held.append(made)
            count = _count(self._held)
            while count > self._max_blocks and len(self._held) > 1:
                count -= self._pass(self._held.popleft())
            self._forget()
            self._arm()
        return made

    def end(self, leases: Iterable[Lease]) -> None:
        """Those and no others are done with; one may be over already."""
        ended = set(leases)
        with self._lock:
            for lease in self._held:
                if lease in ended:
                    lease.blocks.release()
            self._held = deque(lease for lease in self._held if lease not in ended)
            self._over = deque(lease for lease in self._over if lease not in ended)

    def used(self, keys: Sequence[bytes]) -> None:
        """Those were loaded, by a reader that is known by its keys alone: for each the oldest lease that has
        it is done with it. One whose time was over counts for as long again: else its reader, who comes
        late, would end the next one's. The price: where that reader never comes, the next one's word is
        taken for its, and pins of the same blocks stand up to `lease_s` each, until nobody has asked for
        them that long. They are bounded as ever, and nobody loses what was promised."""
        with self._lock:
            self._forget()
            left = set(keys)
            for lease in (*self._over, *self._held):
                if mine := lease.keys & left:
                    lease.keys -= mine
                    left -= mine
            self._over = deque(lease for lease in self._over if lease.keys)
            for lease in self._held:
                if not lease.keys:
                    lease.blocks.release()
            self._held = deque(lease for lease in self._held if lease.keys)

    def _pass(self, lease: Lease) -> int:
        """Its time or its room is over. How many blocks that were."""
        lease.blocks.release()
        self._over.append(lease)
        return len(lease.keys)

    def _forget(self) -> None:
        """Readers that have not come; no more of them are remembered than blocks may be held."""
        late, count = time.monotonic() - self._lease_s, _count(self._over)
        while self._over and (self._over[0].until < late or count > self._max_blocks):
            count -= len(self._over.popleft().keys)

    @property
    def count(self) -> int:
        """Blocks held at the moment."""
        with self._lock:
            return _count(self._held)

    def close(self) -> None:
        """Gives back what is still held; nothing is taken from here on."""
        with self._lock:
            self._closed = True
            for lease in self._held:
                lease.blocks.release()
            self._held.clear()
            self._over.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _arm(self) -> None:
        if self._held and self._timer is None:  # one that runs is left to run: a thread costs 60 us to start
            self._timer = threading.Timer(max(0.0, self._held[0].until - time.monotonic()), self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # it was cancelled while it began
            self._timer = None
            now = time.monotonic()
            while self._held and self._held[0].until <= now:
                self._pass(self._held.popleft())
            self._forget()
            self._arm()


def _count(leases: Iterable[Lease]) -> int:
    return sum(len(lease.keys) for lease in leases)
