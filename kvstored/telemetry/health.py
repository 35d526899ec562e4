"""grpc.health.v1.Health: SERVING means that the store has just done its work, not that a process exists.

Owns the probe. Per namespace, on a thread of its own, with a deadline: a look-up, and where asked a block
created, written, sealed, read back and deleted. The session socket is asked as a client would. Invariant: one
probe per namespace runs at a time, whoever asks, and one that hangs costs its namespace only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstored.errors import Fenced, NoSpace, NotFound, StoreError
from kvstored.telemetry.problems import Degraded

PROBE_TIMEOUT_S = 2.0
FRESH_S = 0.5  # an answer that is younger is not asked for again
WATCH_INTERVAL_S = 1.0
MAX_WATCHERS = 16
STORE_SERVICE = "kvstored.v1.Store"  # with "/NAMESPACE" behind it: that namespace alone
SERVICES = ("", STORE_SERVICE, "kvstored.v1.Admin", "kvstored.v1.Transfer")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_NO_KEY = bytes(32)
_GRANTED, _NO_SPACE = 0, 3  # kv::Grant
# One layer of one token of 512 bytes (docs/formats.md, layout blob).
_BYTES = 512
_LAYOUT = struct.pack("<4s10I", b"KVL1", 1, 1, 1, _BYTES, 0, 1, 0, 0, 0, _BYTES)
# A request for nothing of a client that has not attached; whatever the answer, the thread lives.
_ASK = struct.pack("<IHHII", 0x3153564B, 9, 0, 0, 0)


class NotServing(Exception):
    """The store did not do what it must; the text says what."""


def find_nothing(store: Any) -> None:
    """A look-up. Raises NotServing or StoreError."""
    if store.lookup(_NO_KEY) != b"\0":
        raise NotServing("a key that nobody created was found")


def write_and_read(store: Any) -> None:
    """What a client does, in short, with a block of 512 bytes that is deleted again. Raises NotServing or
    StoreError. A full or draining store serves: that it has no room is an answer."""
    owner = store.open_owner()
    key, content = os.urandom(32), os.urandom(_BYTES)
    try:
        layout_id = store.register_layout(_LAYOUT)
        block = store.create(owner, key, layout_id, [1], 0, 60_000)[0]
        if block.status == _NO_SPACE:
            return
        if block.status != _GRANTED:
            raise NotServing("a new key was not granted")
        store.write(block.handle, 0, content)
        if store.seal(owner, [block.handle]) != [0] or store.read(key) != content:
            raise NotServing("a block was not found after its seal")
        store.delete(key)
    except NoSpace:
        return
    finally:
        store.close_owner(owner)


def ask_sessions(path: str) -> None:
    """Raises OSError if the session server does not answer a request in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as client:
        # As a client does: one without waiting, which settimeout() makes, is refused while others queue.
        limit = struct.pack("ll", int(PROBE_TIMEOUT_S), int(PROBE_TIMEOUT_S % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            client.setsockopt(socket.SOL_SOCKET, option, limit)
        client.connect(path)
        try:
            client.send(_ASK)
            client.recv(4096)  # a refusal, or the end where all sessions are taken: both are answers
        except (BrokenPipeError, ConnectionResetError):
            pass


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self, stores: dict[str, Any], socket_path: str, degraded: Degraded) -> None:
        self.stopping = False
        self._stores = stores
        self._socket_path = socket_path
        self._degraded = degraded
        self._watchers = 0
        self._running: dict[str, tuple[asyncio.Future[None], tuple[Any, ...]]] = {}  # and its arguments
        self._seals: dict[str, int] = {}  # per namespace, at its last probe
        self._fresh_until = 0.0
        # Its own threads, one per probe: a store that hangs must cost nobody else a thread.
        self._threads = ThreadPoolExecutor(len(stores) + 1, thread_name_prefix="health")

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def look(self, write: bool) -> None:
        """Probes everything and brings the degraded states up to date. Takes at most PROBE_TIMEOUT_S."""
        found = await asyncio.gather(
            self._probe("", ask_sessions, self._socket_path),
            *(self._probe(name, self._work, name, write) for name in self._stores),
        )
        if self.stopping:
            return
        self._degraded.put(bool(found[0]), "sessions_not_answering", text=found[0])
        for name, problem in zip(self._stores, found[1:], strict=True):
            self._degraded.put(bool(problem), "namespace_not_answering", name, problem)

    async def answers(self) -> bool:
        """Whether at least one namespace serves; the others may be fenced."""
        await self._look_if_stale()
        return not self.stopping and any(map(self._degraded.serves, self._stores))

    async def _look_if_stale(self) -> None:
        loop = asyncio.get_running_loop()
        if not self.stopping and loop.time() >= self._fresh_until:
            await self.look(write=True)
            self._fresh_until = loop.time() + FRESH_S

    def _work(self, name: str, write: bool) -> None:
        """A store that has sealed something since the last probe has shown that it can: a probe's block might
        cost a full pool one of its own."""
        store = self._stores[name]
        find_nothing(store)
        seals = store.stats()["seals"]
        if write and seals == self._seals.get(name, seals):
            write_and_read(store)
            seals = store.stats()["seals"]
        self._seals[name] = seals

    async def _probe(self, name: str, probe: Callable[..., None], *args: Any) -> str:
        """What is wrong, or nothing. One that still runs from before is waited for, and not repeated if it
        says as much: one that writes does."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                running, arguments = self._running.get(name, (None, ()))
                if running is not None and not running.done() and arguments != args and True not in arguments:
                    await asyncio.wait([running])
                if running is None or running.done():
                    running = asyncio.get_running_loop().run_in_executor(self._threads, probe, *args)
                    running.add_done_callback(lambda done: done.cancelled() or done.exception())
                    self._running[name] = (running, args)
                await asyncio.shield(running)
        except TimeoutError:
            return f"no answer in {PROBE_TIMEOUT_S:g} s"
        except Fenced:
            return ""  # a state of its own
        except (NotServing, StoreError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def _status(self, service: str) -> Any:
        _, _, namespace = service.partition("/")
        if not namespace:
            return SERVING if await self.answers() else NOT_SERVING
        await self._look_if_stale()
        return SERVING if not self.stopping and self._degraded.serves(namespace) else NOT_SERVING

    def _known(self, service: str) -> bool:
        whole, _, namespace = service.partition("/")
        return service in SERVICES or (whole == STORE_SERVICE and namespace in self._stores)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if not self._known(request.service):
            raise NotFound("no such service")
        return health_pb2.HealthCheckResponse(status=await self._status(request.service))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if self._watchers >= MAX_WATCHERS:
            raise NoSpace(f"{self._watchers} watchers, the limit is {MAX_WATCHERS}")
        self._watchers += 1
        last = None
        try:
            while not self.stopping:
                known = self._known(request.service)
                status = await self._status(request.service) if known else SERVICE_UNKNOWN
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            self._watchers -= 1
