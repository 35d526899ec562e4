"""What every gRPC handler needs around it: errors become statuses, calls are counted, long native calls leave
the event loop.

Owns the two thread pools and the call counts. Never decodes a message. Invariant: a native call that may take
long never runs on the event loop, and at most io_threads of them run at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from kvstored import log
from kvstored.errors import InvalidArgument, StoreError, status_name, unknown_namespace
from kvstored.telemetry.histogram import Histogram

CANCELLED = "CANCELLED"  # by the caller, by its deadline or by the daemon's end
KEY_BYTES = 32
MAX_KEYS = 1024
CHUNK_BYTES = 1 << 20
MAX_FOLLOWERS = 64
MAX_WAITS = 128
WAIT_SLICE_MS = 100  # a waiting thread notices the end of its call, or of the daemon, within this time

T = TypeVar("T")


class Threads:
    """Where long native calls run: `io` for work, `waits` for calls that mostly sleep on a futex."""

    def __init__(self, io_threads: int) -> None:
        self.io = ThreadPoolExecutor(io_threads, thread_name_prefix="io")
        # One for each follower and each waiting Get of either socket: nobody waits for another's wait to end.
        self.waits = ThreadPoolExecutor(2 * (MAX_FOLLOWERS + MAX_WAITS), thread_name_prefix="wait")

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.io, functools.partial(function, *args))

    def wait(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.waits, functools.partial(function, *args))

    def close(self) -> None:
        self.io.shutdown(wait=True, cancel_futures=True)
        self.waits.shutdown(wait=True, cancel_futures=True)


class CallCounts:
    """How calls ended, per method and status, and how long they took. Bounded: both come from fixed sets."""

    def __init__(self, methods: Iterable[str] = ()) -> None:
        """`methods`: of these the errors that alert are counted from 0 on. A series that began with the first
        would show no increase."""
        self.by_status: Counter[tuple[str, str]] = Counter({(name, "INTERNAL"): 0 for name in methods})
        self.took: defaultdict[str, Histogram] = defaultdict(Histogram)

    def add(self, method: str, status: str, began_ns: int) -> None:
        self.by_status[(method, status)] += 1
        self.took[method].add(time.monotonic_ns() - began_ns)


def refuse(
    counts: CallCounts, method: str, error: Exception, context: grpc.aio.ServicerContext, began_ns: int
) -> None:
    """Counts the call, which ends with the error's status. Not by abort(): gRPC keeps the exception that it
    raises in the call's context, a cycle. The request, which a hostile caller makes as large as a message may
    be, and the connection's place for the call would stay until some collection."""
    status, text = status_name(error), str(error)
    counts.add(method, status, began_ns)
    if not isinstance(error, StoreError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        log.error("call_failed", method=method, error=f"{type(error).__name__}: {error}", where=where)
        text = "internal error; the daemon's log has it"
    context.set_code(grpc.StatusCode[status])
    context.set_details(text)


def answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler that returns one message. `self.counts` is a CallCounts."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        began_ns = time.monotonic_ns()
        try:
            reply = await method(self, request, context)
        except asyncio.CancelledError:
            self.counts.add(method.__name__, CANCELLED, began_ns)
            raise
        except Exception as error:
            return refuse(self.counts, method.__name__, error, context, began_ns)
        self.counts.add(method.__name__, "OK", began_ns)
        return reply

    return call


def streamed(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
    """Wraps a handler that is an asynchronous generator of messages."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        began_ns = time.monotonic_ns()
        try:
            async with contextlib.aclosing(method(self, request, context)) as messages:
                async for message in messages:
                    yield message
        except (asyncio.CancelledError, GeneratorExit):  # waiting for a message, or for it to be sent
            self.counts.add(method.__name__, CANCELLED, began_ns)
            raise
        except Exception as error:
            refuse(self.counts, method.__name__, error, context, began_ns)
        else:
            self.counts.add(method.__name__, "OK", began_ns)

    return call


def one_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"a key has {len(key)} bytes, it must have {KEY_BYTES}")
    return key


def packed(keys: Sequence[bytes]) -> bytes:
    """The keys of a message as one buffer. Raises InvalidArgument, before anything is made of too many."""
    if len(keys) > MAX_KEYS:
        raise InvalidArgument(f"{len(keys)} keys in a message, the limit is {MAX_KEYS}")
    listed = list(keys)
    for index, key in enumerate(listed):
        if len(key) != KEY_BYTES:
            raise InvalidArgument(f"key {index} has {len(key)} bytes, it must have {KEY_BYTES}")
    return b"".join(listed)


def named(table: dict[str, T], namespace: str) -> T:
    """The entry of a namespace; empty means "default". Raises NotFound."""
    found = table.get(namespace or "default")
    if found is None:
        raise unknown_namespace(namespace or "default")
    return found
