"""A pool across hosts of this machine: etcd and Mooncake as `.ci/cluster` unpacked them, each host in a
network namespace, for Mooncake listens on every address.

    with cluster_here.running("a", "b", "c") as hosts:
        client = kvclient.connect(dir=hosts["a"].dir)

The first host has etcd, and Mooncake's master. Everything goes with the block.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hosts_here

UP_S = 120.0
NEEDED = Path(__file__).resolve().parents[1] / "build" / "cluster"
LIBRARIES = [str(NEEDED / "system" / part) for part in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")]
ENVIRONMENT = {"PYTHONPATH": str(NEEDED / "python"), "LD_LIBRARY_PATH": ":".join(LIBRARIES)}


class NotHere(Exception):
    """This machine cannot have one; the text says why."""


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + UP_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)
    return found


class Etcd:
    """One in a host's namespace; it keeps what it has over kill() and start()."""

    def __init__(self, host: hosts_here.Host, directory: Path) -> None:
        at = f"http://{host.at.partition(':')[0]}:2379"
        self._log = directory / "etcd.log"
        self._command = [*host.network.inside(host.name), str(NEEDED / "system/usr/bin/etcd")]
        self._command += ["--data-dir", str(directory / "etcd"), "--log-level", "error"]
        self._command += ["--listen-client-urls", at, "--advertise-client-urls", at]
        self._command += ["--listen-peer-urls", "http://127.0.0.1:2380", "--log-outputs", "stderr"]
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def pool_of(host: Any) -> dict[str, Any]:
    """As `kvstored peers` has it; {}: it says nothing of one yet."""
    found: dict[str, Any] = host.peers().get("pool", {})
    return found


def told(host: hosts_here.Host) -> dict[str, Any]:
    """What its fabric last told; {} if nothing."""
    return told_at(host.dir)


def told_at(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "fabric.json").read_text())
    except (OSError, ValueError):
        return {}


def fabric_pid(host: hosts_here.Host) -> int:
    """The daemon's child that is the fabric; 0: there is none at the moment."""
    children = Path(f"/proc/{host.daemon.pid}/task").glob("*/children")
    for pid in (pid for path in children for pid in path.read_text().split()):
        if b"kvstored.cluster.fabric" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return 0


@contextlib.contextmanager
def running(
    *names: str, memory: str = "64MiB", pool: str = "64MiB", args: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Hosts by name, and "etcd"; all are members when it is entered. Raises NotHere."""
    if not (NEEDED / "ready").exists():
        raise NotHere("etcd and Mooncake are not here: run .ci/cluster")
    args = ["--cluster", "etcd://10.77.0.1:2379", "--cluster-memory", pool, *(args or [])]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ENVIRONMENT))
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-etcd-")))
        hosts: dict[str, Any] = stack.enter_context(
            hosts_here.running(*names, memory=memory, tls=False, args=args)
        )
        first = hosts[names[0]]
        if not first.network.isolated:
            raise NotHere(f"no network namespaces: {first.network.why}")
        hosts["etcd"] = Etcd(first, base)
        stack.callback(hosts["etcd"].kill)
        until(lambda: told(first).get("members"), "the first is a member, and has the master")
        for name in names:
            until(lambda n=name: told(hosts[n]).get("members") == sorted(names), f"{name} sees all")
            until(lambda n=name: pool_of(hosts[n]).get("state") == "up", f"{name} has its pool")
        yield hosts
