"""What many sessions at rest take of shared memory, and how long one more takes to attach.

A daemon, and one process with so many clients that have attached and done nothing: each its own session.
Shared memory is what the session pages have in /dev/shm (blocks, not lengths), and what the kernel counts.
"""

import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import kvclient
from bench.daemon_figures import Daemon

REACH_MIB, REACH_MS = 40, 2


def _shmem_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    return 0


def measure(count: int) -> dict:
    options = ("--max-sessions", str(count + 64))
    with (
        tempfile.TemporaryDirectory(prefix="kvcrowd-") as home,
        Daemon(Path(home) / "d", "64MiB", *options) as daemon,
    ):
        daemon.start()
        daemon.wait_faulted()
        kvclient.connect(dir=str(daemon.directory)).close()
        before, clients, took_ms = _shmem_kib(), [], []
        for _ in range(count):
            began = time.perf_counter_ns()
            clients.append(kvclient.connect(dir=str(daemon.directory)))
            took_ms.append((time.perf_counter_ns() - began) / 1e6)
        pages = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob("*.s.*"))
        found = {
            "sessions": count,
            "shmem_mib": (_shmem_kib() - before) / 1024,
            "pages_mib": pages / 2**20,
            "attach_p50_ms": median(took_ms),
            "attach_p99_ms": quantiles(took_ms, n=100)[98],
            "attach_first_100_p50_ms": median(took_ms[:100]),
            "attach_last_100_p50_ms": median(took_ms[-100:]),
        }
        for client in clients:
            client.close()
    print(f"{count} sessions at rest: pages {found['pages_mib']:.1f} MiB,", end=" ")
    print(f"shared memory in all {found['shmem_mib']:.1f} MiB (<= {REACH_MIB} for 1,000)")
    print(
        f"attach: p50 {found['attach_p50_ms']:.2f} ms, p99 {found['attach_p99_ms']:.2f} (<= {REACH_MS}),",
        end=" ",
    )
    print(f"of the last hundred {found['attach_last_100_p50_ms']:.2f}")
    return found
