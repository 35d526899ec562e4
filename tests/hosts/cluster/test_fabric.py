"""Goal: what is around a fabric cannot harm it, nor it its daemon: the directory that a daemon was started
in, who connects and says little, what it tells in pieces.

Method: the sidecar starts the interpreter that it would, in a directory that has a trap; a stranger's socket
is an object with a clock of its own.
"""

import io
import socket
import subprocess
import sys
import threading
import types

import pytest

from kvstored.cluster import answers, frames, sidecar
from kvstored.cluster.answers import Answers
from kvstored.cluster.frames import Broken, Stream
from kvstored.cluster.sidecar import Sidecar
from kvstored.config.sources import load
from kvstored.tiers.peers import Peers

WAIT_S = 30.0


def bare(**has) -> Sidecar:
    made = object.__new__(Sidecar)
    made._over, made._inherited, made.restarts = threading.Event(), [], 0
    made._process, made._what_it_is_told = None, lambda: {"address": "127.0.0.1"}
    for name, value in has.items():
        setattr(made, name, value)
    return made


def test_nothing_is_imported_from_the_directory_that_the_daemon_was_started_in(tmp_path, monkeypatch):
    """There may lie anybody's modules, /tmp."""
    (tmp_path / "grpc.py").write_text("open('trapped', 'w').close()\nraise SystemExit(7)\n")
    (tmp_path / "kvstored").mkdir()
    (tmp_path / "kvstored" / "__init__.py").write_text("open('trapped', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    over = threading.Event()
    ended = types.SimpleNamespace(placer_ended=over.set)
    tried = bare(_over=over, _peers=ended)
    tried._watch()  # it is told nothing that it could work with, and ends
    assert tried._process.returncode == 1
    assert not (tmp_path / "trapped").exists()


def test_a_fabric_that_starts_while_its_daemon_stops_ends_too(monkeypatch):
    """close() came between the decision to start it and its process."""
    over, started = threading.Event(), subprocess.Popen
    late = bare(_over=over, _peers=types.SimpleNamespace(placer_ended=lambda: None))

    def start(words, **about):
        over.set()
        return started([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()) > 0)"], **about)

    monkeypatch.setattr(sidecar.subprocess, "Popen", start)
    late._watch()
    assert late._process.returncode == 0, "it read to the end, and nothing"


def test_no_fabric_is_started_while_there_is_no_way_to_etcd(monkeypatch):
    """It would take the master's part in etcd, once that is there, at an address that is everybody's."""
    addresses, warned = iter(["", "", "10.0.0.1"]), []
    monkeypatch.setattr(sidecar.log, "warning", lambda event, **about: warned.append(event))
    monkeypatch.setattr(sidecar, "LEAST_S", 0.001)
    over, started, told = threading.Event(), subprocess.Popen, []

    def start(words, **about):
        over.set()
        told.append("started")
        return started([sys.executable, "-S", "-c", ""], **about)

    monkeypatch.setattr(sidecar.subprocess, "Popen", start)
    early = bare(
        _over=over,
        _config=types.SimpleNamespace(etcd="etcd.invalid:2379"),
        _peers=types.SimpleNamespace(placer_ended=lambda: None),
        _what_it_is_told=lambda: {"address": next(addresses)},
    )
    early._watch()
    assert told == ["started"] and next(addresses, None) is None
    assert warned == ["fabric_not_started"], "once, however long it lasts"


@pytest.mark.parametrize("way", ["", "10.0.0.1"])
def test_where_it_listens_is_told_as_its_address_was_found(monkeypatch, way):
    """The resolver was asked twice: a fabric with an address told the cluster no place for its life."""
    found = iter([way, "10.0.0.9"])
    monkeypatch.setattr(sidecar, "address_towards", lambda etcd: next(found))
    config = load({
        "dir": "/tmp/x", "node": "a", "cluster": "etcd://e:2379", "listen": "0.0.0.0:7400",
        "tls_cert": "/a", "tls_key": "/b", "tls_ca": "/c", "cluster_memory": "0",
    }, {}).config  # fmt: skip
    peers = object.__new__(Peers)
    peers._at, peers._server, peers.pool_port = config.listen, types.SimpleNamespace(port=7400), 0
    peers._inner, peers.salts = types.SimpleNamespace(port=1), {}
    said = bare(_config=config, _peers=peers, _pools={}, _what_it_is_told=None)
    del said._what_it_is_told
    told = said._what_it_is_told()
    assert (told["address"], told["listen"]) == (way, f"{way}:7400" if way else "")


@pytest.mark.parametrize("tail", [b"5\n", b"[1]\n", b"null\n", b'"\xc3\n', b"\xa4\n", b"{\n"])
def test_a_piece_of_what_a_fabric_tells_ends_nothing(tail):
    heard = []
    listening = bare(_peers=types.SimpleNamespace(members_are=heard.append))
    listening._hear(io.BytesIO(tail + b'{"b": "10.0.0.2:7400"}\n'))
    assert heard == [{"b": "10.0.0.2:7400"}]


class Dripping:
    """A socket of a stranger, who says a byte just before it would be late."""

    def __init__(self, said: bytes, monkeypatch) -> None:
        self.said, self.taken, self.now, self.timeout_s = said, 0, 0.0, 0.0
        monkeypatch.setattr(frames, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def setsockopt(self, *_):
        pass

    def settimeout(self, timeout_s):
        self.timeout_s = timeout_s

    def recv(self, _count):
        self.now += 0.9 * self.timeout_s
        self.taken += 1
        return self.said[self.taken - 1 : self.taken]


def test_a_stranger_has_a_second_to_say_who_it_is(monkeypatch):
    """However it divides that: sixty-four of them could keep out the daemon."""
    hello = frames.frame(frames.HELLO, bytes(8 + 2 * frames.NAME_BYTES + 32))
    stranger = Dripping(hello, monkeypatch)
    with pytest.raises(Broken):
        frames.admit(Stream(stranger), "pool", {"s": bytes(32)}, "d")
    assert stranger.now <= frames.STEP_S
    assert stranger.taken < len(hello)


def test_of_a_burst_of_strangers_no_more_stay_than_may(monkeypatch):
    """Each arrival shuts another, though none of their threads has run yet."""
    served = Answers(types.SimpleNamespace(), "pool", "d", {"s": bytes(32)}, {"s": (0, 0)}, 0)
    shut, came, burst = [], [], []

    def admit(stream, *_about):
        came.append(stream)
        if len(came) < 3 * answers.MOST_STRANGERS:
            served._admit(stranger(len(came)), len(came))
        else:
            burst.extend(served._strangers)
        return "s"

    def stranger(number):
        return types.SimpleNamespace(shutdown=lambda _how: shut.append(number))

    monkeypatch.setattr(frames, "admit", admit)
    served._admit(stranger(0), 0)
    assert shut == list(range(2 * answers.MOST_STRANGERS)) and len(burst) == answers.MOST_STRANGERS
    assert served._strangers == []
    served._listener.close()


def test_strangers_of_any_number_keep_the_daemon_out_for_no_moment(monkeypatch):
    """The oldest makes room, also where none is dropped for its silence."""
    monkeypatch.setattr(frames, "STEP_S", WAIT_S)
    served = Answers(types.SimpleNamespace(), "pool", "d", {"s": bytes(32)}, {"s": (0, 0)}, 0)
    threading.Thread(target=served.serve, daemon=True).start()
    at = served._listener.getsockname()
    most = answers.MOST_STREAMS + answers.THREADS
    strangers = [socket.create_connection(at, WAIT_S) for _ in range(most + 1)]
    stream = Stream(socket.create_connection(at, WAIT_S))
    frames.introduce(stream, "d", "s", bytes(32), "pool")
    stream.send(frames.frame(frames.PING, b"", 3))
    assert stream.take().kind == frames.PONG
    for stranger in strangers:
        stranger.close()
    stream.close()
    served._listener.close()
