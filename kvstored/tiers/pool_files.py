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
import hashlib
import os
import re
import secrets
import stat
from typing import Protocol

import posix_ipc

from kvstored.errors import StartupError
from kvstored.process import runtime_dir
from kvstored.process.fd_store import Keeper

SHM_DIR = "/dev/shm"
HUGE_DIR = "/run/kvstored-pool"  # where deploy/systemd mounts a tmpfs with huge pages
SEALED = "memfd"
ROLES = ("table", "progress", "pool")
HOME = "home"  # the file that names the runtime directory a pool is of; always in /dev/shm
PREFIX = re.compile(r"kvstored-[0-9a-f]{16}-\d{1,2}")
# SEAL as well: a client that may write could otherwise seal the memory against writing, for ever.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 8  # Linux 6.3
MEMINFO = "/proc/meminfo"
_MEMORY_FILE_SYSTEMS = ("tmpfs", "hugetlbfs", "ramfs")


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


def available_bytes() -> int:
    """What this machine can give now without ending a process: as the kernel estimates it, and swap. Where
    the kernel does not say (/proc without meminfo, as ProcSubset=pid has it): all its memory."""
    try:
        with open(MEMINFO) as lines:
            kib = dict(line.split(":", 1) for line in lines)
    except FileNotFoundError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(int(kib[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))


class Named:
    """Files in /dev/shm or another directory. Session pages are always in /dev/shm; a hugetlbfs, which has
    whole huge pages only, gets the pool alone."""

    def __init__(self, pool_dir: str) -> None:
        self.name = pool_dir
        whole = os.path.isdir(pool_dir) and file_system(pool_dir)[0] == "tmpfs"
        self._others = pool_dir if whole else SHM_DIR

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
        if not runtime_dir.is_own(found):
            why_not = f"foreign: {runtime_dir.described(found)}"
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
        free_bytes = system.f_bavail * system.f_frsize
        if not system.f_blocks:  # a tmpfs without a size
            return available_bytes()
        reserved = file_system(self._directory(role))[0] == "hugetlbfs"  # taken from the machine before
        return free_bytes if reserved else min(free_bytes, available_bytes())

    def held_bytes(self, prefix: str) -> dict[object, int]:
        held: dict[object, int] = {}
        for path in _files(prefix, self.name):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if found.st_uid == os.geteuid():
                    held[found.st_dev] = held.get(found.st_dev, 0) + found.st_blocks * 512
        return held

    def _directory(self, role: str) -> str:
        return self.name if role == "pool" else self._others


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
            why_not = f"foreign: {runtime_dir.described(found)}"
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
        return available_bytes()

    def held_bytes(self, prefix: str) -> dict[object, int]:
        return {SEALED: sum(self._keeper.held_bytes(f"{prefix}.{role}") for role in ROLES)}


def mark_of(directory: str) -> str:
    """What prefixes of this runtime directory begin with, "" if it is gone. Another directory under the same
    name, in a container that shares /dev/shm, has another."""
    home = os.path.realpath(directory)
    try:
        found = os.stat(home)
    except OSError:
        return ""
    return hashlib.sha256(os.fsencode(f"{home}\0{found.st_dev}\0{found.st_ino}")).hexdigest()[:8]


def is_path(text: str) -> bool:
    """Whether the kernel can be asked about it: JSON can hold halves of characters."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def new_prefix(directory: str, number: int) -> str:
    """Of a pool of this runtime directory that nobody has made yet."""
    return f"kvstored-{mark_of(directory)}{secrets.token_hex(4)}-{number}"


def note_home(prefix: str, directory: str) -> None:
    """Says with the pool whose it is: its name cannot be turned back into a path. Raises StartupError."""
    path = os.path.join(SHM_DIR, f"{prefix}.{HOME}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, os.fsencode(os.path.realpath(directory)))
        finally:
            os.close(fd)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def chosen(pool: str, pool_dir: str) -> str:
    """The name of the place that these fields of the configuration ask for. Raises StartupError."""
    if pool == SEALED:
        if pool_dir:
            raise StartupError(f"pool_dir: {pool_dir!r} holds named pools, and pool is {SEALED}")
        return SEALED
    if not pool_dir:
        usable = has_huge_pages(HUGE_DIR) and os.access(HUGE_DIR, os.W_OK | os.X_OK)
        return HUGE_DIR if usable else SHM_DIR
    if not os.path.isdir(pool_dir):
        raise StartupError(f"pool_dir: {pool_dir!r} is no directory")
    found, _ = file_system(pool_dir)
    if found not in _MEMORY_FILE_SYSTEMS:
        raise StartupError(
            f"pool_dir: {pool_dir!r} is on {found}, wanted is one of {', '.join(_MEMORY_FILE_SYSTEMS)}"
        )
    return pool_dir


def has_huge_pages(path: str) -> bool:
    """Whether files in this directory are made of huge pages, as far as there are any."""
    if not os.path.isdir(path):
        return False
    found, options = file_system(path)
    return found == "hugetlbfs" or (found == "tmpfs" and bool({"huge=always", "huge=within_size"} & options))


def file_system(path: str) -> tuple[str, set[str]]:
    """The type and the options of the file system a path lies on, from the kernel's mount table."""
    wanted = os.stat(path).st_dev
    found, options = "unknown", set[str]()
    with open("/proc/self/mountinfo") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            major, minor = map(int, fields.split()[2].split(":"))
            if os.makedev(major, minor) == wanted:
                found, _, at_end = rest.strip().split(" ", 2)
                options = set(at_end.split(","))
    return found, options


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


def lying_about(mark: str, directories: set[str]) -> dict[str, str]:
    """Prefix -> directory of the pools of this user that begin so."""
    found: dict[str, str] = {}
    for directory in directories:
        for path in glob.glob(os.path.join(glob.escape(directory), mark + "*.*")):
            prefix, _, role = os.path.basename(path).partition(".")
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid == os.geteuid() and (role == "pool" or prefix not in found):
                    found[prefix] = directory
    return found


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
