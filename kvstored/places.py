"""Where the bytes of a segment lie: in files with names, or in sealed memory without one that the supervisor
keeps.

Owns nothing: descriptors are the caller's. Invariants: what is opened can only have been made by this user;
memory of Sealed can be neither shortened nor stretched, by whoever holds a descriptor of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
from typing import Protocol

import posix_ipc

from kvstored import rundir
from kvstored.errors import StartupError
from kvstored.keeper import Keeper

SHM_DIR = "/dev/shm"
SEALED = "memfd"
ROLES = ("table", "progress", "pool")
# SEAL as well: a client that may write could otherwise seal the memory against writing, for ever.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 8  # Linux 6.3


class Place(Protocol):
    """`name` stands in state.json."""

    name: str

    def open(self, prefix: str, role: str, size_bytes: int) -> tuple[int, str]:
        """(descriptor, "") or (-1, why not). Size 0: any."""

    def create(self, prefix: str, role: str, size_bytes: int) -> int:
        """New memory, reserved but for the pool's, which grows. Raises StartupError."""

    def remove(self, prefix: str) -> None:
        """Gives up everything of this prefix, session pages included."""

    def device(self, role: str) -> tuple[object, str]:
        """What its memory is taken from: an identity, and how it is called."""

    def free_bytes(self, role: str) -> int | None:
        """What the device can still give; None: no limit."""

    def held_bytes(self, prefix: str) -> dict[object, int]:
        """What removing it would give back, per device."""


class Named:
    """POSIX shared memory, but for the pool where a directory was given (--pool-dir)."""

    def __init__(self, pool_dir: str) -> None:
        self.name = pool_dir

    def path(self, prefix: str, role: str) -> str:
        return os.path.join(self._directory(role), f"{prefix}.{role}")

    def open(self, prefix: str, role: str, size_bytes: int) -> tuple[int, str]:
        try:
            fd = os.open(self.path(prefix, role), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            return -1, error.strerror or "cannot be opened"
        found = os.fstat(fd)
        # A pool may be smaller than its capacity: it grows while it is used.
        fits = found.st_size <= size_bytes if role == "pool" else found.st_size == size_bytes
        if not rundir.is_own(found):
            why_not = f"foreign: {rundir.described(found)}"
        elif size_bytes and not fits:
            why_not = f"{found.st_size} bytes, {size_bytes} expected"
        else:
            return fd, ""
        os.close(fd)
        return -1, why_not

    def create(self, prefix: str, role: str, size_bytes: int) -> int:
        path = self.path(prefix, role)
        try:
            if os.path.dirname(path) == SHM_DIR:
                fd = posix_ipc.SharedMemory("/" + os.path.basename(path), posix_ipc.O_CREX, mode=0o600).fd
            else:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.set_inheritable(fd, False)
            if role != "pool":
                os.posix_fallocate(fd, 0, size_bytes)
            return fd
        except (OSError, posix_ipc.Error) as error:
            raise StartupError(f"{path}: {size_bytes} bytes: {error}") from error

    def remove(self, prefix: str) -> None:
        _unlink(prefix, self.name)

    def device(self, role: str) -> tuple[object, str]:
        return os.stat(self._directory(role)).st_dev, self._directory(role)

    def free_bytes(self, role: str) -> int | None:
        system = os.statvfs(self._directory(role))
        return system.f_bavail * system.f_frsize if system.f_blocks else None

    def held_bytes(self, prefix: str) -> dict[object, int]:
        held: dict[object, int] = {}
        for path in _files(prefix, self.name):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if found.st_uid == os.geteuid():
                    held[found.st_dev] = held.get(found.st_dev, 0) + found.st_blocks * 512
        return held

    def _directory(self, role: str) -> str:
        return self.name if role == "pool" else SHM_DIR


class Sealed:
    """memfds of their full size, sealed, kept over restarts by the supervisor. Session pages have names."""

    name = SEALED

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def open(self, prefix: str, role: str, size_bytes: int) -> tuple[int, str]:
        fd = self._keeper.take(f"{prefix}.{role}")
        if fd is None:
            return -1, "no supervisor kept it"
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink:
            why_not = f"foreign: {rundir.described(found)}"
        elif not _is_sealed(fd):
            why_not = "it is not sealed"
        elif size_bytes and found.st_size != size_bytes:
            why_not = f"{found.st_size} bytes, {size_bytes} expected"
        else:
            return fd, ""
        os.close(fd)
        return -1, why_not

    def create(self, prefix: str, role: str, size_bytes: int) -> int:
        name = f"{prefix}.{role}"
        try:
            fd = _memfd(name)
            # Another user's reader could open what it was given for reading once more for writing: the mode
            # of a memfd is open to all.
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            if role != "pool":
                os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise StartupError(f"memfd {name}: {size_bytes} bytes: {error}") from error
        self._keeper.keep(name, fd)
        return fd

    def remove(self, prefix: str) -> None:
        for role in ROLES:
            self._keeper.give_up(f"{prefix}.{role}")
        _unlink(prefix, SHM_DIR)

    def device(self, role: str) -> tuple[object, str]:
        return SEALED, "this machine"

    def free_bytes(self, role: str) -> int | None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def held_bytes(self, prefix: str) -> dict[object, int]:
        return {}


def _memfd(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memfd at all
        return False


def _files(prefix: str, pool_dir: str) -> list[str]:
    """All files of a pool, the session pages included."""
    return [
        path
        for directory in {SHM_DIR, pool_dir}
        for path in glob.glob(os.path.join(glob.escape(directory), prefix + ".*"))
    ]


def _unlink(prefix: str, pool_dir: str) -> None:
    """Removes a pool's files. Only those of this user, whatever their names say."""
    for path in _files(prefix, pool_dir):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid():
                os.unlink(path)
