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

ROOT = Path(__file__).resolve().parents[3]


def start_refused(directory, *args, **environ):
    """Starts a daemon that must not start. Its exit status and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstored", "serve", "--dir", str(directory), "--memory", "64MiB", *args],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told_and_leaves_its_segments(daemon, number):
    one = daemon()
    one.process.send_signal(number)
    assert one.process.wait(60) == 0
    left = {path.name for path in one.dir.iterdir()}
    assert (
        "state.json" in left and "grpc.sock" not in left and "kvstored.sock" not in left and "pid" not in left
    )
    assert "stopped took_ms=" in one.log()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (one.dir / "state.json").read_text()))
    kept = {path.suffix for path in Path("/dev/shm").glob(prefix + ".*")}
    assert kept == {".table", ".progress", ".pool", ".home"}
    assert "memory_kept size=" in one.log() and "kvstored stop --discard" in one.log()


def test_a_second_daemon_is_refused_and_told_who_runs(daemon):
    one = daemon()
    code, text = start_refused(one.dir)
    assert code == Exit.CANNOT_START
    assert text.count("\n") == 1 and f"pid {one.pid}" in text and str(one.dir) in text
    with Calls(one.dir) as calls:
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
        one = daemon("16MiB", args, start=False)
        one.command = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *one.command]
        return one

    needed = set()
    for most in (16, 20, 23):
        with pytest.raises(DaemonFailed, match=f"ended with {int(Exit.CANNOT_START)} ") as refused:
            limited(most).start()
        said = re.search(r"limit on open files is (\d+), this configuration needs (\d+)", str(refused.value))
        assert int(said[1]) == most
        needed.add(int(said[2]))
    (most,) = needed
    one = limited(most).start()
    with Calls(one.dir) as calls, one.connect(namespace="a" if args else "default"):
        # A directory that takes its time to open is told of until it is there.
        wait_until(lambda: not calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S).degraded)


def test_a_directory_that_others_may_write_is_refused(daemon):
    one = daemon(start=False)
    one.dir.chmod(0o777)
    code, text = start_refused(one.dir)
    assert code == Exit.CANNOT_START and "0777" in text
    assert list(one.dir.iterdir()) == []


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
    one = daemon(start=False)
    os.chown(one.dir, 1234, -1)
    code, text = start_refused(one.dir)
    assert code == Exit.CANNOT_START and "1234" in text


def test_a_directory_that_is_missing_is_made_for_the_owner_alone(daemon):
    one = daemon(start=False)
    one.dir.rmdir()
    one.start()
    assert stat.S_IMODE(one.dir.stat().st_mode) == 0o700


def test_every_file_is_for_the_owner_alone(daemon):
    one = daemon()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (one.dir / "state.json").read_text()))
    paths = [*one.dir.iterdir(), *Path("/dev/shm").glob(prefix + ".*")]
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
    one = daemon()
    with Calls(one.dir) as calls:
        calls.put("a", "b")
        before = calls.get("a", "b")
        lease = calls.create([key("unsealed")]).lease
        calls.write(lease.id, key("unsealed"), b"x")
    one.restart(kill=kill)
    with Calls(one.dir) as calls:
        assert calls.get("a", "b") == before
        assert calls.states("unsealed") == [0]
        stats = calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
        assert stats.namespaces[0].adopted and stats.pid == one.pid
        calls.admin.Integrity(admin_pb2.IntegrityRequest(), timeout=CALL_S)


def test_fresh_starts_empty_and_discard_leaves_nothing(daemon):
    one = daemon()
    with Calls(one.dir) as calls:
        calls.put("a")
    old = (one.dir / "state.json").read_text()
    one.args.append("--fresh")
    one.restart()
    with Calls(one.dir) as calls:
        assert calls.states("a") == [0]
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", old))
    assert not list(Path("/dev/shm").glob(prefix + "*")), "the old pool is still there"
    one.args.append("--discard")
    one.restart()
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (one.dir / "state.json").read_text()))
    assert one.stop() == 0
    assert not list(Path("/dev/shm").glob(prefix + "*")) and not (one.dir / "state.json").exists()


def test_it_feeds_the_watchdog_and_says_when_it_stops(daemon):
    one = daemon(start=False)
    path = str(one.dir.parent / "supervisor")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstored", *one.args], cwd=ROOT, stderr=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"},
        )  # fmt: skip
        one.process = process
        said = [supervisor.recv(4096).decode() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        while said[-1] != "STOPPING=1":
            said.append(supervisor.recv(4096).decode())
        assert process.wait(60) == 0
    assert sum(text.startswith("READY=1\n") for text in said) == 1
    assert said.count("WATCHDOG=1") >= 2
    one._note_segments()


def test_a_call_in_progress_does_not_keep_it_from_ending(daemon):
    one = daemon(args=("--drain-timeout-s", "10"))  # within which the stream is told
    with Calls(one.dir) as calls:
        events = calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S)
        assert next(events).kind == admin_pb2.EventsResponse.KIND_OPEN
        lease = calls.create([key("open")]).lease
        assert lease.id
        assert one.stop() == 0
        assert next(events).kind == admin_pb2.EventsResponse.KIND_STOPPING


def test_at_its_end_calls_in_progress_are_answered_and_new_ones_are_not(daemon):
    one = daemon(args=("--drain-timeout-s", "30"))
    told = threading.Event()

    def late():
        told.wait(CALL_S)
        yield store_pb2.LookupRequest(keys=[key("nobody's")]).SerializeToString()

    with Calls(one.dir) as calls:
        begun = calls.channel.stream_unary("/kvstored.v1.Store/Lookup").future(late(), timeout=CALL_S)
        assert calls.states("nobody's") == [0]  # after it on the same connection: it has begun
        one.process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping" in one.log(), "it was told", timeout_s=20)
        with pytest.raises(grpc.RpcError) as refusal:
            for _ in range(100):
                calls.states("nobody's")
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refusal.value.details() == "the daemon is about to end"
        told.set()
        assert store_pb2.LookupResponse.FromString(begun.result()).states == [0]
        assert one.process.wait(20) == 0


def test_grpcs_own_end_is_never_run(daemon, tmp_path):
    """On a busy machine it ended some daemons by SIGSEGV. Here it would end each."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, grpc.aio\n"
        "grpc.aio._server.Server.stop = grpc.aio._server.Server.__del__ = lambda *_: os.abort()\n"
    )
    one = daemon(env={"PYTHONPATH": str(tmp_path)})
    with Calls(one.dir) as calls:
        calls.put("a")
    assert one.stop() == 0
    assert "stopped took_ms=" in one.log()


def test_the_log_is_one_line_an_event_and_holds_no_key(daemon):
    one = daemon(args=("--log-level", "debug"))
    with Calls(one.dir) as calls:
        calls.put("secret")
        calls.get("secret", "missing")
        calls.admin.Flush(admin_pb2.FlushRequest(), timeout=CALL_S)
    one.stop()
    line = re.compile(r'\S+Z (debug|info|warning|error) [a-z_]+( [a-z_]+=("(\\.|[^"\\])*"|[^\s"]+))*')
    for text in one.log().splitlines():
        assert line.fullmatch(text), text
    assert key("secret").hex() not in one.log()
    assert " info ready " in one.log() and " info flushed namespace=default deleted=1" in one.log()


@pytest.mark.parametrize("name", ["kvstored.sock", "grpc.sock", "guests.sock"])
def test_a_socket_that_cannot_be_made_is_an_error_that_names_it(daemon, name):
    one = daemon(start=False)
    (one.dir / name / "in the way").mkdir(parents=True)
    code, text = start_refused(one.dir, "--discard")
    assert code == Exit.CANNOT_START and f"{one.dir}/{name}" in text and "Traceback" not in text


@pytest.mark.parametrize("name", ["a%20b", "a#b?c", "a b"])
def test_a_directory_may_have_any_name(daemon, name):
    """gRPC takes a socket's path as a URI's."""
    one = daemon(start=False)
    one.dir.rmdir()
    one.dir = one.dir.parent / name
    one.args[one.args.index("--dir") + 1] = str(one.dir)
    one.start()
    asked = [sys.executable, "-m", "kvstored", "status", "--json", "--dir", str(one.dir)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.DONE, done.stderr
    assert f'"pid": {one.pid}' in done.stdout


def test_no_file_takes_the_place_of_a_closed_stream(daemon):
    """What a library writes to standard error must not go into the pool."""
    one = daemon(start=False)
    one.command = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable]
    one.start()
    assert [os.readlink(f"/proc/{one.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3


def test_a_log_that_nobody_reads_does_not_hold_it_up(daemon):
    one = daemon(start=False)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    os.set_inheritable(writing, True)
    one.command = ["/bin/sh", "-c", f'exec "$@" 2>/proc/{os.getpid()}/fd/{writing}', "sh", sys.executable]
    try:
        one.start()
        with Calls(one.dir) as calls:
            calls.put("a")
        assert one.stop() == 0
    finally:
        os.close(reading)
        os.close(writing)
