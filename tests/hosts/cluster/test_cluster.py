"""A pool across machines: what one host's daemon put into Mooncake another finds when the first is gone.

Real etcd and real Mooncake, in network namespaces, for Mooncake listens on every address. Needs
`.ci/cluster`, and root for the namespaces.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvclient
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import cluster_here
from cluster_here import fabric_pid, told, told_at, until

pytestmark = pytest.mark.engines


def started(*names):
    try:
        with cluster_here.running(*names) as hosts:
            yield hosts
    except cluster_here.NotHere as why:
        pytest.skip(str(why))


@pytest.fixture
def cluster():
    yield from started("a", "b")


@pytest.fixture
def three():
    yield from started("a", "b", "c")


def got(client, keys, geometry):
    client.register_layout(geometry.to_blob())
    with client.get(keys, wait_s=30) as blocks:
        for block in blocks:
            if block is not None:
                check(block, geometry.num_layers)
        return sum(block is not None for block in blocks)


def put(client, keys, geometry):
    """And asks for them once more, which is what makes them useful."""
    with client.create(keys, client.register_layout(geometry.to_blob())) as writer:
        for block in writer:
            fill(block, geometry.num_layers)
    assert got(client, keys, geometry) == len(keys)


def flush(host):
    words = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(host.dir)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def counters(host):
    return told(host).get("counters", {})


def test_what_one_host_put_another_finds_when_the_first_is_gone(cluster):
    small, big, unread = new_keys(5), new_keys(3), new_keys(2)
    with kvclient.connect(dir=str(cluster["a"].dir)) as one:
        with one.create(unread, one.register_layout(SMALL.to_blob())) as writer:  # nobody asks for these
            for block in writer:
                fill(block, SMALL.num_layers)
        put(one, small, SMALL)
        put(one, big, BIG)
        until(lambda: counters(cluster["a"]).get("puts") == 8, "all are in the pool")
        flush(cluster["a"])
    with kvclient.connect(dir=str(cluster["b"].dir)) as two:
        assert got(two, small, SMALL) == 5 and got(two, big, BIG) == 3
        assert got(two, new_keys(2), SMALL) == 0 and got(two, unread, SMALL) == 0
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
    until(lambda: told(cluster["a"]).get("etcd_away"), "it is noticed")
    assert told(cluster["a"])["members"] == ["a", "b"]
    keys = new_keys(2)
    clients = [kvclient.connect(dir=str(cluster[name].dir)) for name in ("a", "b")]
    with clients[0] as one, clients[1] as two:
        put(one, keys, SMALL)
        until(lambda: counters(cluster["a"]).get("puts") == 2, "they are put all the same")
        cluster["a"].freeze()
        try:
            assert got(two, keys, SMALL) in (0, 2)  # the replica here, or none
        finally:
            cluster["a"].thaw()


def test_one_of_two_replicas_hosts_is_killed_and_no_read_and_no_put_fails(three):
    keys = new_keys(24)
    with kvclient.connect(dir=str(three["a"].dir)) as one, kvclient.connect(dir=str(three["c"].dir)) as two:
        put(one, keys, SMALL)
        until(lambda: counters(three["a"]).get("puts") == 24, "all are in the pool")
        assert counters(three["a"])["replicas"] == 48
        flush(three["a"])
        three["b"].kill()
        for key in keys:
            assert got(two, [key], SMALL) == 1
        until(lambda: counters(three["c"]).get("hits") == 24, "all came from the pool")
        assert counters(three["c"])["failed_over"] > 0, "b had the nearer replica of some"
        until(lambda: counters(three["c"])["known"] == 24, "what b had is put again")
        more = new_keys(12)
        put(two, more, SMALL)
        until(lambda: counters(three["c"])["known"] == 36, "they are put")
        assert counters(three["c"])["put_failed"] == 0
        flush(three["c"])
        assert got(one, more, SMALL) == 12
    asked = [sys.executable, "-m", "kvstored", "peers", "--dir", str(three["c"].dir)]
    shown = subprocess.run(asked, capture_output=True, text=True).stdout
    assert "pool of a, " in shown and "at a second replica" in shown, shown


def test_etcd_that_comes_back_finds_the_members_again(cluster):
    cluster["etcd"].kill()
    until(lambda: told(cluster["a"]).get("etcd_away"), "it is noticed")
    cluster["etcd"].start()
    for name in ("a", "b"):
        until(lambda n=name: told(cluster[n]).get("etcd_away") == "", f"{name} sees it")
        assert told(cluster[name])["members"] == ["a", "b"]


def test_a_host_joins_by_the_clusters_name_alone(cluster, tmp_path):
    near, keys = cluster["a"], new_keys(3)
    with kvclient.connect(dir=str(near.dir)) as one:
        put(one, keys, SMALL)
        until(lambda: counters(near).get("known") == 3, "they are in the pool")
    words = [
        *cluster["b"].network.inside("b"),
        sys.executable,
        "-m",
        "kvstored",
        "serve",
        "--dir",
        str(tmp_path),
    ]
    words += ["--dir", str(tmp_path), "--memory", "64MiB", "--discard", "--cluster", "etcd://10.77.0.1:2379"]
    words += ["--cluster-memory", "64MiB"]
    words += ["--namespaces", f"default:salt=file:{near.dir.parent}/salt:share=read"]
    with open(tmp_path / "log", "wb") as log:
        daemon = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until(lambda: len(told_at(tmp_path).get("members", ())) == 3, "it is a member")
        with kvclient.connect(dir=str(tmp_path)) as far:
            until(lambda: got(far, keys, SMALL) == 3, "it finds what the others put")
    finally:
        daemon.terminate()
        daemon.wait()
