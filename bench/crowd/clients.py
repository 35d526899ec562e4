"""Many client processes that put at the same time, 4 blocks of 128 KiB each time, into a full pool.

Each process attaches before the start and measures each of its puts: create, fill, seal. Told are the worst
client's 99th percentile and how much the slowest did beside the fastest.
"""

import json
import os
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median, quantiles
from typing import TextIO

import numpy as np

import kvclient
from bench.crowd.million import key
from bench.daemon_figures import Daemon

BLOCKS, BLOCK_BYTES = 4, 128 << 10
REACH_MS, REACH_SHARE = 50, 0.5


def _client(directory: Path, number: int, answer_fd: int, seconds: float) -> dict:
    content = np.full(BLOCK_BYTES, number % 251, np.uint8)
    with kvclient.connect(dir=str(directory)) as client:
        layout = client.register_layout(
            kvclient.Layout(1, 1, 128, "uint8", 512, meta_fixed=0, meta_per_token=0)
        )
        took_ms: list[float] = []

        def put(turn: int) -> None:
            keys = [key((number * 1_000_000 + turn) * BLOCKS + i) for i in range(BLOCKS)]
            with client.create(keys, layout) as writer:
                for i in range(BLOCKS):
                    writer[i].layer(0).reshape(-1)[:] = content

        put(0)
        os.write(answer_fd, b"ready\n")
        while not Path(directory, "begin").exists():
            time.sleep(0.01)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            put(len(took_ms) + 1)
            took_ms.append((time.monotonic() - now) * 1e3)
    return {
        "puts": len(took_ms),
        "p50_ms": median(took_ms),
        "p99_ms": quantiles(took_ms, n=100)[98],
        "worst_ms": max(took_ms),
    }


def _fork(directory: Path, number: int, seconds: float) -> tuple[int, TextIO]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading)
    status = 1
    try:
        os.write(writing, json.dumps(_client(directory, number, writing, seconds)).encode())
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


def measure(count: int, seconds: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="kvcrowd-") as home, Daemon(Path(home) / "d", "256MiB") as daemon:
        daemon.start()
        daemon.wait_faulted()
        children = [_fork(daemon.directory, number, seconds) for number in range(count)]
        for pid, answer in children:
            _line(pid, answer)
        Path(daemon.directory, "begin").touch()
        told = [json.loads(_line(pid, answer)) for pid, answer in children]
        for pid, answer in children:
            answer.close()
            os.waitpid(pid, 0)
        Path(daemon.directory, "begin").unlink()
    puts = sorted(each["puts"] for each in told)
    found = {
        "clients": count,
        "puts_per_s": sum(puts) / seconds,
        "worst_p99_ms": max(each["p99_ms"] for each in told),
        "median_p99_ms": median(each["p99_ms"] for each in told),
        "median_p50_ms": median(each["p50_ms"] for each in told),
        "worst_ms": max(each["worst_ms"] for each in told),
        "slowest_share": puts[0] / puts[-1],
    }
    rate, half = found["puts_per_s"], found["median_p50_ms"]
    worst, others = found["worst_p99_ms"], found["median_p99_ms"]
    print(f"{count} processes, {seconds:.0f} s: {rate:.0f} puts/s, p50 {half:.2f} ms")
    print(f"p99 of the worst client: {worst:.1f} ms (<= {REACH_MS}), of the median one {others:.1f}")
    print(f"the slowest client did {found['slowest_share']:.2f} x what the fastest did (>= {REACH_SHARE})")
    return found
