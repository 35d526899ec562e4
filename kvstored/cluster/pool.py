"""Where a block's replicas go, and which of them is read: our rules on top of Mooncake, which notices a dead
host after ten seconds and a frozen one after thirty.

A block is one object: its frames as a peer would send them, so key, length, layout and a checksum of each
layer travel with it. Each replica is an object of its own, on a host that is chosen here: one that cannot be
put lies under the next number on the next host. Owns the choice, the deadlines and who is left alone.
Invariant: what get() gives has been parsed, and all its checksums hold; a call that hangs costs its own
thread and landing memory, and a host has few of them.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvstored.cluster.frames import BLOCK_HEAD, WHOLE, Broken, Frame, parse
from kvstored.cluster.mooncake import Place

GET_S, PUT_S = 0.9, 0.8
HEDGE_S = 0.15  # until the next replica is asked beside the first
BYTES_PER_S = 50e6  # a transfer is given so much longer
ALONE_S = 10.0  # for a host that failed or was late
THREADS = 96
MASTER = ""  # as the host of a call
MOST_OF_A_HOST = 16  # calls in flight: of one that stands still they come back after 30 s
SPARE = 4  # numbers of replicas beyond those that are wanted
MAGIC = b"KVF1"


class Backend(Protocol):
    segment: str
    endpoint: str

    def put(self, name: str, data: bytes, segment: str) -> bool: ...
    def places(self, names: list[str]) -> dict[str, Place]: ...
    def read(self, place: Place) -> bytes | None: ...


class Pool:
    def __init__(
        self, backend: Backend, replicas: int, hosts: Callable[[], dict[str, str]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`hosts`: the segments of all members that are known, and their endpoints."""
        self._backend, self._replicas, self._hosts, self._now = backend, replicas, hosts, now
        self._calls = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="mooncake")
        self._alone: dict[str, float] = {}  # endpoints that are left alone, until when
        self._busy: dict[str, int] = {}  # calls in flight
        self._lock = threading.Lock()
        names = (
            "puts", "put_bytes", "put_failed", "replicas", "placed_elsewhere", "hits", "hit_bytes", "misses",
            "failed_over", "late", "corrupt",
        )  # fmt: skip
        self.counts = dict.fromkeys(names, 0)

    # ---- calls that may hang

    def _submit(self, host: str, call: Any, *arguments: Any) -> concurrent.futures.Future[Any] | None:
        """None: that host has as many calls in flight as it may have."""
        with self._lock:
            if self._busy.get(host, 0) >= MOST_OF_A_HOST:
                return None
            self._busy[host] = self._busy.get(host, 0) + 1

        def run() -> Any:
            try:
                return call(*arguments)
            finally:
                with self._lock:
                    self._busy[host] -= 1

        return self._calls.submit(run)

    def _leave_alone(self, host: str) -> None:
        if host != self._backend.endpoint:
            self._alone[host] = self._now() + ALONE_S

    def _welcome(self, host: str) -> bool:
        return self._alone.get(host, 0.0) <= self._now()

    def _places(self, names: list[str]) -> dict[str, Place] | None:
        """None: the master does not answer."""
        future = self._submit(MASTER, self._backend.places, names)
        try:
            return future.result(GET_S) if future is not None else None
        except concurrent.futures.TimeoutError:
            self.counts["late"] += 1
        except Exception:  # whatever Mooncake's binding throws: the pool has nothing then
            self.counts["misses"] += 1
        return None

    # ---- putting

    def _names(self, space: str, key: bytes) -> list[str]:
        return [f"{space}/{key.hex()}/{number}" for number in range(self._replicas + SPARE)]

    def _in_order(self, key: bytes) -> list[tuple[str, str]]:
        """Segments and endpoints of the hosts that are welcome, the same order on every host (rendezvous
        hashing: Thaler and Ravishankar, 1998)."""

        def weight(host: tuple[str, str]) -> bytes:
            return hashlib.sha256(key + host[0].encode()).digest()

        return sorted((host for host in self._hosts().items() if self._welcome(host[1])), key=weight)

    def wants(self, space: str, key: bytes) -> bool:
        """Whether fewer replicas of it can be reached than there should be."""
        found = self._places(self._names(space, key))
        if found is None:
            return True
        there = {place.endpoint for place in found.values() if self._welcome(place.endpoint)}
        return len(there) < min(self._replicas, len(self._in_order(key)))

    def put(self, space: str, key: bytes, block: list[Frame]) -> int:
        """How many replicas lie in the pool then."""
        data = MAGIC + b"".join(frame.encoded() for frame in block)
        names, found = self._names(space, key), self._places(self._names(space, key))
        if found is None:
            self.counts["put_failed"] += 1
            return 0
        there = {place.endpoint for place in found.values() if self._welcome(place.endpoint)}
        free = [name for name in names if name not in found]
        hosts = [host for host in self._in_order(key) if host[1] not in there]
        placed, limit_s = len(there), PUT_S + len(data) / BYTES_PER_S
        elsewhere = False
        while placed < self._replicas and free and hosts:
            count = min(self._replicas - placed, len(free), len(hosts))
            tried = [(free.pop(0), hosts.pop(0)) for _ in range(count)]
            done = self._put_all(tried, data, limit_s)
            placed += done
            self.counts["placed_elsewhere"] += done if elsewhere else 0
            elsewhere = True
        self.counts["puts" if placed else "put_failed"] += 1
        self.counts["put_bytes"] += len(data) if placed else 0
        self.counts["replicas"] += placed
        return placed

    def _put_all(self, tried: list[tuple[str, tuple[str, str]]], data: bytes, limit_s: float) -> int:
        end, done, waiting = self._now() + limit_s, 0, []
        for name, (segment, host) in tried:
            future = self._submit(host, self._backend.put, name, data, segment)
            if future is not None:
                waiting.append((future, host))
        for future, host in waiting:
            try:
                if future.result(max(0.0, end - self._now())):
                    done += 1
                    continue
            except concurrent.futures.TimeoutError:
                self.counts["late"] += 1
            except Exception:  # as a put that failed
                pass
            self._leave_alone(host)
        return done

    # ---- getting

    def get(self, space: str, key: bytes) -> list[Frame] | None:
        """A block's frames. None: nobody has it, or not in time, or what came is not that block."""
        found = self._places(self._names(space, key))

        def rank(place: Place) -> tuple[bool, bool]:  # here first; who is left alone if nobody else has it
            return not self._welcome(place.endpoint), place.endpoint != self._backend.endpoint

        block = self._first_good(sorted((found or {}).values(), key=rank), key)
        self.counts["misses" if block is None else "hits"] += 1
        return block

    def _first_good(self, places: list[Place], key: bytes) -> list[Frame] | None:
        """Asks one after the other, the next beside those that have not answered yet."""
        waiting: dict[concurrent.futures.Future[Any], Place] = {}
        asked = 0
        end = self._now() + GET_S + max((place.length for place in places), default=0) / BYTES_PER_S
        while self._now() < end:
            if asked < len(places):
                place = places[asked]
                asked += 1
                future = self._submit(place.endpoint, self._backend.read, place)
                if future is not None:
                    waiting[future] = place
            if not waiting:
                if asked == len(places):
                    return None
                continue
            hedge_s = HEDGE_S if asked < len(places) else end - self._now()
            ready, _ = concurrent.futures.wait(
                waiting, max(0.0, hedge_s), return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in ready:
                place = waiting.pop(future)
                if (block := self._checked(future, place, key)) is not None:
                    self._note_late(waiting.values())
                    self.counts["failed_over"] += asked > 1
                    return block
        self._note_late(waiting.values())
        return None

    def _note_late(self, places: Iterable[Place]) -> None:
        for place in places:
            self.counts["late"] += 1
            self._leave_alone(place.endpoint)

    def _checked(
        self, future: concurrent.futures.Future[Any], place: Place, key: bytes
    ) -> list[Frame] | None:
        try:
            data = future.result(0)
        except Exception:  # as a read that failed
            data = None
        if not data:
            self._leave_alone(place.endpoint)
            return None
        try:
            if not data.startswith(MAGIC):
                raise Broken("no block")
            found = list(parse(data[len(MAGIC) :]))
            heads = [frame.payload[:32] for frame in found if frame.kind == BLOCK_HEAD]
            if heads != [key] or found[-1].kind != WHOLE:
                raise Broken("another block")
        except Broken:
            self.counts["corrupt"] += 1
            return None
        self.counts["hit_bytes"] += len(data)
        return found

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
