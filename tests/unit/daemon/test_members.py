"""Who of a cluster's hosts becomes a peer: by the rules of a configured one. And a daemon that starts while
its predecessor's fabric lives."""

import fcntl
import os
import socket
import threading
import types
from unittest import mock

import pytest

from kvstored.cluster import sidecar
from kvstored.cluster.sidecar import Left
from kvstored.config.peers import MAX_PEERS, Endpoint
from kvstored.config.sources import load
from kvstored.errors import ConfigError, StartupError
from kvstored.tiers.peers import Peers, address_towards, held_port

TLS = {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}
SHARED = {"node": "me", "cluster": "etcd://10.0.0.8:2379", "cluster_memory": "0"}


class Tier:
    def __init__(self, most=MAX_PEERS):
        self.peers, self._most = {}, most

    def join(self, name, host, port):
        if name not in self.peers and len(self.peers) >= self._most:
            return False
        self.peers[name] = f"{host}:{port}"
        return True

    def leave(self, name):
        self.peers.pop(name, None)


@pytest.fixture
def peers(tmp_path):
    def made(**said):
        bare = object.__new__(Peers)
        bare._config = load({"dir": str(tmp_path), **SHARED, **said}, {}).config
        bare.pool_port, bare._members, bare._tiers = 0, {}, {"default": Tier()}
        bare.welcome = []
        bare._server = types.SimpleNamespace(welcome=lambda names: setattr(bare, "welcome", names))
        return bare

    return made


def joined(host, told):
    host.members_are(told)
    assert sorted(host._tiers["default"].peers) == host.welcome
    return host._tiers["default"].peers


def test_members_come_move_and_go(peers):
    host = peers(trusted_network="10.0.0.0/24", listen="10.0.0.1:7400", peer="set=10.0.0.7:7400")
    told = {
        "me": "10.0.0.1:7400",
        "b": "10.0.0.2:7400",
        "c": "10.0.0.3:1",
        "set": "10.0.0.9:1",
        "pool": "10.0.0.4:1",
    }
    assert joined(host, told) == {"b": "10.0.0.2:7400", "c": "10.0.0.3:1"}
    assert joined(host, {"b": "10.0.0.5:7400"}) == {"b": "10.0.0.5:7400"}
    assert joined(host, {}) == {}


@pytest.mark.parametrize(
    "told",
    [
        "10.0.1.2:7400",
        "127.0.0.1:7400",
        "0.0.0.0:7400",
        "10.0.0.2:0",
        "10.0.0.2",
        "host:7400",
        "",
        "::1:7400",
    ],
)
def test_an_address_that_no_configured_peer_might_have_is_none(peers, told):
    host = peers(trusted_network="10.0.0.0/24", listen="10.0.0.1:7400")
    assert joined(host, {"b": told}) == {}


@pytest.mark.parametrize("name", ["B", "", "x" * 64, "a b", "../a", "-"])
def test_a_name_that_no_configured_peer_might_have_is_none(peers, name):
    assert joined(peers(trusted_network="10.0.0.0/24", listen="10.0.0.1:7400"), {name: "10.0.0.2:1"}) == {}


def test_without_a_trusted_network_only_certificates_make_peers(peers):
    told = {"b": "10.0.0.2:7400"}
    assert joined(peers(listen="127.0.0.1:7400"), told) == {}
    assert joined(peers(listen="0.0.0.0:7400", **TLS), told) == told


def test_loopback_is_another_hosts_unless_etcd_is_there_too(peers):
    told = {"b": "127.0.0.2:7400"}
    assert joined(peers(listen="0.0.0.0:7400", **TLS), told) == {}
    assert joined(peers(listen="127.0.0.1:7400", cluster="etcd://127.0.0.1:2379"), told) == told


def test_there_are_no_more_than_there_may_be(peers):
    host = peers(trusted_network="10.0.0.0/16", listen="10.0.0.1:7400")
    told = {f"n{i:03}": f"10.0.1.{i}:7400" for i in range(1, 101)}
    assert len(joined(host, told)) == MAX_PEERS
    with mock.patch("resource.getrlimit", lambda _: (400, 400)):
        assert len(joined(host, told)) == 10, "ten descriptors each, in a quarter of them"


@pytest.mark.parametrize("refuses", [False, RuntimeError("no thread")], ids=["no slot", "no thread"])
def test_who_found_room_in_one_namespace_alone_is_no_peer_in_any(peers, refuses):
    """It was in no list afterwards, and nobody told that namespace when it left."""
    host = peers(trusted_network="10.0.0.0/24", listen="10.0.0.1:7400")
    full = Tier(most=0)
    if refuses:
        full.join = mock.Mock(side_effect=refuses)
    host._tiers = {"default": Tier(), "full": full, "other": Tier()}
    assert joined(host, {"b": "10.0.0.2:7400"}) == {}
    assert joined(host, {}) == {} and not host._tiers["other"].peers


def test_a_daemon_that_starts_waits_for_its_predecessors_fabric(tmp_path, monkeypatch):
    assert Left(str(tmp_path), False).fd == -1 and not os.listdir(tmp_path), "there never was one"
    Left(str(tmp_path), True).close()
    fabric = os.open(tmp_path / "fabric.lock", os.O_RDWR)
    fcntl.flock(fabric, fcntl.LOCK_EX)
    monkeypatch.setattr(sidecar, "LEFT_S", 0.05)
    for wanted in (True, False):
        with pytest.raises(StartupError, match="has not ended"):
            Left(str(tmp_path), wanted)
    monkeypatch.setattr(sidecar, "LEFT_S", 30.0)
    threading.Timer(0.05, os.close, [fabric]).start()
    Left(str(tmp_path), False).close()


def test_listening_on_the_way_to_etcd(peers, monkeypatch):
    from kvstored.tiers import peers as module

    monkeypatch.setattr(module, "address_towards", lambda etcd: "10.0.0.1")
    assert module.listening_at(peers()._config) is None
    assert module.listening_at(peers(trusted_network="10.9.0.0/24")._config) is None
    assert module.listening_at(peers(trusted_network="10.0.0.0/24")._config) == Endpoint("10.0.0.1", 0)
    assert module.listening_at(peers(**TLS)._config) == Endpoint("10.0.0.1", 0)
    assert module.listening_at(peers(listen="127.0.0.1:7400")._config) == Endpoint("127.0.0.1", 7400)
    monkeypatch.setattr(module, "address_towards", lambda etcd: "")
    assert module.listening_at(peers(**TLS)._config) is None  # not loopback, which is every host's


def test_the_address_is_that_towards_an_etcd_there_is_a_way_to():
    nowhere = "255.255.255.255:2379"  # refused at once, as where there is no network
    assert address_towards(f"{nowhere},127.0.0.1:2379") == "127.0.0.1"
    assert address_towards(nowhere) == ""


def test_a_cluster_goes_with_tls_where_it_has_no_pool():
    both = {"dir": "/tmp/x", **SHARED, "listen": "10.0.0.1:7400", **TLS}
    with pytest.raises(ConfigError, match="Mooncake has no TLS"):
        load({**both, "cluster_memory": "256MiB"}, {})
    assert load(both, {}).config.cluster_memory == 0


def test_the_pools_port_is_nobody_elses_while_no_fabric_listens_there():
    with held_port() as held:
        at = held.getsockname()
        for _ in range(2):  # a fabric, and the next
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(at)
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(at)
            with socket.create_server(at), socket.create_connection(at):
                pass
