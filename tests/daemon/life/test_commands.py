"""The operator's commands and the metrics against a real daemon: what they print, and how they exit.

Method: main() in this process with the daemon's directory; `top` and `stop` as processes.
"""

import argparse
import fcntl
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from kvstored.cli import connection
from kvstored.cli.main import main
from kvstored.errors import Exit
from kvstored.v1 import admin_pb2, store_pb2, transfer_pb2
from tests.daemon.grpc_calls import BLOCK_BYTES, Calls, key
from tests.warm_python import WarmDaemon
from tests.warm_python import run as warm

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def held(calls):
    """A daemon that holds three blocks."""
    calls.put("a", "b", "c")
    return calls


@pytest.fixture
def run(held, capsys):
    """`run("ls", "--json")` -> (exit code, standard output, standard error)."""

    def command(*arguments):
        code = main([arguments[0], "--dir", str(held.daemon.dir), *arguments[1:]])
        return code, *capsys.readouterr()

    return command


def run_json(run, *arguments, code=Exit.DONE):
    found, out, _ = run(*arguments, "--json")
    assert found == code
    return json.loads(out)


def test_status(run, calls):
    code, out, _ = run("status")
    assert code == Exit.DONE and "namespace default" in out and "3 sealed" in out
    found = run_json(run, "status", "--sessions")
    assert found["pid"] == calls.daemon.pid and found["sessions"] == []
    (told,) = found["namespaces"]
    assert told["counters"]["blocks"] == 3 and told["problem"] == "" and told["adopted"] is False
    assert "session  pid" in run("status", "--sessions")[1]


def test_ls(run):
    code, out, _ = run("ls")
    assert code == Exit.DONE and len(out.splitlines()) == 4 and key("a").hex() in out and "sealed" in out
    found = run_json(run, "ls")
    assert {block["key"] for block in found} == {key(name).hex() for name in "abc"}
    assert all(block["length_bytes"] == BLOCK_BYTES and block["state"] == "sealed" for block in found)
    code, out, error = run("ls", "--limit", "2", "--json")
    assert len(json.loads(out)) == 2 and "more than these 2: --limit" in error
    assert run("ls", "--limit", "3", "--quiet")[2] == "", "all of them are no part"
    found = run_json(run, "ls", "--prefix", key("b").hex()[:16])
    assert [block["key"] for block in found] == [key("b").hex()]
    assert run("ls", "--quiet", "--prefix", key("b").hex()) == (Exit.DONE, key("b").hex() + "\n", "")
    assert run_json(run, "ls", "--key", key("c").hex())[0]["key"] == key("c").hex()
    code, out, error = run("ls", "--key", key("x").hex())
    assert (code, out) == (Exit.NO, "") and "no such block" in error


def test_ping(run, calls):
    code, out, _ = run("ping")
    assert code == Exit.DONE and re.fullmatch(r"serves; [\d.]+ ms\n", out)
    assert run_json(run, "ping")["serving"] is True


def test_describe(run):
    code, out, _ = run("describe", key("a").hex())
    assert code == Exit.DONE and key("a").hex() in out and re.search(r"^state +sealed$", out, re.MULTILINE)
    assert run_json(run, "describe", key("a").hex())["length_bytes"] == BLOCK_BYTES
    code, out, error = run("describe", key("x").hex())
    assert (code, out) == (Exit.NO, "") and "no such block" in error


def test_top_paints_on_a_terminal_only(run, calls):
    """A terminal of our own; NO_COLOR is its user's word."""
    for environ, painted in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        ours, theirs = os.openpty()
        home = str(calls.daemon.dir)
        command = [sys.executable, "-m", "kvstored", "top", "--dir", home, "--interval-s", "0.1"]
        with WarmDaemon(
            command, cwd=ROOT, stdout=theirs, stderr=theirs, env={**os.environ, "NO_COLOR": "", **environ}
        ) as process:
            os.close(theirs)
            seen = b""
            while seen.count(b"memory") < 4:
                seen += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        os.close(ours)
        assert b"[####" in seen or b"[...." in seen
        assert (b"\x1b[1mnamespace" in seen) is painted


def test_an_unknown_namespace_is_refused_by_name(run):
    for command in (
        ["ls"],
        ["ls", "--key", key("x").hex()],
        ["rm", key("x").hex()],
        ["flush", "--yes"],
        ["scrub"],
    ):
        code, out, error = run(*command, "--namespace", "nobody")
        assert (code, out) == (Exit.REFUSED, "") and "'nobody'" in error


def test_rm(run, calls):
    assert run("rm", key("a").hex())[:2] == (Exit.DONE, "1 deleted, 0 not there\n")
    found = run_json(run, "rm", key("a").hex(), key("b").hex(), code=Exit.NO)
    assert found == {"deleted": 1, "missing": [key("a").hex()]}
    assert calls.states("a", "b", "c") == [0, 0, 2]


def test_flush_asks_first(run, calls):
    code, out, error = run("flush")
    assert (code, out) == (Exit.USAGE, "") and "--yes" in error
    assert calls.states("a") == [2]
    assert run_json(run, "flush", "--yes") == {"deleted": 3}
    assert calls.states("a", "b", "c") == [0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("", Exit.USAGE, 2), ("\n", Exit.NO, 2), ("y\n", Exit.DONE, 0)]
)
def test_flush_takes_no_answer_for_none_and_asks_beside_the_output(
    run, calls, monkeypatch, answer, code, left
):
    typed = io.StringIO(answer)
    typed.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", typed)
    found, out, error = run("flush", "--json")
    assert found == code and "Delete every sealed block" in error
    assert out == "" or json.loads(out) == {"deleted": 3}
    assert calls.states("a") == [left]


def test_drain(run, calls):
    lease = calls.create([key("open")]).lease.id
    assert run_json(run, "drain", "--wait-s", "0", code=Exit.NO) == {"draining": True, "unsealed": 1}
    assert "DRAINING" in run("status")[1]
    calls.seal(lease, zero_rest=True)
    code, out, _ = run("drain")
    assert code == Exit.DONE and "refusing new blocks" in out
    assert run_json(run, "drain", "--off") == {"draining": False, "unsealed": 0}
    calls.put("again")


def test_scrub(run, calls):
    assert run_json(run, "scrub") == {
        "verified": 0,
        "computed": 3,
        "corrupt": 0,
        "read_bytes": 3 * BLOCK_BYTES,
    }
    calls.corrupt("a")
    code, out, _ = run("scrub")
    assert code == Exit.NO and "1 corrupt and dropped" in out and "index is consistent" in out
    assert run("scrub")[0] == Exit.DONE


def test_config(run):
    assert re.search(r"^memory +64MiB +flag$", run("config")[1], re.MULTILINE)
    assert {"name": "max_leases", "value": "1024", "source": "default"}.items() <= {
        entry["name"]: entry for entry in run_json(run, "config")
    }["max_leases"].items()


def test_top_looks_once_or_refreshes_until_it_is_interrupted(run, calls):
    code, out, _ = run("top", "--once")
    assert code == Exit.DONE and "\x1b" not in out and "namespace default" in out
    assert run_json(run, "top", "--once")["pid"] == calls.daemon.pid
    command = [sys.executable, "-m", "kvstored", "top", "--dir", str(calls.daemon.dir), "--interval-s", "0.1"]
    with WarmDaemon(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        seen = ""
        while seen.count("\x1b[H\x1b[J") < 2:
            line = process.stdout.readline()
            assert line, "top ended by itself"
            seen += line
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == Exit.DONE
    assert "a second  " in seen


def test_a_reader_of_the_output_may_leave(held):
    program = f"{sys.executable} -m kvstored ls --dir {held.daemon.dir} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.DONE and "Traceback" not in done.stderr


def test_stop_waits_until_the_daemon_is_gone(run, calls):
    pid = calls.daemon.pid
    code, out, _ = run("stop")
    assert code == Exit.DONE and out.startswith(f"pid {pid} has ended; ")
    assert "stay for the next daemon: kvstored stop --discard frees them" in out
    assert calls.daemon.process.wait(60) == 0
    assert run("status")[0] == Exit.UNREACHABLE and run("stop")[0] == Exit.UNREACHABLE


def test_stop_signals_nobody_who_only_has_the_daemons_number(tmp_path, capsys):
    """A daemon in a container writes the number that it has there; here another process may have it."""
    lock = os.open(tmp_path / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with socket.socket(socket.AF_UNIX) as listening, subprocess.Popen("cat", stdin=subprocess.PIPE) as other:
        listening.bind(str(tmp_path / "grpc.sock"))
        listening.listen()
        (tmp_path / "pid").write_text(f"{other.pid}\n")
        assert main(["stop", "--dir", str(tmp_path)]) == Exit.REFUSED
        assert f"says pid {other.pid} and is pid {os.getpid()} here" in capsys.readouterr().err
        other.communicate()
        assert other.returncode == 0
    os.close(lock)


def test_a_frozen_daemon_is_unreachable_not_endless(run, calls):
    os.kill(calls.daemon.pid, signal.SIGSTOP)
    try:
        for command in ("status", "ls", "scrub", "top", "config", "reload", "stop"):
            code, out, error = run(command, "--timeout-s", "0.3")
            assert (code, out) == (Exit.REFUSED if command == "stop" else Exit.UNREACHABLE, ""), command
            assert "0.3 s" in error, command
    finally:
        os.kill(calls.daemon.pid, signal.SIGCONT)
    calls.daemon.process.wait(60)  # it was told to stop


@pytest.mark.parametrize("shown", ["--json", "--interval-s=0.2"])
def test_top_ends_with_its_daemon_and_says_so(held, shown):
    words = ["top", "--dir", str(held.daemon.dir), "--interval-s", "0.1", shown]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmDaemon([sys.executable, "-m", "kvstored", *words], cwd=ROOT, text=True, **both) as process:
        assert process.stdout.readline()
        held.daemon.process.kill()
        _, error = process.communicate(timeout=60)
    assert process.returncode == Exit.UNREACHABLE
    said = json.loads(error)["error"]["text"] if shown == "--json" else error
    assert f"no daemon in {held.daemon.dir}" in said and error.count("\n") == 1


class Failed(grpc.RpcError):
    def __init__(self, code):
        self.code, self.details = (lambda: code), (lambda: "Socket closed")


def test_a_daemon_whose_sockets_close_before_its_lock_has_ended(held, monkeypatch, capsys):
    """As the kernel ends a process."""
    first = [held.daemon.pid]
    monkeypatch.setattr(connection.runtime_dir, "running_pid", lambda _: first.pop(0) if first else None)
    held.daemon.process.kill()
    arguments = argparse.Namespace(json=False, timeout_s=1.0)
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        assert connection.complain_of(Failed(code), "/d", arguments) == Exit.UNREACHABLE
        assert "no daemon in /d" in capsys.readouterr().err


def test_a_daemon_that_stops_and_cuts_off_a_scrub_is_not_late(held, monkeypatch, capsys):
    def steps(_request):
        yield admin_pb2.ScrubResponse(verified=1)
        raise Failed(grpc.StatusCode.CANCELLED)

    monkeypatch.setattr(connection, "ENDING_S", 0.0)
    monkeypatch.setattr(
        connection.Connection, "__enter__",
        lambda self: argparse.Namespace(admin=argparse.Namespace(Scrub=steps), timeout_s=1.0),
    )  # fmt: skip
    assert main(["scrub", "--dir", str(held.daemon.dir)]) == Exit.UNREACHABLE
    out, error = capsys.readouterr()
    assert out == "" and "has not finished" in error and "within" not in error


# ---- metrics


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.read().decode()


def test_metrics_parse_and_count(daemon):
    port = free_port()
    kvstored = daemon(memory="64MiB", args=("--metrics-port", str(port)))
    with Calls(kvstored.dir) as calls:
        calls.put("secret", "b")
        calls.get("secret", "x")
    text = fetch(port, "/metrics")
    sample = re.compile(
        r'(kvstored_[a-z_]+)(\{[a-z]+="[\w.+-]*"(,[a-z]+="[\w.+-]*")*\})? (-?\d+(\.\d+)?(e-?\d+)?)'
    )
    values, typed = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in typed
            typed[name] = kind
        elif not line.startswith("# HELP "):
            match = sample.fullmatch(line)
            assert match, line
            name = re.sub(r"_(bucket|sum|count)$", "", match.group(1))
            assert name in typed and (typed[name] == "counter") == name.endswith("_total"), name
            assert (name != match.group(1)) == (typed[name] == "histogram")
            values[match.group(1) + (match.group(2) or "")] = float(match.group(4))
    assert values['kvstored_blocks{namespace="default"}'] == 2
    assert values['kvstored_hits_total{namespace="default"}'] == 1
    assert values['kvstored_misses_total{namespace="default"}'] == 1
    assert values['kvstored_grpc_calls_total{method="Get",status="OK"}'] == 1
    assert values["kvstored_process_resident_bytes"] > 0
    assert key("secret").hex() not in text
    assert fetch(port, "/healthz") == "serving\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/")


def test_the_first_internal_error_is_an_increase(daemon):
    """To Prometheus a series that begins with it has none: each method has one before its first call."""
    port = free_port()
    daemon(args=("--metrics-port", str(port)))
    text = fetch(port, "/metrics")
    for file in (admin_pb2, store_pb2, transfer_pb2):
        (service,) = file.DESCRIPTOR.services_by_name.values()
        for method in service.methods:
            assert f'kvstored_grpc_calls_total{{method="{method.name}",status="INTERNAL"}} 0\n' in text


def test_a_port_that_is_taken_is_an_error_that_names_it(daemon):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        kvstored = daemon(start=False)
        command = [sys.executable, "-m", "kvstored", *kvstored.args, "--metrics-port", str(port), "--discard"]
        done = warm(command, timeout=60, python=WarmDaemon, cwd=ROOT)
    assert done.returncode == Exit.CANNOT_START and f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
