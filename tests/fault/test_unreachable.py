"""Goal: a client whose daemon is away, late, frozen or replaced by an empty one does what its policy says,
within its deadlines, and carries on when the store is back (docs/design.md §7). Method: real daemons that
are killed, started late, stopped by SIGSTOP, or started with --fresh on the same directory.
"""

import contextlib
import os
import resource
import signal

import pytest

import kvclient
from kvclient.errors import DeadlineExceeded, Detached, Unavailable
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from tests.fault.children import eventually


def put(client, keys, layout_id):
    with client.create(keys, layout_id) as writer:
        assert writer.results == ["granted"] * len(keys), writer.results
        for index in writer.granted:
            fill(writer[index])


def test_a_tolerant_client_computes_on(daemon, layouts):
    """on_error="miss" with a real daemon: degraded while it is down, attached again after."""
    started = daemon(memory="8MiB")
    client = started.connect(on_error="miss")
    small, _ = layouts(client)
    keys = new_keys(2)
    put(client, keys, small)
    with client.create(new_keys(1), small) as writer:
        fill(writer[0])
        started.kill()
        assert client.create(new_keys(1), small).results == ["unavailable"]
        assert client.degraded and kvclient.metrics()["kvclient_degraded"] == 1
        assert client.lookup(keys).resident == 2, "shared memory still answers"
    assert writer.results == ["granted"]
    started.start()
    eventually(lambda: client.touch(keys) == 2, "the client is attached again")
    assert not client.degraded
    layout = client.register_layout(SMALL.to_blob())
    put(client, new_keys(1), layout)
    client.close()
    assert kvclient.metrics()["kvclient_degraded"] == 0


def test_a_client_without_a_descriptor_says_so(daemon, fork):
    """And not that the daemon is of another version, or away. As soon as there are some it attaches."""
    started = daemon(memory="8MiB")
    started.connect().close()  # what is imported at the first time is

    def work(_steps):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for said in ("Too many open files", *4 * ["no descriptor left"]):  # its socket, and four more
            with pytest.raises(Unavailable, match=said):
                started.connect()
            os.close(taken.pop())
        started.connect().close()

    fork(work).finish()


def test_a_daemon_that_comes_later(daemon, layouts):
    """on_error="miss" may attach before there is a daemon; a layout named meanwhile is good when it comes."""
    late = daemon(memory="8MiB", start=False)
    with pytest.raises(Unavailable):
        late.connect()
    client = late.connect(on_error="miss")
    assert client.degraded and client.lookup(new_keys(3)).resident == 0
    layout = client.register_layout(SMALL.to_blob())
    late.start()
    with late.connect() as other:
        layouts(other)
        keys = new_keys(2)

        def stored() -> bool:
            with client.create(keys, layout) as writer:
                for index in writer.granted:
                    fill(writer[index])
            return client.lookup(keys).resident == 2

        eventually(stored, "the client stores blocks")
        assert not client.degraded
        with other.get(keys) as blocks:
            for block in blocks:
                check(block)
        del block, blocks


def test_an_empty_pool_takes_the_place_of_a_full_one(daemon, layouts):
    """on_error="miss" attaches before there is a daemon; a layout named meanwhile is good when it comes."""
    started = daemon(memory="8MiB")
    client = started.connect()
    small, big = layouts(client)
    keys = new_keys(3)
    put(client, keys, small)
    held = client.get(keys)
    started.stop()
    started.args.append("--fresh")
    started.start()
    with started.connect() as other:
        assert other.register_layout(BIG.to_blob()) != big, "ids are given anew, in another order"
    assert client.lookup(keys).resident == 0
    put(client, keys, small)
    with client.get(keys) as blocks:
        for block in blocks:
            check(block)
    for block in held:
        check(block)
    del block, blocks
    held.release()


class DiesNumbering:
    """The native client, whose daemon does not answer the first layout that is registered after attaching."""

    def __init__(self, native):
        self._native = native
        self.silent = False

    def __getattr__(self, name):
        return getattr(self._native, name)

    def reattach(self):
        self._native.reattach()
        self.silent = True

    def register_layout(self, blob):
        if self.silent:
            self.silent = False
            raise DeadlineExceeded("no answer")
        return self._native.register_layout(blob)


@pytest.mark.parametrize("on_error", ["raise", "miss"])
def test_no_block_is_made_in_the_layout_of_another_number(daemon, layouts, on_error):
    """An empty pool took the other's place, and layouts have other numbers there; the client is attached to
    it before it knows them."""
    started = daemon(memory="8MiB")
    client = started.connect(on_error=on_error)
    small, _ = layouts(client)
    old = client._native.attachment
    started.stop()
    started.args.append("--fresh")
    started.start()
    with started.connect() as other:
        other.register_layout(BIG.to_blob())
        client._native = DiesNumbering(client._native)
        if on_error == "raise":
            with pytest.raises(DeadlineExceeded):
                client.create(new_keys(1), small)
        else:
            assert client.create(new_keys(1), small).results == ["unavailable"]
        with pytest.raises(Detached):
            client._native.create(new_keys(1), small, attachment=old)
        keys = new_keys(2)

        def stored() -> bool:
            with client.create(keys, small) as writer:
                for index in writer.granted:
                    fill(writer[index])
            return client.lookup(keys).resident == 2

        eventually(stored, "the client stores blocks")
        with other.get(keys) as blocks:
            for block in blocks:
                check(block)
        del block, blocks


def test_grants_that_nobody_heard_of_come_back(daemon, layouts):
    """The daemon grants when the client has stopped listening: the memory must not wait for the client's end,
    and what the client holds stays."""
    started = daemon(memory="8MiB")
    watcher, client = started.connect(), started.connect(timeout_s=2.0)
    small, _ = layouts(watcher)
    keys, unheard = new_keys(2), new_keys(4)
    put(watcher, keys, small)
    before = watcher.stats()
    held = client.get(keys)
    os.kill(started.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, started.pid, os.WSTOPPED)
    try:
        with pytest.raises(DeadlineExceeded):
            client.create(unheard, small)
    finally:
        os.kill(started.pid, signal.SIGCONT)
    eventually(lambda: watcher.stats()["creates"] == before["creates"] + 4, "the daemon has granted them")
    eventually(lambda: watcher.stats()["quarantined"] == 4, "and has seen that nobody listens")

    def served() -> bool:
        try:
            return client.touch(keys) == 2
        except (DeadlineExceeded, Unavailable):
            return False

    eventually(served, "the client is served again")
    for block in held:
        check(block)
    del block
    held.release()
    del held
    eventually(lambda: watcher.stats()["used_bytes"] == before["used_bytes"], "the memory is back")
    put(client, unheard, small)
    assert watcher.lookup([*keys, *unheard]).resident == 6


def test_a_frozen_daemon_holds_nobody_up(daemon, layouts):
    """Every call has a deadline; reading needs no daemon; afterwards all goes on."""
    started = daemon(memory="8MiB")
    patient = started.connect()
    small, _ = layouts(patient)
    keys = new_keys(3)
    put(patient, keys, small)
    client, tolerant = started.connect(timeout_s=2.0), started.connect(timeout_s=2.0, on_error="miss")

    def served() -> bool:
        try:
            return client.touch(keys) == 3 and tolerant.touch(keys) == 3 and not tolerant.degraded
        except (DeadlineExceeded, Unavailable):
            return False

    eventually(served, "the clients are served")
    os.kill(started.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, started.pid, os.WSTOPPED)  # all its threads have stopped
    try:
        for call in (lambda: client.create(new_keys(1), small), lambda: client.delete(keys), client.stats):
            with pytest.raises((DeadlineExceeded, Unavailable)):
                call()
        assert tolerant.create(new_keys(1), small).results == ["unavailable"] and tolerant.degraded
        for reader in (client, tolerant):
            with reader.get(keys) as blocks:
                for block in blocks:
                    check(block)
            del block, blocks
        with pytest.raises((DeadlineExceeded, Unavailable)):
            started.connect(timeout_s=0.5)
    finally:
        os.kill(started.pid, signal.SIGCONT)
    eventually(served, "the clients are served again")
    more = new_keys(2)
    put(patient, more, small)
    assert patient.delete([*keys, *more]) == 5
