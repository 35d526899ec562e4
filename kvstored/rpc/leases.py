"""Writers without shared memory: what each holds, and until when.

Owns the table of leases (bounded) and their deadlines; everything runs on the event loop, so no lock. Never
reads or writes a block. Invariants: a block is in at most one lease; a lease that ends, however, leaves no
unsealed block behind; memory is not given back while a native write into it is running.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvstored.access.quota import Bound
from kvstored.errors import LeaseEnded, NotFound
from kvstored.rpc.written import Written


@dataclass
class Held:
    """One granted block that is not sealed yet."""

    key: bytes
    handle: Any  # the store's
    length_bytes: int
    written: Written
    writing: int = 0  # native writes in progress
    sealing: bool = False  # nobody else writes into it, seals or aborts it

    @property
    def busy(self) -> bool:
        return self.sealing or self.writing > 0


@contextlib.contextmanager
def sealing(blocks: list[Held]) -> Iterator[None]:
    for held in blocks:
        held.sealing = True
    try:
        yield
    finally:
        for held in blocks:
            held.sealing = False


@dataclass
class Lease:
    id: int
    namespace: str
    store: Any
    owner: int  # the store's name for this writer
    ttl_s: float
    deadline: float  # of the loop's clock
    user: int | None  # in whose share it counts
    blocks: dict[bytes, Held] = field(default_factory=dict)
    ended: bool = False
    timer: asyncio.TimerHandle | None = None  # the deadline's

    def held(self, key: bytes) -> Held:
        found = self.blocks.get(key)
        if found is None:
            raise NotFound("the lease does not hold this key")
        return found

    @property
    def writing(self) -> bool:
        return any(held.writing for held in self.blocks.values())


class Leases:
    def __init__(self, max_leases: int, max_ttl_s: float, on_expired: Callable[[str, int], None]) -> None:
        """`on_expired(namespace, aborted)` is told of each lease that reached its deadline."""
        self._bound = Bound(max_leases, "{total} leases are open, the limit is {most} (max_leases)")
        self._max_ttl_s = max_ttl_s
        self._on_expired = on_expired
        self._leases: dict[int, Lease] = {}
        self.expired = 0

    def limit(self, max_leases: int) -> None:
        """Another bound, for the leases opened from now on."""
        self._bound.most = max_leases

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, namespace: str, store: Any, ttl_ms: int, user: int | None = None) -> Lease:
        """A lease that holds nothing yet. Raises NoSpace at the limit, or at the user's share of it."""
        self._bound.take(user)
        try:
            owner = store.open_owner()
        except BaseException:  # a namespace that is fenced: its refusals take no place from the others
            self._bound.give(user)
            raise
        loop = asyncio.get_running_loop()
        ttl_s = min(ttl_ms / 1000, self._max_ttl_s) if ttl_ms else self._max_ttl_s
        lease = Lease(secrets.randbits(63) | 1, namespace, store, owner, ttl_s, loop.time() + ttl_s, user)
        self._leases[lease.id] = lease
        lease.timer = loop.call_at(lease.deadline, self._look, lease)
        return lease

    def find(self, namespace: str, lease_id: int) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.namespace != namespace:  # another namespace's is as unknown as none
            raise LeaseEnded(
                f"lease {lease_id} is unknown: it ended, or its deadline passed and its blocks were aborted"
            )
        return lease

    def renew(self, lease: Lease) -> int:
        """Sets the deadline anew; the milliseconds to it."""
        lease.deadline = asyncio.get_running_loop().time() + lease.ttl_s
        return int(lease.ttl_s * 1000)

    def remaining_ms(self, lease: Lease) -> int:
        return max(0, int((lease.deadline - asyncio.get_running_loop().time()) * 1000))

    async def write(self, lease: Lease, held: Held, start: Callable[[], asyncio.Future[None]]) -> None:
        """Waits for a native write. Until it has really returned the block stays the lease's, whatever
        happens to the caller: seal and abort are refused, the deadline's work waits."""
        held.writing += 1
        try:
            running = start()
        except BaseException:
            self._wrote(lease, held)
            raise
        running.add_done_callback(lambda _: self._wrote(lease, held))
        # A cancelled call must not be taken for a finished write: the thread goes on.
        await asyncio.shield(running)

    def _wrote(self, lease: Lease, held: Held) -> None:
        held.writing -= 1
        if lease.ended and not lease.writing:
            self._close_owner(lease)

    def drop_if_empty(self, lease: Lease) -> None:
        """Ends a lease that holds nothing any more."""
        if not lease.blocks and not lease.ended:
            self.end(lease)

    def end(self, lease: Lease) -> int:
        """Ends a lease now; its unsealed blocks are aborted, at once or when the last write into them has
        returned."""
        if lease.ended:
            return 0
        lease.ended = True
        if lease.timer is not None:
            lease.timer.cancel()  # else the loop would hold the lease until its deadline
        del self._leases[lease.id]
        self._bound.give(lease.user)
        if not lease.writing:
            self._close_owner(lease)
        return len(lease.blocks)

    def end_all(self) -> None:
        for lease in list(self._leases.values()):
            self.end(lease)

    def _close_owner(self, lease: Lease) -> None:
        lease.store.close_owner(lease.owner)

    def _look(self, lease: Lease) -> None:
        """At a deadline: it may have been moved meanwhile."""
        loop = asyncio.get_running_loop()
        if lease.ended:
            return
        if lease.deadline > loop.time():
            lease.timer = loop.call_at(lease.deadline, self._look, lease)
            return
        self.expired += 1
        self._on_expired(lease.namespace, self.end(lease))
