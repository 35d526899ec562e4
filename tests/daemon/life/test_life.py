"""The daemon as a process: it becomes ready, keeps others out, ends when told, and leaves what it should.

Method: real processes, real signals; readiness is its own READY=1, everything else a condition with a
deadline.
"""

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from kvstored.errors import Exit
from kvstored.v1 import admin_pb2, store_pb2
from tests.conftest import DaemonFailed
from tests.daemon.grpc_calls import CALL_S, Calls, key
from tests.descriptors import sockets
from tests.fault.children import eventually
from tests.warm_python import WarmDaemon, run

ROOT = Path(__file__).resolve().parents[3]


def start_refused(directory, *args, python=WarmDaemon, **environ):
    """Starts a daemon that must not start. Its exit status and what it said."""
    command = [sys.executable, "-m", "kvstored", "serve", "--dir", str(directory), "--memory", "64MiB", *args]
    done = run(command, timeout=60, python=python, cwd=ROOT, env={**os.environ, **environ})
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told_and_leaves_its_segments(daemon, number):
    kvstored = daemon()
    kvstored.process.send_signal(number)
    assert kvstored.process.wait(60) == 0
    left = {path.name for path in kvstored.dir.iterdir()}
    assert (
        "state.json" in left and "grpc.sock" not in left and "kvstored.sock" not in left and "pid" not in left
    )
    assert "stopped took_ms=" in kvstored.log()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (kvstored.dir / "state.json").read_text()))
    kept = {path.suffix for path in Path("/dev/shm").glob(prefix + ".*")}
    assert kept == {".table", ".progress", ".pool", ".home"}
    assert "memory_kept size=" in kvstored.log() and "kvstored stop --discard" in kvstored.log()


def test_a_second_daemon_is_refused_and_told_who_runs(daemon):
    kvstored = daemon()
    code, text = start_refused(kvstored.dir, python=subprocess.Popen)  # as a user's starts
    assert code == Exit.CANNOT_START
    assert text.count("\n") == 1 and f"pid {kvstored.pid}" in text and str(kvstored.dir) in text
    with Calls(kvstored.dir) as calls:
        calls.put("still served")


@pytest.mark.parametrize(
    "args",
    [(), ("--namespaces", "a=0.5,b=0.5"), ("--namespaces", "a=0.5:readers=12301,b=0.5", "--disk", "1")],
)
def test_too_few_descriptors_are_refused_and_told(daemon, tmp_path, wait_until, args):
    """gRPC would end the process by a signal. As many as are asked for are enough for a client and a
    probe."""
    if "--disk" in args:
        args = (*args[:-1], f"{tmp_path}/one,{tmp_path}/two", "--disk-quota", "16MiB")

    def limited(most: int):
        kvstored = daemon("16MiB", args, start=False)
        kvstored.command = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *kvstored.command]
        return kvstored

    needed = set()
    for most in (16, 20, 23):
        with pytest.raises(DaemonFailed, match=f"ended with {int(Exit.CANNOT_START)} ") as refused:
            limited(most).start()
        said = re.search(r"limit on open files is (\d+), this configuration needs (\d+)", str(refused.value))
        assert int(said[1]) == most
        needed.add(int(said[2]))
    (most,) = needed
    kvstored = limited(most).start()
    with Calls(kvstored.dir) as calls, kvstored.connect(namespace="a" if args else "default"):
        # A directory that takes its time to open is told of until it is there.
        wait_until(lambda: not calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S).degraded)


def test_a_directory_that_others_may_write_is_refused(daemon):
    kvstored = daemon(start=False)
    kvstored.dir.chmod(0o777)
    code, text = start_refused(kvstored.dir)
    assert code == Exit.CANNOT_START and "0777" in text
    assert list(kvstored.dir.iterdir()) == []


@pytest.mark.parametrize(("mode", "wanted"), [(0o777, "0777"), (None, "is no directory")])
def test_a_state_directory_that_keeps_no_secret_is_refused(daemon, tmp_path, mode, wanted):
    """Who may write there exchanges the namespaces' salts."""
    state = tmp_path / "state"
    state.touch() if mode is None else state.mkdir()
    mode is None or state.chmod(mode)
    salted = ("--namespaces", "default:salt=generated", "--state-dir", str(state))
    code, text = start_refused(daemon(start=False).dir, *salted)
    assert code == Exit.CANNOT_START and wanted in text and text.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_directory_is_refused(daemon):
    kvstored = daemon(start=False)
    os.chown(kvstored.dir, 1234, -1)
    code, text = start_refused(kvstored.dir)
    assert code == Exit.CANNOT_START and "1234" in text


def test_a_directory_that_is_missing_is_made_for_the_owner_alone(daemon):
    kvstored = daemon(start=False)
    kvstored.dir.rmdir()
    kvstored.start()
    assert stat.S_IMODE(kvstored.dir.stat().st_mode) == 0o700


def test_every_file_is_for_the_owner_alone(daemon):
    kvstored = daemon()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (kvstored.dir / "state.json").read_text()))
    paths = [*kvstored.dir.iterdir(), *Path("/dev/shm").glob(prefix + ".*")]
    assert len(paths) == 9
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def listening_ports(pid):
    """TCP ports that the process listens on, from the kernel's tables."""
    inodes = sockets(pid)
    ports = {}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                ports[int(port, 16)] = address
    return ports


def test_it_listens_on_no_tcp_port_unless_asked(daemon):
    assert listening_ports(daemon().pid) == {}


def test_metrics_listen_on_the_loopback_address_only(daemon):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert listening_ports(daemon(args=("--metrics-port", str(port))).pid) == {port: "0100007F"}


@pytest.mark.parametrize("kill", [False, True])
def test_the_next_daemon_has_the_blocks(daemon, kill):
    kvstored = daemon()
    with Calls(kvstored.dir) as calls:
        calls.put("a", "b")
        before = calls.get("a", "b")
        lease = calls.create([key("unsealed")]).lease
        calls.write(lease.id, key("unsealed"), b"x")
    kvstored.restart(kill=kill)
    with Calls(kvstored.dir) as calls:
        assert calls.get("a", "b") == before
        assert calls.states("unsealed") == [0]
        stats = calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
        assert stats.namespaces[0].adopted and stats.pid == kvstored.pid
        calls.admin.Integrity(admin_pb2.IntegrityRequest(), timeout=CALL_S)


def test_fresh_starts_empty_and_discard_leaves_nothing(daemon):
    kvstored = daemon()
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    old = (kvstored.dir / "state.json").read_text()
    kvstored.args.append("--fresh")
    kvstored.restart()
    with Calls(kvstored.dir) as calls:
        assert calls.states("a") == [0]
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", old))
    assert not list(Path("/dev/shm").glob(prefix + "*")), "the old pool is still there"
    kvstored.args.append("--discard")
    kvstored.restart()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (kvstored.dir / "state.json").read_text()))
    assert kvstored.stop() == 0
    assert not list(Path("/dev/shm").glob(prefix + "*")) and not (kvstored.dir / "state.json").exists()


def test_it_feeds_the_watchdog_and_says_when_it_stops(daemon):
    kvstored = daemon(start=False)
    path = str(kvstored.dir.parent / "supervisor")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstored", *kvstored.args], cwd=ROOT, stderr=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"},
        )  # fmt: skip
        kvstored.process = process
        said = [supervisor.recv(4096).decode() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        while said[-1] != "STOPPING=1":
            said.append(supervisor.recv(4096).decode())
        assert process.wait(60) == 0
    assert sum(text.startswith("READY=1\n") for text in said) == 1
    assert said.count("WATCHDOG=1") >= 2
    kvstored._note_segments()


def test_a_call_in_progress_does_not_keep_it_from_ending(daemon):
    kvstored = daemon(args=("--drain-timeout-s", "10"))  # within which the stream is told
    with Calls(kvstored.dir) as calls:
        events = calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S)
        assert next(events).kind == admin_pb2.EventsResponse.KIND_OPEN
        lease = calls.create([key("open")]).lease
        assert lease.id
        assert kvstored.stop() == 0
        assert next(events).kind == admin_pb2.EventsResponse.KIND_STOPPING


def test_at_its_end_calls_in_progress_are_answered_and_new_ones_are_not(daemon):
    kvstored = daemon(args=("--drain-timeout-s", "30"))
    told = threading.Event()

    def late():
        told.wait(CALL_S)
        yield store_pb2.LookupRequest(keys=[key("nobody's")]).SerializeToString()

    with Calls(kvstored.dir) as calls:
        begun = calls.channel.stream_unary("/kvstored.v1.Store/Lookup").future(late(), timeout=CALL_S)
        assert calls.states("nobody's") == [0]  # after it on the same connection: it has begun
        kvstored.process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping" in kvstored.log(), "it was told", timeout_s=20)
        with pytest.raises(grpc.RpcError) as refusal:
            for _ in range(100):
                calls.states("nobody's")
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refusal.value.details() == "the daemon is about to end"
        told.set()
        assert store_pb2.LookupResponse.FromString(begun.result()).states == [0]
        assert kvstored.process.wait(20) == 0


def test_grpcs_own_end_is_never_run(daemon, tmp_path):
    """On a busy machine it ended some daemons by SIGSEGV. Here it would end each."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, grpc.aio\n"
        "grpc.aio._server.Server.stop = grpc.aio._server.Server.__del__ = lambda *_: os.abort()\n"
    )
    kvstored = daemon(env={"PYTHONPATH": str(tmp_path)})
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    assert kvstored.stop() == 0
    assert "stopped took_ms=" in kvstored.log()


def test_the_log_is_one_line_an_event_and_holds_no_key(daemon):
    kvstored = daemon(args=("--log-level", "debug"))
    with Calls(kvstored.dir) as calls:
        calls.put("secret")
        calls.get("secret", "missing")
        calls.admin.Flush(admin_pb2.FlushRequest(), timeout=CALL_S)
    kvstored.stop()
    line = re.compile(r'\S+Z (debug|info|warning|error) [a-z_]+( [a-z_]+=("(\\.|[^"\\])*"|[^\s"]+))*')
    for text in kvstored.log().splitlines():
        assert line.fullmatch(text), text
    assert key("secret").hex() not in kvstored.log()
    assert " info ready " in kvstored.log() and " info flushed namespace=default deleted=1" in kvstored.log()


@pytest.mark.parametrize("name", ["kvstored.sock", "grpc.sock", "guests.sock"])
def test_a_socket_that_cannot_be_made_is_an_error_that_names_it(daemon, name):
    kvstored = daemon(start=False)
    (kvstored.dir / name / "in the way").mkdir(parents=True)
    code, text = start_refused(kvstored.dir, "--discard")
    assert code == Exit.CANNOT_START and f"{kvstored.dir}/{name}" in text and "Traceback" not in text


@pytest.mark.parametrize("name", ["a%20b", "a#b?c", "a b"])
def test_a_directory_may_have_any_name(daemon, name):
    """gRPC takes a socket's path as a URI's."""
    kvstored = daemon(start=False)
    kvstored.dir.rmdir()
    kvstored.dir = kvstored.dir.parent / name
    kvstored.args[kvstored.args.index("--dir") + 1] = str(kvstored.dir)
    kvstored.start()
    asked = [sys.executable, "-m", "kvstored", "status", "--json", "--dir", str(kvstored.dir)]
    done = run(asked, timeout=60, python=WarmDaemon, cwd=ROOT)
    assert done.returncode == Exit.DONE, done.stderr
    assert f'"pid": {kvstored.pid}' in done.stdout


def test_no_file_takes_the_place_of_a_closed_stream(daemon):
    """What a library writes to standard error must not go into the pool."""
    kvstored = daemon(start=False)
    kvstored.command = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable]
    kvstored.start()
    assert [os.readlink(f"/proc/{kvstored.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3


def test_a_log_that_nobody_reads_does_not_hold_it_up(daemon):
    kvstored = daemon(start=False)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    os.set_inheritable(writing, True)
    into = f"/proc/{os.getpid()}/fd/{writing}"
    kvstored.command = ["/bin/sh", "-c", f'exec "$@" 2>{into}', "sh", sys.executable]
    try:
        kvstored.start()
        with Calls(kvstored.dir) as calls:
            calls.put("a")
        assert kvstored.stop() == 0
    finally:
        os.close(reading)
        os.close(writing)
