"""Goal: Mooncake uses RDMA where all hosts of the cluster have it and TCP elsewhere, and what is told of it
is so. Method: directories that stand in for the kernel's, and for Mooncake a module that does as its source
does: it takes no notice of the protocol, uses RDMA where there is a device, and then reads only into memory
that was registered. No host here has a device: the real Mooncake was not run over RDMA.
"""

import ctypes
import os
import sys
import types

import pytest

from kvstored.cluster import mooncake as under_test
from kvstored.cluster import transport
from kvstored.cluster.fabric import Fabric
from kvstored.cluster.mooncake import Extent, Mooncake, Place, Unusable
from kvstored.cluster.transport import RDMA, TCP, Transport

REMOTE = bytes(range(256)) * 64  # what lies on another host


@pytest.fixture
def host(tmp_path, monkeypatch):
    """(devices, doors): as of a host with two devices, of which one has a port that is up."""
    devices, doors = tmp_path / "infiniband", tmp_path / "dev"
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = devices / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    doors.mkdir()
    (doors / "uverbs0").touch()
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    return devices, doors


def test_rdma_is_chosen_where_a_port_is_up_and_can_be_reached(host):
    devices, doors = host
    assert transport.choose([], devices, doors) == Transport(RDMA, ("mlx5_0",))
    assert transport.choose([RDMA, RDMA], devices, doors).name == RDMA


def test_without_one_it_is_tcp_and_says_why(host, tmp_path):
    devices, doors = host
    none = transport.choose([], tmp_path / "nowhere", doors)
    assert (none.name, none.devices) == (TCP, ()) and "no device" in none.why
    (doors / "uverbs0").unlink()  # a container that was given none
    assert "cannot be reached" in transport.choose([], devices, doors).why
    (devices / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert "no device" in transport.choose([], devices, doors).why


def test_all_hosts_use_the_same_and_an_operator_may_say_tcp(host):
    assert "another host" in transport.choose([RDMA, TCP], *host).why
    os.environ[transport.FORCE_TCP] = "1"
    assert transport.FORCE_TCP in transport.choose([RDMA], *host).why


def test_what_is_told_is_what_the_process_has_open(tmp_path):
    doors, descriptors = tmp_path / "dev", tmp_path / "fd"
    descriptors.mkdir()
    (descriptors / "3").symlink_to("/dev/null")
    (descriptors / "4").symlink_to(doors / "rdma_cm")
    assert transport.in_use(doors, descriptors) == TCP
    (descriptors / "5").symlink_to(doors / "uverbs0")
    assert transport.in_use(doors, descriptors) == RDMA


class Engine:
    """Of a host that has a device."""

    works, made = True, []

    def __init__(self):
        self.registered = []
        Engine.made.append(self)

    def initialize(self, address, metadata, protocol, devices):
        self.rdma, self.devices = transport.FORCE_TCP not in os.environ, devices
        return -1 if self.rdma and not Engine.works else 0

    def register_memory(self, at, length):
        self.registered.append(range(at, at + length))
        return 0

    def get_engine(self):
        return self

    def get_rpc_port(self):
        return 7

    def transfer_sync_read(self, endpoint, to, at, length):
        inside = any(to in known and to + length - 1 in known for known in self.registered)
        if self.rdma and not inside:
            return -1
        ctypes.memmove(to, REMOTE[at : at + length], length)
        return 0


class Store:
    def setup(self, *words):
        self.words = words
        return 0

    def get_hostname(self):
        return "h:1"


@pytest.fixture
def stand_in(host, monkeypatch):
    engine, store = types.ModuleType("mooncake.engine"), types.ModuleType("mooncake.store")
    engine.TransferEngine, store.MooncakeDistributedStore, store.ReplicateConfig = Engine, Store, object
    for name, module in (("mooncake.engine", engine), ("mooncake.store", store)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.setattr(Engine, "works", True)
    monkeypatch.setattr(under_test, "LANDING_BYTES", 1 << 20)
    monkeypatch.setattr(under_test, "in_use", lambda: RDMA if Engine.made[-1].rdma else TCP)


@pytest.mark.parametrize("wanted", [Transport(RDMA, ("mlx5_0",)), Transport(TCP, why="no device")])
def test_a_read_arrives_over_either(stand_in, wanted):
    mooncake = Mooncake("127.0.0.1", "m:1", 1 << 20, wanted)
    engine = Engine.made[-1]
    assert mooncake.transport == wanted.name == (RDMA if engine.rdma else TCP)
    assert engine.devices == ",".join(wanted.devices)
    assert len(engine.registered) == (wanted.name == RDMA), "over TCP anybody could write there"
    assert mooncake.read(Place("e", 0, len(REMOTE)), 100) == REMOTE[:100]
    pool = os.memfd_create("pool")
    os.truncate(pool, 1 << 16)
    assert mooncake.read_into(Place("e", 256, 4096), 8, Extent(pool, 4096, 1000))
    whole = os.pread(pool, 1 << 16, 0)
    assert whole[4096:5096] == REMOTE[264:1264] and not any(whole[:4096]) and not any(whole[5096:])
    assert mooncake._landing._free == [(0, 1 << 20)]
    os.close(pool)


def test_where_rdma_does_not_start_it_is_tcp(stand_in, monkeypatch):
    warned = []
    monkeypatch.setattr(under_test.log, "warning", lambda event, **about: warned.append(event))
    monkeypatch.setattr(Engine, "works", False)
    mooncake = Mooncake("127.0.0.1", "m:1", 1 << 20, Transport(RDMA, ("mlx5_0",)))
    assert (mooncake.transport, len(Engine.made), warned) == (TCP, 2, ["fabric_without_rdma"])
    assert mooncake._store.words[4:6] == (TCP, "")


def test_a_host_that_has_none_joins_and_the_others_begin_anew_over_tcp():
    fabric = object.__new__(Fabric)
    fabric._said = {"node": "a"}
    fabric.pool, fabric._transport = object(), RDMA
    told = {"a": {"segment": "a:1", "transport": TCP}, "b": {"segment": "b:1", "transport": RDMA}, "c": {}}
    fabric.members = types.SimpleNamespace(members=told)
    fabric._same_transport()
    told["d"] = {"segment": "d:1"}  # of a version that knew no other
    with pytest.raises(Unusable, match="d uses tcp"):
        fabric._same_transport()
    fabric._transport = TCP
    fabric._same_transport()


def test_the_kernels_own_directories_are_looked_at():
    """On this machine, whatever it has."""
    assert transport.choose([]).name in (RDMA, TCP) and transport.in_use() == TCP
    assert any(transport.DESCRIPTORS.iterdir())
