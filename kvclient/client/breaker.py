"""When to stop asking a store that does not answer, and what a caller who goes on without it gets.

Owns the circuit breaker of on_error="miss" and the empty answers; never calls the daemon. Invariant:
after a failure nobody asks before the backoff has passed, then exactly one caller does (half open) while the
others go on without; the backoff has a bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvclient.errors import InvalidArgument

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0
HURRIED_BACKOFF_S = 0.02


class Breaker:
    """Closed: everybody may ask. Open: nobody. Half open: one probe decides which of the two it becomes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = self._failed_at = 0.0
        self._probing = False
        self.open = False
        self.opened_total = 0
        self.why = ""  # of the last failure

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock or was probing does not exist here."""
        self._lock = threading.Lock()
        self._probing = False

    def may_ask(self) -> bool:
        """Whether this caller may ask the store now. A True must be followed by succeeded() or failed()."""
        if not self.open:
            return True
        with self._lock:
            if not self.open:
                return True
            if self._probing or self._now() < self._retry_at:
                return False
            self._probing = True
            return True

    def hurry(self) -> None:
        """Shared memory says that a new daemon is there: the next try need not wait as long as for one that
        is gone. A daemon that does not answer after all costs a try per HURRIED_BACKOFF_S."""
        with self._lock:
            self._retry_at = min(self._retry_at, self._failed_at + HURRIED_BACKOFF_S)

    def succeeded(self) -> None:
        """A call did what it should: the breaker closes."""
        if self.open:
            with self._lock:
                self.open = self._probing = False
                self._backoff_s = FIRST_BACKOFF_S

    def failed(self, why: BaseException | str = "") -> None:
        """A call failed: the breaker opens, or stays open for twice as long."""
        self.why = str(why)
        with self._lock:
            if self.open and not self._probing:
                return  # a call from before the opening; it says nothing about the probe to come
            if not self.open:
                self.open = True
                self.opened_total += 1
            self._probing = False
            self._failed_at = self._now()
            self._retry_at = self._failed_at + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class NoLookup:
    """What look-up answers without a store: nothing is there."""

    resident = pending = on_disk = on_peers = 0

    def __init__(self, count: int) -> None:
        self.states = bytes(count)


class NoBlocks:
    """What get answers without a store: a miss per key."""

    hits = 0

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return ([None] * self._count)[index]

    def __iter__(self) -> Iterator[None]:
        return iter([None] * self._count)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """There is nothing to wait for."""

    def layers(self, layer: int, timeout_s: float | None = None) -> list[None]:
        """No layer of any block is there: None for each."""
        return [None] * self._count

    def copy_layer(
        self, layer: int, target: Any, indices: Any, offsets: Any, verify: bool = False
    ) -> list[int]:
        """Raises InvalidArgument for any index: nothing was found."""
        if len(indices):
            raise InvalidArgument(f"block {indices[0]} is not one that was found: the store is unreachable")
        return []

    def copy_out(self, layer: int, targets: Any, indices: Any, whole: bool = True) -> list[int]:
        """Raises InvalidArgument for any index: nothing was found."""
        return self.copy_layer(layer, targets, indices, ())

    def release(self) -> None:
        """There is nothing to give back."""

    def __enter__(self) -> NoBlocks:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass


class NoWriter:
    """What create answers without a store: nothing was granted, and not for want of memory."""

    def __init__(self, count: int) -> None:
        self.results = ["unavailable"] * count
        self.granted: list[int] = []

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> Any:
        raise InvalidArgument(f"key {index} was not granted: the store is unreachable")

    def copy_layer(self, layer: int, source: Any, indices: Any, offsets: Any) -> None:
        """Raises InvalidArgument for any index: nothing was granted."""
        if len(indices):
            self[indices[0]]

    def copy_in(self, layer: int, sources: Any, indices: Any, whole: bool = True) -> None:
        """Raises InvalidArgument for any index: nothing was granted."""
        self.copy_layer(layer, sources, indices, ())

    def seal(self, index: int | None = None, zero_rest: bool = False) -> None:
        """There is nothing to publish."""

    def abort(self, index: int | None = None) -> None:
        """There is nothing to give up."""

    def wait_pending(self, timeout_s: float | None = None) -> bool:
        """True: nobody else's blocks are waited for."""
        return True

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass
