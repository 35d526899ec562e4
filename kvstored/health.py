"""grpc.health.v1.Health: SERVING means that the store has just answered, not that a process exists.

Owns the probe: a look-up in every namespace on a thread of its own, with a deadline. Never changes the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstored.errors import StoreError

PROBE_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 1.0
MAX_WATCHERS = 16
SERVICES = ("", "kvstored.v1.Store", "kvstored.v1.Admin", "kvstored.v1.Transfer")
_NO_KEY = bytes(32)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self, stores: dict[str, Any]) -> None:
        self.stopping = False
        self._stores = stores
        self._watchers = 0
        # Its own thread: a store that hangs must cost the probe its deadline, not everybody a thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="health")

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answers(self) -> bool:
        """Whether at least one namespace answers in time; the others may be fenced."""
        if self.stopping:
            return False
        probe = asyncio.get_running_loop().run_in_executor(self._thread, self._probe)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await probe
        except TimeoutError:
            return False

    def _probe(self) -> bool:
        served = False
        for store in self._stores.values():
            try:
                store.lookup(_NO_KEY)
                served = True
            except StoreError:
                continue
        return served

    async def _status(self) -> Any:
        return SERVING if await self.answers() else NOT_SERVING

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=await self._status())

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the limit is {MAX_WATCHERS} watchers")
        self._watchers += 1
        last = None
        try:
            while not self.stopping:
                status = await self._status() if request.service in SERVICES else SERVICE_UNKNOWN
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            self._watchers -= 1
