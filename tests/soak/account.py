"""When all clients are gone: is every byte accounted for?

Owns nothing. Asks the daemon through its admin door, looks at the directory and at /proc. Invariant: it
deletes every key there can be, so what is left afterwards is leaked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvclient import connect
from kvstored.v1 import admin_pb2
from tests.conformance.grpc_door import GrpcClient
from tests.fault.children import eventually
from tests.soak.truth import Universe

BUSY = ["disk_loads_in_flight", "disk_loads_waiting", "disk_writes_in_flight", "disk_indexing"]
MOST_FILES_OPEN = 64  # of an idle daemon: sockets, segments, locks


class Account:
    def __init__(self, daemon, disk: Path, universe: Universe) -> None:
        self._daemon = daemon
        self._disk = disk
        self._universe = universe
        self.problems: list[str] = []

    def settle(self, before_deleting: Callable[[], None], wait_s: float = 30.0) -> int:
        """The bytes that are left of nothing."""
        with GrpcClient(str(self._daemon.dir / "grpc.sock")) as door:
            self._door = door
            eventually(
                lambda: (
                    not any(map(self._counters().get, [*BUSY, "pending_writes", "sessions", "quarantined"]))
                ),
                f"idle: {self._counters()}",
                60.0,
            )
            now = self._counters()
            self._expect(
                now["disk_bytes"] <= now["disk_quota_bytes"],
                f"the quota holds: {now['disk_bytes']} of {now['disk_quota_bytes']}",
            )
            before_deleting()
            self._check_integrity()
            with connect(self._daemon.dir) as client:
                for _ in range(2):  # a file that could not be removed is still listed
                    client.delete(self._universe.keys)
            eventually(
                lambda: not any(map(self._counters().get, ["pins", "zombies"])), "no pin is left", 30.0
            )
            names = ["used_bytes", "disk_bytes"]
            last: list[int] = []

            def nothing() -> bool:
                last[:] = [self._counters()[name] for name in names]
                return not any(last)

            try:
                eventually(nothing, f"nothing in use: {last}", wait_s)
            except AssertionError:
                self.problems.append(f"in use after deleting all: {dict(zip(names, last, strict=True))}")
            self._check_integrity()
            files = [path for path in self._disk.rglob("*") if path.is_file() or path.is_symlink()]
            left = sum(path.lstat().st_size for path in files)
            self._expect(not files, f"files are left: {[str(path) for path in files[:5]]}")
            self._expect_few_descriptors()
            return sum(last) + left

    def _expect_few_descriptors(self) -> None:
        open_files = [
            os.readlink(one) for one in Path(f"/proc/{self._daemon.pid}/fd").iterdir() if one.is_symlink()
        ]
        blocks = [one for one in open_files if ".kv" in one and str(self._disk) in one]
        self._expect(not blocks, f"block files are open: {blocks[:5]}")
        self._expect(len(open_files) <= MOST_FILES_OPEN, f"{len(open_files)} descriptors: {open_files}")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)

    def _check_integrity(self) -> None:
        self._door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=60)

    def _counters(self) -> dict[str, int]:
        reply = self._door.admin.Stats(admin_pb2.StatsRequest(namespace="default"), timeout=60)
        return dict(reply.namespaces[0].counters)
