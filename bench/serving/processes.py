"""A server process under measurement: started, asked until it answers, its CPU and memory read, ended.

Owns the process. CPU seconds and PSS are of it and all its children. Never leaves one behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600.0
TICK = os.sysconf("SC_CLK_TCK")


class Served:
    """url: where it will answer. ready: the path that says 200 once it computes."""

    def __init__(
        self, name: str, command: Sequence[str], url: str, log: Path, ready: str = "/health",
        env: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.url, self._log = name, url, log
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
            )  # fmt: skip
        while not self._answers(ready):
            if self.process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                self.end()
                raise RuntimeError(f"{name} did not start: {self._log.read_text(errors='replace')[-600:]}")
            time.sleep(0.1)
        self.start_s = time.perf_counter() - began

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def figures(self) -> dict[str, Any]:
        """What ours tells of itself: /v1/stats."""
        with urllib.request.urlopen(self.url + "/v1/stats", timeout=60) as answer:
            return json.load(answer)

    def cpu_s(self) -> float:
        return sum(_cpu(pid) for pid in _family(self.process.pid))

    def pss_mib(self) -> tuple[float, float]:
        """(all, of it shared memory: a daemon's pool)."""
        whole, shared = 0, 0
        for pid in _family(self.process.pid):
            for line in _lines(f"/proc/{pid}/smaps_rollup"):
                name, _, value = line.partition(":")
                if name in ("Pss", "Pss_Shmem"):
                    kib = int(value.split()[0])
                    whole += kib if name == "Pss" else 0
                    shared += kib if name == "Pss_Shmem" else 0
        return whole / 1024, shared / 1024

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()


def _family(pid: int) -> list[int]:
    out = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _lines(str(task)):
            out += [member for child in child.split() for member in _family(int(child))]
    return out


def _cpu(pid: int) -> float:
    for line in _lines(f"/proc/{pid}/stat"):
        fields = line.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK
    return 0.0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return []
