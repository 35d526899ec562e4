"""A pool across machines: what one host's daemon put into Mooncake another finds when the first is gone.

Real etcd and real Mooncake, in network namespaces, for Mooncake listens on every address. Needs
`.ci/cluster`, and root for the namespaces.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvclient
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ROOT / "build" / "cluster"
sys.path.insert(0, str(ROOT / "examples"))
import hosts_here  # noqa: E402

UP_S = 90.0
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not (NEEDED / "ready").exists(), reason="etcd and Mooncake: run .ci/cluster"),
]


def until(condition, what):
    end = time.monotonic() + UP_S
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


@pytest.fixture
def etcd():
    """Starts one in a host's namespace; "" stands for its process until then."""
    made = []

    def start(host: hosts_here.Host, directory: Path):
        at = f"http://{host.at.partition(':')[0]}:2379"
        command = [*host.network.inside(host.name), str(NEEDED / "system/usr/bin/etcd")]
        command += ["--data-dir", str(directory / "etcd"), "--log-level", "error", "--log-outputs", "stderr"]
        command += ["--listen-client-urls", at, "--advertise-client-urls", at]
        command += ["--listen-peer-urls", "http://127.0.0.1:2380"]
        with open(directory / "etcd.log", "ab") as log:
            made.append(subprocess.Popen(command, stdout=log, stderr=log))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()


def told(host):
    try:
        return json.loads((host.dir / "fabric.json").read_text())
    except (OSError, ValueError):
        return {}


def fabric_pid(host):
    """The daemon's child that is the fabric."""
    children = Path(f"/proc/{host.daemon.pid}/task").glob("*/children")
    for pid in (one for path in children for one in path.read_text().split()):
        if b"kvstored.cluster.fabric" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return 0


@pytest.fixture
def cluster(etcd, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NEEDED / "python"))
    libraries = [str(NEEDED / "system" / one) for one in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(libraries))
    args = ["--cluster", "etcd://10.77.0.1:2379", "--cluster-memory", "64MiB"]
    with hosts_here.running("a", "b", memory="64MiB", tls=False, args=args) as hosts:
        if not hosts["a"].network.isolated:
            pytest.skip(f"no network namespaces: {hosts['a'].network.why}")
        hosts["etcd"] = etcd(hosts["a"], tmp_path)
        for name in ("a", "b"):
            until(lambda n=name: told(hosts[n]).get("members") == ["a", "b"], f"{name} sees both")
            until(lambda n=name: hosts[n].peers()["pool"]["state"] == "up", f"{name} has its pool")
        yield hosts


def got(client, keys, geometry):
    client.register_layout(geometry.to_blob())
    with client.get(keys, wait_s=30) as blocks:
        for block in blocks:
            if block is not None:
                check(block, geometry.num_layers)
        return sum(block is not None for block in blocks)


def put(client, keys, geometry):
    with client.create(keys, client.register_layout(geometry.to_blob())) as writer:
        for block in writer:
            fill(block, geometry.num_layers)


def test_what_one_host_put_another_finds_when_the_first_is_gone(cluster):
    small, big = new_keys(5), new_keys(3)
    with kvclient.connect(dir=str(cluster["a"].dir)) as one:
        put(one, small, SMALL)
        put(one, big, BIG)
        until(lambda: told(cluster["a"])["counts"]["puts"] == 8, "all are in the pool")
        flush = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(cluster["a"].dir)]
        subprocess.run(flush, check=True, stdout=subprocess.DEVNULL)
    with kvclient.connect(dir=str(cluster["b"].dir)) as two:
        assert got(two, small, SMALL) == 5 and got(two, big, BIG) == 3
        assert got(two, new_keys(2), SMALL) == 0
    assert cluster["b"].peers()["pool"]["fetched"] == 8 and cluster["b"].peers()["a"]["fetched"] == 0


def test_a_fabric_that_is_killed_or_frozen_costs_hits_and_comes_back(cluster):
    keys = new_keys(3)
    with kvclient.connect(dir=str(cluster["b"].dir)) as two:
        first = until(lambda: fabric_pid(cluster["b"]), "it runs")
        os.kill(first, signal.SIGKILL)
        assert got(two, keys, SMALL) == 0
        put(two, keys, SMALL)
        assert got(two, keys, SMALL) == 3
        second = until(lambda: (pid := fabric_pid(cluster["b"])) != first and pid, "another")
        until(lambda: cluster["b"].peers()["pool"]["state"] == "up", "and serves")
        os.kill(second, signal.SIGSTOP)
        try:
            assert got(two, new_keys(2), SMALL) == 0
        finally:
            os.kill(second, signal.SIGCONT)


def test_a_daemon_that_is_killed_takes_its_fabric_along(cluster):
    pid = until(lambda: fabric_pid(cluster["b"]), "it runs")
    cluster["b"].kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")


def test_etcd_that_is_away_stops_nothing(cluster):
    cluster["etcd"].kill()
    cluster["etcd"].wait()
    until(lambda: told(cluster["a"]).get("etcd_away"), "it is noticed")
    assert told(cluster["a"])["members"] == ["a", "b"]
    keys = new_keys(2)
    clients = [kvclient.connect(dir=str(cluster[name].dir)) for name in ("a", "b")]
    with clients[0] as one, clients[1] as two:
        put(one, keys, SMALL)
        until(lambda: told(cluster["a"])["counts"]["puts"] == 2, "they are put all the same")
        cluster["a"].freeze()
        try:
            assert got(two, keys, SMALL) in (0, 2)  # the replica here, or none
        finally:
            cluster["a"].thaw()
