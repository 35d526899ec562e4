"""The pool across machines, real etcd and real Mooncake in network namespaces (`.ci/cluster` fetches them):
one of two replicas' hosts killed, and what a daemon with its fabric and eight peers costs while nothing is
done.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kvclient
from kvclient.testing.conformance.case import BIG, fill, new_keys

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import cluster_here
import hosts_here
from cluster_here import told, until

BLOCKS, IDLE_S, PEERS = 24, 20.0, 8


def put(client: Any, keys: list[bytes]) -> None:
    """And asks for them once more, which is what makes them useful."""
    with client.create(keys, client.register_layout(BIG.to_blob())) as writer:
        for block in writer:
            fill(block, BIG.num_layers)
    with client.get(keys):
        pass


def counted(host: Any, name: str) -> float:
    return told(host).get("counters", {}).get(name, 0)


def killed(rounds: int) -> Iterator[dict[str, Any]]:
    """Two rows: reads, then puts, from the moment on at which a host with a replica of some is killed."""
    reads, puts, failed_reads, failed_puts = [], [], 0, 0
    for _ in range(min(rounds, 3)):
        with cluster_here.running("a", "b", "c", memory="128MiB", pool="128MiB") as hosts:
            master = told(hosts["a"])["master"].partition(":")[0]
            others = [name for name in "abc" if hosts[name].at.partition(":")[0] != master]
            reader, lost = (hosts[name] for name in (*others,))
            writer = next(hosts[name] for name in "abc" if name not in others)
            clients = [kvclient.connect(dir=str(host.dir)) for host in (writer, reader)]
            with clients[0] as first, clients[1] as second:
                second.register_layout(BIG.to_blob())
                keys = new_keys(BLOCKS)
                put(first, keys)
                until(lambda h=writer: counted(h, "known") == BLOCKS, "all are in the pool")
                words = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(writer.dir)]
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
                lost.kill()
                here = BLOCKS
                for key in keys:
                    began = time.perf_counter()
                    with second.get([key], wait_s=10) as blocks:
                        here += blocks[0] is not None
                    reads.append(time.perf_counter() - began)
                failed_reads += 2 * BLOCKS - here
                put(second, new_keys(BLOCKS))
                until(lambda h=reader, n=here: counted(h, "known") == n, "what it read, and what it made")
                failed_puts += counted(reader, "put_failed")
                puts.append(counted(reader, "longest_put_ms") / 1000)
    for what, took, failed in (("reads", reads, failed_reads), ("puts", puts, failed_puts)):
        yield {
            "what": f"pool: one of two replicas' hosts killed: {what}, the longest",
            "reach": "<= 1 s, none failed", "us": {"ours": round(max(took) * 1e6)}, "failed": int(failed),
        }  # fmt: skip


def idle() -> Iterator[dict[str, Any]]:
    names = [f"h{i}" for i in range(PEERS + 1)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", cluster_here.ENVIRONMENT))
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-etcd-")))
        hosts = stack.enter_context(hosts_here.running(*names, memory="64MiB", tls=False))
        first = hosts["h0"]
        if not first.network.isolated:
            print(f"idle with a fabric: not measured, {first.network.why}")
            return
        etcd = cluster_here.Etcd(first, base)
        stack.callback(etcd.kill)
        first.end()
        first.command += ["--cluster", "etcd://10.77.0.1:2379", "--cluster-memory", "64MiB"]
        first.start()
        until(lambda: told(first).get("members"), "it is a member")
        up = lambda: all(peer["state"] == "up" for peer in first.peers().values())  # noqa: E731
        until(up, "it reaches its peers, and its fabric")
        time.sleep(2 * IDLE_S)  # until the fabric looks seldom
        assert first.daemon
        watched = {"daemon": first.daemon.pid, "fabric": cluster_here.fabric_pid(first)}
        before = {name: cpu_s(pid) for name, pid in watched.items()}
        began = time.monotonic()
        time.sleep(IDLE_S)
        shares = {name: 100 * (cpu_s(pid) - before[name]) for name, pid in watched.items()}
        took = time.monotonic() - began
        yield {
            "what": f"idle daemon with {PEERS} peers, its fabric included", "reach": "<= 1 % of a core",
            "us": {}, "percent_of_a_core": round(sum(shares.values()) / took, 2),
            "of which": {name: round(share / took, 2) for name, share in shares.items()},
        }  # fmt: skip


def cpu_s(pid: int) -> float:
    """Processor time of a process, all threads."""
    return time.clock_gettime((~pid << 3) | 2)


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """None where the cluster's programs or namespaces are not here."""
    try:
        yield from killed(rounds)
        yield from idle()
    except cluster_here.NotHere as why:
        print(f"pool: not measured, {why}")
