"""A pool across machines: what one host's daemon put into Mooncake another finds when the first is gone.

Real etcd and real Mooncake, in network namespaces, for Mooncake listens on every address. Needs
`.ci/cluster`, and root for the namespaces.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvclient
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, geometry, new_keys

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import cluster_here
import test_ca
from cluster_here import fabric_pid, told, told_at, until

pytestmark = pytest.mark.engines


def started(*names, **about):
    try:
        with cluster_here.running(*names, **about) as hosts:
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
    with kvclient.connect(dir=str(cluster["a"].dir)) as here:
        with here.create(unread, here.register_layout(SMALL.to_blob())) as writer:  # nobody asks for these
            for block in writer:
                fill(block, SMALL.num_layers)
        put(here, small, SMALL)
        put(here, big, BIG)
        until(lambda: counters(cluster["a"]).get("puts") == 8, "all are in the pool")
        flush(cluster["a"])
    with kvclient.connect(dir=str(cluster["b"].dir)) as two:
        assert got(two, small, SMALL) == 5 and got(two, big, BIG) == 3
        assert got(two, new_keys(2), SMALL) == 0 and got(two, unread, SMALL) == 0
    pool = cluster["b"].peers()["pool"]
    assert pool["fetched"] == 8 and cluster["b"].peers()["a"]["fetched"] == 0
    assert pool["placed"] == 3 and pool["lent"] == 0, "the large ones came straight to their place"
    until(lambda: counters(cluster["b"]).get("straight") == 3, "and the fabric tells so")


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
    with clients[0] as here, clients[1] as there:
        put(here, keys, SMALL)
        until(lambda: counters(cluster["a"]).get("puts") == 2, "they are put all the same")
        cluster["a"].freeze()
        try:
            assert got(there, keys, SMALL) in (0, 2)  # the replica here, or none
        finally:
            cluster["a"].thaw()


def test_one_of_two_replicas_hosts_is_killed_and_no_read_and_no_put_fails(three):
    keys = new_keys(24)
    a, c = (kvclient.connect(dir=str(three[name].dir)) for name in "ac")
    with a as here, c as there:
        put(here, keys, SMALL)
        until(lambda: counters(three["a"]).get("puts") == 24, "all are in the pool")
        assert counters(three["a"])["replicas"] == 48
        flush(three["a"])
        three["b"].kill()
        for key in keys:
            assert got(there, [key], SMALL) == 1
        until(lambda: counters(three["c"]).get("hits") == 24, "all came from the pool")
        assert counters(three["c"])["failed_over"] > 0, "b had the nearer replica of some"
        until(lambda: counters(three["c"])["known"] == 24, "what b had is put again")
        more = new_keys(12)
        put(there, more, SMALL)
        until(lambda: counters(three["c"])["known"] == 36, "they are put")
        assert counters(three["c"])["put_failed"] == 0
        until(lambda: told(three["c"])["members"] == ["a", "c"], "b's lease has run out")
        until(lambda: counters(three["c"])["short"] == 0, "and what it had is on both others")
        flush(three["c"])
        assert got(here, more, SMALL) == 12
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


class Joining:
    """A daemon that is told nothing but its cluster, in the namespace of one of the hosts."""

    def __init__(self, host, directory, name, *args):
        self.dir, self.host = directory, host
        directory.mkdir(mode=0o700, exist_ok=True)
        words = [*host.network.inside(host.name), sys.executable, "-m", "kvstored", "serve"]
        words += ["--dir", str(directory), "--memory", "64MiB", "--discard", "--node", name, *args]
        words += ["--namespaces", f"default:salt=file:{host.dir.parent}/salt:share=read"]
        with open(directory / "log", "wb") as log:
            self._daemon = subprocess.Popen(words, stdout=log, stderr=log)

    def peers(self):
        return cluster_here.hosts_here.Host.peers(self)

    def up(self, name):
        peer = self.peers().get(name, {"state": "none"})
        return peer["state"] == "up" and peer["complete"]

    def end(self):
        self._daemon.terminate()
        self._daemon.wait()


@pytest.fixture
def joining():
    made = []
    yield lambda *about: made.append(Joining(*about)) or made[-1]
    for host in made:
        host.end()


ETCD = ["--cluster", "etcd://10.77.0.1:2379"]
TRUSTED = ["--trusted-network", "10.77.0.0/24"]


def test_a_host_joins_by_the_clusters_name_alone(cluster, joining, tmp_path):
    near, keys = cluster["a"], new_keys(3)
    with kvclient.connect(dir=str(near.dir)) as here:
        put(here, keys, SMALL)
        until(lambda: counters(near).get("known") == 3, "they are in the pool")
    new = joining(cluster["b"], tmp_path / "c", "c", *ETCD, "--cluster-memory", "64MiB")
    until(lambda: len(told_at(new.dir).get("members", ())) == 3, "it is a member")
    with kvclient.connect(dir=str(new.dir)) as far:
        until(lambda: got(far, keys, SMALL) == 3, "it finds what the others put")
    assert set(new.peers()) == {"pool"}, "nobody said that it may speak to others in plain"


def test_members_are_peers_of_each_other(cluster, joining, tmp_path):
    near, keys, back = cluster["a"], new_keys(3), new_keys(2)
    new = joining(cluster["b"], tmp_path / "c", "c", *ETCD, *TRUSTED, "--cluster-memory", "64MiB")
    until(lambda: new.up("a") and new.up("b"), "it has both as peers")
    until(lambda: near.peers().get("c", {"state": ""})["state"] == "up", "and they have it")
    with kvclient.connect(dir=str(near.dir)) as here, kvclient.connect(dir=str(new.dir)) as far:
        with here.create(keys, here.register_layout(SMALL.to_blob())) as writer:
            for block in writer:
                fill(block, SMALL.num_layers)
        assert got(far, keys, SMALL) == 3
        assert new.peers()["a"]["fetched"] == 3, "not by the pool: nobody asked for them before"
        with far.create(back, far.register_layout(SMALL.to_blob())) as writer:
            for block in writer:
                fill(block, SMALL.num_layers)
        assert got(here, back, SMALL) == 2
    new.end()
    until(lambda: "c" not in near.peers(), "it has left")
    assert near.peers()["b"]["state"] == "up", "who is configured stays"


def test_members_over_tls_without_a_pool(cluster, joining, tmp_path):
    test_ca.authority(tmp_path / "tls")
    args = ["--cluster", "etcd://10.77.0.1:2379/other", "--cluster-memory", "0"]
    args += ["--tls-ca", str(tmp_path / "tls/ca.pem")]
    made = {}
    for name, host in (("c", "a"), ("d", "b")):
        certificate, key = test_ca.certificate(tmp_path / "tls", name)
        words = [*args, "--tls-cert", str(certificate), "--tls-key", str(key)]
        made[name] = joining(cluster[host], tmp_path / name, name, *words)
    until(lambda: made["c"].up("d") and made["d"].up("c"), "they are each other's peers, and nobody else's")
    assert set(made["c"].peers()) == {"d"}
    keys = new_keys(3)
    with kvclient.connect(dir=str(made["c"].dir)) as here, kvclient.connect(dir=str(made["d"].dir)) as far:
        with here.create(keys, here.register_layout(BIG.to_blob())) as writer:
            for block in writer:
                fill(block, BIG.num_layers)
        assert got(far, keys, BIG) == 3


def test_the_masters_host_dies_and_the_others_put_again_what_they_have(three):
    master = told(three["a"])["master"].partition(":")[0]
    lost = next(name for name in "abc" if three[name].at.partition(":")[0] == master)
    first, second = (three[name] for name in "abc" if name != lost)
    keys = new_keys(12)
    with kvclient.connect(dir=str(first.dir)) as here, kvclient.connect(dir=str(second.dir)) as there:
        put(here, keys, SMALL)
        until(lambda: counters(first).get("puts") == 12, "all are in the pool")
        three[lost].kill()
        for host in (first, second):
            until(
                lambda h=host: told(h).get("master", master).partition(":")[0] != master, "there is another"
            )
        until(lambda: counters(first).get("puts") == 12 and counters(first)["known"] == 12, "put again")
        flush(first)
        until(lambda: second.peers()["pool"]["state"] == "up", "it is there")
        until(lambda: got(there, keys, SMALL) == 12, "they are found")


def masters_pid(fabric):
    """Of Mooncake's master, if this fabric runs it; 0: it does not."""
    for path in Path(f"/proc/{fabric}/task").glob("*/children"):
        for pid in path.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().startswith("mooncake_master"[:15]):
                return int(pid)
    return 0


def test_the_masters_process_is_killed_and_nothing_but_hits_is_lost(cluster):
    near, far = cluster["a"], cluster["b"]
    keys, later = new_keys(6), new_keys(6)
    with kvclient.connect(dir=str(near.dir)) as here, kvclient.connect(dir=str(far.dir)) as there:
        put(here, keys, SMALL)
        until(lambda: counters(near).get("puts") == 6, "all are in the pool")
        before = {host: fabric_pid(host) for host in (near, far)}
        os.kill(next(filter(None, map(masters_pid, before.values()))), signal.SIGKILL)
        put(here, later, SMALL)
        assert got(here, keys, SMALL) == 6 and got(there, new_keys(2), SMALL) == 0
        for host, pid in before.items():
            until(lambda h=host, p=pid: fabric_pid(h) not in (None, p), "it joins anew, on both hosts")
        until(lambda: counters(near).get("puts") == 12 and counters(near)["known"] == 12, "put again")
        flush(near)
        until(lambda: far.peers()["pool"]["state"] == "up", "it is there")
        until(lambda: got(there, keys + later, SMALL) == 12, "they are found")


@pytest.fixture
def slow():
    yield from started("a", "b", memory="192MiB", pool="192MiB", args=["--cluster-replicas", "1"])


def test_a_fabric_that_is_killed_while_a_block_comes_costs_a_hit_and_its_memory_comes_back(slow):
    large = geometry(layers=16, heads=16, dim=64, tokens=128)  # 8 MiB
    keys = new_keys(6)
    near, far = slow["a"], slow["b"]
    with kvclient.connect(dir=str(near.dir)) as here, kvclient.connect(dir=str(far.dir)) as there:
        put(here, keys, large)
        until(lambda: counters(near).get("known") == 6, "all are in the pool, some here, some there")
        flush(near)
        near.network.slow("a", 2e6)  # four seconds for one
        first = fabric_pid(far)
        found = []
        reader = threading.Thread(target=lambda: found.append(got(there, keys, large)))
        reader.start()
        until(lambda: far.peers()["pool"]["lent"], "one is on its way to its place")
        os.kill(first, signal.SIGKILL)
        until(lambda: far.peers()["pool"]["lent"] == 0, "what was lent is over when the process is")
        reader.join()
        assert found[0] < 6
        put(there, new_keys(12), large)  # twelve of 8 MiB, in 192 MiB of memory
