"""Where a block's replicas go, and which of them is read: our rules on top of Mooncake, which notices a dead
host after ten seconds and a frozen one after three, as it is told, or thirty.

Each replica of a block is an object of its own (stored.py), on a host that is chosen here: one that cannot be
put lies under the next number on the next host. Owns the choice, the deadlines and who is left alone.
Invariants: the frames that are given have been parsed, and all their checksums hold; a call that hangs costs
its own thread and the memory that it writes to, and a host has few of them.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from kvstored.cluster.frames import Broken, Frame
from kvstored.cluster.mooncake import Extent, NoRoom, Place
from kvstored.cluster.stored import FIRST_BYTES, FORMAT, Described, describe, described_bytes, pack

GET_S, PUT_S = 0.9, 0.8
HEDGE_S, HEDGE_BYTES_PER_S = 0.15, 400e6  # until the next replica is asked beside the first
BYTES_PER_S = 50e6  # a transfer is given so much longer
ALONE_S = 10.0  # for a host that failed or was late
FULL_S = 30.0  # for a host that passed a replica on: no other is put there
THREADS = 96
MASTER = ""  # as the host of a call
MOST_OF_A_HOST = 16  # calls in flight: of one that stands still they come back after some seconds
SPARE = 4  # numbers of replicas beyond those that are wanted
SMALL = 64 << 10  # an object that is read whole at once
ALIVE_S = 0.5  # between two words to who waits
Alive = Callable[[], None]


def _hedge_s(length: int) -> float:
    return HEDGE_S + length / HEDGE_BYTES_PER_S


class Backend(Protocol):
    segment: str
    endpoint: str

    def put(self, name: str, data: bytes, segment: str) -> bool: ...
    def remove(self, name: str) -> bool: ...
    def places(self, names: list[str]) -> dict[str, Place]: ...
    def read(self, place: Place, length: int) -> bytes | None: ...
    def read_into(self, place: Place, at: int, extent: Extent) -> bool: ...


class Reached(NamedTuple):
    """Of a block: the hosts that can be reached and have it, and whether another would take a replica."""

    hosts: frozenset[str]
    room: bool


class Pool:
    def __init__(
        self, backend: Backend, replicas: int, hosts: Callable[[], dict[str, str]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`hosts`: the segments of all members that are known, and their endpoints."""
        self._backend, self._replicas, self._hosts, self._now = backend, replicas, hosts, now
        self._calls = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="mooncake")
        self._alone: dict[str, float] = {}  # endpoints that are left alone, until when
        self._full: dict[str, float] = {}  # endpoints that passed a replica on, until when
        self._busy: dict[str, int] = {}  # calls in flight
        self._lock = threading.Lock()
        names = (
            "puts", "put_bytes", "put_failed", "replicas", "placed_elsewhere", "mended", "hits",
            "hit_bytes", "straight", "misses", "failed_over", "late", "corrupt",
        )  # fmt: skip
        self.counts = dict.fromkeys(names, 0)
        self.longest_put_s = 0.0

    # ---- calls that may hang

    def _submit(self, host: str, call: Any, *arguments: Any) -> concurrent.futures.Future[Any] | None:
        """None: that host has as many calls in flight as it may have, or there is no thread for this one."""
        made: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._busy.get(host, 0) >= MOST_OF_A_HOST:
                return None
            self._busy[host] = self._busy.get(host, 0) + 1

        def over() -> None:
            with self._lock:
                self._busy[host] -= 1

        def run() -> None:
            if not made.set_running_or_notify_cancel():
                return
            try:
                result = call(*arguments)
            except BaseException as error:
                over()
                made.set_exception(error)
            else:
                over()
                made.set_result(result)

        try:
            self._calls.submit(run)
        except RuntimeError:  # no new thread; but it is in the queue, and a thread that is there may have it
            if made.cancel():
                over()
                return None
        return made

    def _leave_alone(self, host: str) -> None:
        if host != self._backend.endpoint:
            self._alone[host] = self._now() + ALONE_S

    def _welcome(self, host: str) -> bool:
        return self._alone.get(host, 0.0) <= self._now()

    def _places(self, names: list[str]) -> dict[str, Place] | None:
        """None: the master does not answer."""
        found: dict[str, Place] | None = self._of_master(self._backend.places, names)
        return found

    def _of_master(self, call: Any, *arguments: Any) -> Any:
        future = self._submit(MASTER, call, *arguments)
        try:
            return future.result(GET_S) if future is not None else None
        except concurrent.futures.TimeoutError:
            self.counts["late"] += 1
        except Exception:  # whatever Mooncake's binding throws: the pool has nothing then
            self.counts["misses"] += 1
        return None

    # ---- putting

    def _names(self, space: str, key: bytes) -> list[str]:
        return [f"{FORMAT}/{space}/{key.hex()}/{number}" for number in range(self._replicas + SPARE)]

    def _in_order(self, key: bytes) -> list[tuple[str, str]]:
        """Segments and endpoints of the hosts that are welcome, the same order on every host (rendezvous
        hashing: Thaler and Ravishankar, 1998)."""

        def weight(host: tuple[str, str]) -> bytes:
            return hashlib.sha256(key + host[0].encode()).digest()

        return sorted((host for host in self._hosts().items() if self._welcome(host[1])), key=weight)

    def hosts(self) -> frozenset[str]:
        """Endpoints of the members, this one's among them."""
        return frozenset(self._hosts().values())

    def wanted(self) -> int:
        """Replicas that a block should have: no more than there are hosts."""
        return min(self._replicas, len(self.hosts()))

    def reached(self, space: str, key: bytes) -> Reached | None:
        """None: the master does not answer."""
        names, found = self._names(space, key), self._places(self._names(space, key))
        if found is None:
            return None
        there = self._reached(found)
        return Reached(there, len(found) < len(names) and self.has_room(there))

    def _reached(self, found: Mapping[str, Place]) -> frozenset[str]:
        """By host: two that lie on the same one are lost together, and who is no member is gone."""
        hosts = self.hosts()
        return frozenset(
            place.endpoint
            for place in found.values()
            if place.endpoint in hosts and self._welcome(place.endpoint)
        )

    def has_room(self, there: frozenset[str]) -> bool:
        """Whether a replica is missing, and a host would take it."""
        return len(there) < self._replicas and bool(self._takers(list(self._hosts().items()), there))

    def _takers(self, hosts: list[tuple[str, str]], there: frozenset[str]) -> list[tuple[str, str]]:
        """Those that are welcome, have none and are not full; full ones where nobody has any."""
        others = [host for host in hosts if host[1] not in there and self._welcome(host[1])]
        return [host for host in others if self._full.get(host[1], 0.0) <= self._now()] or (
            [] if there else others
        )

    def put(self, space: str, key: bytes, block: list[Frame]) -> frozenset[str]:
        """The hosts that can be reached and have it then. Raises Broken for what is no block."""
        data, began_s = pack(block), self._now()
        names, found = self._names(space, key), self._places(self._names(space, key))
        if found is None:
            self.counts["put_failed"] += 1
            return frozenset()
        there = before = self._reached(found)
        free = [name for name in names if name not in found]
        hosts = self._takers(self._in_order(key), there)
        limit_s, elsewhere, puts = PUT_S + len(data) / BYTES_PER_S, False, 0
        while len(there) < self._replicas and free and hosts:
            count = min(self._replicas - len(there), len(free), len(hosts))
            tried = [(free.pop(0), hosts.pop(0)) for _ in range(count)]
            now = self._landed(names, self._put_all(tried, data, limit_s), there)
            puts += len(now - there)
            self.counts["placed_elsewhere"] += len(now - there) if elsewhere else 0
            there, elsewhere = now, True
        self.longest_put_s = max(self.longest_put_s, self._now() - began_s)
        self.counts["put_failed"] += not there
        self.counts["puts"] += bool(there and not before)
        self.counts["mended"] += bool(before and len(there) > len(before))
        self.counts["put_bytes"] += len(data) if puts else 0
        self.counts["replicas"] += puts
        return there

    def _landed(self, names: list[str], done: dict[str, str], there: frozenset[str]) -> frozenset[str]:
        """The hosts that have it now. One that was full has passed it on: nothing is put there for a while,
        and what landed beside another replica is removed; if Mooncake does not, it keeps its name."""
        found = self._places(names) if done else None
        if found is None:
            return there | frozenset(done.values())
        first = set()
        for name in names:  # by number: others that do so at the same time keep the same one
            at = found[name].endpoint if name in found else None
            if name in done and at != done[name]:
                self._full[done[name]] = self._now() + FULL_S
            if name in done and at in first:
                self._of_master(self._backend.remove, name)
            first.add(at)
        return self._reached(found)

    def _put_all(
        self, tried: list[tuple[str, tuple[str, str]]], data: bytes, limit_s: float
    ) -> dict[str, str]:
        """What was taken, by name: the hosts to which it was given."""
        end, done, waiting = self._now() + limit_s, dict[str, str](), []
        for name, (segment, host) in tried:
            future = self._submit(host, self._backend.put, name, data, segment)
            if future is not None:
                waiting.append((future, name, host))
        for future, name, host in waiting:
            try:
                if future.result(max(0.0, end - self._now())):
                    done[name] = host
                    continue
            except concurrent.futures.TimeoutError:
                self.counts["late"] += 1
            except Exception:  # as a put that failed
                pass
            self._leave_alone(host)
        return done

    # ---- getting

    def find(self, space: str, key: bytes) -> list[Place]:
        """Its replicas, in the order in which they are asked."""
        found = self._places(self._names(space, key)) or {}

        def rank(place: Place) -> tuple[bool, bool]:  # here first; who is left alone if nobody else has it
            return not self._welcome(place.endpoint), place.endpoint != self._backend.endpoint

        return sorted(found.values(), key=rank)

    def describe(self, places: list[Place], key: bytes, alive: Alive) -> tuple[Described, list[Frame]] | None:
        """What the block is; and of a small one the rest of its frames. None: nobody has it, or not in time,
        or what came is not that block."""

        def read(place: Place) -> bytes | None:
            length = place.length if place.length <= SMALL else min(FIRST_BYTES, place.length)
            data = self._backend.read(place, length)
            if data and length < described_bytes(data) <= place.length:
                data = self._backend.read(place, described_bytes(data))
            return data

        def checked(data: bytes, place: Place) -> tuple[Described, list[Frame]]:
            known = describe(data, key, place.length)
            if len(data) < place.length:
                return known, []
            return known, known.frames(memoryview(data)[known.at :])

        found: tuple[Described, list[Frame]] | None = self._first_good(places, read, checked, alive)
        return found

    def whole(self, places: list[Place], known: Described, alive: Alive) -> list[Frame] | None:
        """The rest of that block's frames. None: as describe()."""
        found: list[Frame] | None = self._whole(places, known, alive)
        return found

    def _whole(self, places: list[Place], known: Described, alive: Alive, also: Any = None) -> Any:
        key = known.head.payload[:32]

        def checked(data: bytes, place: Place) -> list[Frame]:
            found = describe(data, key, place.length)
            if (found.layout, found.sums) != (known.layout, known.sums):
                raise Broken("another block")
            return found.frames(memoryview(data)[found.at :])

        return self._first_good(places, lambda at: self._backend.read(at, at.length), checked, alive, also)

    def bring(
        self, places: list[Place], known: Described, extent: Extent, alive: Alive, over: Callable[[], None]
    ) -> list[Frame] | bool | None:
        """The block's extent to its place. True: it is there, and has yet to be verified. Frames: another
        replica came sooner, as whole() has it. None: as describe(). Unless it is True, over() is called as
        soon as nothing is written to the extent any more, which may be long after this has returned."""
        writing: concurrent.futures.Future[Any] | None = None
        found: list[Frame] | bool | None = None
        try:
            for index, place in enumerate(places):
                into = self._submit(place.endpoint, self._backend.read_into, place, known.at, extent)
                if into is None:
                    continue
                writing = into
                if not concurrent.futures.wait([into], _hedge_s(extent.length)).done:
                    found = self._whole(places[index + 1 :], known, alive, (into, place))
                    return found
                writing = None
                if self._filled(into, place):
                    found = True
                    return found
            return None
        finally:
            if found is not True:
                over() if writing is None else writing.add_done_callback(lambda _: over())

    def _filled(self, into: concurrent.futures.Future[Any], place: Place) -> bool:
        try:
            if into.result(0):
                return True
        except OSError:  # the extent cannot be mapped: nothing is said of the host
            return False
        except Exception:  # as a read that failed
            pass
        self._leave_alone(place.endpoint)
        return False

    def _first_good(
        self, places: list[Place], read: Any, checked: Any, alive: Alive, also: Any = None
    ) -> Any:
        """What checked(read(place), place) gives of the first that is whole: asks one after the other, the
        next beside those that have not answered yet. `also`: one that fills an extent, and its place, which
        gives True."""
        waiting: dict[concurrent.futures.Future[Any], Place] = {also[0]: also[1]} if also else {}
        asked = 0
        length = max((place.length for place in places), default=also[1].length if also else 0)
        end = self._now() + GET_S + length / BYTES_PER_S
        while self._now() < end:
            if asked < len(places):
                place = places[asked]
                asked += 1
                future = self._submit(place.endpoint, read, place)
                if future is not None:
                    waiting[future] = place
            if not waiting:
                if asked == len(places):
                    return None
                continue
            for future in self._ready(waiting, end, asked < len(places), length, alive):
                place = waiting.pop(future)
                found = (
                    self._filled(future, place) if also and future is also[0]
                    else self._good(future, place, checked)
                )  # fmt: skip
                if found:
                    self._note_late(waiting.values())
                    self.counts["failed_over"] += asked > 1 or (also is not None and found is not True)
                    return found
        self._note_late(waiting.values())
        return None

    def _ready(self, waiting: Any, end: float, more: bool, length: int, alive: Alive) -> Any:
        """Those that have answered. With `more` to ask it waits no longer than a hedge."""
        until = min(end, self._now() + _hedge_s(length)) if more else end
        while True:
            pause_s = max(0.0, min(until - self._now(), ALIVE_S))
            ready, _ = concurrent.futures.wait(
                waiting, pause_s, return_when=concurrent.futures.FIRST_COMPLETED
            )
            if ready or self._now() >= until:
                return ready
            alive()

    def _note_late(self, places: Iterable[Place]) -> None:
        for place in places:
            self.counts["late"] += 1
            self._leave_alone(place.endpoint)

    def _good(self, future: concurrent.futures.Future[Any], place: Place, checked: Any) -> Any:
        try:
            data = future.result(0)
        except NoRoom:
            return None
        except Exception:  # as a read that failed, or of what is no block
            data = None
        if not data:
            self._leave_alone(place.endpoint)
            return None
        try:
            return checked(data, place)
        except Broken:
            self.counts["corrupt"] += 1
            return None

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
