"""When all clients are gone: is every byte accounted for? A program of its own, because gRPC survives no fork
and the soak forks.

Owns nothing. Asks the daemon through its admin door, looks at the directory and at /proc. Invariant: it
deletes every key there can be, so what is left afterwards is leaked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvclient import connect
from kvstored.v1 import admin_pb2
from tests.conformance.grpc_door import GrpcClient
from tests.descriptors import descriptors
from tests.fault.children import eventually
from tests.soak.harm import clear_away
from tests.soak.truth import Universe

BUSY = ["disk_loads_in_flight", "disk_loads_waiting", "disk_writes_in_flight", "disk_indexing"]
BUSY += ["pending_writes", "sessions", "quarantined"]
MOST_FILES_OPEN = 64  # of an idle daemon: sockets, segments, locks


class Account:
    def __init__(self, directory: Path, disk: Path, universe: Universe) -> None:
        self._directory = directory
        self._disk = disk
        self._universe = universe
        self.problems: list[str] = []

    def settle(self, wait_s: float = 300.0) -> int:
        """The bytes that are left of nothing."""
        with GrpcClient(str(self._directory / "grpc.sock")) as door:
            self._door = door
            eventually(lambda: not self._any(BUSY), f"idle: {self._counters()}", wait_s)
            now = self._counters()
            self._expect(now["disk_bytes"] <= now["disk_quota_bytes"], f"the quota holds: {now}")
            clear_away(self._disk)
            self._check_integrity()
            with connect(self._directory) as client:
                client.delete(self._universe.keys)
            eventually(lambda: not self._any(["pins", "zombies"]), "no pin is left", wait_s)
            return self._left(wait_s)

    def _left(self, wait_s: float) -> int:
        names = ["used_bytes", "blocks", "on_disk", "disk_bytes", "disk_files"]
        try:
            eventually(lambda: not self._any(names), "nothing is in use", wait_s)
        except AssertionError:
            self.problems.append(f"in use after deleting all: {[self._counters()[name] for name in names]}")
        self._check_integrity()
        files = [path for path in self._disk.rglob("*") if path.is_file() or path.is_symlink()]
        self._expect(not files, f"files are left: {[str(path) for path in files[:5]]}")
        self._expect_few_descriptors()
        return self._counters()["used_bytes"] + sum(path.lstat().st_size for path in files)

    def _expect_few_descriptors(self) -> None:
        open_files = descriptors(int((self._directory / "pid").read_text()))
        blocks = [file for file in open_files if ".kv" in file and str(self._disk) in file]
        self._expect(not blocks, f"block files are open: {blocks[:5]}")
        self._expect(len(open_files) <= MOST_FILES_OPEN, f"{len(open_files)} descriptors: {open_files}")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)

    def _any(self, names: list[str]) -> bool:
        now = self._counters()
        return any(now[name] for name in names)

    def _check_integrity(self) -> None:
        self._door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=60)

    def _counters(self) -> dict[str, int]:
        reply = self._door.admin.Stats(admin_pb2.StatsRequest(namespace="default"), timeout=60)
        return dict(reply.namespaces[0].counters)


def main(directory: str, disk: str, seed: str, clients: str, per_kind: str) -> None:
    account = Account(Path(directory), Path(disk), Universe(int(seed), int(clients), json.loads(per_kind)))
    leaked_bytes = account.settle()
    print(json.dumps({"leaked_bytes": leaked_bytes, "problems": account.problems}))


if __name__ == "__main__":
    main(*sys.argv[1:])
