"""The tiers below memory: one disk tier per namespace, opened, started, watched and stopped.

Owns the native tiers and the directories they work in. What is written, loaded and removed is decided
natively (`native/core/disk/tier.h`); here it is configured, and its state is told. Invariants: a tier stops
before its store closes, and its directories are free only after that; a disk that does not answer holds up
nobody here, but who closes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from kvstored import _core, log
from kvstored.config.config import Config
from kvstored.errors import StartupError, StoreError
from kvstored.telemetry.histogram import Histogram
from kvstored.telemetry.problems import Degraded
from kvstored.tiers.disk_directories import Directories, left_over

# A schedule of failures for the file system below the tier (native/core/files/faults.h): for tests only.
FAULTS = "KVSTORED_FAULTS"
STATES = {"full": "disk_full", "read_only": "disk_read_only", "failed": "disk_failed"}
ANSWER_S = 2.0  # a disk that has not answered by then is done without, until it does


class Tier:
    """The tier of one namespace. Each of its directories is opened on a thread of its own, which may never
    return from there: until it does nothing is found there and nothing is written, and what is deleted is
    kept in mind. The tier begins with those that have answered."""

    def __init__(self, native: Any, directories: Directories, name: str, loads: str, others: Any) -> None:
        self.native = native
        self.directories = directories
        self.errors: dict[str, Exception] = {}  # by path: why it could not be opened
        self.answered = threading.Event()  # each was opened, or could not be
        self._name = name
        self._loads = loads
        self._others = others  # called when all were opened
        self._silent = list(directories.paths)
        self._engines: dict[str, Any] = {}  # of those that were opened
        self._changing = threading.Lock()
        self._wanted = self._begun = self._closed = False
        for number, path in enumerate(directories.paths):
            threading.Thread(
                target=self._open, args=(number, path), name=f"open-{name}-{number}", daemon=True
            ).start()

    def _open(self, number: int, path: str) -> None:
        engine = error = None
        try:
            self.directories.open(number)
            engine = self.native.open(number)
        except (StartupError, StoreError, OSError, RuntimeError) as why:  # the last: no thread is to be had
            error = why
        with self._changing:
            self._silent.remove(path)
            if error:
                self.errors[path] = error
            else:
                self._engines[path] = engine
                if self._begun:
                    self._tell(path)
            last = not self._silent
        try:
            if last and not self.errors:
                self._others()
        except OSError as why:
            with self._changing:
                self.errors[path] = why
        finally:
            with self._changing:
                if last:
                    self.answered.set()
                self._begin()

    def start(self) -> None:
        """As soon as one is opened."""
        with self._changing:
            self._wanted = True
            self._begin()

    def _begin(self) -> None:
        if not self._wanted or self._closed or self._begun or not self._engines:
            return
        self._begun = True
        for path in self._engines:
            self._tell(path)
        try:
            self.native.begin()
        except RuntimeError as why:  # no thread for it; nobody else would say that nothing is found
            self.errors.update(dict.fromkeys(self._engines, why))

    def _tell(self, path: str) -> None:
        engine = self._engines[path]
        log.info(
            "disk", namespace=self._name, directory=path, engine=engine.name, reason=engine.reason,
            loads=self._loads,
        )  # fmt: skip

    def close(self) -> None:
        with self._changing:
            self._closed = True
        self.native.stop()
        if self.answered.is_set():
            self.directories.close()

    def conditions(self) -> list[tuple[str, str]]:
        """(degraded state, text)"""
        with self._changing:
            failed, silent = list(self.errors.values()), list(self._silent)
        told = [("disk_failed", f"{error}: the store goes on without it until a restart") for error in failed]
        for path in silent:
            told.append(
                ("disk_failed", f"{path} does not answer: the store goes on without it until it does")
            )
        return told + [(STATES[found.state], found.text) for found in self.native.conditions()]


class Tiers:
    def __init__(self, config: Config, stores: Mapping[str, Any], huge: Collection[str]) -> None:
        """`huge`: the namespaces whose pools are made of huge pages. Raises StartupError for what is wrong
        with a disk that answers."""
        self._tiers: dict[str, Tier] = {}
        levels, digits = map(int, config.disk_fanout.split("x"))
        if not config.disks:
            return
        others = threading.Lock()

        def tell_others() -> None:
            """What lies beside the namespaces' directories: told by the first that is opened."""
            if not others.acquire(blocking=False):
                return
            for path in left_over(config.disks, stores.keys()):
                why = "no namespace of this name is configured: its files count to no quota"
                log.warning("disk_left_over", directory=path, why=why)

        try:
            for name, store in stores.items():
                disks = config.disks_of(name)
                if not disks:
                    why = 'not shared: share = "read" keeps it in disk_shared, a directory in disk here alone'
                    log.warning("disk_none", namespace=name, why=why)
                    continue
                directories = Directories(disks, name, config.disk_mounted, config.own_shared)
                native = _core.DiskTier(
                    store,
                    directories.paths,
                    config.disk_bytes(name),
                    config.disk_files_of(name),
                    levels,
                    digits,
                    daily_write_bytes=-(-config.disk_daily_writes // len(stores)),  # 0: no limit
                    keep_corrupt=config.keep_corrupt,
                    huge_pool=name in huge,
                    faults=os.environ.get(FAULTS, ""),
                )
                loads = "in_place" if name in huge else "through_buffers"
                self._tiers[name] = Tier(native, directories, name, loads, tell_others)
            end = time.monotonic() + ANSWER_S
            for tier in self._tiers.values():
                tier.answered.wait(max(0.0, end - time.monotonic()))
                for error in tier.errors.values():
                    if isinstance(error, StartupError):  # it says of which disk
                        raise error
                    raise StartupError(f"disk: {error}") from error
        except StoreError as error:
            self.close()
            raise StartupError(f"disk: {error}") from error
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        for tier in self._tiers.values():
            tier.start()

    def close(self) -> None:
        """Waits for what is in flight: no file stays half, no memory is written afterwards."""
        for tier in self._tiers.values():
            tier.close()

    def resize(self, config: Config) -> None:
        """Another quota, at run time."""
        for name, tier in self._tiers.items():
            tier.native.set_quota(config.disk_bytes(name))

    def stats(self, namespace: str) -> dict[str, Any]:
        """Figures that stand beside the store's, {} without a disk tier."""
        tier = self._tiers.get(namespace)
        return tier.native.stats() if tier else {}

    async def aside(self, namespace: str) -> dict[str, Any]:
        if namespace not in self._tiers:
            return {}
        count, size_bytes = await self._tiers[namespace].directories.aside()
        return {"disk_aside_files": count, "disk_aside_bytes": size_bytes}

    def latencies(self) -> dict[tuple[str, str], Histogram]:
        """By (namespace, "load" or "write")."""
        return {
            (name, took.operation): Histogram(took.counts, took.sum_s)
            for name, tier in self._tiers.items()
            for took in tier.native.latencies()
        }

    def watch(self, degraded: Degraded) -> None:
        """Brings the degraded states of the disks up to date."""
        for name, tier in self._tiers.items():
            found: dict[str, str] = {}
            for state, text in tier.conditions():
                found[state] = f"{found[state]}; {text}" if state in found else text
            for state in STATES.values():
                degraded.put(state in found, state, name, found.get(state, ""))
