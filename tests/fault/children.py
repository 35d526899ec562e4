"""Forked children that announce each step and go on when told, so that a signal lands exactly between two
of them.

Owns the processes it makes and reaps all of them. A child runs one function and ends by os._exit: no
finalizer of the test process runs in it. Invariant: between reached() and go_on() the child is at that step
and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0


class Steps:
    """The child's end: tells where it is, and waits there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def reached(self, name: str) -> None:
        """Announces the step and waits for go_on(). Ends the process when the parent is gone."""
        self.tell(name)
        if not self._connection.recv(1):
            os._exit(3)

    def tell(self, name: str) -> None:
        """Announces without waiting."""
        self._connection.sendall(name.encode() + b"\n")

    def note(self, name: str) -> None:
        """A sign of life; lost if the parent has enough of them unread."""
        with contextlib.suppress(BlockingIOError):
            self._connection.send(name.encode() + b"\n", socket.MSG_DONTWAIT)


class Child:
    """A forked process that runs `work(steps)`."""

    def __init__(self, work: Callable[[Steps], Any], *others: Child) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                for other in others:  # else this child would keep the end of another one's connection open
                    other._connection.close()
                work(Steps(theirs))
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        theirs.close()
        self._connection = ours
        self._connection.settimeout(WAIT_S)
        self._pidfd = os.pidfd_open(self.pid)
        self._buffer = b""
        self.status: int | None = None

    def next_step(self) -> str:
        """The next step the child announces; "" when it ended. Fails at the deadline."""
        while b"\n" not in self._buffer:
            try:
                received = self._connection.recv(65536)
            except ConnectionResetError:
                received = b""
            if not received:
                return ""
            self._buffer += received
        name, self._buffer = self._buffer.split(b"\n", 1)
        return name.decode()

    def run_to(self, wanted: str) -> None:
        """Lets the child go on until it stands at that step."""
        while (step := self.next_step()) != wanted:
            assert step, f"the child ended before {wanted!r}, status {self.wait()}"
            self.go_on()

    def go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.sendall(b"g")

    def finish(self) -> None:
        """Lets the child run to its end, which must be a good one."""
        while self.next_step():
            self.go_on()
        assert self.wait() == 0, f"the child ended with status {self.status}"

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit status as waitstatus_to_exitcode gives it. Fails at the deadline."""
        if self.status is None:
            ready, _, _ = select.select([self._pidfd], [], [], timeout_s)
            assert ready, f"child {self.pid} did not end within {timeout_s} s"
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._connection.close()
            os.close(self._pidfd)
        return self.status


class Children:
    """Makes children and ends all of them with the test."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def __call__(self, work: Callable[[Steps], Any]) -> Child:
        child = Child(work, *(child for child in self._all if child.status is None))
        self._all.append(child)
        return child

    def end(self) -> None:
        for child in self._all:
            if child.status is None:
                child.kill()


def as_user(
    uid: int, work: Callable[[Steps], Any], gid: int | None = None, groups: tuple[int, ...] = ()
) -> Any:
    """`work` as that user, for a child that is forked after all imports. Needs root."""

    def child(steps: Steps) -> None:
        os.setgroups(groups)
        os.setresgid(*(3 * [uid if gid is None else gid]))
        os.setresuid(uid, uid, uid)
        work(steps)

    return child


def eventually(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Looks until the condition holds. Fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0005
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s: {what}"
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 0.02)
