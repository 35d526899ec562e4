"""Goal: what could not be put into the pool is put later, as what lies on too few hosts is, holds up nothing
else, and a runtime directory that is full ends no fabric. Method: the daemon's answers are the test's, the
rules of the pool are the real ones, on hosts that are dictionaries (machines.py).
"""

import hashlib
import struct
import types

import pytest

from kvstored.cluster import frames, putting
from kvstored.cluster.fabric import Fabric
from kvstored.cluster.frames import Broken, Frame
from kvstored.cluster.pool import FULL_S, Pool
from tests.hosts.cluster.machines import Machines, block


class Daemon:
    """`blocks`: whose bytes it gives, of those that it lists."""

    def __init__(self, listed: list[bytes]) -> None:
        self.listed, self.blocks = listed, set(listed)
        self.breaks: set[bytes] = set()  # end the stream
        self.fetched = 0

    def List(self, _asked, timeout):
        return types.SimpleNamespace(
            blocks=[types.SimpleNamespace(key=key) for key in self.listed], next_page_token=""
        )

    def fetch(self, _stream, keys, _request):
        self.fetched += len(keys)
        if self.breaks & set(keys):
            raise Broken("a checksum")
        layout, head, *rest = block()
        digest = hashlib.sha256(layout.payload).digest()
        return {
            key: [layout, Frame(head.kind, 0, 0, 0, key + digest + head.payload[64:]), *rest]
            for key in keys
            if key in self.blocks
        }


class Hosts(Machines):
    """`members`: whose replicas count, until they are gone."""

    def __init__(self) -> None:
        super().__init__(4)
        self.members, self.now, self.put_takes_s = {"s0", "s1", "s2"}, 0.0, 0.0

    def hosts(self):
        return {segment: at for segment, at in super().hosts().items() if segment in self.members}

    def put(self, name, data, segment):
        self.now += self.put_takes_s
        return super().put(name, data, segment)
    def leaves(self, segment: str) -> None:
        self.members.discard(segment)

    def has(self) -> list[str]:
        return sorted({name.split("/")[2] for objects in self.objects.values() for name in objects})

    def replicas(self, key: bytes) -> int:
        """On members."""
        held = [self.objects[at] for at in self.hosts().values()]
        return sum(any(key.hex() in name for name in objects) for objects in held)


@pytest.fixture
def two(monkeypatch, tmp_path):
    keys = [struct.pack("<Q24x", number) for number in range(putting.MOST_A_STEP + 1)]
    daemon, hosts = Daemon(keys), Hosts()
    monkeypatch.setattr(putting.admin_pb2_grpc, "AdminStub", lambda channel: daemon)
    monkeypatch.setattr(frames, "fetch", daemon.fetch)
    monkeypatch.setattr(putting.Putter, "_stream", lambda self, space: None)
    pool, daemon_at = Pool(hosts, 2, hosts.hosts, lambda: hosts.now), ("d", "127.0.0.1:1")
    salts = {"s": bytes(32)}
    yield daemon, hosts, putting.Putter(pool, str(tmp_path), daemon_at, "p", salts, lambda: hosts.now)
    pool.close()


def all_put(putter, hosts, keys) -> bool:
    """After no more rounds than it may take."""
    for _ in range(4):
        putter.round()
    return [hosts.replicas(key) for key in keys] == [2] * len(keys)


def test_what_the_daemon_did_not_give_is_put_when_it_does(two):
    daemon, hosts, putter = two
    late = daemon.listed[0]
    daemon.blocks.discard(late)
    while putter.round():
        pass
    assert late.hex() not in hosts.has() and len(hosts.has()) == putting.MOST_A_STEP
    daemon.blocks.add(late)
    putter.round()
    assert late.hex() in hosts.has()


def test_what_is_never_given_keeps_nothing_from_being_put(two):
    daemon, hosts, putter = two
    last = daemon.listed[-1]
    daemon.blocks = {last}
    for _ in range(2):
        putter.round()
    assert hosts.has() == [last.hex()]


def test_a_host_that_goes_leaves_blocks_that_are_put_again(two):
    daemon, hosts, putter = two
    assert all_put(putter, hosts, daemon.listed) and putter.short == 0
    hosts.leaves("s1")
    assert min(hosts.replicas(key) for key in daemon.listed) == 1
    assert all_put(putter, hosts, daemon.listed) and putter.short == 0


def test_a_host_that_comes_gets_what_one_alone_had(two):
    daemon, hosts, putter = two
    hosts.members = {"s0"}
    for _ in range(4):
        putter.round()
    assert {hosts.replicas(key) for key in daemon.listed} == {1} and putter.short == 0, "one is all there is"
    hosts.members = {"s0", "s3"}
    assert all_put(putter, hosts, daemon.listed)


def test_a_host_that_fails_while_it_is_a_member_gets_its_blocks_when_it_is_back(two):
    daemon, hosts, putter = two
    hosts.members, hosts.dead = {"s0", "s1"}, {"e1"}
    for _ in range(4):
        putter.round()
    assert putter.short == putter.known == len(daemon.listed)
    assert hosts.asked.count("e1") <= putting.MOST_A_FETCH, "it is left alone"
    hosts.dead, hosts.now = set(), 100.0
    assert all_put(putter, hosts, daemon.listed) and putter.short == 0


def test_what_the_daemon_has_no_more_is_not_asked_for_without_end(two):
    daemon, hosts, putter = two
    assert all_put(putter, hosts, daemon.listed)
    daemon.listed, daemon.blocks = [], set()
    hosts.leaves("s1")
    for _ in range(2):
        putter.round()
    assert putter.short == 0


def test_two_replicas_on_one_host_are_one(two):
    """A host that is full passes on what it is given."""
    daemon, hosts, putter = two
    daemon.listed = daemon.listed[:1]
    straight, passed = hosts.put, []

    def put(name, data, segment):
        passed.append(segment)
        return straight(name, data, "s0")

    hosts.put = put
    putter.round()
    assert hosts.replicas(daemon.listed[0]) == 1 and putter.short == 1
    assert set(passed) == {"s0", "s1", "s2"}, "and the next host was asked"


def test_hosts_that_are_full_get_no_copies_and_cost_no_fetches(two):
    daemon, hosts, putter = two
    daemon.listed = daemon.listed[:20]
    straight = hosts.put
    hosts.put = lambda name, data, segment: straight(name, data, "s0")
    put = []
    for _ in range(10):
        hosts.now += 1
        put.append(putter.round())
        assert len(hosts.objects["e0"]) <= len(hosts.has()), "one of each, never a second beside it"
    assert put == [20, *[0] * 9], "and what was not mended is not counted"
    assert putter.short == 20 and daemon.fetched == 20 and putter._pool.counts["mended"] == 0
    hosts.put, hosts.now = straight, hosts.now + FULL_S
    assert all_put(putter, hosts, daemon.listed) and putter.short == 0, "they have room again"


def test_what_has_no_name_left_is_not_fetched(two):
    """They lie on hosts that are none of ours any more, and cannot be reached."""
    daemon, hosts, putter = two
    daemon.listed = daemon.listed[:1]
    hosts.objects["e3"] = dict.fromkeys(putter._pool._names("s", daemon.listed[0]), b"")
    for _ in range(10):
        assert putter.round() == 0
    assert daemon.fetched == 0


def test_what_breaks_the_stream_holds_up_nothing_else(two, capfd):
    daemon, hosts, putter = two
    fresh = daemon.listed[10:20]
    daemon.listed = daemon.listed[:10]
    assert all_put(putter, hosts, daemon.listed)
    daemon.listed = daemon.listed + fresh
    old, new = daemon.listed[0], fresh[0]
    daemon.breaks = {old, new}
    hosts.leaves("s0")
    for _ in range(4):
        putter.round()
    assert {key: hosts.replicas(key) for key in fresh} == {key: 2 * (key != new) for key in fresh}
    fetched, putter._later = daemon.fetched, set()
    putter.round()
    assert daemon.fetched == fetched, "they are postponed"
    logged = capfd.readouterr().err
    assert "fabric_block_postponed" in logged and new.hex() not in logged, "the log has no key"
    daemon.breaks, hosts.now = set(), hosts.now + putting.POSTPONED_S
    assert all_put(putter, hosts, daemon.listed) and putter.short == 0


def test_a_round_ends_though_hosts_are_slow(two):
    """The lease is kept between two rounds."""
    daemon, hosts, putter = two
    hosts.put_takes_s = 0.3
    before = hosts.now
    putter.round()
    assert 0 < putter.known < len(daemon.listed)
    assert hosts.now - before <= 2 * (putting.ROUND_S + 2 * 0.3)


def test_a_master_that_does_not_answer_is_asked_once_a_round(two):
    _daemon, hosts, putter = two
    asked = []
    hosts.places = lambda names: asked.append(names) or 1 / 0
    putter.round()
    assert len(asked) == 1 and putter.known == 0


def test_a_runtime_directory_that_takes_nothing_ends_no_fabric(tmp_path):
    fabric = Fabric.__new__(Fabric)
    fabric.pool, fabric._master, fabric._said = None, "", {"dir": str(tmp_path / "gone")}
    fabric._transport = "none"
    fabric.members = types.SimpleNamespace(members={}, away="")
    fabric._tell()
