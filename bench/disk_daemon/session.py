"""A daemon with a disk tier in a process of its own, and one client of it, for the disk tier's benchmarks.

Owns the process, its pool and its directories; removes them at the end. Never measures anything.
"""

import contextlib
import os
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

import kvclient
from bench.daemon_figures import Daemon
from bench.pages import huge_tmpfs
from kvstored.v1 import admin_pb2, admin_pb2_grpc

MIB = 1 << 20
LAYERS, HEADS, DIM = 32, 8, 128
WRITTEN, NOT_WRITTEN = 60, 40  # priorities beside the daemon's threshold
THRESHOLD = 50
WAIT_S = 60.0


class Session(contextlib.AbstractContextManager):
    """A daemon with a disk tier, and one client of it."""

    def __init__(self, home: Path, memory_bytes: int, *more: str) -> None:
        home.mkdir(exist_ok=True)
        options = ["--disk", str(home / "disk"), "--disk-quota", "64GiB"]
        options += ["--disk-write-priority", str(THRESHOLD), *more]
        self.daemon = Daemon(home / "run", f"{memory_bytes // MIB}MiB", *options)

    def __enter__(self) -> "Session":
        self.ready_ms = self.daemon.start()
        self.client = kvclient.connect(str(self.daemon.directory))
        self.channel = grpc.insecure_channel(f"unix:{self.daemon.directory}/grpc.sock")
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.channel.close()
        shutil.rmtree(self.daemon.directory.parent / "disk", ignore_errors=True)
        self.daemon.__exit__()

    def figures(self) -> dict[str, int]:
        return dict(self.admin.Stats(admin_pb2.StatsRequest()).namespaces[0].counters)

    def cpu_s(self) -> float:
        """CPU time of the disk thread so far."""
        assert self.daemon.process is not None
        for task in Path(f"/proc/{self.daemon.process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "kv-disk":
                return int((task / "schedstat").read_text().split()[0]) / 1e9
        raise RuntimeError("the daemon has no disk thread")

    def layout(self, size: int) -> int:
        tokens = size // (LAYERS * 2 * HEADS * DIM)
        return self.client.register_layout(
            kvclient.Layout(LAYERS, HEADS, DIM, "uint8", tokens, meta_fixed=0, meta_per_token=0)
        )

    def put(self, keys: list[bytes], layout: int, source: np.ndarray, priority: int = WRITTEN) -> list[float]:
        """Blocks one by one; seconds of each create + seal, the copying left out."""
        took, clock = [], time.perf_counter
        for key in keys:
            began = clock()
            with self.client.create([key], layout, priority=priority) as writer:
                filling = clock()
                if writer.granted:
                    writer[0].copy_from(source)
                filled = clock()
            took.append(filling - began + clock() - filled)
        return took

    def push_out(self, size: int) -> None:
        """Everything there is leaves memory for blocks of more value, and those are deleted: free memory."""
        tokens = size // (LAYERS * 2 * DIM)
        dense = kvclient.Layout(LAYERS, 1, DIM, "uint8", tokens, meta_fixed=0, meta_per_token=0)
        layout, source = self.client.register_layout(dense), np.zeros(size, dtype=np.uint8)
        keys = new_keys(self.client.stats()["capacity_bytes"] // size + 1)
        self.put(keys, layout, source, NOT_WRITTEN)
        self.client.delete(keys)

    def wait(self, condition: Callable[[], object], what: str, pause_s: float = 0.001) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not after {WAIT_S} s: {what}")
            select.select([], [], [], pause_s)

    def wait_written(self, count: int) -> None:
        """The daemon's native thread is asked while much is left, its Python only at the end."""
        self.wait(lambda: self.client.stats()["pending_writes"] == 0, "nothing waits to be written")
        self.wait(lambda: self.figures()["disk_written"] >= count, f"{count} blocks are written")


@contextlib.contextmanager
def pools(home: Path, pages: str, room_bytes: int) -> Iterator[list[str]]:
    """Options for a pool of such pages. RuntimeError says why there is none."""
    if pages != "huge":
        yield []
        return
    place = home / "huge"
    place.mkdir(mode=0o700)
    with huge_tmpfs(place, room_bytes):
        yield ["--pool-dir", str(place)]


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]
