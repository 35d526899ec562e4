"""The directories of the disk tier: made, checked and locked, and what is kept aside in them.

Owns the locks that keep two daemons, or a daemon and `kvstored fsck`, out of one directory. Never opens a
block: that is native (`native/core/disk`). Invariant: while a Directories exists, nobody else of good will
changes anything in them. One that hosts share is not locked, for that would be a lock over the network: it is
claimed by a file that says whose it is.

    DIR/<namespace>/a/b/<key>.kv     DIR/<namespace>/tmp/     DIR/<namespace>/aside/
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Sequence

from aiofiles import os as files

from kvstored import _core
from kvstored.errors import StartupError, StoreError
from kvstored.process import runtime_dir
from kvstored.tiers.shared import check_shared

ASIDE = "aside"
LOCK_WAIT_S, LOCK_LOOK_S = 1.0, 0.01
LOOK_S = 1.0  # a disk that takes longer to list what is kept aside is asked again later


class Directories:
    """Those of one namespace, one below each directory of the configuration."""

    def __init__(
        self, configured: Sequence[str], namespace: str, mounted: bool = False, shared: str = ""
    ) -> None:
        """`shared`: which of them lies where other hosts see it."""
        self._mounted = mounted
        self._shared = shared
        self.paths = [os.path.join(directory, namespace) for directory in configured]
        self._locks: list[int] = []
        self._look: asyncio.Task[None] | None = None
        self._aside = (0, 0)

    def open(self, at: int) -> None:
        """Makes, checks and locks the one of this number, for as long as the disk takes. Raises
        StartupError."""
        path = self.paths[at]
        directory = os.path.dirname(path)
        try:
            if not os.path.isdir(parent := os.path.dirname(directory)):
                raise StartupError(f"disk: {directory}: {parent} is no directory: mount it or make it first")
            if self._mounted and os.stat(_existing(directory)).st_dev == os.stat("/").st_dev:
                why = "is on the root file system, and disk_mounted is set: mount it"
                raise StartupError(f"disk: {directory} {why}")
            if directory == self._shared:
                check_shared(parent)
            for place in (directory, path):
                runtime_dir.prepare(place, "disk directory")
            if directory != self._shared:
                self._locks.append(_locked(path))
        except (StoreError, OSError) as error:
            raise StartupError(f"disk: {error}") from error

    def close(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    async def aside(self) -> tuple[int, int]:
        """How many files are kept aside, and their bytes; what was found last, of a disk that does not
        answer: one look is under way at a time."""
        if self._look is None:
            self._look = asyncio.ensure_future(self._look_aside())
        done, _ = await asyncio.wait((self._look,), timeout=LOOK_S)
        if done:
            self._look = None
        return self._aside

    async def _look_aside(self) -> None:
        found = [await _kept(os.path.join(path, ASIDE)) for path in self.paths]
        self._aside = sum(count for count, _ in found), sum(size_bytes for _, size_bytes in found)


def _existing(directory: str) -> str:
    """Where it is, or where it would be made."""
    return directory if os.path.isdir(directory) else os.path.dirname(directory)


def _locked(path: str) -> int:
    """Its lock. `kvstored fsck` holds it for a moment to see whether a daemon does, so one refusal proves
    nothing. Raises StoreError."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return _core.lock_directory(path)
        except StoreError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOCK_LOOK_S)


def left_over(configured: Sequence[str], namespaces: Collection[str]) -> list[str]:
    """The directories of blocks there of namespaces that are configured no more."""
    found = []
    for directory in configured:
        with os.scandir(directory) as entries:
            others = [entry.path for entry in entries if entry.name not in namespaces]
        found += [path for path in sorted(others) if os.path.isdir(os.path.join(path, "tmp"))]
    return found


@files.wrap  # a thread's hop for a directory, not for a file
def _kept(directory: str) -> tuple[int, int]:
    count = size_bytes = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    size_bytes += entry.stat(follow_symlinks=False).st_size
                except OSError:  # taken away meanwhile: they are the operator's
                    continue
                count += 1
    except OSError:  # none there, or a disk that fails: a state tells that, and metrics are wanted then
        pass
    return count, size_bytes
