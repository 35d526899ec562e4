"""Many client processes that put at the same time, 4 blocks of 128 KiB each time, into a full pool.

Each process attaches before the start and measures each of its puts: create, fill, seal. Told are the worst
client's 99th percentile and how much the slowest did beside the fastest. Then the floor: as many processes
that use as much processor as a put takes, over and over, and ask nobody. What these wait is the scheduler's.
"""

import contextlib
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TextIO

import numpy as np

import kvclient
from bench.crowd.million import key
from bench.daemon_figures import Daemon
from bench.pages import huge_tmpfs

BLOCKS, BLOCK_BYTES = 4, 128 << 10
REACH_MS, REACH_SHARE = 50, 0.5


def _client(directory: Path, number: int, answer_fd: int, seconds: float) -> dict:
    content = np.full(BLOCK_BYTES, number % 251, np.uint8)
    with kvclient.connect(dir=str(directory)) as client:
        layout = client.register_layout(
            kvclient.Layout(1, 1, 128, "uint8", 512, meta_fixed=0, meta_per_token=0)
        )
        took_ms: list[float] = []
        processor_ms: list[float] = []

        def put(turn: int) -> None:
            keys = [key((number * 1_000_000 + turn) * BLOCKS + i) for i in range(BLOCKS)]
            with client.create(keys, layout) as writer:
                for i in range(BLOCKS):
                    writer[i].layer(0).reshape(-1)[:] = content

        put(0)
        _begin(directory, answer_fd)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            used = time.thread_time()
            put(len(took_ms) + 1)
            processor_ms.append((time.thread_time() - used) * 1e3)
            took_ms.append((time.monotonic() - now) * 1e3)
    return _told(took_ms) | {"processor_ms": median(processor_ms)}


def _busy(processor_ms: float, directory: Path, number: int, answer_fd: int, seconds: float) -> dict:
    took_ms: list[float] = []
    content, to = np.full(BLOCK_BYTES, number % 251, np.uint8), np.empty(BLOCK_BYTES, np.uint8)
    _begin(directory, answer_fd)
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        until = time.thread_time() + processor_ms / 1e3
        while time.thread_time() < until:
            to[:] = content
        took_ms.append((time.monotonic() - now) * 1e3)
    return _told(took_ms)


def _begin(directory: Path, answer_fd: int) -> None:
    os.write(answer_fd, b"ready\n")
    parent = os.getppid()
    while not Path(directory, "begin").exists():
        if os.getppid() != parent:  # who would begin has failed: nobody is left behind
            raise RuntimeError("the process that measures has ended")
        time.sleep(0.01)


def _told(took_ms: list[float]) -> dict:
    return {
        "puts": len(took_ms),
        "p50_ms": median(took_ms),
        "p99_ms": quantiles(took_ms, n=100)[98],
        "worst_ms": max(took_ms),
    }


def _fork(work: Callable[..., dict], directory: Path, number: int, seconds: float) -> tuple[int, TextIO]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading)
    status = 1
    try:
        os.write(writing, json.dumps(work(directory, number, writing, seconds)).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _line(pid: int, answer: TextIO) -> str:
    line = answer.readline()
    if not line:
        raise RuntimeError(f"client process {pid} ended without an answer: its error is above")
    return line


def _run(work: Callable[..., dict], count: int, directory: Path, seconds: float) -> list[dict]:
    children = [_fork(work, directory, number, seconds) for number in range(count)]
    for pid, answer in children:
        _line(pid, answer)
    Path(directory, "begin").touch()
    told = [json.loads(_line(pid, answer)) for pid, answer in children]
    for pid, answer in children:
        answer.close()
        os.waitpid(pid, 0)
    Path(directory, "begin").unlink()
    return told


def measure(count: int, seconds: float, pages: str) -> dict:
    """`pages`: "huge" (of the file system), "small", or "made": small ones that the daemon made huge."""
    with contextlib.ExitStack() as stack:
        home, pool = (stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcrowd-")) for _ in range(2))
        args = {"huge": ("--pool-dir", pool), "made": ("--huge-after-s", "1")}.get(pages, ())
        if pages == "huge":
            stack.enter_context(huge_tmpfs(Path(pool), 1 << 30))
        with Daemon(Path(home) / "d", "256MiB", *args) as daemon:
            daemon.start()
            daemon.wait_faulted()
            if pages == "made":
                daemon.wait_huge()
            told = _run(_client, count, daemon.directory, seconds)
        processor_ms = median(each["processor_ms"] for each in told)
        floor = _run(partial(_busy, processor_ms), count, Path(home), seconds)
    puts = sorted(each["puts"] for each in told)
    found = {
        "clients": count,
        "pages": pages,
        "puts_per_s": sum(puts) / seconds,
        "worst_p99_ms": max(each["p99_ms"] for each in told),
        "median_p99_ms": median(each["p99_ms"] for each in told),
        "median_p50_ms": median(each["p50_ms"] for each in told),
        "worst_ms": max(each["worst_ms"] for each in told),
        "slowest_share": puts[0] / puts[-1],
        "processor_ms": processor_ms,
        "floor_worst_p99_ms": max(each["p99_ms"] for each in floor),
    }
    rate, half = found["puts_per_s"], found["median_p50_ms"]
    worst, others, floor_ms = found["worst_p99_ms"], found["median_p99_ms"], found["floor_worst_p99_ms"]
    print(f"{count} processes, {seconds:.0f} s, {pages} pages: {rate:.0f} puts/s, p50 {half:.2f} ms")
    print(f"p99 of the worst client: {worst:.1f} ms (<= {REACH_MS}), of the median one {others:.1f}")
    print(f"the same of processes that use {processor_ms:.2f} ms each time and ask nobody: {floor_ms:.1f} ms")
    print(f"the slowest client did {found['slowest_share']:.2f} x what the fastest did (>= {REACH_SHARE})")
    return found
