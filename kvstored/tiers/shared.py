"""A directory that daemons of several hosts have mounted: each writes in its part and reads the others'.

Owns the claim of this daemon's part and the native readers (`native/core/shared`). Never writes into another
daemon's part, and takes no lock there: a lock over the network would stand or fall with it. The only one is
of this daemon's own part, while it is claimed. Invariant: two daemons that follow this never write in one
part.

    DIR/<node>/owner          which machine and runtime directory the part belongs to
    DIR/<node>/<namespace>/   a directory of the disk tier
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvstored import _core, log
from kvstored.config.config import Config
from kvstored.errors import StartupError
from kvstored.process import runtime_dir

OWNER = "owner"
MAX_OWNER_BYTES = 4096
CLAIM_WAIT_S, CLAIM_LOOK_S = 10.0, 0.01  # for another that claims it too


def check_shared(directory: str) -> None:
    """Raises StartupError if others than this user may change what lies there: blocks could be planted."""
    found = os.stat(directory)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        mode = found.st_mode & 0o7777
        raise StartupError(
            f"disk_shared: {directory} belongs to user {found.st_uid} and has mode {mode:04o}: it "
            f"must be of user {os.geteuid()}, whom the daemons run as, and writable by nobody else"
        )


def _self(config: Config) -> dict[str, str]:
    try:
        with open("/etc/machine-id") as file:
            machine = file.read(64).strip()
    except OSError:
        machine = ""
    return {"machine": machine, "host": socket.gethostname(), "dir": os.path.realpath(config.dir)}


def _owner(path: str, mark: Mapping[str, str]) -> dict[str, str] | None:
    """What the file says, None if there is none. Raises StartupError."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_OWNER_BYTES))
        return {name: str(found[name]) for name in mark}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"disk_shared: {path}: {error!r:.200}: remove it if no daemon uses it") from None


def _is_first(path: str, mark: Mapping[str, str]) -> bool:
    """Writes the file unless another daemon, which starts at the same moment, was sooner: by a link, which of
    two exactly one can make. Raises StartupError."""
    mine = f"{path}.{secrets.token_hex(8)}"
    runtime_dir.write_whole(mine, json.dumps(mark).encode())
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        os.rename(mine, path)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(mine)
    return True


@contextlib.contextmanager
def _alone(directory: str) -> Iterator[None]:
    """Daemons of this machine look who owns the part, and write that they do, one after another: two that
    find an owner who is dead would both take it. Another machine's is refused in any case. Where the file
    system has no such lock (NFS has none of a directory) it is done without. Raises StartupError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + CLAIM_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break
            if time.monotonic() > deadline:
                raise StartupError(
                    f"disk_shared: another daemon has been claiming {directory}: it stands still"
                )
            time.sleep(CLAIM_LOOK_S)
        yield
    finally:
        os.close(fd)


def claim(config: Config) -> None:
    """Says that the part is this daemon's. Raises StartupError where another may be at work in it: one of
    another machine, or a living one of this."""
    directory = config.own_shared
    check_shared(config.disk_shared)
    runtime_dir.prepare(directory, "disk_shared")
    with _alone(directory):
        _claim(directory, _self(config))


def _claim(directory: str, mark: dict[str, str]) -> None:
    path = os.path.join(directory, OWNER)
    other = _owner(path, mark)
    if other is None and _is_first(path, mark):
        return
    other = other or _owner(path, mark) or mark
    elsewhere = (other["machine"], other["host"]) != (mark["machine"], mark["host"])
    if elsewhere or (other["dir"] != mark["dir"] and runtime_dir.running_pid(other["dir"]) is not None):
        raise StartupError(
            f"disk_shared: {directory} is the part of the daemon in {other['dir']!r} on {other['host']!r}: "
            f"give this one another `node`, or remove {path} if that one is gone for good"
        )
    if other != mark:
        runtime_dir.write_whole(path, json.dumps(mark).encode())


class Shared:
    def __init__(self, config: Config, stores: Mapping[str, Any], peers: Mapping[str, Any]) -> None:
        """`peers`: native tiers by namespace, asked for what nobody keeps here. Raises StartupError."""
        self._readers: dict[str, Any] = {}
        if not config.disk_shared:
            return
        try:
            claim(config)
        except OSError as error:
            raise StartupError(f"disk_shared: {config.disk_shared}: {error.strerror}") from error
        levels, digits = map(int, config.disk_fanout.split("x"))
        for name in config.shared:
            self._readers[name] = _core.SharedReader(
                stores[name], config.disk_shared, config.node, name, levels, digits, peers.get(name)
            )
        log.info("shared_directory", directory=config.disk_shared, own=config.node, read=len(self._readers))

    def start(self) -> None:
        for reader in self._readers.values():
            reader.start()

    def close(self) -> None:
        """Before the peers."""
        for reader in self._readers.values():
            reader.stop()

    def stats(self, namespace: str) -> dict[str, int]:
        """Figures that stand beside the store's, {} without a shared directory."""
        reader = self._readers.get(namespace)
        return reader.stats() if reader else {}
