"""The child's end of a contender: reads JSON lines on stdin, answers one line each, times operations.

Owns the timing loop, so that all contenders are timed alike. Standard library only: it runs in every peer's
virtual environment. A contender is a class with `setup(params) -> dict`, `close()`, and one method
`op_<name>(params) -> Call` that returns a Call, or a sentence why there is none. `info() -> dict` is what a
second client needs as its setup.
"""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from bench.pace import here_ns

PR_SET_PDEATHSIG = 1
PACE_EVERY_NS = 3_000_000


class Call:
    """One operation. `run(i)` is timed, the loop's own 0.1 µs included; `before(i)` and `after(i)` are not.

    `run` may return the nanoseconds it spent in a part of itself (the copy, say): the series `part_ns`.
    """

    def __init__(self, run, before=None, after=None, note=""):
        self.run, self.before, self.after, self.note = run, before, after, note


class _Pace:
    """The pace beside each call: the slower of those before and after its stretch of PACE_EVERY_NS."""

    def __init__(self):
        self.of_call: list[int] = []
        self.cpu_ns = 0
        self.last = self._take()

    def _take(self) -> int:
        cpu = time.process_time_ns()
        pace = here_ns()
        self.cpu_ns += time.process_time_ns() - cpu
        self.due = time.perf_counter_ns() + PACE_EVERY_NS
        return pace

    def up_to(self, calls: int) -> None:
        now = self._take()
        self.of_call += [max(self.last, now)] * (calls - len(self.of_call))
        self.last = now


def timed(call: Call, first: int, n: int) -> dict:
    """Time `n` iterations, numbered from `first` so that rounds go on where the last one stopped."""
    clock, run, before, after = time.perf_counter_ns, call.run, call.before, call.after
    ns, part = [0] * n, []
    gc.collect()
    gc.disable()
    cpu, pace = time.process_time_ns(), _Pace()
    try:
        for k in range(n):
            i = first + k
            if before is not None:
                before(i)
            start = clock()
            inner = run(i)
            end = clock()
            ns[k] = end - start
            if inner.__class__ is int:
                part.append(inner)
            inner = None
            if after is not None:
                after(i)
            if end > pace.due:
                pace.up_to(k + 1)
        pace.up_to(n)
    finally:
        cpu = time.process_time_ns() - cpu - pace.cpu_ns
        gc.enable()
    return {"ns": ns, "part_ns": part, "pace_ns": pace.of_call, "cpu_ns": cpu, "note": call.note}


def counted(call: Call, start_ns: int, duration_s: float) -> dict:
    """Run from an agreed moment of the monotonic clock for a while; how many were done in how long."""
    clock, run = time.monotonic_ns, call.run
    while clock() < start_ns:
        time.sleep(max(0.0, (start_ns - clock()) / 1e9 - 0.0005))
    gc.disable()
    begin, done, end = clock(), 0, start_ns + int(duration_s * 1e9)
    while clock() < end:
        for _ in range(16):
            run(done)
            done += 1
    gc.enable()
    return {"done": done, "seconds": (clock() - begin) / 1e9, "note": call.note}


def start_server(command: list[str], log_path: Path, env: dict | None = None) -> subprocess.Popen:
    """Start a server that dies with this process, its output in a file."""

    def die_with_parent():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
            preexec_fn=die_with_parent,
        )


def stop_server(server: subprocess.Popen | None, timeout_s: float = 10.0) -> None:
    if server is None or server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(timeout_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(timeout_s)


def wait_until(ready, what: str, timeout_s: float = 20.0):
    """Poll `ready` until it returns something true; when time runs out, the message has the last error."""
    deadline, error = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        try:
            value = ready()
            if value:
                return value
        except Exception as failure:  # the server is not there yet
            error = failure
        time.sleep(0.01)
    raise TimeoutError(f"{what} not ready within {timeout_s} s ({error})")


def thread_cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, from the scheduler (utime in /proc/PID/stat counts in 10 ms)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue
    return total


class _Loop:
    """Answers requests for one contender until `close` or the end of stdin."""

    def __init__(self, contender):
        self.contender = contender
        self.calls: dict[str, Call] = {}
        self.next: dict[str, int] = {}

    def answer(self, request: dict) -> dict:
        kind = request["call"]
        if kind == "setup":
            return self.contender.setup(request["params"]) or {}
        if kind == "close":
            self.contender.close()
            return {}
        if kind == "info":
            return self.contender.info()
        if kind == "prepare":
            return self.prepare(request)
        if kind == "run":
            return self.run(request)
        if kind == "count":
            return counted(self.calls[request["op"]], request["start_ns"], request["duration_s"])
        raise ValueError(f"unknown call {kind!r}")

    def prepare(self, request: dict) -> dict:
        op = request["op"]
        make = getattr(self.contender, "op_" + request["method"], None)
        if make is None:
            return {"absent": "it has no such operation"}
        call = make(request["params"])
        if isinstance(call, str):
            return {"absent": call}
        self.calls[op] = call
        self.next[op] = 0
        return {"note": call.note}

    def run(self, request: dict) -> dict:
        op, n = request["op"], request["n"]
        server = getattr(self.contender, "server_pid", None)
        before = thread_cpu_ns(server) if server else 0
        result = timed(self.calls[op], self.next[op], n)
        self.next[op] += n
        result["server_cpu_ns"] = thread_cpu_ns(server) - before if server else 0
        return result


def serve(contender) -> None:
    """Run one contender. Its libraries may print: only the answers go to the real standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    loop = _Loop(contender)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": loop.answer(request)}
            except Exception as failure:
                traceback.print_exc()
                answer = {"error": f"{type(failure).__name__}: {failure}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if request["call"] == "close":
                return
    finally:
        contender.close()
