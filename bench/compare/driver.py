"""This end of a contender: a child process that answers JSON lines (peers/contract.py is the other end).

Owns the child: it is started here, asked here, and ended here by its process id. Every request has a
deadline; a child that misses it is ended, and its column says so in the table.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

AT_REST_S = 0.02  # a server looks for more for some milliseconds


class DriverFailed(Exception):
    """The contender said no, died, or did not answer in time. The message is what the table prints."""


class Driver:
    """One contender's process. A context manager; after it the process is gone."""

    def __init__(self, name: str, command: list[str], log_path: Path, env: dict[str, str] | None = None):
        self.name = name
        self._log = open(log_path, "ab")  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(env or {})},
            process_group=0,  # with the servers that it starts, so that all of them can be paused
        )
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def pause(self) -> None:
        """Stops the contender and its servers: an idle store still has threads that wake. Not while one still
        looks for the next request: it would find on waking that a look took seconds, and think the machine
        busy.
        """
        time.sleep(AT_REST_S)
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def ask(self, timeout_s: float, **request) -> dict:
        self.send(**request)
        return self.answer(timeout_s)

    def send(self, **request) -> None:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as failure:
            raise DriverFailed(f"process ended ({self._process.poll()})") from failure

    def answer(self, timeout_s: float) -> dict:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                self._process.kill()
                raise DriverFailed(f"no answer within {timeout_s:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise DriverFailed(f"process ended with {self._process.wait()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise DriverFailed(answer["error"][:200])
        return answer["ok"]

    def close(self, timeout_s: float = 15.0) -> None:
        self.go_on()
        if self._process.poll() is None:
            try:
                self.ask(timeout_s, call="close")
                self._process.stdin.close()
                self._process.wait(timeout_s)
            except (DriverFailed, OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._selector.close()
        self._process.stdout.close()
        self._log.close()
