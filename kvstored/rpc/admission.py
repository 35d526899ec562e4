"""Which calls are taken in: who calls, and whether there is room, before a call's message is read.

Owns the count of the calls in progress, of one server, and their end. Never looks into a message. Invariants:
a call that is held open is counted, also one whose message never comes; whatever refuses a call before or
after its method runs, the caller gets the error's status; after stop() no method runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvstored.access.authorization import Door
from kvstored.access.quota import Bound
from kvstored.errors import InvalidArgument, Stopping, StoreError
from kvstored.rpc.calls import CallCounts, refuse

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
NO_MESSAGE = "the request's bytes are no message of this method"


class Admission(grpc.aio.ServerInterceptor):
    """Every method is served as one of a stream of requests: gRPC starts others only when their message is
    there. Its own bound (maximum_concurrent_rpcs) lets in half of what is beyond it."""

    def __init__(self, door: Door, max_calls: int, counts: CallCounts) -> None:
        self._door = door
        self._calls = Bound(max_calls, "{total} calls are in progress, the limit is {most} (max_calls)")
        self._counts = counts
        self._running: set[asyncio.Task[Any]] = set()  # each sends its call's answer, too
        self._stopping = False

    async def stop(self, drain_s: float) -> None:
        """No call is taken in any more. Those in progress have `drain_s`, and are cancelled then."""
        self._stopping = True
        for wait_s in (drain_s, None):
            if self._running:
                await asyncio.wait(set(self._running), timeout=wait_s)
            for task in self._running:
                task.cancel()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        name = details.method.rpartition("/")[2]
        method = next(found for kind in KINDS if (found := getattr(handler, kind)) is not None)

        async def asked(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            return _each(requests) if handler.request_streaming else await _one(context)

        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            began_ns = time.monotonic_ns()
            try:
                with self._place(context):
                    return await method(await asked(requests, context), context)
            except StoreError as error:
                refuse(self._counts, name, error, context, began_ns)

        async def stream(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            began_ns = time.monotonic_ns()
            try:
                with self._place(context):
                    async with contextlib.aclosing(
                        method(await asked(requests, context), context)
                    ) as messages:
                        async for message in messages:
                            yield message
            except StoreError as error:
                refuse(self._counts, name, error, context, began_ns)

        served: Any = (
            grpc.stream_stream_rpc_method_handler(stream)
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler(answer)
        )
        return served._replace(
            request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    @contextlib.contextmanager
    def _place(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        if self._stopping:
            raise Stopping("the daemon is about to end")
        task = asyncio.current_task()
        assert task is not None, "a call has its task"
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        user = self._door.user(context)
        self._calls.take(user)
        try:
            yield
        finally:
            self._calls.give(user)


async def _one(context: grpc.aio.ServicerContext) -> Any:
    """The only message. Read, not iterated to: an iterator keeps what it gave, and a refused call keeps its
    iterator."""
    try:
        request = await context.read()
    except DecodeError:  # gRPC alone would answer UNKNOWN and log a traceback
        raise InvalidArgument(NO_MESSAGE) from None
    if request is grpc.aio.EOF:
        raise InvalidArgument("the call ended without its message")
    return request


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for request in requests:
            yield request
    except DecodeError:
        raise InvalidArgument(NO_MESSAGE) from None
