"""Health means serving: a namespace whose store does not do its work is told, by name, and costs no other.

Method: stores that hang, lose a block, have no room or are fenced stand for real ones; the session socket is
the test's own. The states that result are compared, and what a probe asked of a store.
"""

import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstored.errors import Fenced
from kvstored.telemetry import health
from kvstored.telemetry.health import Health
from kvstored.telemetry.problems import STATES, Degraded
from tests.fault.children import eventually


class Fake:
    """A store that does what a store does, for one block at a time."""

    def __init__(self, granted=0):
        self.granted, self.block, self.calls, self.seals = granted, None, [], 0

    def lookup(self, keys):
        self.calls.append("lookup")
        return b"\0"

    def stats(self):
        return {"seals": self.seals}

    def register_layout(self, blob):
        return 0

    def open_owner(self):
        self.calls.append("open")
        return 7

    def close_owner(self, owner):
        self.calls.append("close")

    def create(self, owner, key, layout, tokens, priority, ttl_ms):
        return [SimpleNamespace(status=self.granted, handle=(1, 1), length_bytes=512)]

    def write(self, handle, offset, data):
        self.block = data

    def seal(self, owner, handles):
        self.seals += 1
        return [0]

    def read(self, key):
        return self.block

    def delete(self, keys):
        self.calls.append("delete")


class Forgetful(Fake):
    def read(self, key):
        return None


class Harmed(Fake):
    def lookup(self, keys):
        raise Fenced("cut")


class Hanging(Fake):
    def __init__(self):
        super().__init__()
        self.go, self.probes = threading.Event(), 0

    def lookup(self, keys):
        self.probes += 1
        self.go.wait(60)
        return b"\0"


@pytest.fixture
def sessions(tmp_path):
    """A session socket that answers anything."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.recv(100)
                    client.send(b"no")
                    client.close()

        threading.Thread(target=answer, daemon=True).start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)


def looked(stores, path, looks=1, write=True):
    """The states after a look, and who serves."""

    async def scenario():
        degraded = Degraded()
        health = Health(stores, path, degraded)
        for _ in range(looks):
            await health.look(write)
        health.close()
        found = {(entry.state, entry.namespace) for entry in degraded.active()}
        return found, {name: degraded.serves(name) for name in stores}

    return asyncio.run(scenario())


def test_a_store_that_works_serves_and_keeps_nothing(sessions):
    store = Fake()
    assert looked({"a": store}, sessions) == (set(), {"a": True})
    assert store.calls == ["lookup", "open", "delete", "close"]


def test_a_full_store_serves(sessions):
    assert looked({"a": Fake(granted=3)}, sessions) == (set(), {"a": True})


def test_a_store_that_loses_a_block_does_not_serve_and_the_other_does(sessions):
    found, serves = looked({"a": Forgetful(), "b": Fake()}, sessions)
    assert found == {("namespace_not_answering", "a")}
    assert serves == {"a": False, "b": True}


def test_a_look_alone_writes_nothing(sessions):
    store = Forgetful()
    assert looked({"a": store}, sessions, write=False) == (set(), {"a": True})
    assert store.calls == ["lookup"]


def test_a_store_with_traffic_is_not_written_to(sessions):
    class Busy(Fake):
        def stats(self):
            self.seals += 1
            return {"seals": self.seals}

    store = Busy()
    looked({"a": store}, sessions, looks=3)
    assert store.calls.count("open") == 1, "only the first probe, which knows of no seal before"


def test_a_fenced_store_is_a_state_of_its_own(sessions):
    assert looked({"a": Harmed()}, sessions)[0] == set()


def test_a_store_that_hangs_costs_its_namespace_only_and_one_thread(sessions, monkeypatch):
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 1.0)
    store = Hanging()
    try:
        found, serves = looked({"a": store, "b": Fake()}, sessions, looks=3)
        assert found == {("namespace_not_answering", "a")} and serves == {"a": False, "b": True}
        assert store.probes == 1, "one probe at a time"
    finally:
        store.go.set()


def test_a_session_socket_that_is_gone_serves_nobody(tmp_path):
    found, serves = looked({"a": Fake()}, str(tmp_path / "none"))
    assert found == {("sessions_not_answering", "")} and serves == {"a": False}


def test_a_state_is_told_once_and_again_when_it_is_over():
    told = []
    degraded = Degraded(lambda entry, holds: told.append((entry.state, entry.namespace, entry.text, holds)))
    degraded.set("disk_full", "a", "no room")
    degraded.set("disk_full", "a", "no room")
    degraded.put(False, "disk_full", "b")
    assert degraded.gauges(["a", "b"])[("disk_full", "a")] == 1
    assert degraded.gauges(["a", "b"])[("disk_full", "b")] == 0
    degraded.clear("disk_full", "a")
    degraded.clear("disk_full", "a")
    assert told == [("disk_full", "a", "no room", True), ("disk_full", "a", "no room", False)]
    assert degraded.active() == []


def test_only_a_state_of_the_table_can_be_set():
    with pytest.raises(KeyError):
        Degraded().set("on_fire", text="")
    assert all(about.text for about in STATES.values())


def test_a_queue_of_others_at_the_session_socket_is_waited_for(tmp_path):
    """Anybody may knock there: that must not look as if nobody answered, or the watchdog ends the daemon."""
    path, tid, ended = str(tmp_path / "socket"), [], []

    def ask() -> None:
        tid.append(threading.get_native_id())
        try:
            ended.append(health.ask_sessions(path))
        except OSError as error:
            ended.append(error)

    def waits() -> bool:
        """In connect (its number on x86-64 and on aarch64), or done."""
        if ended or not tid:
            return bool(ended)
        return Path(f"/proc/self/task/{tid[0]}/syscall").read_text().split()[0] in ("42", "203")

    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    with socket.socket(*kind) as listening, contextlib.ExitStack() as knocking:
        listening.bind(path)
        listening.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                other = knocking.enter_context(socket.socket(*kind))
                other.setblocking(False)
                other.connect(path)
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(waits, "it waits in the queue")
        while asking.is_alive():
            listening.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                listening.accept()[0].close()
        assert ended == [None]
