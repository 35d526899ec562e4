"""Descriptors that outlive the daemon: the service manager's descriptor store (sd_notify's FDSTORE=1, taken
back through LISTEN_FDS).

Owns the descriptors that were handed to this process, until settle(). Believes no name: whoever takes one
checks what it is. Without a supervisor nothing is kept, and `keeps` says so.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Mapping, MutableMapping

from kvstored.process.notify import notify

FIRST_FD = 3
MAX_FDS = 1024


class Keeper:
    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self.keeps = bool(environ.get("NOTIFY_SOCKET"))
        self._given = _given(environ)
        for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            environ.pop(name, None)  # they are ours: no process that we start may take them for its own

    def keep(self, name: str, fd: int) -> None:
        """Hands a copy to the supervisor, which gives it to the next daemon under this name."""
        # FDPOLL=0: it is memory, there is nothing to wait for on it.
        told = notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))
        self.keeps = self.keeps and told

    def take(self, name: str) -> int | None:
        """A copy of what was kept under this name, for the caller to close. None if there is none, or two."""
        fds = self._given.get(name, [])
        return fcntl.fcntl(fds[0], fcntl.F_DUPFD_CLOEXEC, FIRST_FD) if len(fds) == 1 else None

    def held_bytes(self, name: str) -> int:
        """The memory of what was kept under this name."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._given.get(name, ()))

    def give_up(self, name: str) -> None:
        """The supervisor is to forget the name."""
        for fd in self._given.pop(name, []):
            os.close(fd)
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def settle(self, used: Collection[str]) -> list[str]:
        """Gives up what was kept under other names than these. Those names."""
        others = [name for name in self._given if name not in used]
        for name in others:
            self.give_up(name)
        for fds in self._given.values():
            for fd in fds:
                os.close(fd)
        self._given = {}
        return others


def _given(environ: Mapping[str, str]) -> dict[str, list[int]]:
    """name -> descriptors, as sd_listen_fds_with_names(3) finds them; nothing if they are not for us."""
    try:
        pid, count = int(environ.get("LISTEN_PID", "0")), int(environ.get("LISTEN_FDS", "0"))
    except ValueError:
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    if pid != os.getpid() or not 0 < count <= MAX_FDS or len(names) != count:
        return {}
    found: dict[str, list[int]] = {}
    for fd, name in enumerate(names, FIRST_FD):
        try:
            os.set_inheritable(fd, False)
        except OSError:
            continue
        found.setdefault(name, []).append(fd)
    return found
