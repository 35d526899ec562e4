"""Fixtures of the hostile tests: a daemon, a decent client beside the hostile one, what must hold after."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from tests.fault.children import Children, eventually

# What a daemon may grow by under attack: allocators keep some, but nothing may add up.
GROWTH_BYTES = 48 << 20


@pytest.fixture
def fork() -> Iterator[Children]:
    """`fork(work)` runs work(steps) in a forked child."""
    children = Children()
    yield children
    children.end()


def private_bytes(pid: int) -> int:
    """Memory that belongs to the process alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


class Watched:
    """A daemon under attack, and a client that must not notice."""

    def __init__(self, daemon) -> None:
        self.daemon = daemon
        self.client = daemon.connect()
        self.layout = self.client.register_layout(SMALL.to_blob())
        self.kept = new_keys(3)
        self.put(self.kept)
        self.held = self.client.get(self.kept)  # a writer may fill the pool; it may not take what is read
        self.memory = private_bytes(daemon.pid)
        self.descriptors = self.open_descriptors()

    def put(self, keys: list[bytes]) -> None:
        with self.client.create(keys, self.layout) as writer:
            assert writer.results == ["granted"] * len(keys), writer.results
            for index in writer.granted:
                fill(writer[index])

    def open_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.daemon.pid}/fd").iterdir()))

    def serves(self) -> None:
        """The daemon is up, the decent client reads what it wrote and writes more."""
        assert self.daemon.process.poll() is None, f"the daemon ended:\n{self.daemon.log()}"
        keys = new_keys(2)
        self.put(keys)
        with self.client.get([*self.kept, *keys]) as blocks:
            for block in blocks:
                check(block)
        assert self.client.delete(keys) == 2

    def survived(self, growth_bytes: int = GROWTH_BYTES) -> None:
        """After the attack: serving, within bounds, tables in order, nothing left behind."""
        from kvstored.v1 import admin_pb2
        from tests.conformance.grpc_door import GrpcClient

        self.serves()
        self.held.release()
        with GrpcClient(str(self.daemon.dir / "grpc.sock")) as door:
            door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=30)
            door.admin.Flush(admin_pb2.FlushRequest(namespace="default"), timeout=30)
        eventually(lambda: self.client.stats()["sessions"] == 1, "the hostile sessions are gone")
        eventually(lambda: self.client.stats()["used_bytes"] == 0, "not a byte is in use")
        assert private_bytes(self.daemon.pid) - self.memory < growth_bytes
        eventually(lambda: self.open_descriptors() <= self.descriptors + 4, "no descriptor is left open")


@pytest.fixture
def watched(daemon) -> Callable[..., Watched]:
    """`watched()` starts a daemon and a client that must not notice the attack."""
    return lambda **options: Watched(daemon(**{"memory": "8MiB", **options}))
