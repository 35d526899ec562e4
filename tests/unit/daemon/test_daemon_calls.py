"""What stands around every gRPC call: waits that end, calls that are counted, errors of a bounded length.

Method: each part is driven alone; a store is a recorder of the calls it gets.
"""

import asyncio
import functools
import os
import struct
import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from kvstored.access.authorization import NO_TOKEN, GuestsDoor
from kvstored.errors import Fenced
from kvstored.rpc.admission import Admission
from kvstored.rpc.calls import CallCounts, Threads, answered, streamed
from kvstored.rpc.leases import Leases
from kvstored.rpc.store import DISK, MISSING, PENDING, RESIDENT, StoreService
from kvstored.server import Daemon
from kvstored.telemetry.metrics_server import MetricsServer
from kvstored.v1 import store_pb2

A, B = b"a" * 32, b"b" * 32


class Waited:
    """Stands for a store whose blocks come one by one: `answers` to await_blocks, the last for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def await_blocks(self, keys, priority, timeout_ms, wanted_ms):
        self.asked.append((keys, timeout_ms))
        return bytes(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


def waiting(store, wait_ms, then=None):
    """Runs the wait of a Get on two keys to its end; `then(task)` beside it."""

    async def scenario():
        threads = Threads(1)
        service = StoreService(None, {}, None, threads, CallCounts())
        task = asyncio.ensure_future(service._wait(store, A + B, wait_ms))
        try:
            if then is not None:
                await then(task)
            await task
        finally:
            threads.close()

    asyncio.run(scenario())


def test_a_wait_takes_a_thread_for_a_slice_at_a_time_and_ends_when_all_have_come():
    store = Waited((PENDING, PENDING), (RESIDENT, DISK), (MISSING,))
    waiting(store, 60_000)
    assert store.asked == [(A + B, 100), (A + B, 100), (B, 100)]


def test_a_wait_ends_at_its_time():
    store = Waited((PENDING, PENDING))
    waiting(store, 5)
    assert store.asked[-1][1] == 0 and store.asked[0][1] <= 5


def test_a_cancelled_wait_asks_no_more():
    store = Waited((PENDING, PENDING))

    async def cancel(task):
        async with asyncio.timeout(20):
            while len(store.asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        waiting(store, 60_000, cancel)


class Endless:
    """Methods that go on until they are cancelled."""

    def __init__(self):
        self.counts = CallCounts()

    @answered
    async def Answer(self, request, context):
        await asyncio.Event().wait()

    @streamed
    async def Stream(self, request, context):
        yield 1
        await asyncio.Event().wait()


def test_a_cancelled_call_is_counted():
    async def scenario():
        service = Endless()
        stream = service.Stream(None, None)
        assert await anext(stream) == 1
        for waits in (service.Answer(None, None), anext(stream)):
            task = asyncio.ensure_future(waits)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        left = service.Stream(None, None)
        await anext(left)
        await left.aclose()  # cancelled while its message was being sent
        assert service.counts.by_status == {("Answer", "CANCELLED"): 1, ("Stream", "CANCELLED"): 2}

    asyncio.run(scenario())


class Context:
    """Of a call whose message must not be read."""

    code = None

    def invocation_metadata(self):
        return ()

    def set_code(self, code):
        self.code = code

    def set_details(self, text):
        self.text = text


def test_a_call_without_a_token_is_refused_before_its_message_is_read_and_counted():
    async def scenario():
        door = GuestsDoor({}, SimpleNamespace(token=lambda shown: None))
        counts, context = CallCounts(), Context()
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: None)
        details = SimpleNamespace(method="/kvstored.v1.Store/Lookup")

        async def found(details):
            return handler

        served = await Admission(door, 8, counts).intercept_service(found, details)
        await served.stream_unary(None, context)
        assert (context.code, context.text) == (grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        assert counts.by_status == {("Lookup", "UNAUTHENTICATED"): 1}

    asyncio.run(scenario())


def test_a_namespace_that_is_fenced_takes_no_lease_from_the_others():
    def fenced():
        raise Fenced("its memory is gone")

    async def scenario():
        leases = Leases(2, 60.0, lambda *_: None)
        for _ in range(4):
            with pytest.raises(Fenced):
                leases.open("other", SimpleNamespace(open_owner=fenced), ttl_ms=0, user=1000)
        good = SimpleNamespace(open_owner=lambda: 1, close_owner=lambda owner: None)
        leases.end(leases.open("default", good, ttl_ms=0, user=1000))

    asyncio.run(scenario())


def test_a_scrape_asks_all_namespaces_at_one_time():
    """Each waits for a disk that hangs: of many, one after the other, the scrape would get no answer."""
    names = [f"n{number}" for number in range(6)]
    asked = []

    async def scenario():
        all_are_asked = asyncio.Event()

        async def figures(name):
            asked.append(name)
            if len(asked) == len(names):
                all_are_asked.set()
            async with asyncio.timeout(20):
                await all_are_asked.wait()
            return {"blocks": int(name[1:])}

        daemon = SimpleNamespace(_stores=names, _figures=figures)
        return await Daemon._all_figures(daemon)

    assert asyncio.run(scenario()) == {name: {"blocks": int(name[1:])} for name in names}


@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
def test_a_scrape_that_fails_is_answered_and_logged(monkeypatch, path):
    logged = []
    monkeypatch.setattr("kvstored.log.error", lambda event, **fields: logged.append((event, fields)))

    async def refused():
        raise RuntimeError("can't start new thread")

    async def scenario():
        server = MetricsServer(refused, refused)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.start(0))
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await reader.read(-1)
        writer.close()
        server.close()
        return answer

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 500 ")
    error = "RuntimeError: can't start new thread"
    assert logged == [("scrape_failed", {"path": path, "error": error})]


class Written:
    """Stands for a store of two blocks, A (1) and B (2). The native write of B's bytes ends while zeros are
    written into A."""

    def __init__(self):
        self.sealed, self.zeros = [], []
        self.b_begins, self.b_may_end = threading.Event(), threading.Event()
        self.while_zeros = lambda: None

    def layouts(self):
        blob = struct.pack("<4s9II", b"KVL1", 1, 2, 1, 256, 0, 16, 0, 0, 0, 512)
        return [{"id": 7, "num_layers": 1, "block_tokens": 16, "blob": blob}]

    def open_owner(self):
        return 1

    def close_owner(self, owner):
        pass

    def create(self, owner, keys, *_):
        return [SimpleNamespace(status=0, handle=number + 1, length_bytes=8192) for number in range(2)]

    def write(self, handle, offset, data):
        if handle == 2:
            self.b_begins.set()
            assert self.b_may_end.wait(60)
        elif not any(data):
            self.zeros.append((handle, offset, len(data)))
            self.while_zeros()

    def seal(self, owner, handles):
        self.sealed += handles
        return [False] * len(handles)


def sealed_beside_a_write(while_zeros):
    """Seals A and B with zero_rest while a Write into B is under way; `while_zeros(store, service, lease)`
    runs on a thread while zeros are written into A. The store, and what the Seal said of both."""

    async def scenario():
        threads, store = Threads(4), Written()
        door = SimpleNamespace(admit=lambda *_, **__: ("default", store), user=lambda _: None)
        leases = Leases(4, 60.0, lambda *_: None)
        service = StoreService(door, {"default": store}, leases, threads, CallCounts())
        created = await service.Create(store_pb2.CreateRequest(keys=[A, B], layout_id=7), Context())
        lease = leases.find("default", created.lease.id)
        store.while_zeros = functools.partial(while_zeros, store, service, lease, asyncio.get_running_loop())

        async def pieces():
            yield store_pb2.WriteRequest(lease_id=lease.id, key=B, data=b"x")

        try:
            async with asyncio.timeout(60):
                writing = asyncio.ensure_future(service.Write(pieces(), Context()))
                await asyncio.to_thread(store.b_begins.wait)
                said = await service.Seal(store_pb2.SealRequest(lease_id=lease.id, zero_rest=True), Context())
                store.b_may_end.set()
                await writing
        finally:
            store.b_may_end.set()
            threads.close()
        return store, [result.status for result in said.results] if said else []

    return asyncio.run(scenario())


def test_a_block_whose_write_ends_during_a_seal_of_others_is_not_sealed_with_them():
    """Nobody looked whether all of it was written, and its rest holds the bytes of the block before."""

    def while_zeros(store, service, lease, loop):
        store.b_may_end.set()
        end = time.monotonic() + 60
        while lease.blocks[B].writing and time.monotonic() < end:
            os.sched_yield()

    store, statuses = sealed_beside_a_write(while_zeros)
    assert store.zeros == [(1, 0, 8192)]
    assert store.sealed == [1]
    assert statuses == [store_pb2.EndResult.STATUS_OK, store_pb2.EndResult.STATUS_BUSY]


def test_of_a_lease_that_ends_while_the_rest_is_zeroed_nothing_is_sealed():
    """Its owner is open still, as the write into B is under way."""
    gone = threading.Event()

    def while_zeros(store, service, lease, loop):
        loop.call_soon_threadsafe(lambda: (service._leases.end(lease), gone.set()))
        assert gone.wait(60)

    store, statuses = sealed_beside_a_write(while_zeros)
    assert store.sealed == [] and statuses == []


def test_into_a_block_that_is_being_sealed_nothing_is_written():
    """A Write that was answered would be overwritten by the zeros."""
    refused = []

    def while_zeros(store, service, lease, loop):
        async def write():
            async def piece():
                yield store_pb2.WriteRequest(lease_id=lease.id, key=A, data=b"x")

            context = Context()
            await service.Write(piece(), context)
            return context.code

        refused.append(asyncio.run_coroutine_threadsafe(write(), loop).result(60))

    store, _ = sealed_beside_a_write(while_zeros)
    assert refused == [grpc.StatusCode.FAILED_PRECONDITION]
    assert store.zeros == [(1, 0, 8192)] and store.sealed == [1]
