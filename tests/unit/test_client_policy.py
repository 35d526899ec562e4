"""Goal: KVClient attaches anew when its session ends, raises at once when there is no daemon, and with
on_error="miss" goes on without the store, counted and bounded. Method: a scripted stand-in for the native
client that is detached, refused or answering as each case says, and a breaker whose clock the case moves.
"""

import threading

import pytest

import kvclient
from kvclient.client.breaker import FIRST_BACKOFF_S, HURRIED_BACKOFF_S, MAX_BACKOFF_S, Breaker
from kvclient.client.client import ATTACH_TRIES, KVClient
from kvclient.client.connect import default_directory
from kvclient.client.tolerant import TolerantClient
from kvclient.errors import BlockLost, Closed, Detached, InvalidArgument, Unavailable

KEYS = [bytes(32), bytes([1]) * 32]
BLOB = bytes(kvclient.Layout(1, 1, 8))
OTHER_BLOB = bytes(kvclient.Layout(2, 1, 8))


class Daemon:
    """What the stand-ins attach to: up or down, and one layout table per start."""

    def __init__(self):
        self.up = True
        self.layouts: list[bytes] = []
        self.epoch = 1
        self.attached_total = 0

    def restart(self, empty: bool = True):
        self.epoch += 1
        if empty:
            self.layouts = []

    def attach(self):
        if not self.up:
            raise Unavailable("connection refused")
        return Native(self)


class Native:
    def __init__(self, daemon: Daemon):
        self.daemon = daemon
        self.created: list[tuple] = []
        self.closed = False
        self.reattach()

    @property
    def attached(self):
        return self.epoch == self.daemon.epoch and not self.closed

    @property
    def readable(self):
        return self.epoch == self.daemon.epoch

    awaited = False

    def reattach(self):
        if not self.daemon.up:
            raise Unavailable("connection refused")
        self.epoch = self.daemon.epoch
        self.daemon.attached_total += 1
        self.attachment = self.daemon.attached_total

    def _check(self, needs_socket=False):
        if self.closed:
            raise Closed("closed")
        if self.epoch != self.daemon.epoch:
            raise Detached("the epoch changed")
        if needs_socket and not self.daemon.up:
            raise Detached("the daemon is gone")

    def lookup(self, keys):
        self._check()
        return "found"

    def get(self, keys, follow=False, wait_s=0.0, verify=False):
        self._check()
        return ["block"] * len(keys)

    def create(self, keys, layout_id, priority, ttl_s, token_counts, sealing, attachment):
        self._check(needs_socket=True)
        if attachment != self.attachment:
            raise Detached("attached anew")
        self.created.append((layout_id, ttl_s))
        return "writer"

    def delete(self, keys):
        self._check(needs_socket=True)
        return len(keys)

    def register_layout(self, blob):
        self._check(needs_socket=True)
        if blob not in self.daemon.layouts:
            self.daemon.layouts.append(blob)
        return self.daemon.layouts.index(blob)

    def stats(self):
        self._check(needs_socket=True)
        return '{"blocks": 0}'

    def close(self):
        self.closed = True

    def renew_lock(self):
        """Other tests of this process fork."""


@pytest.fixture
def daemon():
    return Daemon()


def test_a_restart_is_not_seen_by_the_caller(daemon):
    client = KVClient(daemon.attach, "default")
    for call in (
        lambda: client.lookup(KEYS),
        lambda: client.get(KEYS),
        lambda: client.create(KEYS, 0),
        client.stats,
    ):
        daemon.restart()
        assert call()
    assert client.reattached_total == 4


def test_a_dead_daemon_raises_at_once_but_reading_goes_on(daemon):
    client = KVClient(daemon.attach, "default")
    daemon.up = False
    for call in (lambda: client.create(KEYS, 0), lambda: client.delete(KEYS), client.stats):
        with pytest.raises(Unavailable):
            call()
    assert client.lookup(KEYS) == "found" and len(client.get(KEYS)) == 2
    daemon.up = True
    daemon.restart()
    assert client.delete(KEYS) == 2


def test_sessions_that_end_for_ever_are_given_up(daemon):
    client = KVClient(daemon.attach, "default")
    daemon.restart()
    restarting = type(
        "Restarting", (Native,), {"lookup": lambda self, keys: (daemon.restart(), self._check())}
    )
    client._bind(restarting(daemon))
    with pytest.raises(Unavailable, match="in a row"):
        client.lookup(KEYS)
    assert daemon.attached_total <= ATTACH_TRIES + 2


def test_layout_ids_stay_what_the_caller_was_told(daemon):
    client = KVClient(daemon.attach, "default")
    first, second = client.register_layout(BLOB), client.register_layout(OTHER_BLOB)
    assert client.register_layout(BLOB) == first != second
    daemon.restart()
    Native(daemon).register_layout(OTHER_BLOB)  # another process registers first in the new pool
    client.create(KEYS, first)
    client.create(KEYS, second)
    assert [daemon.layouts[layout_id] for layout_id, _ in client._native.created] == [BLOB, OTHER_BLOB]
    third = client.register_layout(bytes(kvclient.Layout(3, 1, 8)))
    assert third not in (first, second)


@pytest.mark.parametrize("kind", [KVClient, TolerantClient])
def test_an_answer_of_the_daemon_before_numbers_no_layout_of_this_one(daemon, monkeypatch, kind):
    client = kind(daemon.attach, "default")
    told_by_daemon, threads = Native.register_layout, []

    def overtaken(native, blob):
        answer = told_by_daemon(native, blob)
        if not threads:  # another daemon, where others have those numbers, and a thread that asks it
            daemon.restart()
            daemon.layouts = [b"x" * len(blob), b"y" * len(blob)]
            threads.append(threading.Thread(target=client.stats))
            threads[0].start()
            threads[0].join(0.2)  # it attaches anew, unless it has to wait
        return answer

    monkeypatch.setattr(Native, "register_layout", overtaken)
    layout_id = client.register_layout(BLOB)
    threads[0].join()
    client.create(KEYS, layout_id)
    assert daemon.layouts[client._native.created[-1][0]] == BLOB


def test_threads_attach_anew_once(daemon):
    client = KVClient(daemon.attach, "default")
    daemon.restart()
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (barrier.wait(10), client.lookup(KEYS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert client.reattached_total == 1


def test_a_closed_client_stays_closed(daemon):
    for kind in (KVClient, TolerantClient):
        client = kind(daemon.attach, "default")
        client.close()
        client.close()
        daemon.restart()
        for call in (lambda c=client: c.lookup(KEYS), lambda c=client: c.create(KEYS, 0), client.stats):
            with pytest.raises(Closed):
                call()


def test_times_to_live_are_bounded(daemon):
    client = KVClient(daemon.attach, "default")
    client.create(KEYS, 0, ttl_s=1.5)
    assert client._native.created == [(0, 2)], "rounded up to whole seconds"
    for wrong in (0, -1, 1e12):
        with pytest.raises(InvalidArgument):
            client.create(KEYS, 0, ttl_s=wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", None, 1 << 70])
def test_a_length_that_is_none_is_named_with_its_bounds(daemon, wrong):
    for client in (
        KVClient(daemon.attach, "default"),
        TolerantClient(daemon.attach, "default"),
        kvclient.InMemoryClient(1 << 20),
    ):
        with pytest.raises(InvalidArgument, match=r"length_bytes=.*0\.\."):
            client.load_estimate_s(wrong)


@pytest.mark.parametrize("wrong", ["", "x" * 64, "default\0x", 4, None])
def test_a_namespace_that_is_no_name_is_refused_before_the_daemon_is_asked(tmp_path, wrong):
    for on_error in ("raise", "miss"):
        with pytest.raises(InvalidArgument, match=r"namespace=.*1 to 63 bytes"):
            kvclient.connect(tmp_path, wrong, on_error)


def test_without_a_store_everything_is_a_miss(daemon):
    daemon.up = False
    client = TolerantClient(daemon.attach, "default")
    assert client.degraded and kvclient.metrics()["kvclient_degraded"] == 1
    found = client.lookup(KEYS)
    assert (found.resident, found.pending, found.on_disk, found.states) == (0, 0, 0, bytes(2))
    with client.get(KEYS) as blocks:
        assert list(blocks) == [None, None] and blocks[0] is None and len(blocks) == 2 and blocks.hits == 0
        blocks.wait_layer(0, timeout_s=0)
    with client.create(KEYS, 0) as writer:
        assert writer.results == ["unavailable"] * 2 and writer.granted == []
        writer.wait_pending(timeout_s=0)
    assert client.delete(KEYS) == 0 and client.touch(KEYS) == 0
    assert client.stats()["used_bytes"] == client.stats()["disk_written"] == client.stats()["evictions"] == 0
    assert client.stats()["node"] == ""
    assert set(client.stats()) <= set(kvclient.InMemoryClient().stats())
    with pytest.raises(Unavailable):
        client.grpc_token()
    assert client.suppressed_total >= 6
    client.close()
    assert kvclient.metrics()["kvclient_degraded"] == 0


def test_a_tolerant_client_comes_back(daemon, monkeypatch):
    daemon.up = False
    client = TolerantClient(daemon.attach, "default")
    clock = [0.0]
    client._breaker = Breaker(now=lambda: clock[0])
    client._breaker.failed()
    layout_id = client.register_layout(BLOB)
    daemon.up = True
    Native(daemon).register_layout(OTHER_BLOB)
    assert client.create(KEYS, layout_id).results == ["unavailable"] * 2  # the backoff has not passed
    clock[0] += FIRST_BACKOFF_S
    client.create(KEYS, layout_id)
    assert not client.degraded
    assert daemon.layouts[client._native.created[0][0]] == BLOB


def test_blocks_that_cannot_be_sealed_on_the_way_are_misses(daemon, monkeypatch):
    client = TolerantClient(daemon.attach, "default")
    monkeypatch.setattr(Native, "create", lambda _self, *args: _lost() if args[5] == "earlier" else "writer")
    earlier = client.create(KEYS, 0)
    earlier._writer = "earlier"
    assert client.create(KEYS, 0, sealing=earlier)._writer == "writer"
    assert client.suppressed_total == 1


def _lost():
    raise BlockLost("its session ended")


def test_the_callers_errors_are_not_misses(daemon):
    client = TolerantClient(daemon.attach, "default")
    with pytest.raises(InvalidArgument):
        client.create(KEYS, 0, ttl_s=-1)
    refusing = type(
        "Refusing", (Native,), {"delete": lambda self, keys: (_ for _ in ()).throw(InvalidArgument("no"))}
    )
    client._bind(refusing(daemon))
    with pytest.raises(InvalidArgument):
        client.delete(KEYS)
    assert not client.degraded


def test_the_breaker_opens_probes_and_closes():
    clock = [100.0]
    breaker = Breaker(now=lambda: clock[0])
    assert breaker.may_ask() and not breaker.open
    breaker.failed()
    assert breaker.open and not breaker.may_ask()
    clock[0] += FIRST_BACKOFF_S
    assert breaker.may_ask(), "half open: one may ask"
    assert not breaker.may_ask(), "and only one"
    breaker.failed()
    clock[0] += FIRST_BACKOFF_S
    assert not breaker.may_ask(), "the backoff doubled"
    clock[0] += FIRST_BACKOFF_S
    assert breaker.may_ask()
    breaker.succeeded()
    assert not breaker.open and breaker.may_ask() and breaker.may_ask()
    for _ in range(50):
        breaker.failed()
        clock[0] += MAX_BACKOFF_S
        assert breaker.may_ask(), "the backoff is bounded"
    assert breaker.opened_total == 2


def test_a_sign_of_a_new_daemon_shortens_the_backoff_and_not_below_its_bound():
    clock = [100.0]
    breaker = Breaker(now=lambda: clock[0])
    for _ in range(10):
        breaker.failed()
        clock[0] += MAX_BACKOFF_S
        assert breaker.may_ask()
    breaker.failed()
    breaker.hurry()
    assert not breaker.may_ask()
    clock[0] += HURRIED_BACKOFF_S
    assert breaker.may_ask()
    breaker.succeeded()
    breaker.hurry()
    assert breaker.may_ask() and not breaker.open


def test_connect_checks_its_arguments(tmp_path):
    for wrong in (
        {"on_error": "ignore"}, {"timeout_s": 0}, {"timeout_s": "5"}, {"door": "window"},
        {"max_pins": 0}, {"max_pins": -1}, {"max_pins": "5"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            kvclient.connect(dir=tmp_path, **wrong)
    for wrong in ({"dir": f"{tmp_path}/\udce4"}, {"dir": tmp_path, "namespace": "\udce4"}):
        with pytest.raises(InvalidArgument, match="no UTF-8"):  # as Python reads such bytes of a path
            kvclient.connect(**wrong)


def test_a_directory_may_be_named_as_a_shell_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Unavailable, match=f"no daemon at {tmp_path}/none/kvstored.sock"):
        kvclient.connect("~/none")


def test_the_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORED_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVSTORED_DIR", "~/chosen")
    assert default_directory() == tmp_path / "chosen", "the daemon and its commands read it so"
    monkeypatch.delenv("KVSTORED_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvstored").mkdir()
    (tmp_path / "kvstored" / "kvstored.sock").touch()
    assert default_directory().name == "kvstored"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_directory()) == "/run/kvstored"
