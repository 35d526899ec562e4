"""The tiers below memory: one disk tier per namespace, started, watched and stopped.

Owns the native tiers and the directories they work in. What is written, loaded and removed is decided
natively (`native/core/disk/tier.h`); here it is configured, and its state is told. Invariant: a tier stops
before its store closes, and its directories are free only after that.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from kvstored import _core, log
from kvstored.config import Config
from kvstored.degraded import Degraded
from kvstored.disk import Directories, left_over
from kvstored.errors import StartupError, StoreError

# A schedule of failures for the file system below the tier (native/core/disk/faults.h): for tests only.
FAULTS = "KVSTORED_FAULTS"
STATES = {"full": "disk_full", "read_only": "disk_read_only", "failed": "disk_failed"}


class Tiers:
    def __init__(self, config: Config, stores: Mapping[str, Any], huge: Collection[str]) -> None:
        """`huge`: the namespaces whose pools are made of huge pages."""
        self._directories: dict[str, Directories] = {}
        self._disk: dict[str, Any] = {}
        self._huge = frozenset(huge)
        levels, digits = map(int, config.disk_fanout.split("x"))
        if not config.disk:
            return
        try:
            for name, store in stores.items():
                directories = self._directories[name] = Directories(config.disk, name)
                self._disk[name] = _core.DiskTier(
                    store,
                    directories.paths,
                    config.disk_bytes(name),
                    config.disk_files_of(name),
                    levels,
                    digits,
                    daily_write_bytes=config.disk_daily_writes // len(stores),
                    keep_corrupt=config.keep_corrupt,
                    huge_pool=name in huge,
                    faults=os.environ.get(FAULTS, ""),
                )
            for path in left_over(config.disk, stores.keys()):
                why = "no namespace of this name is configured: its files count to no quota"
                log.warning("disk_left_over", directory=path, why=why)
        except (StoreError, OSError) as error:
            self.close()
            raise StartupError(f"disk: {error}") from error
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        for name, disk in self._disk.items():
            for path, (engine, reason) in zip(self._directories[name].paths, disk.engines, strict=True):
                loads = "in_place" if name in self._huge else "through_buffers"
                log.info("disk", namespace=name, directory=path, engine=engine, reason=reason, loads=loads)
            disk.start()

    def close(self) -> None:
        """Waits for what is in flight: no file stays half, no memory is written afterwards."""
        for disk in self._disk.values():
            disk.stop()
        for directories in self._directories.values():
            directories.close()

    def resize(self, config: Config) -> None:
        """Another quota, at run time."""
        for name, disk in self._disk.items():
            disk.set_quota(config.disk_bytes(name))

    def stats(self, namespace: str) -> dict[str, Any]:
        """Figures that stand beside the store's, {} without a disk tier."""
        disk = self._disk.get(namespace)
        return disk.stats() if disk else {}

    async def aside(self, namespace: str) -> dict[str, Any]:
        if namespace not in self._directories:
            return {}
        count, size_bytes = await self._directories[namespace].aside()
        return {"disk_aside_files": count, "disk_aside_bytes": size_bytes}

    def latencies(self) -> dict[tuple[str, str], tuple[list[int], float]]:
        """(namespace, "load" or "write") -> counts per bucket, sum in seconds."""
        return {
            (name, operation): (counts, sum_s)
            for name, disk in self._disk.items()
            for operation, counts, sum_s in disk.latencies()
        }

    def watch(self, degraded: Degraded) -> None:
        """Brings the degraded states of the disks up to date."""
        for name, disk in self._disk.items():
            found = {STATES[state]: text for _, state, text in disk.conditions()}
            for state in STATES.values():
                degraded.put(state in found, state, name, found.get(state, ""))
