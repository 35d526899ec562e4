"""`kvstored reload` and SIGHUP: what may change changes, what needs a restart is named, a wrong file changes
nothing.

Method: a real daemon with a configuration file that the test rewrites; what is in effect is read from its
behaviour, its configuration and what it tells its supervisor.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from kvstored.errors import Exit
from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls, key, refused
from tests.warm_python import WarmDaemon, run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def configured(daemon, tmp_path):
    """A daemon that reads `one.file`, and its services."""
    file = tmp_path / "kvstored.toml"
    file.write_text('log_level = "info"\nmax_leases = 1\nmax_pins = 1000\n')
    kvstored = daemon("64MiB", ("--config", str(file), "--drain-timeout-s", "0.2"))
    kvstored.file = file
    with Calls(kvstored.dir) as calls:
        kvstored.calls = calls
        yield kvstored


def reload(kvstored, *words):
    command = [sys.executable, "-m", "kvstored", "reload", "--dir", str(kvstored.dir), *words]
    done = run(command, timeout=60, python=WarmDaemon, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def in_effect(kvstored):
    entries = kvstored.calls.admin.Config(admin_pb2.ConfigRequest(), timeout=CALL_S).entries
    return {entry.name: (entry.value, entry.source) for entry in entries}


def states(kvstored):
    reply = kvstored.calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
    return [entry.state for entry in reply.degraded]


@pytest.mark.parametrize("table", ["default", "new"])
def test_a_list_that_would_fail_the_next_start_is_refused(configured, table):
    configured.file.write_text(f'[namespaces.{table}]\nwriters = ["no_such_user_here"]\n')
    code, said = reload(configured)
    assert code == Exit.REFUSED and "no user 'no_such_user_here'" in said, said
    assert states(configured) == ["reload_refused"]


def test_what_may_change_changes_and_the_rest_is_named(configured):
    first = configured.calls.create([key("a")])
    refused(lambda: configured.calls.create([key("b")]), grpc.StatusCode.RESOURCE_EXHAUSTED)
    configured.file.write_text(
        'log_level = "debug"\nmax_leases = 2\nmax_pins = 2000\ndrain_timeout_s = 9\nevent_queue = 64\n'
    )
    code, text = reload(configured, "--json")
    assert code == Exit.DONE, text
    changes = json.loads(text)
    found = {change["name"]: (change["before"], change["after"], change["applied"]) for change in changes}
    assert found == {
        "log_level": ("info", "debug", True),
        "max_leases": ("1", "2", True),
        "max_pins": ("1000", "2000", False),
        "event_queue": ("256", "64", True),
    }, "the flag's drain_timeout_s wins over the file's"
    assert configured.calls.create([key("b")]).lease.id and first.lease.id
    now = in_effect(configured)
    assert now["max_pins"] == ("1000", "file"), "what is shown is what is in effect"
    assert now["event_queue"] == ("64", "file") and now["drain_timeout_s"] == ("0.2", "flag")
    code, text = reload(configured)
    assert code == Exit.DONE and text.split()[:4] == ["field", "before", "now", "in"]
    assert "max_pins  1000" in text and "after a restart" in text and "log_level" not in text


def test_the_quota_of_the_disk_changes_at_once(daemon, tmp_path):
    file = tmp_path / "kvstored.toml"
    text = f'disk = ["{tmp_path}/disk"]\ndisk_quota = "%dMiB"\n'
    file.write_text(text % 64)
    kvstored = daemon("64MiB", ("--config", str(file)))
    with Calls(kvstored.dir) as calls:
        assert calls.stats()["disk_quota_bytes"] == 64 << 20
        file.write_text(text % 32)
        code, said = reload(kvstored)
        assert code == Exit.DONE and "disk_quota  64MiB   32MiB  applied" in said, said
        assert calls.stats()["disk_quota_bytes"] == 32 << 20


@pytest.mark.parametrize(
    "text", ["max_leases = 0\nlog_level = 'debug'\n", "nonsense", "no_such_field = 1\n", None]
)
def test_a_wrong_file_changes_nothing_and_is_told(configured, text):
    before = in_effect(configured)
    if text is None:
        configured.file.unlink()
    else:
        configured.file.write_text(text)
    code, said = reload(configured)
    assert code == Exit.REFUSED and "the old one stays" in said and said.count("\n") == 1
    assert in_effect(configured) == before and states(configured) == ["reload_refused"]
    configured.file.write_text('log_level = "info"\nmax_leases = 1\nmax_pins = 1000\n')
    assert reload(configured) == (Exit.DONE, "nothing has changed\n")
    assert states(configured) == []


def test_sighup_reloads_and_the_supervisor_is_told(daemon, tmp_path, wait_until):
    file, path = tmp_path / "kvstored.toml", str(tmp_path / "supervisor")
    file.write_text("")
    kvstored = daemon(args=("--config", str(file)), start=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(20)
        with open(kvstored.log_path, "ab") as log:
            kvstored.process = subprocess.Popen(
                [sys.executable, "-m", "kvstored", *kvstored.args],
                cwd=ROOT, stderr=log, env={**os.environ, "NOTIFY_SOCKET": path},
            )  # fmt: skip
        assert supervisor.recv(4096).startswith(b"READY=1\n")
        kvstored._note_segments()
        wrong = ("max_leases = 0", "reload_refused why=")
        for text, applied in (('log_level = "debug"', "applied=1"), wrong):
            file.write_text(text)
            kvstored.process.send_signal(signal.SIGHUP)
            told = [supervisor.recv(4096), supervisor.recv(4096)]
            assert told[0].startswith(b"RELOADING=1\nMONOTONIC_USEC=") and told[1] == b"READY=1"
            wait_until(lambda applied=applied: applied in kvstored.log(), "the log says so")


def ignored(pid: int) -> set[int]:
    """The signals that the process ignores."""
    (bits,) = re.findall(r"SigIgn:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return {number for number in range(1, 65) if int(bits, 16) >> (number - 1) & 1}


def test_a_daemon_that_stops_ignores_what_would_end_it_half_way(daemon, tmp_path, wait_until):
    """Its loop's handlers end before its pool is discarded, and a second SIGTERM would leave the pool."""
    file = tmp_path / "kvstored.toml"
    file.write_text("")
    kvstored = daemon("64MiB", ("--config", str(file), "--drain-timeout-s", "300"))
    with Calls(kvstored.dir) as calls:
        calls.create([key("a")])
        follower = calls.follow("a", timeout_ms=60_000)
        next(follower)  # the call goes on until it is cancelled
        kvstored.process.send_signal(signal.SIGTERM)
        wait_until(lambda: " stopping " in kvstored.log(), "the daemon stops")
        assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} <= ignored(kvstored.pid)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            kvstored.process.send_signal(number)
        follower.cancel()
        assert kvstored.process.wait(60) == 0
    assert "reload" not in kvstored.log().partition(" stopping ")[2]


def test_sighup_while_it_starts_is_a_reload_once_it_serves(configured, wait_until):
    configured.stop()

    def as_soon_as_its_number_can_be_read():
        deadline = time.monotonic() + 60
        while not (configured.dir / "pid").exists() and time.monotonic() < deadline:
            os.sched_yield()
        os.kill(int((configured.dir / "pid").read_text()), signal.SIGHUP)

    signalling = threading.Thread(target=as_soon_as_its_number_can_be_read)
    signalling.start()
    configured.start()
    signalling.join()
    wait_until(lambda: " reloaded " in configured.log(), "the configuration was read again")
    assert configured.stop() == 0
