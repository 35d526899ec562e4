"""Goal: what could not be put into the pool is put later, holds up nothing else, and a runtime directory that
is full ends no fabric. Method: the daemon's answers are the test's.
"""

import hashlib
import struct
import types

import pytest

from kvstored.cluster import frames, putting
from kvstored.cluster.fabric import Fabric
from kvstored.cluster.frames import Frame
from tests.hosts.cluster.machines import block


class Daemon:
    """`blocks`: whose bytes it gives, of those that it lists."""

    def __init__(self, listed: list[bytes]) -> None:
        self.listed, self.blocks = listed, set(listed)

    def List(self, _asked, timeout):
        return types.SimpleNamespace(
            blocks=[types.SimpleNamespace(key=key) for key in self.listed], next_page_token=""
        )

    def fetch(self, _stream, keys, _request):
        layout, head, *rest = block()
        digest = hashlib.sha256(layout.payload).digest()
        return {
            key: [layout, Frame(head.kind, 0, 0, 0, key + digest + head.payload[64:]), *rest]
            for key in keys
            if key in self.blocks
        }


class Pool:
    def __init__(self) -> None:
        self.has: list[bytes] = []

    def wants(self, _space, key):
        return key not in self.has

    def put(self, _space, key, _whole):
        self.has.append(key)
        return 1


@pytest.fixture
def two(monkeypatch, tmp_path):
    keys = [struct.pack("<Q24x", number) for number in range(putting.MOST_A_STEP + 1)]
    daemon, pool = Daemon(keys), Pool()
    monkeypatch.setattr(putting.admin_pb2_grpc, "AdminStub", lambda channel: daemon)
    monkeypatch.setattr(frames, "fetch", daemon.fetch)
    monkeypatch.setattr(putting.Putter, "_stream", lambda self, space: None)
    return daemon, pool, putting.Putter(pool, str(tmp_path), ("d", "127.0.0.1:1"), "pool", {"s": bytes(32)})


def test_what_the_daemon_did_not_give_is_put_when_it_does(two):
    daemon, pool, putter = two
    late = daemon.listed[0]
    daemon.blocks.discard(late)
    while putter.round():
        pass
    assert late not in pool.has and len(pool.has) == putting.MOST_A_STEP
    daemon.blocks.add(late)
    putter.round()
    assert late in pool.has


def test_what_is_never_given_keeps_nothing_from_being_put(two):
    daemon, pool, putter = two
    last = daemon.listed[-1]
    daemon.blocks = {last}
    for _ in range(2):
        putter.round()
    assert pool.has == [last]


def test_a_runtime_directory_that_takes_nothing_ends_no_fabric(tmp_path):
    fabric = Fabric.__new__(Fabric)
    fabric.pool, fabric._master, fabric._said = None, "", {"dir": str(tmp_path / "gone")}
    fabric.members = types.SimpleNamespace(members={}, away="")
    fabric._tell()
