"""Fixtures of the fault tests: children that are ended with the test, and what must hold when all is over."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvclient.conformance.case import BIG, SMALL
from tests.fault.children import Children, eventually
from tests.fault.disk import DiskRig


@pytest.fixture
def fork() -> Iterator[Children]:
    """`fork(work)` runs work(steps) in a forked child."""
    children = Children()
    yield children
    children.end()


@pytest.fixture
def integrity() -> Callable[..., None]:
    """`integrity(daemon)`: the daemon's tables agree with each other."""

    def check(daemon) -> None:
        from kvstored.v1 import admin_pb2
        from tests.conformance.grpc_door import GrpcClient

        with GrpcClient(str(daemon.dir / "grpc.sock")) as door:
            door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=30)

    return check


@pytest.fixture
def nothing_leaks(integrity) -> Callable[..., None]:
    """`nothing_leaks(daemon, client, keys)`: after deleting these keys not a byte is in use, and no pin."""

    def check(daemon, client, keys) -> None:
        gc.collect()
        client.delete(keys)
        eventually(lambda: client.stats()["pins"] == 0, "no pin is left")
        eventually(lambda: client.stats()["used_bytes"] == 0, f"not a byte is in use: {client.stats()}")
        integrity(daemon)

    return check


@pytest.fixture
def layouts() -> Callable[..., tuple[int, int]]:
    """`layouts(client)`: ids of the small layout (8 KiB a block) and the big one (1 MiB)."""
    return lambda client: (client.register_layout(SMALL.to_blob()), client.register_layout(BIG.to_blob()))


@pytest.fixture
def rig(daemon, tmp_path) -> Iterator[Callable[..., DiskRig]]:
    """`rig(faults)`: a daemon with a disk tier whose calls fail on that schedule."""
    made: list[DiskRig] = []

    def make(faults: str = "", **options: Any) -> DiskRig:
        directory = options.pop("directory", None) or tmp_path / f"disk{len(made)}"
        made.append(DiskRig(daemon, directory, faults, **options))
        return made[-1]

    yield make
    for one in made:
        one.drop_client()
