"""The store behind InMemoryClient: the daemon's rules in plain Python, inside one process.

Owns the records, the pool and every change to them, under one lock; never does I/O and never waits while it
changes something. Not for speed and not for sharing between processes: it exists so that code written against
KVClient can be tested without a daemon, and it passes the same conformance suite.

Invariant: used_bytes is the sum of the extents of all records that are not free; an extent is reused only
when no pin names its record. Readers get a read-only mapping of the pool, as from the daemon: writing
through a reader's view ends the process by SIGSEGV instead of changing a block.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvclient.blocks.layout import Geometry
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument, NoSpace

MISSING, PENDING, RESIDENT, DISK = range(4)  # states a look-up answers per key
CREATED, SEALED, ZOMBIE = "created", "sealed", "zombie"
DISK_FIGURES = ("disk_files", "disk_bytes", "disk_quota_bytes", "disk_loaded", "disk_written")  # none here
MAX_LAYOUTS = 512  # of a namespace, as in native/core/format/block.h


@dataclass(eq=False)
class Record:
    """One block. Its extent is free again when it is a zombie without pins."""

    key: bytes
    owner: object
    geometry: Geometry
    layout_id: int
    tokens: int
    base_position: int
    priority: int
    expires_at: float
    offset: int
    length: int
    state: str = CREATED
    layers_ready: int = 0
    pins: int = 0
    used_at: int = 0
    checksum: int | None = None
    trace: tuple[int | None, bytes | None] = (None, None)  # fingerprint and parent: what searches go by

    @property
    def sealed(self) -> bool:
        """Whether it was ever sealed: true also for a deleted block that somebody still reads."""
        return self.checksum is not None


class Pin:
    """One reader's claim. Whatever can still read the block refers to it; it ends with the last of those."""

    __slots__ = ("__weakref__", "_dropped", "record", "session")

    def __init__(self, record: Record, session: Session, dropped: deque) -> None:
        self.record, self.session, self._dropped = record, session, dropped

    def __del__(self) -> None:
        # May run anywhere, also while the lock is held: only queue it.
        self._dropped.append((self.record, self.session))


@dataclass(eq=False)
class Session:
    """An attached client: what it may hold and what it holds."""

    max_pins: int
    pins: int = 0


class InMemoryStore:
    """Records and memory shared by any number of InMemoryClients of one process."""

    def __init__(self, capacity_bytes: int = 256 << 20, max_blocks: int = 65_536) -> None:
        check_bounds("capacity_bytes", capacity_bytes, mmap.PAGESIZE, 1 << 40)
        check_bounds("max_blocks", max_blocks, 1, 1 << 24)
        self.capacity_bytes = capacity_bytes
        self.max_blocks = max_blocks
        self.changed = threading.Condition(threading.RLock())
        self.layouts: list[tuple[bytes, Geometry]] = []
        self.sessions: set[Session] = set()
        self.counts = dict.fromkeys(("hits", "misses", "evictions"), 0)
        self._records: dict[bytes, Record] = {}
        self._zombies: set[Record] = set()
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)]  # (offset, length), sorted, never adjacent
        self._clock = itertools.count(1)
        self._dropped: deque = deque()
        fd = os.memfd_create("kvclient-in-memory")
        try:
            os.ftruncate(fd, capacity_bytes)
            self.writable = np.frombuffer(mmap.mmap(fd, capacity_bytes), np.uint8)
            self.readable = np.frombuffer(mmap.mmap(fd, capacity_bytes, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)

    # ---------------------------------------------------------------- reading

    def state(self, key: bytes) -> int:
        """What a look-up says about one key."""
        record = self._find(key)
        return MISSING if record is None else PENDING if record.state == CREATED else RESIDENT

    def pin(self, key: bytes, session: Session, follow: bool) -> Pin | str:
        """A pin, or "miss" or "exhausted"."""
        self.settle()
        record = self._find(key)
        if record is None or (record.state == CREATED and not follow):
            self.counts["misses"] += 1
            return "miss"
        if session.pins >= session.max_pins:
            return "exhausted"
        self.counts["hits"] += 1
        record.used_at = next(self._clock)
        record.pins += 1
        session.pins += 1
        return Pin(record, session, self._dropped)

    def by_fingerprint(self, tokens: int) -> dict[int, list[bytes]]:
        """Keys of the sealed blocks of so many tokens at least, by fingerprint."""
        found: dict[int, list[bytes]] = {}
        for key, record in self._records.items():
            if record.state == SEALED and record.tokens >= tokens and record.trace[0] is not None:
                found.setdefault(record.trace[0], []).append(key)
        return found

    def children(self, parent: bytes) -> list[bytes]:
        """Keys of the sealed blocks that name `parent` as theirs."""
        return [k for k, r in self._records.items() if r.state == SEALED and r.trace[1] == parent]

    def touch(self, key: bytes) -> bool:
        """The block is the last to be evicted; False if it is not there."""
        record = self._find(key)
        if record is None or record.state != SEALED:
            return False
        record.used_at = next(self._clock)
        return True

    def stats(self) -> dict[str, int]:
        """Counts by name, in the units the names end in."""
        self.settle()
        live = list(self._records.values())
        return {
            "used_bytes": sum(r.length for r in (*live, *self._zombies)),
            "capacity_bytes": self.capacity_bytes,
            "faulted_bytes": self.capacity_bytes,
            "blocks": sum(r.state == SEALED for r in live),
            "created": sum(r.state == CREATED for r in live),
            "zombies": len(self._zombies),
            "pins": sum(r.pins for r in (*live, *self._zombies)),
            "sessions": len(self.sessions),
            **dict.fromkeys(DISK_FIGURES, 0),
            **self.counts,
        }

    # ---------------------------------------------------------------- writing

    def register_layout(self, blob: bytes) -> int:
        """The number of that layout, new or known. Raises NoSpace when all are taken."""
        for known, (registered, _) in enumerate(self.layouts):
            if registered == blob:
                return known
        if len(self.layouts) >= MAX_LAYOUTS:
            raise NoSpace(f"all {MAX_LAYOUTS} layouts of this namespace are taken")
        self.layouts.append((blob, Geometry.from_blob(blob)))
        return len(self.layouts) - 1

    def create(
        self,
        owner: object,
        key: bytes,
        layout_id: int,
        tokens: int,
        base: int,
        priority: int,
        ttl_s: float | None,
        trace: tuple[int | None, bytes | None] = (None, None),
    ) -> Record | str:
        """The granted record, or "exists", "pending" or "no_space"."""
        self.settle()
        found = self._find(key)
        if found is not None:
            return "pending" if found.state == CREATED else "exists"
        geometry = self.layouts[layout_id][1]
        length = geometry.length(tokens)
        offset = self._allocate(length)
        if offset is None:
            return "no_space"
        expires_at = float("inf") if not ttl_s else time.monotonic() + ttl_s
        record = Record(key, owner, geometry, layout_id, tokens, base, priority, expires_at, offset, length)
        record.trace = trace
        self._records[key] = record
        self.writable[offset : offset + length] = 0  # pads and meta area must not show the block before
        return record

    def mark_layer(self, record: Record, layer: int) -> None:
        """Publishes that layer. Raises InvalidArgument out of order."""
        if not 0 <= layer < record.geometry.num_layers:
            raise InvalidArgument(f"layer {layer}; the layout has {record.geometry.num_layers}")
        if layer != record.layers_ready:
            due = f"the next is {record.layers_ready} of {record.geometry.num_layers}"
            raise InvalidArgument(f"layer is {layer}, layers are published in order and {due}")
        record.layers_ready = layer + 1
        self.changed.notify_all()

    def seal(self, record: Record) -> None:
        """Everybody finds the block from now on; who waits is woken."""
        record.state, record.owner = SEALED, None
        record.layers_ready = record.geometry.num_layers
        record.used_at = next(self._clock)
        record.checksum = self.crc_of(record)
        self.changed.notify_all()

    def remove(self, record: Record) -> None:
        """Takes a block out of the index; its extent follows when the last pin is gone."""
        if self._records.get(record.key) is record:
            del self._records[record.key]
        record.state, record.owner = ZOMBIE, None
        self._zombies.add(record)
        self.settle()
        self.changed.notify_all()

    def delete(self, key: bytes) -> bool:
        """Takes a sealed block away; False if it is not there."""
        record = self._find(key)
        if record is None or record.state != SEALED:
            return False
        self.remove(record)
        return True

    def evict(self, victim: Record) -> None:
        """Takes out a sealed block that nobody reads, to make room."""
        self.remove(victim)
        self.counts["evictions"] += 1

    def end(self, owner: object) -> None:
        """Aborts what this owner left unsealed."""
        for record in [r for r in self._records.values() if r.owner is owner]:
            self.remove(record)

    # ---------------------------------------------------------------- memory

    def crc_of(self, record: Record) -> int:
        """Of the bytes of its layers."""
        end = record.offset + record.geometry.layers_length(record.tokens)
        return zlib.crc32(self.readable[record.offset : end])

    def settle(self) -> None:
        """Counts dropped pins and frees the extents nobody can read any more."""
        while self._dropped:
            record, session = self._dropped.popleft()
            record.pins -= 1
            session.pins -= 1
            assert record.pins >= 0 and session.pins >= 0
        for record in [r for r in self._zombies if r.pins == 0]:
            self._zombies.discard(record)
            self._release(record.offset, record.length)

    def check_integrity(self) -> None:
        """Raises AssertionError unless extents and free runs tile the pool exactly."""
        self.settle()
        runs = sorted(
            [*self._free, *((r.offset, r.length) for r in (*self._records.values(), *self._zombies))]
        )
        end = 0
        for offset, length in runs:
            assert offset == end, f"run at {offset} follows one that ends at {end}"
            end = offset + length
        assert end == self.capacity_bytes, f"runs end at {end} of {self.capacity_bytes}"
        assert all((r.state == CREATED) == (r.owner is not None) for r in self._records.values())

    def _find(self, key: bytes) -> Record | None:
        record = self._records.get(key)
        if record is not None and record.state == SEALED and record.expires_at <= time.monotonic():
            self.remove(record)
            return None
        return record

    def _allocate(self, length: int) -> int | None:
        self.settle()
        offset = self._take(length) if len(self._records) + len(self._zombies) < self.max_blocks else None
        if offset is not None or not self._could_fit(length):
            return offset
        unpinned = (r for r in self._records.values() if r.state == SEALED and r.pins == 0)
        for victim in sorted(unpinned, key=lambda r: (r.priority, r.used_at)):
            self.evict(victim)
            offset = self._take(length)
            if offset is not None:
                return offset
        return None

    def _could_fit(self, length: int) -> bool:
        """Whether a run of that length would be free if every unpinned sealed block went."""
        kept = [r for r in (*self._records.values(), *self._zombies) if r.state != SEALED or r.pins]
        edges = [(0, 0), *sorted((r.offset, r.length) for r in kept), (self.capacity_bytes, 0)]
        gaps = (after[0] - (before[0] + before[1]) for before, after in itertools.pairwise(edges))
        return len(kept) < self.max_blocks and max(gaps) >= length

    def _take(self, length: int) -> int | None:
        for at, (offset, run) in enumerate(self._free):
            if run >= length:
                self._free[at : at + 1] = [(offset + length, run - length)] if run > length else []
                return offset
        return None

    def _release(self, offset: int, length: int) -> None:
        at = bisect.bisect(self._free, (offset, length))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before = self._free.pop(at - 1)
            offset, length = before[0], before[1] + length
        bisect.insort(self._free, (offset, length))
