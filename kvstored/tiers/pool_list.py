"""Which pools lie in this machine's shared memory, whose they are, and whether anybody still needs them.

Owns that verdict and the removal of pools that nobody owns. Never looks into a pool. A pool's owner is the
runtime directory in its file `.home`: whoever serves that directory next adopts it. Invariants: what a
process has open, what a directory that exists owns, and what does not say whose it is are never removed;
files that another user gives a pool's name, or however many of other names, change nothing of the pool.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstored.config.units import approximate_size
from kvstored.process import runtime_dir
from kvstored.tiers.pool_files import HOME, HUGE_DIR, PREFIX, SHM_DIR, mark_of

SERVED, KEPT, HELD, ORPHAN, UNKNOWN, FOREIGN = "served", "kept", "held", "orphan", "unknown", "another user's"
STATE = "state.json"  # of a runtime directory
MAX_POOLS = 4096  # of a user in one look; nobody has more names than that in earnest
_MAX_PATH = 4096
_F_SETLEASE = 1024


@dataclass(frozen=True)
class Found:
    """One pool: its files, their memory, the runtime directory it is of ("" if it does not say)."""

    prefix: str
    paths: tuple[str, ...]
    uid: int
    size_bytes: int
    home: str
    state: str
    pid: int  # of the daemon that serves it, or 0

    @property
    def why(self) -> str:
        return {
            SERVED: f"the daemon in {self.home}, pid {self.pid}",
            KEPT: f"waits for the next daemon in {self.home}",
            HELD: f"{self.home or 'its directory'} is gone or elsewhere, and a process has the pool open",
            ORPHAN: f"{self.home} is gone, and nobody has the pool open",
            UNKNOWN: "an earlier version made it, which does not say for which directory",
            FOREIGN: "only that user and root can tell",
        }[self.state]


def pools(places: Iterable[str] = (), only: Iterable[str] = ()) -> list[Found]:
    """All pools in /dev/shm, the huge pages' directory and `places`; with `only`, those of these names."""
    named, wanted = dict[tuple[str, int], list[str]](), set(only)  # by name and user
    many = Counter[int]()
    for place in dict.fromkeys((SHM_DIR, HUGE_DIR, *places)):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                prefix = entry.name.partition(".")[0]
                if not PREFIX.fullmatch(prefix) or (wanted and prefix not in wanted):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    uid = entry.stat(follow_symlinks=False).st_uid
                    many[uid] += (prefix, uid) not in named
                    if many[uid] <= MAX_POOLS:
                        named.setdefault((prefix, uid), []).append(entry.path)
    found = (_found(prefix, uid, sorted(paths)) for (prefix, uid), paths in sorted(named.items()))
    return [pool for pool in found if pool is not None]


def remove(pool: Found) -> int:
    """Removes an orphan's files. The bytes that came back; 0 if somebody has it open by now."""
    assert pool.state == ORPHAN, "only what nobody owns is removed"
    if any(map(_is_open, pool.paths)):
        return 0
    for path in pool.paths:
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_uid == pool.uid:
                os.unlink(path)
    return pool.size_bytes


def advice() -> str:
    """For a message that memory is short: what lies there for nobody. "" if nothing does."""
    orphans = [pool for pool in pools() if pool.state == ORPHAN]
    if not orphans:
        return ""
    held = approximate_size(sum(orphan.size_bytes for orphan in orphans))
    many = len(orphans) > 1
    what = f"{len(orphans)} pools that nobody owns hold" if many else "a pool that nobody owns holds"
    return f"{what} {held}: kvstored pools --remove"


def kept_bytes(directory: str) -> int:
    """What the pools of this runtime directory hold, wherever its daemon put them."""
    pools_here = (pool for pool in pools(_places_of(directory)) if pool.home and _same(pool.home, directory))
    return sum(pool.size_bytes for pool in pools_here)


def _places_of(directory: str) -> list[str]:
    """The directories that its state.json names: `pool_dir` may be any."""
    state, _ = runtime_dir.read_json(os.path.join(directory, STATE))
    entries = state.get("pools") if isinstance(state, dict) else None
    named = [entry.get("pool_dir") for entry in (entries or {}).values()] if isinstance(entries, dict) else []
    return [place for place in named if isinstance(place, str) and os.path.isabs(place) and "\0" not in place]


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _found(prefix: str, uid: int, paths: list[str]) -> Found | None:
    sizes = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            sizes.append(os.lstat(path).st_blocks * 512)
    if not sizes:
        return None  # removed meanwhile
    size_bytes = sum(sizes)
    if os.geteuid() not in (uid, 0):
        return Found(prefix, tuple(paths), uid, size_bytes, "", FOREIGN, 0)
    home = _home(prefix, uid)
    state, pid = _judged(prefix, home, paths)
    return Found(prefix, tuple(paths), uid, size_bytes, home, state, pid)


def _judged(prefix: str, home: str, paths: list[str]) -> tuple[str, int]:
    if home and mark_of(home) == re.sub(r"^kvstored-|.{8}-\d+$", "", prefix):
        pid = runtime_dir.running_pid(home) or 0
        return (SERVED if pid else KEPT), pid
    if any(map(_is_open, paths)):
        return HELD, 0
    return (ORPHAN if home else UNKNOWN), 0


def _home(prefix: str, uid: int) -> str:
    try:
        fd = os.open(
            os.path.join(SHM_DIR, f"{prefix}.{HOME}"),
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
    except OSError:
        return ""
    try:
        if os.fstat(fd).st_uid != uid:
            return ""
        path = os.fsdecode(os.read(fd, _MAX_PATH))
        return path if os.path.isabs(path) and "\0" not in path else ""
    finally:
        os.close(fd)


def _is_open(path: str) -> bool:
    """Whether any process, of whatever user or container, has this file open or mapped: then the kernel
    grants no lease on it. Where it cannot say, yes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # who opens it in this moment would end us
    try:
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_UNLCK)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)
