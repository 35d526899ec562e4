"""The daemon's own figures: time to readiness and to exit, idle CPU, memory of its own, index per block.

    python -m bench.daemon_figures [--json FILE] [--quick] [--memory 4GiB]

Starts `python -m kvstored serve` as a process several times; readiness is its READY=1 to a socket of ours,
the exit is seen through a pidfd. Prints JSON. Never judges: the reach stands beside the figure.
"""

import argparse
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
START_S, FAULT_S = 30.0, 60.0
IDLE_S, IDLE_QUICK_S = 10.0, 3.0
BLOCKS = 100_000  # for the restart; empty but for one layer of 512 bytes


class Daemon:
    """One daemon process on a directory; a context manager that leaves nothing behind."""

    def __init__(self, directory: Path, memory: str, *args: str) -> None:
        self.directory, self.notify_path = directory, directory.parent / "notify"
        self.command = [
            sys.executable,
            "-m",
            "kvstored",
            "serve",
            "--dir",
            str(directory),
            "--memory",
            memory,
        ]
        self.command += ["--log-level", "warning", *args]
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        """A last start and stop with --fresh --discard removes what the runs left, whatever ended them."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.command += ["--fresh", "--discard"]
        with contextlib.suppress(RuntimeError):
            self.start()
            self.end(signal.SIGTERM)

    def start(self) -> float:
        """Milliseconds from before the process exists to READY=1."""
        with contextlib.suppress(FileNotFoundError):
            self.notify_path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(self.notify_path))
            notify.settimeout(START_S)
            began_ns = time.monotonic_ns()
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env={**os.environ, "NOTIFY_SOCKET": str(self.notify_path)}
            )
            try:
                while not notify.recv(4096).startswith(b"READY=1"):
                    pass
            except TimeoutError:
                raise RuntimeError(f"not ready within {START_S} s") from None
            return (time.monotonic_ns() - began_ns) / 1e6

    def end(self, number: int) -> float:
        """Milliseconds from the signal to the end of the process."""
        assert self.process is not None
        pidfd = os.pidfd_open(self.process.pid)
        began_ns = time.monotonic_ns()
        os.kill(self.process.pid, number)
        if not select.select([pidfd], [], [], START_S)[0]:
            raise RuntimeError(f"signal {number}: still there after {START_S} s")
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        os.close(pidfd)
        self.process.wait()
        return took_ms

    def stats(self) -> dict:
        command = [sys.executable, "-m", "kvstored", "status", "--json", "--dir", str(self.directory)]
        return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)

    def wait_faulted(self) -> None:
        self._wait_for("faulted_bytes", "faulted in")

    def wait_huge(self) -> None:
        self._wait_for("huge_bytes", "of huge pages")

    def _wait_for(self, counter: str, what: str) -> None:
        deadline = time.monotonic() + FAULT_S
        while True:
            counters = self.stats()["namespaces"][0]["counters"]
            if counters[counter] == counters["capacity_bytes"]:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pool is not {what} after {FAULT_S} s")
            select.select([], [], [], 0.1)

    def remove_pool(self) -> None:
        """Between daemons: the next one starts on nothing."""
        state = json.loads((self.directory / "state.json").read_text())
        for path in Path("/dev/shm").glob(state["pools"]["default"]["prefix"] + ".*"):
            path.unlink()
        (self.directory / "state.json").unlink()

    def cpu_ns(self) -> int:
        """CPU time of all threads, from the scheduler (exact, unlike the ticks of /proc/*/stat)."""
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks)

    def index_bytes_per_block(self, max_blocks: int) -> float:
        state = json.loads((self.directory / "state.json").read_text())
        geometry = state["pools"]["default"]["geometry"]
        return (geometry["table_bytes"] + geometry["progress_bytes"]) / max_blocks


def fill(directory: Path, blocks: int) -> None:
    """Seals many small blocks through gRPC, 1,024 a call."""
    import grpc

    from kvstored.v1 import store_pb2, store_pb2_grpc

    with grpc.insecure_channel(f"unix:{directory}/grpc.sock") as channel:
        store = store_pb2_grpc.StoreStub(channel)
        blob = struct.pack("<4s10I", b"KVL1", 1, 2, 1, 1, 0, 1, 0, 0, 0, 2)
        layout_id = store.RegisterLayout(store_pb2.RegisterLayoutRequest(blob=blob)).layout_id
        for at in range(0, blocks, 1024):
            numbers = range(at, min(at + 1024, blocks))
            keys = [hashlib.sha256(str(number).encode()).digest() for number in numbers]
            created = store.Create(store_pb2.CreateRequest(keys=keys, layout_id=layout_id))
            store.Seal(store_pb2.SealRequest(lease_id=created.lease.id))


def measure(memory: str, quick: bool) -> dict:
    rounds = 3 if quick else 7
    found: dict = {"memory": memory, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="kvbench-") as home, Daemon(Path(home) / "d", memory) as daemon:
        ready, at_once = [], []
        for _ in range(rounds):
            ready.append(daemon.start())
            at_once.append(daemon.end(signal.SIGTERM))
            daemon.remove_pool()
        daemon.start()
        daemon.wait_faulted()
        began_ns, cpu = time.monotonic_ns(), daemon.cpu_ns()
        select.select([], [], [], IDLE_QUICK_S if quick else IDLE_S)
        found["idle_cpu_percent"] = 100 * (daemon.cpu_ns() - cpu) / (time.monotonic_ns() - began_ns)
        found["own_memory_mb"] = daemon.stats()["rss_bytes"] / 1e6
        exits = []
        for _ in range(rounds):
            exits.append(daemon.end(signal.SIGTERM))
            daemon.start()
            daemon.wait_faulted()
        daemon.end(signal.SIGTERM)
        found |= {"ready_ms": median(ready), "ready_ms_max": max(ready)}
        found |= {
            "exit_ms": median(exits),
            "exit_ms_max": max(exits),
            "exit_while_faulting_ms": median(at_once),
        }
    found |= measure_restart(BLOCKS // 10 if quick else BLOCKS)
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def measure_restart(blocks: int) -> dict:
    options = ("--max-blocks", str(blocks))
    with (
        tempfile.TemporaryDirectory(prefix="kvbench-") as home,
        Daemon(Path(home) / "d", "1GiB", *options) as daemon,
    ):
        daemon.start()
        fill(daemon.directory, blocks)
        before = daemon.stats()
        daemon.end(signal.SIGKILL)
        back = daemon.start()
        after = daemon.stats()
        kept = after["namespaces"][0]["counters"]["blocks"]
        per_block = daemon.index_bytes_per_block(blocks)
        daemon.end(signal.SIGTERM)
    return {
        "restart_blocks": before["namespaces"][0]["counters"]["blocks"],
        "restart_blocks_kept": kept,
        "restart_ready_ms": back,
        "own_memory_with_blocks_mb": after["rss_bytes"] / 1e6,
        "index_bytes_per_block": per_block,
    }


ROWS = (
    ("ready_ms", "ms", "≤ 300 ms", "daemon: start to READY=1, {memory} pool"),
    ("restart_ready_ms", "ms", "≤ 1 s", "daemon: killed with {restart_blocks:,} blocks, start to READY=1"),
    ("exit_ms", "ms", "≤ 200 ms", "daemon: SIGTERM to exit, {memory} faulted in"),
    ("idle_cpu_percent", "%", "≤ 1 %", "daemon: idle CPU of one core"),
    ("own_memory_mb", "MB", "≤ 60 MB", "daemon: memory beside pool and index"),
    ("index_bytes_per_block", "B", "≤ 160 B", "daemon: index per block"),
)


def rows(found: dict) -> list[dict]:
    """For the bench table."""
    return [
        {
            "id": f"daemon_{name}",
            "title": title.format(**found),
            "reach": reach,
            "cells": [{"column": "kvstored", "variant": "", "unit": unit, "value": found[name]}],
            "detail": found,
        }
        for name, unit, reach, title in ROWS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows of the bench table there")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--memory", default="4GiB", help="size of the pool; default 4GiB")
    chosen = parser.parse_args()
    found = measure(chosen.memory, chosen.quick)
    print(json.dumps(found, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows(found), "absent": []}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
