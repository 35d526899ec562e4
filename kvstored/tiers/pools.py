"""The files behind the shared memory: made once, found again by the next daemon, removed when they fit no
more.

Owns state.json and the names in it. A pool's segments are `<prefix>.table`, `.progress` and `.pool` (and the
session pages `<prefix>.s.*`, which the native half makes, always POSIX shared memory). What they are made of
and whether one is to be believed is for pool_files.py.

Never maps a segment and never reads a byte of one: what they contain is for the Store to judge.

Invariants: a segment is adopted only if it is this user's alone and of the size the same geometry gives;
names are written to state.json before the files exist, and begin with a mark of the runtime directory, so
none is ever orphaned, whatever becomes of state.json; of two pools of one namespace one alone is served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvstored import log
from kvstored.config.config import Config
from kvstored.config.units import approximate_size
from kvstored.errors import StartupError
from kvstored.process import runtime_dir
from kvstored.process.fd_store import Keeper
from kvstored.tiers import pool_list
from kvstored.tiers.pool_files import (
    HUGE_DIR,
    PREFIX,
    ROLES,
    SEALED,
    SHM_DIR,
    Named,
    Place,
    Sealed,
    chosen,
    has_huge_pages,
    is_path,
    lying_about,
    mark_of,
    new_prefix,
    note_home,
)

STATE_VERSION = 1
CLOSE_AFTER_S = 1.0


@dataclass(frozen=True)
class Geometry:
    """What must be equal for a pool to be adopted."""

    namespace: str
    capacity_bytes: int
    max_blocks: int
    table_bytes: int
    progress_bytes: int

    def also(self, table_bytes: int) -> Geometry:
        """The same pool with a table as an earlier version made it."""
        return dataclasses.replace(self, table_bytes=table_bytes)

    def file_bytes(self, role: str) -> int:
        return {"table": self.table_bytes, "progress": self.progress_bytes, "pool": self.capacity_bytes}[role]


@dataclass(frozen=True)
class Pool:
    """The open segments of one namespace. The descriptors are the caller's to close()."""

    geometry: Geometry
    pool_id: bytes
    prefix: str
    place: str  # a directory, or SEALED
    table_fd: int
    progress_fd: int
    pool_fd: int
    adopted: bool

    @property
    def huge_pages(self) -> bool:
        return has_huge_pages(self.place)

    @property
    def fds(self) -> tuple[int, int, int]:
        """In the order of ROLES."""
        return self.table_fd, self.progress_fd, self.pool_fd

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Segments:
    """The pools of one runtime directory. The caller holds its Lock."""

    def __init__(
        self,
        config: Config,
        geometries: list[Geometry],
        retire: Callable[[int], None],
        older: Callable[[Geometry], Geometry] = lambda geometry: geometry,
    ) -> None:
        """`retire` is told the table of each pool that is given up, so that its readers learn of it before
        it is gone. A pool is adopted too if its geometry is `older` of the wanted one."""
        self._older = older
        self._path = config.in_dir("state.json")
        self._keeper = Keeper()
        self._place = self._placed(chosen(config.pool, config.pool_dir))
        # If nobody chose by name, a pool that lies where the choice then fell is as good as any.
        self._by_itself = config.pool != SEALED and not config.pool_dir
        self._retire = retire
        self._geometries = geometries
        self._pools: dict[str, Pool] = {}
        self._undone: list[Pool] = []
        self._planned = False  # whether state.json names what this start makes
        self._replaced: dict[str, dict[str, Any]] = {}  # what is given up once this daemon serves

    @property
    def kept(self) -> bool:
        """Whether the next daemon will find the memory."""
        return self._place.name != SEALED or self._keeper.keeps

    def _placed(self, name: str) -> Place:
        return Sealed(self._keeper) if name == SEALED else Named(name)

    def open(self, fresh: bool) -> list[Pool]:
        """Adopts what fits, makes the rest. With `fresh` nothing is adopted. Raises StartupError if the
        memory is too small."""
        state, why = runtime_dir.read_json(self._path)
        known = {} if state is None else _understood(state)
        if state is None and why != "absent":
            log.warning("state_ignored", path=self._path, why=why)
        elif state is not None and not known:
            log.warning("state_ignored", path=self._path, why="another version or shape")
        wanted = {geometry.namespace: geometry for geometry in self._geometries}
        given_up: dict[str, str] = {}
        for namespace, entry in known.items():
            if why_not := "fresh start asked for" if fresh else self._adopt(entry, wanted.get(namespace)):
                given_up[namespace] = why_not
        # Before anything is removed: a start that cannot succeed (a typing error in --memory) must cost no
        # block.
        strays = self._strays(known)
        roomy = self._room_somewhere([known[namespace] for namespace in given_up] + strays)
        for entry in strays:
            log.warning("pool_removed", prefix=entry["prefix"], why="of this directory, not in state.json")
            self._give_up(entry, at_leisure=roomy)
        for namespace, why_not in given_up.items():
            log.info("pool_discarded", namespace=namespace, why=why_not)
            self._replaced[namespace] = known[namespace]
        if not roomy:  # the new pools need this memory
            self.settle(at_leisure=False)
        missing = [geometry for geometry in self._geometries if geometry.namespace not in self._pools]
        if missing or given_up:
            self._make(missing)
        return [self._pools[geometry.namespace] for geometry in self._geometries]

    def settle(self, at_leisure: bool = True) -> None:
        """Gives up what the new pools replace: last of all, since a start that fails on something else must
        cost no block."""
        while self._replaced:
            self._give_up(self._replaced.popitem()[1], at_leisure)
        used = {f"{pool.prefix}.{role}" for pool in self._pools.values() for role in ROLES}
        for name in self._keeper.settle(used):
            log.info("descriptor_given_up", name=name)

    def replace(self, namespace: str) -> Pool:
        """A new pool for one whose content the Store refused."""
        old = self._pools.pop(namespace)
        with contextlib.suppress(OSError):
            self._retire(old.table_fd)
        old.close()
        self._placed(old.place).remove(old.prefix)
        self._make([geometry for geometry in self._geometries if geometry.namespace == namespace])
        return self._pools[namespace]

    def give_up(self, discard: bool) -> None:
        """Leaves them for the next daemon, or removes them: with `discard`, and where no daemon would find
        them, because the runtime directory is gone."""
        if discard or not self.kept or not os.path.isdir(os.path.dirname(self._path)):
            return self.discard()
        held = (self._placed(pool.place).held_bytes(pool.prefix).values() for pool in self._pools.values())
        if kept_bytes := sum(map(sum, held)):
            free = f"kvstored stop --discard --dir {os.path.dirname(self._path)}"
            log.info("memory_kept", size=approximate_size(kept_bytes), bytes=kept_bytes, free_with=free)
        return None

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """A start that failed leaves no pool that was not there before, and those that were (where memory had
        room for both, else settle() came first)."""
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        self._undone = [pool for pool in self._pools.values() if not pool.adopted]
        self._pools = {name: pool for name, pool in self._pools.items() if pool.adopted}
        for pool in self._undone:
            self._placed(pool.place).remove(pool.prefix)
        if self._replaced or (self._planned and self._pools):
            self._save(self._replaced)
            self._replaced = {}
        elif self._planned:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def discard(self) -> None:
        """Removes everything: the next daemon starts empty."""
        self.settle()
        for pool in self._pools.values():
            with contextlib.suppress(OSError):
                self._retire(pool.table_fd)
            self._placed(pool.place).remove(pool.prefix)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        for pool in (*self._pools.values(), *self._undone):
            pool.close()

    def _adopt(self, entry: dict[str, Any], geometry: Geometry | None) -> str:
        """Takes the pool over and returns "", or says why not."""
        if geometry is None:
            return "the namespace is no longer configured"
        if not entry["complete"]:
            return "the daemon that made it did not finish"
        place = self._place
        if self._by_itself and entry["pool_dir"] in (SHM_DIR, HUGE_DIR):
            place = self._placed(entry["pool_dir"])
        if entry["pool_dir"] != place.name:
            return f"pool_dir was {entry['pool_dir']}"
        if entry["geometry"] == dataclasses.asdict(self._older(geometry)):
            geometry = self._older(geometry)
        elif entry["geometry"] != dataclasses.asdict(geometry):
            return "another geometry"
        fds: list[int] = []
        for role in ROLES:
            fd, why_not = place.open(entry["prefix"], role, geometry.file_bytes(role))
            if why_not:
                for opened in fds:
                    os.close(opened)
                return f"{role}: {why_not}"
            fds.append(fd)
        self._pools[geometry.namespace] = Pool(
            geometry, bytes.fromhex(entry["pool_id"]), entry["prefix"], place.name, *fds, True
        )
        return ""

    def _give_up(self, entry: dict[str, Any], at_leisure: bool) -> None:
        """Retires and removes a pool. Giving its memory back takes a second per 30 GiB: `at_leisure`, where
        the new pool does not need it, that happens while the daemon already serves."""
        place = self._placed(entry["pool_dir"])
        if at_leisure:
            pool_fd, why_not = place.open(entry["prefix"], "pool", 0)
            if not why_not:  # the last reference: the memory goes when it is closed
                later = threading.Timer(CLOSE_AFTER_S, os.close, (pool_fd,))
                later.daemon = True
                later.start()
        fd, why_not = place.open(entry["prefix"], "table", 0)
        if not why_not:
            with contextlib.suppress(OSError):
                self._retire(fd)
            os.close(fd)
        place.remove(entry["prefix"])

    def _strays(self, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Pools made by daemons of this runtime directory that its state.json does not name: it was lost, or
        nobody can read it. No daemon serves them, since the caller holds the directory's lock."""
        named = {entry["prefix"] for entry in known.values()}
        places = {SHM_DIR, HUGE_DIR, self._place.name} - {SEALED}
        found = lying_about(f"kvstored-{mark_of(os.path.dirname(self._path))}", places)
        return [
            {"prefix": prefix, "pool_dir": place}
            for prefix, place in found.items()
            if prefix not in named and PREFIX.fullmatch(prefix)
        ]

    def _make(self, geometries: list[Geometry]) -> None:
        home = os.path.dirname(self._path)
        plans = {
            g.namespace: (g, new_prefix(home, self._geometries.index(g)), secrets.token_bytes(16))
            for g in geometries
        }
        # First the names, then the files: a daemon that dies in between leaves nothing that the next does not
        # find.
        self._save({name: _entry(*plan, self._place.name, False) for name, plan in plans.items()})
        self._planned = True
        try:
            for namespace, (geometry, prefix, pool_id) in plans.items():
                if self._place.name != SEALED:
                    note_home(prefix, home)
                fds = [self._place.create(prefix, role, geometry.file_bytes(role)) for role in ROLES]
                self._pools[namespace] = Pool(geometry, pool_id, prefix, self._place.name, *fds, False)
        except BaseException:
            for _, prefix, _ in plans.values():
                self._place.remove(prefix)
            raise
        self._save({})

    def _save(self, planned: dict[str, dict[str, Any]]) -> None:
        entries = {
            name: _entry(p.geometry, p.prefix, p.pool_id, p.place, True) for name, p in self._pools.items()
        } | planned
        runtime_dir.write_whole(
            self._path, json.dumps({"version": STATE_VERSION, "pools": entries}, indent=1).encode()
        )

    def _room_somewhere(self, given_up: list[dict[str, Any]]) -> bool:
        """_check_space(), and if nobody chose the tmpfs of huge pages and it is too small, ordinary ones."""
        try:
            return self._check_space(given_up)
        except StartupError as too_small:
            if not self._by_itself or self._place.name != HUGE_DIR:
                raise
            log.warning("huge_pages_not_used", path=HUGE_DIR, why=str(too_small))
        self._place = self._placed(SHM_DIR)
        return self._check_space(given_up)

    def _check_space(self, given_up: list[dict[str, Any]]) -> bool:
        """Refuses a file system that cannot hold what is promised, before anything is made: later it would be
        a SIGBUS.

        What the pools to be given up hold counts as free. Whether there is room even before it is free.
        """
        needs: dict[object, int] = {}
        about: dict[object, tuple[int | None, str]] = {}  # device -> what it can still give, how it is called
        for geometry in self._geometries:
            pool = self._pools.get(geometry.namespace)
            place = self._placed(pool.place) if pool else self._place
            for role, fd in zip(ROLES, pool.fds if pool else (None,) * 3, strict=True):
                device, called = place.device(role)
                held = os.fstat(fd).st_blocks * 512 if fd is not None else 0
                needs[device] = needs.get(device, 0) + max(0, geometry.file_bytes(role) - held)
                about[device] = place.free_bytes(role), called
        held_by_old = [self._placed(entry["pool_dir"]).held_bytes(entry["prefix"]) for entry in given_up]
        roomy = True
        for device, need_bytes in needs.items():
            free_bytes, called = about[device]
            if free_bytes is None:
                continue
            roomy = roomy and need_bytes <= free_bytes
            free_bytes += sum(held.get(device, 0) for held in held_by_old)
            if need_bytes > free_bytes:
                advised = pool_list.advice()
                lacking = need_bytes - free_bytes
                raise StartupError(
                    f"memory: {called} has {free_bytes} bytes free now ({approximate_size(free_bytes)}), "
                    f"{need_bytes} are needed: {lacking} more ({approximate_size(lacking)}): "
                    "give less --memory, or a larger file system" + (f"; {advised}" if advised else "")
                )
        return roomy


def _entry(geometry: Geometry, prefix: str, pool_id: bytes, place: str, complete: bool) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "pool_id": pool_id.hex(),
        "pool_dir": place,
        "complete": complete,
        "geometry": dataclasses.asdict(geometry),
    }


def _understood(state: Any) -> dict[str, dict[str, Any]]:
    """The pools that state.json names, {} if it has another shape. Nothing that follows can leave the
    directories it names."""
    if (
        not isinstance(state, dict)
        or state.get("version") != STATE_VERSION
        or not isinstance(state.get("pools"), dict)
    ):
        return {}
    for entry in state["pools"].values():
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("prefix"), str)
            and PREFIX.fullmatch(entry["prefix"])
            and isinstance(entry.get("pool_id"), str)
            and re.fullmatch(r"[0-9a-f]{32}", entry["pool_id"])
            and isinstance(entry.get("pool_dir"), str)
            and (os.path.isabs(entry["pool_dir"]) or entry["pool_dir"] == SEALED)
            and is_path(entry["pool_dir"])
            and isinstance(entry.get("complete"), bool)
            and isinstance(entry.get("geometry"), dict)
        ):
            return {}
    prefixes = [entry["prefix"] for entry in state["pools"].values()]
    return state["pools"] if len(set(prefixes)) == len(prefixes) else {}
