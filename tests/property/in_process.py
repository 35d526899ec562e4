"""A daemon inside the test's process: the native store and its session server, without gRPC and
configuration.

Owns the segment files and removes them. Never forks. `restart()` is what a killed daemon's successor does:
the old store lets go of its segments and a new one adopts them, while the clients keep their mappings and
their sessions.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import kvclient
from kvstored import _core

SHM = "/dev/shm"


class InProcessDaemon:
    """One namespace, "default"."""

    def __init__(
        self, capacity_bytes: int, max_blocks: int, max_sessions: int = 64, max_pins: int = 65_536
    ) -> None:
        self.capacity_bytes, self.max_blocks = capacity_bytes, max_blocks
        self.max_sessions, self.max_pins = max_sessions, max_pins
        self.directory = tempfile.mkdtemp(prefix="kvtest-in-process-", dir=SHM)
        self.pool_id = os.urandom(16)
        self._fds = [self._make(name) for name in ("table", "progress", "pool")]
        os.posix_fallocate(self._fds[0], 0, _core.Store.table_bytes(max_blocks, capacity_bytes))
        os.posix_fallocate(self._fds[1], 0, _core.Store.progress_bytes(max_blocks))
        self.store: Any = None
        self.server: Any = None
        self.start(adopt=False)

    def _make(self, name: str) -> int:
        return os.open(
            os.path.join(self.directory, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )

    def start(self, adopt: bool) -> None:
        self.store = _core.Store(
            "default",
            *self._fds,
            self.capacity_bytes,
            self.max_blocks,
            self.pool_id,
            self.directory,
            "p",
            adopt,
        )
        socket_path = os.path.join(self.directory, "kvstored.sock")
        self.server = _core.SessionServer(socket_path, [self.store], self.max_sessions, self.max_pins, [])
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.store.close()
            self.server = self.store = None

    def restart(self) -> None:
        self.stop()
        self.start(adopt=True)

    def connect(self, **options: Any) -> kvclient.KVClient:
        return kvclient.connect(dir=self.directory, **options)

    def remove(self) -> None:
        self.stop()
        for fd in self._fds:
            os.close(fd)
        shutil.rmtree(self.directory, ignore_errors=True)
