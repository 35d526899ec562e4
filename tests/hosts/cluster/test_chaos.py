"""Three hosts with a pool: daemons, fabrics and etcd killed, frozen and cut off from a seed, while clients of
all put, get, follow and delete. No byte is wrong, none leaks, nothing stays lent, and all come back.

Real etcd and real Mooncake in network namespaces: needs `.ci/cluster`, and root for the namespaces.
Method: ROUNDS of harm; with SOAK_MINUTES (`make soak`) as many as fit into them, for each seed. In `make
test`, where there is what it needs, four rounds that are the same each time: SHORT.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import kvclient
from kvclient.testing.conformance.case import new_keys
from tests.soak.hosts import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import cluster_here
from cluster_here import fabric_pid, told, until

NAMES, ROUNDS, WORK_S = "abc", 10, 4.0
HARMS = ("daemon", "fabric", "still fabric", "etcd", "still etcd", "frozen", "cut off")
# Of each round, which host suffers what; together they are all of HARMS.
SHORT = (
    {"b": "daemon", "a": "still fabric"}, {"c": "fabric", "a": "still etcd"}, {"b": "cut off", "c": "frozen"},
    {"a": "etcd"},
)  # fmt: skip
SHORT_WORK_S = 1.5
SOAK_S = 60 * float(os.environ.get("SOAK_MINUTES", "0"))


class Place:
    """A host as a Worker sees it."""

    def __init__(self, host):
        self._host = host

    def connect(self):
        return kvclient.connect(dir=str(self._host.dir))


class Chaos:
    def __init__(self, hosts, seed):
        self.choose = random.Random(seed)
        self.problems, self.met, self.over = [], Counter(), threading.Event()
        self.keys = [new_keys(40), new_keys(10)]
        self.by_name, self.hosts = hosts, [Place(hosts[name]) for name in NAMES]
        self.workers = [Worker(self, i % len(NAMES), seed * 100 + i) for i in range(2 * len(NAMES))]

    def harm(self, name, what):
        """And what undoes it."""
        host, etcd = self.by_name[name], self.by_name["etcd"]
        self.met[what] += 1
        if what == "daemon":
            host.kill()
            return host.start
        if what == "etcd":
            etcd.kill()
            return etcd.start
        if what == "still etcd":
            etcd.freeze()
            return etcd.thaw
        if what == "frozen":
            host.freeze()
            return host.thaw
        if what == "cut off":  # of the first host: etcd and the master too
            host.network.cut_off(host.name)
            return lambda: host.network.join_again(host.name)
        pid = fabric_pid(host)
        if not pid:
            return lambda: None
        os.kill(pid, signal.SIGKILL if what == "fabric" else signal.SIGSTOP)
        return lambda: goes_on(pid)

    def harms(self):
        """One or two at a time, of one host or of two; and what undoes them."""
        count = self.choose.choice([1, 1, 2])
        names, all = self.choose.sample(NAMES, count), list(HARMS)
        for name in names:
            what = all.pop(self.choose.randrange(len(all)))
            yield self.harm(name, what)
            if what.endswith("etcd"):
                all = [other for other in all if not other.endswith("etcd")]

    def rounds(self):
        """What undoes each round's harm, and for how long it is to last."""
        began, rounds = time.monotonic(), 0
        while rounds < ROUNDS or time.monotonic() - began < SOAK_S:
            rounds += 1
            yield list(self.harms()), self.choose.uniform(0.5, WORK_S)

    def short(self):
        """The same of SHORT."""
        for names in SHORT:
            yield [self.harm(name, what) for name, what in names.items()], SHORT_WORK_S

    def run(self, rounds):
        for worker in self.workers:
            worker.start()
        for undo, work_s in rounds:
            self.over.wait(work_s)  # which nobody sets: clients work meanwhile
            for undoing in undo:
                undoing()
            self.over.wait(self.choose.uniform(0.0, 1.0))
        self.over.set()
        for worker in self.workers:
            worker.join(120)
            assert not worker.is_alive(), worker.name


def goes_on(pid):
    with contextlib.suppress(ProcessLookupError):  # it was killed
        os.kill(pid, signal.SIGCONT)


def is_back(hosts, name):
    host = hosts[name]
    if told(host).get("members") != sorted(NAMES) or told(host).get("etcd_away"):
        return False
    return all(peer["state"] == "up" and not peer["lent"] for peer in host.peers().values())


def run(seed, rounds):
    try:
        with cluster_here.running(*NAMES, memory="32MiB", pool="32MiB") as hosts:
            chaos = Chaos(hosts, seed)
            chaos.run(rounds(chaos))
            for name in NAMES:
                until(lambda n=name: is_back(hosts, n), f"{name} is back in service, and nothing is lent")
            assert not chaos.problems, chaos.problems
            assert chaos.met["blocks checked"] > 100, chaos.met
            for name in NAMES:
                words = ["--dir", str(hosts[name].dir)]
                flush = [sys.executable, "-m", "kvstored", "flush", "--yes", *words]
                subprocess.run(flush, check=True, stdout=subprocess.DEVNULL)
                with kvclient.connect(dir=str(hosts[name].dir)) as client:
                    until(lambda c=client: c.stats()["used_bytes"] == 0, "every byte is given back")
            print(dict(chaos.met))
            return chaos.met
    except cluster_here.NotHere as why:
        pytest.skip(str(why))


@pytest.mark.engines
@pytest.mark.parametrize("seed", range(2))
def test_chaos(seed):
    run(seed, Chaos.rounds)


def test_a_few_rounds_of_every_harm():
    met = run(2306, Chaos.short)
    assert all(met[what] == 1 for what in HARMS), met
