"""Mooncake's master, store and transfer engine: the only module that loads them.

Owns this host's segment, the engine and the memory that reads land in. Never waits by itself: each call takes
as long as Mooncake takes, and a caller that gave up leaves it to its thread. Invariants: memory that a read
lands in belongs to that read until Mooncake has returned from it; an extent of the daemon's pool is mapped
for one transfer, and none is registered, for whoever reaches Mooncake's port may write what is registered.
RDMA reads into registered memory alone: there what is read is copied before anybody verifies it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import threading
import time
from bisect import insort
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstored import log
from kvstored.cluster.transport import RDMA, TCP, Transport, in_use, tell

START_S = 20.0
PROGRESS_S = 3  # without a byte, until a transfer is given up; Mooncake's own is 30
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of Linux; Python does not name them
MAP_FAILED = ctypes.c_void_p(-1).value
LANDING_BYTES = 256 << 20  # of reads in flight, those that hang among them


class Unusable(Exception):
    """Mooncake cannot be used; the text says why."""


class NoRoom(Exception):
    """There is no memory here for a read to land in: nothing is said of the host that would have given it."""


class Place(NamedTuple):
    """Where a replica of an object lies."""

    endpoint: str
    address: int
    length: int


class Extent(NamedTuple):
    """Bytes of a daemon's pool."""

    fd: int
    offset: int
    length: int


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_master(address: str, port: int, log: Any) -> subprocess.Popen[bytes]:
    import mooncake

    program = Path(mooncake.__file__).parent / "mooncake_master"
    words = [f"--rpc_address={address}", f"--rpc_port={port}", "--metrics_host=127.0.0.1", "--metrics_port=0"]
    words += ["--client_ttl=3", "--minloglevel=2"]
    return subprocess.Popen(
        [str(program), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
    )


class Landing:
    """Memory that is given out in pieces, first fit; a piece comes back when nobody writes to it any more."""

    def __init__(self, length: int) -> None:
        self.memory = mmap.mmap(-1, length)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._free = [(0, length)]  # by offset, no two beside each other
        self._lock = threading.Lock()

    def take(self, length: int) -> int | None:
        """The offset of so many bytes. None: there is no room."""
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= length:
                    self._free[index : index + 1] = (
                        [(offset + length, room - length)] if room > length else []
                    )
                    return offset
        return None

    def give_back(self, offset: int, length: int) -> None:
        with self._lock:
            insort(self._free, (offset, length))
            joined: list[tuple[int, int]] = []
            for at, room in self._free:
                if joined and sum(joined[-1]) == at:
                    joined[-1] = (joined[-1][0], joined[-1][1] + room)
                else:
                    joined.append((at, room))
            self._free = joined


class Mapped:
    """Extents of the daemon's pool, each mapped for one transfer. Mooncake gives up a transfer that takes too
    long without ending it: where one failed, nothing is mapped ever again. Not by Python's mmap, which keeps
    a descriptor as long as the addresses are kept."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap = libc.mmap, libc.munmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def fill(self, extent: Extent, transfer: Callable[[int], bool]) -> bool:
        """What the transfer, which is told the address, says. Raises what it raises; OSError where the extent
        cannot be mapped."""
        about = os.fstat(extent.fd)
        if extent.offset + extent.length > about.st_size:
            raise OSError(errno.ENXIO, "the pool ends before")
        grain = max(mmap.ALLOCATIONGRANULARITY, about.st_blksize)  # a huge page
        start = extent.offset - extent.offset % grain
        end = extent.offset + extent.length + -(extent.offset + extent.length) % grain
        base = self._map(None, end - start, mmap.MAP_SHARED | mmap.MAP_POPULATE, extent.fd, start)
        if base is None:
            raise OSError(ctypes.get_errno(), "the pool cannot be mapped")
        good = False
        try:
            good = transfer(base + extent.offset - start)
        finally:
            if good:
                self._munmap(base, end - start)
            else:
                self._bar(base, end - start)
        return good

    def _map(self, at: int | None, length: int, flags: int, fd: int, offset: int) -> int | None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if fd >= 0 else 0
        found: int | None = self._mmap(at, length, protection, flags, fd, offset)
        return None if found == MAP_FAILED else found

    def _bar(self, base: int, length: int) -> None:
        """Nothing may be read or written there from now on: a write ends in an error, not in the pool."""
        flags = MAP_FIXED | MAP_NORESERVE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if self._map(base, length, flags, -1, 0) != base:
            os._exit(1)  # the daemon takes back what was lent once this process has ended


class Mooncake:
    def __init__(self, address: str, master: str, segment_bytes: int, wanted: Transport) -> None:
        """Raises Unusable."""
        try:
            from mooncake.engine import TransferEngine
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise Unusable(f"mooncake cannot be loaded: {error}; pip install 'kvstored[cluster]'") from None
        self._config = ReplicateConfig
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_S))
        self._landing, self._mapped = Landing(LANDING_BYTES), Mapped()
        if not self._start(TransferEngine, address, wanted):
            log.warning("fabric_without_rdma", devices=",".join(wanted.devices))
            wanted = Transport(TCP)
            self._start(TransferEngine, address, wanted)
        self._store = MooncakeDistributedStore()
        end = time.monotonic() + START_S
        of = (wanted.name, ",".join(wanted.devices))
        words = (address, "P2PHANDSHAKE", segment_bytes, 64 << 20, *of, master)
        while code := self._store.setup(*words, self._engine.get_engine()):
            if time.monotonic() > end:
                raise Unusable(f"the pool's master at {master} is not to be had: setup answered {code}")
            time.sleep(0.2)
        self.transport = in_use()
        self.segment: str = self._store.get_hostname()
        self.endpoint = f"{address}:{self._engine.get_rpc_port()}"

    def _start(self, engine: Callable[[], Any], address: str, wanted: Transport) -> bool:
        """False: not over RDMA. Raises Unusable."""
        tell(wanted)
        self._engine = engine()
        code = self._engine.initialize(address, "P2PHANDSHAKE", wanted.name, ",".join(wanted.devices))
        if not code and wanted.name == RDMA:
            code = self._engine.register_memory(self._landing.start, LANDING_BYTES)
        self._copies = wanted.name == RDMA
        if code and not self._copies:
            raise Unusable(f"Mooncake's engine does not start on {address}: {code}")
        return not code

    def put(self, name: str, data: bytes, segment: str) -> bool:
        """Whether it lies, once, in that host's segment, or in another's if that one is full."""
        config = self._config()
        config.replica_num = 1
        config.preferred_segments = [segment]
        return bool(self._store.put(name, data, config) == 0)

    def remove(self, name: str) -> bool:
        """Also while somebody reads it: what is read is verified."""
        return bool(self._store.remove(name, True) == 0)

    def places(self, names: list[str]) -> dict[str, Place]:
        """Of those that are there, and are not given up for some seconds."""
        found = {}
        for name, replicas in self._store.batch_get_replica_desc(names).items():
            for replica in replicas:
                if replica.is_memory_replica():
                    lies = replica.get_memory_descriptor().buffer_descriptor
                    found[name] = Place(lies.transport_endpoint, lies.buffer_address, lies.size)
                    break
        return found

    def read(self, place: Place, length: int) -> bytes | None:
        """The first so many bytes of what lies there. None: its host does not give them. Raises NoRoom."""
        return self._landed(place, 0, length, lambda at: self._landing.memory[at : at + length])

    def _landed(self, place: Place, at: int, length: int, use: Callable[[int], Any]) -> Any:
        """What is made of the bytes that lie there from `at` on, at an offset in the memory that reads land
        in. None: its host does not give them. Raises NoRoom."""
        offset = self._landing.take(length)
        if offset is None:
            raise NoRoom(f"{length} bytes")
        try:
            to = self._landing.start + offset
            if self._engine.transfer_sync_read(place.endpoint, to, place.address + at, length):
                return None
            return use(offset)
        finally:  # Mooncake has returned: it writes there no more, or what it writes late is verified
            self._landing.give_back(offset, length)

    def read_into(self, place: Place, at: int, extent: Extent) -> bool:
        """Fills the extent with what lies there from `at` on. False: its host does not give it. When this
        returns the extent is mapped no more, and nothing of this process can write there. Raises NoRoom."""

        def transfer(to: int) -> bool:
            code = self._engine.transfer_sync_read(place.endpoint, to, place.address + at, extent.length)
            return bool(code == 0)

        def copy(offset: int) -> bool:
            landed = self._landing.start + offset
            return self._mapped.fill(extent, lambda to: bool(ctypes.memmove(to, landed, extent.length)))

        if self._copies:
            return bool(self._landed(place, at, extent.length, copy))
        return self._mapped.fill(extent, transfer)
