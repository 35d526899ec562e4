"""The runtime directory: whose it is, who runs in it, and small files that appear whole or not at all.

Owns daemon.lock (the kernel's proof that at most one daemon runs here) and pid. Never touches segments or
sockets. Invariant: while a Lock exists no other daemon runs in this directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from typing import Any

from kvstored.errors import StartupError

MAX_JSON_BYTES = 1 << 20
MAX_PID = 1 << 22  # the kernel's limit
LOCK_WAIT_S, LOCK_LOOK_S = 0.1, 0.005


def prepare(path: str, what: str = "runtime directory") -> bool:
    """Makes the directory, mode 0700, or checks the one that is there: ours, and writable by nobody else.
    Whether it was made."""
    made = True
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        made = False
    except OSError as error:
        raise StartupError(f"{what} {path!r}: {error.strerror}") from error
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StartupError(f"{what} {path!r} is a symbolic link: name {os.path.realpath(path)!r} itself")
    if not stat.S_ISDIR(found.st_mode):
        raise StartupError(f"{what} {path!r} is no directory")
    if found.st_uid != os.geteuid():
        raise StartupError(
            f"{what} {path!r} belongs to user {found.st_uid}, the daemon runs as {os.geteuid()}"
        )
    if found.st_mode & 0o022:
        raise StartupError(
            f"{what} {path!r} has mode {found.st_mode & 0o7777:04o}: others may write to it, "
            "which would let them replace what the daemon keeps there; chmod go-w"
        )
    return made


class Lock:
    """daemon.lock, held until close() or the end of the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._fd = os.open(
                os.path.join(path, "daemon.lock"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise StartupError(f"{path}/daemon.lock: {error.strerror}") from error
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise
        write_whole(os.path.join(path, "pid"), f"{os.getpid()}\n".encode())

    def _take(self) -> None:
        """Raises StartupError. A command that looks who runs here holds the lock for a moment, so one refusal
        proves nothing."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StartupError(f"{self._path}/daemon.lock: {error.strerror}") from error
            if time.monotonic() > deadline:
                pid = read_pid(self._path) or "unknown"
                raise StartupError(f"another kvstored (pid {pid}) runs in {self._path}")
            time.sleep(LOCK_LOOK_S)

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, "pid"))
        os.close(self._fd)


def running_pid(path: str) -> int | None:
    """The pid of the daemon that runs in this directory, None if none does (a stale pid file proves
    nothing)."""
    try:
        fd = os.open(os.path.join(path, "daemon.lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return read_pid(path)
    finally:
        os.close(fd)


def read_pid(path: str) -> int | None:
    """What the file `pid` says. Whoever owns the directory wrote it, so it proves nothing: see belongs()."""
    try:
        with open(os.path.join(path, "pid"), "rb") as file:
            pid = int(file.read(32))
    except (OSError, ValueError):
        return None
    return pid if 1 <= pid <= MAX_PID else None


def belongs(pid: int, path: str) -> bool:
    """Whether the process may be the daemon of this directory: it is of the user whose the directory and its
    lock are. Otherwise root, told to stop a daemon, would signal whatever process that user names."""
    try:
        owners = {os.stat(path).st_uid, os.lstat(os.path.join(path, "daemon.lock")).st_uid}
        return owners == {os.stat(f"/proc/{pid}").st_uid}
    except OSError:
        return False


def holds_lock(pid: int, path: str) -> bool:
    """Whether the process has the directory's lock open: the number in a file that an earlier daemon left may
    be anybody's by now. Yes where the kernel does not let us look."""
    try:
        lock = os.lstat(os.path.join(path, "daemon.lock"))
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), lock):
                    return True
    except PermissionError:
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def as_its_user(path: str) -> Iterator[None]:
    """Root does in a daemon's directory what the directory's user could do, and no more: what it made or
    removed there as root would be a foreign file to the next daemon."""
    try:
        owner = os.stat(path)
    except OSError:
        owner = None
    if owner is None or os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    group = os.getegid()
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def listening_pid(path: str) -> int | None:
    """The process behind grpc.sock by the kernel's word: its number here, 0 if it is in a container whose
    processes have none here. None if nobody listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asked:
            asked.settimeout(LOCK_WAIT_S)
            asked.connect(os.path.join(path, "grpc.sock"))
            pid: int = struct.unpack("iii", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid
    except OSError:
        return None


def grpc_address(path: str) -> str:
    """A Unix socket as gRPC names it: a URI, in which a bare %, # or ? of the path has another meaning."""
    return "unix:" + path.replace("%", "%25").replace("#", "%23").replace("?", "%3F")


def write_whole(path: str, data: bytes) -> None:
    """The file has the old or the new content, whatever happens, also after a loss of power. Mode 0600.
    Raises StartupError."""
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"  # nobody else can have put something there
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(data)
            while left:  # a disk that is nearly full takes a part
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise StartupError(f"{path}: {error.strerror}") from error


def is_own(found: os.stat_result) -> bool:
    """Whether a file can only have been made by this user: regular, ours, for nobody else, under one name."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and stat.S_IMODE(found.st_mode) == 0o600
        and found.st_nlink == 1
    )


def described(found: os.stat_result) -> str:
    """Whose a file is, for a message that says why it was not believed."""
    return f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}, {found.st_nlink} links"


def read_json(path: str) -> tuple[Any, str]:
    """(value, "") or (None, why not). A file that is not ours alone, too large or no JSON is refused,
    never half believed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, "absent"
    except OSError as error:
        return None, error.strerror or "unreadable"
    try:
        found = os.fstat(fd)
        if not is_own(found):
            return None, f"foreign: {described(found)}"
        if found.st_size > MAX_JSON_BYTES:
            return None, f"{found.st_size} bytes, the limit is {MAX_JSON_BYTES}"
        return json.loads(os.read(fd, MAX_JSON_BYTES)), ""
    except (ValueError, RecursionError) as error:
        return None, f"no JSON: {error}"
    finally:
        os.close(fd)
