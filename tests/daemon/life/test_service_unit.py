"""The systemd service: the unit that is installed is valid, tight and fits what the daemon does.

Method: deploy/systemd/install renders it as a package would; systemd-analyze judges it; a daemon is run under
its filter, file system and capabilities (sandbox.py) and must serve all doors. Where systemd or root is
missing the test says so and is skipped.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.testing.conformance.case import SMALL, fill, new_keys
from kvstored.cli.main import parser
from kvstored.config.sources import load
from kvstored.tiers.pool_files import HUGE_DIR
from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls, content

ROOT = Path(__file__).resolve().parents[3]
SYSTEMD = ROOT / "deploy/systemd"
MAX_EXPOSURE = 1.5
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


@pytest.fixture
def installed(tmp_path):
    """The files as a package would install them."""
    program = tmp_path / "bin" / "kvstored"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    subprocess.run(
        [SYSTEMD / "install", program], check=True, env={**os.environ, "DESTDIR": str(tmp_path / "root")}
    )
    return tmp_path / "root" / "etc"


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True, timeout=60)


def settings(etc: Path) -> dict[str, str]:
    text = (etc / "systemd/system/kvstored.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


@needs_systemd
def test_systemd_accepts_the_unit(installed):
    unit = installed / "systemd/system/kvstored.service"
    done = analyze("verify", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    # The verdict is one: a word that systemd does not know is told.
    unit.write_text(unit.read_text().replace("\nType=notify\n", "\nType=notfiy\n"))
    assert "notfiy" in analyze("verify", unit).stderr


@needs_systemd
def test_the_pools_memory_is_mounted_where_the_daemon_looks_for_it(installed):
    name = r"run-kvstored\x2dpool.mount"
    unit = installed / "systemd/system" / name
    done = analyze("verify", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    of = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert of["Where"] == HUGE_DIR and of["Type"] == "tmpfs"
    escaped = subprocess.run(
        ["systemd-escape", "--path", "--suffix=mount", HUGE_DIR], check=True, capture_output=True, text=True
    )
    assert escaped.stdout.strip() == name, "a mount unit must be called by its path"
    assert "huge=within_size" in of["Options"].split(",")
    service = settings(installed)
    assert service["Wants"] == service["ReadWritePaths"].replace("-/run/kvstored-pool", name) == name


@needs_systemd
def test_systemd_rates_the_unit_as_tight(installed):
    unit = installed / "systemd/system/kvstored.service"
    done = analyze("--offline=true", "security", unit)
    rated = re.search(r"Overall exposure level for kvstored.service: ([\d.]+)", done.stdout)
    assert rated, done.stdout + done.stderr
    assert float(rated[1]) <= MAX_EXPOSURE


def test_the_unit_keeps_the_pool_over_a_restart(installed):
    """What would delete it: a user that changes, RemoveIPC, a directory that is emptied."""
    of = settings(installed)
    assert (of["Type"], of["RemoveIPC"], of["RuntimeDirectoryPreserve"]) == ("notify", "no", "yes")
    assert of["User"] == "kvstored" and "DynamicUser" not in of and "PrivateUsers" not in of
    assert int(of["FileDescriptorStoreMax"]) >= 3 * 16
    assert of["Restart"] == "on-failure" and int(of["WatchdogSec"].rstrip("s")) > 4
    assert re.search(r"^u kvstored - ", (installed / "sysusers.d/kvstored.conf").read_text(), re.MULTILINE)


def test_the_unit_starts_what_exists_and_the_example_loads(installed):
    for name in ("ExecStart", "ExecReload"):
        words = settings(installed)[name].split()
        parsed = parser().parse_args(words[1:])
        assert parsed.dir == "/run/kvstored"
    config = installed / "kvstored/kvstored.toml"
    assert config.stat().st_mode & 0o777 == 0o640
    assert load({"dir": "/tmp"}, {}, str(config)).config.metrics_port == 9464
    text = config.read_text()
    text = text.replace("/etc/kvstored/metrics.token", str(installed / "kvstored/metrics.token"))
    (installed / "kvstored/metrics.token").write_text("0123456789abcdef" * 2)
    (installed / "kvstored/metrics.token").chmod(0o600)
    config.write_text(re.sub(r"^# (\w+ = |\[)", r"\1", text, flags=re.MULTILINE))
    load({"dir": "/tmp"}, {}, str(config))  # what is commented out is valid too


@pytest.mark.parametrize("program", ["/does/not/exist", "kvstored", "/etc"])
def test_a_program_that_cannot_be_run_is_refused(program, tmp_path):
    done = subprocess.run(
        [SYSTEMD / "install", program], env={**os.environ, "DESTDIR": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr and not list(tmp_path.iterdir())


def test_a_program_that_the_unit_hides_is_refused(tmp_path):
    """Here: below /tmp, where tests lie. Nothing is written, root or not."""
    program = tmp_path / "kvstored"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = subprocess.run([SYSTEMD / "install", program], capture_output=True, text=True)
    assert done.returncode == 1 and "lies where the unit hides it" in done.stderr, done.stderr


def test_an_operators_configuration_is_not_overwritten(installed, tmp_path):
    config = installed / "kvstored/kvstored.toml"
    config.write_text("memory = 1\n")
    subprocess.run(
        [SYSTEMD / "install", tmp_path / "bin/kvstored"],
        check=True, env={**os.environ, "DESTDIR": str(tmp_path / "root")},
    )  # fmt: skip
    assert config.read_text() == "memory = 1\n"


@needs_systemd
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make the unit's file system")
@pytest.mark.parametrize("pool", ["shm", "memfd"])
def test_the_daemon_serves_under_what_the_unit_forbids(daemon, installed, pool, wait_until):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = ("--metrics-port", str(port), "--pool", pool, "--disk-quota", "64MiB")
    kvstored = daemon(memory="64MiB", args=args, start=False)
    kvstored.args += ["--disk", str(kvstored.dir / "disk")]
    kvstored.start().stop()  # outside, to compare
    unit = installed / "systemd/system/kvstored.service"
    kvstored.command = [
        sys.executable, str(ROOT / "tests/daemon/sandbox.py"), str(unit), str(kvstored.dir), "--",
        sys.executable,
    ]  # fmt: skip
    kvstored.start()
    status = Path(f"/proc/{kvstored.pid}/status").read_text()
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status
    with Calls(kvstored.dir) as calls:
        calls.put("a")
        assert calls.get("a") == [content("a")]
        calls.admin.Integrity(admin_pb2.IntegrityRequest(), timeout=CALL_S)

        def scrubbed():
            last = calls.scrub()[-1]
            return (last.verified + last.computed, last.corrupt) == (1, 0)

        wait_until(scrubbed, "the block is checked")  # on its way to disk it is passed over
    with kvstored.connect() as client:
        assert client.stats()["blocks"] == 1
        layout = client.register_layout(SMALL.to_blob())
        with client.create(new_keys(1), layout, priority=100) as writer:
            fill(writer[0])
    wait_until(lambda: list((kvstored.dir / "disk").rglob("*.kv")), "the block is written to disk")
    outside, inside = re.findall(r" info disk .* engine=(\w+) ", kvstored.log())
    assert outside == inside, kvstored.log()
    with socket.create_connection(("127.0.0.1", port)) as web:
        web.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert web.recv(100).startswith(b"HTTP/1.1 200 ")
    assert kvstored.stop() == 0
    assert not re.search("call_failed|problem|degraded", kvstored.log()), kvstored.log()
