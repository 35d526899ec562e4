"""Fixtures of the fault tests: children that are ended with the test, and what must hold when all is over."""

import gc
from collections.abc import Callable, Iterator

import pytest

from kvclient.testing.conformance.case import BIG, SMALL
from tests.fault.children import Children, eventually


@pytest.fixture
def fork() -> Iterator[Children]:
    """`fork(work)` runs work(steps) in a forked child."""
    children = Children()
    yield children
    children.end()


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
