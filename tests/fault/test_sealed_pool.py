"""--pool memfd: no client can cut the memory, and the service manager keeps it while no daemon runs.

Method: a fake service manager (supervisor.py) holds the descriptors of a real daemon and starts the next one
with them; clients with views live on through it. Attackers hold the very descriptors that a writer or a
reader is given.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.testing.conformance.case import check, fill, new_keys
from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls
from tests.fault.children import eventually
from tests.fault.supervisor import Supervisor
from tests.hostile.raw import RawSession

GUEST = 43_210
ROOT = Path(__file__).resolve().parents[2]


def put(client, keys, layout_id):
    with client.create(keys, layout_id) as writer:
        assert writer.results == ["granted"] * len(keys), writer.results
        for index in writer.granted:
            fill(writer[index])


@pytest.fixture
def supervised(daemon):
    """A supervisor with a running daemon of sealed memory."""
    args = ("--pool", "memfd", "--namespaces", f"default:writers={GUEST}")
    kvstored = daemon(memory="64MiB", args=args, start=False)
    supervisor = Supervisor(kvstored)
    supervisor.start()
    yield supervisor
    kvstored.stop()
    supervisor.close()


def prefix_of(kvstored):
    return json.loads((kvstored.dir / "state.json").read_text())["pools"]["default"]["prefix"]


def states(kvstored):
    with Calls(kvstored.dir) as calls:
        reply = calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
        return {entry.state for entry in reply.degraded}, reply.namespaces[0].adopted


def test_the_supervisor_holds_the_memory_and_nothing_of_it_has_a_name(supervised):
    kvstored = supervised.daemon
    prefix = prefix_of(kvstored)
    assert set(supervised.kept()) == {f"{prefix}.{role}" for role in ("table", "progress", "pool")}
    with kvstored.connect():
        assert {path.name.split(".")[1] for path in Path("/dev/shm").glob(prefix + ".*")} == {"s"}
    assert states(kvstored) == (set(), False)


@pytest.mark.parametrize("kill", [False, True])
def test_blocks_views_and_pins_survive_the_daemon(supervised, layouts, kill):
    kvstored = supervised.daemon
    client, other = kvstored.connect(), kvstored.connect()
    small, _ = layouts(client)
    keys = new_keys(20)
    put(client, keys, small)
    held = client.get(keys)
    supervised.restart(kill)
    assert states(kvstored)[1], kvstored.log()
    assert client.lookup(keys).resident == 20
    for block in held:
        check(block)
    assert client.stats()["pins"] == 20
    assert client.delete(keys) == 20
    assert client.stats()["zombies"] == 20, "the pins of before the restart hold the memory"
    put(other, new_keys(5), small)
    for block in held:
        check(block)
    del block
    held.release()
    eventually(lambda: client.stats()["zombies"] == 0, "the memory is back")
    supervised.restart(kill)
    assert client.stats()["blocks"] == 5
    assert kvstored.log().count(" info descriptor_given_up ") == 0


def test_a_writer_can_neither_cut_nor_stretch_nor_seal_the_memory(supervised, layouts):
    kvstored = supervised.daemon
    client = kvstored.connect()
    small, _ = layouts(client)
    keys = new_keys(5)
    put(client, keys, small)
    with RawSession(kvstored.socket_path) as writer:
        assert writer.attach()[0] == 0
        _table, progress, pool, _page = writer.fds
        for fd in (progress, pool):
            size = os.fstat(fd).st_size
            for attack in (
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd, size=size: os.ftruncate(fd, size + 4096),
                lambda fd=fd, size=size: os.posix_fallocate(fd, size, 4096),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(PermissionError) as refused:
                    attack()
                assert refused.value.errno == errno.EPERM
            assert os.fstat(fd).st_size == size
    with client.get(keys) as blocks:
        for block in blocks:
            check(block)
    assert states(kvstored)[0] == set()


def test_the_pool_grows_inside_its_seals(supervised):
    with supervised.daemon.connect() as client:
        eventually(lambda: client.stats()["frontier_bytes"] == 64 << 20, "the whole pool is reserved")
    (fd,) = (fd for name, fd in supervised.kept().items() if name.endswith(".pool"))
    assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size == 64 << 20


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_users_reader_cannot_open_what_it_got_for_writing(supervised, fork):
    path = supervised.daemon.socket_path

    def work(_steps):
        os.setgroups([])
        os.setresgid(GUEST, GUEST, GUEST)
        os.setresuid(GUEST, GUEST, GUEST)
        with RawSession(path) as reader:
            assert reader.attach(read_only=1)[0] == 0
            for fd in reader.fds[:3]:
                with pytest.raises(OSError):
                    os.ftruncate(fd, 0)
                with pytest.raises(PermissionError):
                    os.open(f"/proc/self/fd/{fd}", os.O_RDWR)

    fork(work).finish()


def test_another_geometry_gives_the_old_memory_back_to_the_supervisor(supervised, layouts):
    kvstored = supervised.daemon
    client = kvstored.connect()
    small, _ = layouts(client)
    keys = new_keys(3)
    put(client, keys, small)
    old = set(supervised.kept())
    kvstored.args[kvstored.args.index("64MiB")] = "32MiB"
    supervised.restart()
    supervised.wait(lambda: not old & {name for name, _ in supervised._store})
    assert len(supervised.kept()) == 3 and not states(kvstored)[1]
    assert client.lookup(keys).resident == 0, "the old table was retired: its readers attach anew"
    put(client, keys, small)


def test_from_sealed_to_named_memory_and_back_leaves_nothing(supervised, layouts):
    kvstored = supervised.daemon
    client = kvstored.connect()
    small, _ = layouts(client)
    for kind, other in (("memfd", "shm"), ("shm", "memfd")):
        keys, prefix = new_keys(3), prefix_of(kvstored)
        put(client, keys, small)
        kvstored.args[kvstored.args.index(kind)] = other
        supervised.restart()
        assert client.lookup(keys).resident == 0
        assert not list(Path("/dev/shm").glob(prefix + "*")), "the old memory is gone"
        supervised.wait(lambda old=prefix: not any(name.startswith(old) for name in supervised.kept()))
    assert len(supervised.kept()) == 3


def unsealed(size):
    fd = os.memfd_create("x")
    os.ftruncate(fd, size)
    return fd


@pytest.mark.parametrize("wrong", ["missing", "unsealed", "short", "a file", "twice", "swapped"])
def test_a_descriptor_that_is_not_what_its_name_says_is_not_adopted(supervised, wrong, tmp_path, layouts):
    kvstored = supervised.daemon
    prefix = prefix_of(kvstored)
    name = f"{prefix}.pool"
    kvstored.stop()
    kept = supervised.kept()
    size = os.fstat(kept[name]).st_size
    if wrong != "twice":
        supervised._obey({"FDSTOREREMOVE": "1", "FDNAME": name}, [])
    if wrong == "unsealed":
        supervised.offer(name, unsealed(size))
    elif wrong == "short":
        supervised.offer(name, kept[f"{prefix}.progress"])
    elif wrong == "a file":
        path = tmp_path / "pool"
        path.touch(mode=0o600)
        os.truncate(path, size)
        supervised.offer(name, os.open(path, os.O_RDWR))
    elif wrong == "twice":
        supervised.offer(name, kept[name])
    elif wrong == "swapped":
        supervised.offer(name, kept[f"{prefix}.table"])
    supervised.offer("somebody else's", unsealed(1))
    supervised.start()
    assert not states(kvstored)[1]
    supervised.wait(lambda: {n for n, _ in supervised._store}.isdisjoint({*kept, "somebody else's"}))
    assert len(supervised.kept()) == 3
    client = kvstored.connect()
    small, _ = layouts(client)
    put(client, new_keys(2), small)
    assert not list(Path("/dev/shm").glob(prefix + "*"))


def test_without_a_supervisor_it_says_that_nothing_survives(daemon, wait_until):
    kvstored = daemon(memory="64MiB", args=("--pool", "memfd"), start=False)
    environ = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    with open(kvstored.log_path, "ab") as log:
        kvstored.process = subprocess.Popen(
            [sys.executable, "-m", "kvstored", *kvstored.args], cwd=ROOT, stderr=log, env=environ
        )
    wait_until(lambda: " info ready " in kvstored.log(), "the daemon is ready")
    assert states(kvstored)[0] == {"pool_not_kept"}
    assert "warning degraded state=pool_not_kept" in kvstored.log()
    prefix = prefix_of(kvstored)
    client = kvstored.connect()
    assert kvstored.stop() == 0
    assert not (kvstored.dir / "state.json").exists() and not list(Path("/dev/shm").glob(prefix + "*"))
    client.close()
