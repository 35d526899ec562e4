"""A command's connection to the daemon of a runtime directory, and why a call over it failed.

Owns the channel for the time of one command. Invariant: a daemon that does not answer, or that ends
meanwhile, is Exit.UNREACHABLE; what it refused itself is Exit.REFUSED.
"""

from __future__ import annotations

import argparse
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from kvstored.cli import stop
from kvstored.cli.answers import complain
from kvstored.errors import Exit
from kvstored.process import runtime_dir
from kvstored.v1 import admin_pb2_grpc, store_pb2_grpc

ENDING_S = 1.0  # from a daemon's last word until it has ended


class Connection:
    """The daemon's services. Every call has the command's deadline."""

    def __init__(self, directory: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.channel = grpc.insecure_channel(
            runtime_dir.grpc_address(os.path.join(os.path.abspath(directory), "grpc.sock")),
            options=[("grpc.enable_http_proxy", 0)],
        )
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.store = store_pb2_grpc.StoreStub(self.channel)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


class TooLate(Exception):
    """The next message of a stream did not come in time."""


def no_answer(directory: str, arguments: argparse.Namespace) -> Exit:
    text = f"the daemon in {directory} did not answer within {arguments.timeout_s} s"
    return complain(text, Exit.UNREACHABLE, arguments)


def complain_of(error: grpc.RpcError, directory: str, arguments: argparse.Namespace) -> Exit:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return no_answer(directory, arguments)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) and _has_ended(directory):
        nobody = runtime_dir.running_pid(directory) is None
        text = stop.nobody_in(directory) if nobody else f"the daemon in {directory} has ended; another runs"
        return complain(text, Exit.UNREACHABLE, arguments)
    if code is grpc.StatusCode.CANCELLED:  # nobody here does that
        text = f"the daemon in {directory} ends, and has not finished this"
        return complain(text, Exit.UNREACHABLE, arguments)
    return complain(f"{code.name.lower()}: {error.details()}", Exit.REFUSED, arguments)


def _has_ended(directory: str) -> bool:
    """Whether no daemon runs there, or the one that does just ends: its sockets close before its lock."""
    if (pid := runtime_dir.running_pid(directory)) is None:
        return True
    try:
        watched = os.pidfd_open(pid)
    except OSError:
        return runtime_dir.running_pid(directory) is None
    try:
        if select.select([watched], [], [], ENDING_S)[0]:
            return True  # though another may have started
    finally:
        os.close(watched)
    return runtime_dir.running_pid(directory) is None


def each_within(stream: Any, timeout_s: float) -> Iterator[Any]:
    """The messages of a stream that may take any time as a whole. Cancels it when one takes too long, and
    raises TooLate."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        stream.cancel()

    while True:
        alarm = threading.Timer(timeout_s, cut)
        alarm.daemon = True
        alarm.start()
        try:
            message = next(stream)
        except StopIteration:
            return
        except grpc.RpcError:
            if late.is_set():
                raise TooLate from None
            raise
        finally:
            alarm.cancel()
        yield message
