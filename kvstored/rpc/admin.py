"""The Admin service: what the daemon holds and does, for operators. Decode, call, encode; no policy.

Owns which namespaces are being scrubbed, and whether the daemon drains. Never logs a key.
Invariant: what List, Scrub and Events hold in memory at a time is one page, one step, one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvstored import __version__, log
from kvstored.cluster.sidecar import told_of_the_pool
from kvstored.errors import FailedPrecondition, InvalidArgument, NotFound
from kvstored.process.limits import own_memory_bytes
from kvstored.process.reload import Reload
from kvstored.rpc.calls import CallCounts, Threads, answered, named, one_key, streamed
from kvstored.rpc.leases import Leases
from kvstored.rpc.store import block_message
from kvstored.telemetry.events import Event, Events, Sampler
from kvstored.telemetry.problems import Degraded
from kvstored.tiers.disk import Tiers
from kvstored.tiers.peers import Peers
from kvstored.tiers.pools import Pool
from kvstored.v1 import admin_pb2, admin_pb2_grpc

MAX_PAGE = 1000
MAX_DRAIN_WAIT_MS = 300_000
DRAIN_LOOK_S = 0.02
SCRUB_STEP_BYTES = 64 << 20


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(
        self,
        stores: dict[str, Any],
        tiers: Tiers,
        pools: dict[str, Pool],
        sessions: Any,
        reload: Reload,
        leases: Leases,
        events: Events,
        threads: Threads,
        counts: CallCounts,
        degraded: Degraded,
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers
        self.counts = counts
        self._degraded = degraded
        self.draining = False
        self._stores = stores
        self._tiers = tiers
        self._pools = pools
        self._sessions = sessions
        self._reload = reload
        self._leases = leases
        self._events = events
        self._threads = threads
        self._scrubbing: set[str] = set()
        self._started = time.monotonic()

    @answered
    async def Stats(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        chosen = (
            {request.namespace: named(self._stores, request.namespace)} if request.namespace else self._stores
        )
        reply = admin_pb2.StatsResponse(
            version=__version__,
            pid=os.getpid(),
            uptime_ms=int((time.monotonic() - self._started) * 1000),
            rss_bytes=own_memory_bytes(),
            draining=self.draining,
            leases=len(self._leases),
            degraded=[
                admin_pb2.DegradedState(
                    state=entry.state,
                    namespace=entry.namespace,
                    text=entry.text,
                    since_ms=entry.since_ms,
                )
                for entry in self._degraded.active()
            ],
        )
        for name, store in chosen.items():
            config = self._reload.config
            about = config.namespace(name)
            message = reply.namespaces.add(
                namespace=name,
                adopted=self._pools[name].adopted,
                place=self._pools[name].place,
                huge_pages=self._pools[name].huge_pages,
                problem=await self._threads.run(store.problem),
                memory_quota_bytes=config.capacity_bytes(name),
                disk_quota_bytes=config.disk_bytes(name),
                readers=about.readers,
                writers=about.writers,
                salted=bool(about.salt),
            )
            figures = await self._threads.run(store.stats) | self._tiers.stats(name)
            for counter, value in figures.items():
                if isinstance(value, int):  # seconds of CPU are in the metrics
                    message.counters[counter] = value
        return reply

    @answered
    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        store = named(self._stores, request.namespace)
        limit = request.limit or 100
        if limit > MAX_PAGE:
            raise InvalidArgument(f"limit is {limit}, the most is {MAX_PAGE}")
        if len(request.key_prefix) > 32:
            raise InvalidArgument(f"key_prefix has {len(request.key_prefix)} bytes, the limit is 32")
        if request.page_token and not (
            request.page_token.isascii() and request.page_token.isdigit() and len(request.page_token) <= 8
        ):
            raise InvalidArgument(f"page_token {request.page_token[:40]!r} is none of this daemon's")
        start = int(request.page_token or 0)
        found = await self._threads.run(store.list, start, limit, request.key_prefix, request.min_uses)
        blocks = [block_message(block["key"], block) for block in found["blocks"]]
        token = "" if found["next"] is None else str(found["next"])
        return admin_pb2.ListResponse(blocks=blocks, next_page_token=token)

    @answered
    async def Describe(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        found = named(self._stores, request.namespace).describe(one_key(request.key))
        if found is None:
            raise NotFound("nothing is known under this key")
        return admin_pb2.DescribeResponse(block=block_message(request.key, found))

    @answered
    async def Flush(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        deleted = await self._threads.run(named(self._stores, request.namespace).flush)
        self._events.publish(Event("FLUSH", request.namespace or "default", {"deleted": deleted}))
        log.info("flushed", namespace=request.namespace or "default", deleted=deleted)
        return admin_pb2.FlushResponse(deleted=deleted)

    @answered
    async def Drain(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.wait_ms > MAX_DRAIN_WAIT_MS:
            raise InvalidArgument(f"wait_ms is {request.wait_ms}, the limit is {MAX_DRAIN_WAIT_MS}")
        for store in self._stores.values():
            store.drain(request.on)
        if request.on != self.draining:
            self.draining = request.on
            self._degraded.put(request.on, "draining")
            self._events.publish(Event("DRAIN", text="on" if request.on else "off"))
            log.info("draining", on=request.on)
        deadline = asyncio.get_running_loop().time() + request.wait_ms / 1000
        while (  # noqa: ASYNC110
            (unsealed := self._unsealed()) and self.draining and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(DRAIN_LOOK_S)  # the store has no event for it; at most wait_ms / 20 ms looks
        return admin_pb2.DrainResponse(draining=self.draining, unsealed=unsealed)

    def _unsealed(self) -> int:
        return sum(store.stats()["unsealed"] for store in self._stores.values())

    @streamed
    async def Scrub(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        namespace = request.namespace or "default"
        store = named(self._stores, namespace)
        if namespace in self._scrubbing:
            raise FailedPrecondition(f"a scrub of namespace {namespace!r} is running")
        self._scrubbing.add(namespace)
        try:
            total = store.stats()["used_bytes"]
            sums = {"verified": 0, "computed": 0, "corrupt": 0, "bytes": 0}
            at, done = 0, False
            while not done:
                step = await self._threads.run(store.scrub, at, SCRUB_STEP_BYTES)
                for name in sums:
                    sums[name] += step[name]
                at, done = step["next"], step["done"]
                if step["corrupt"]:
                    self._events.publish(Event("CORRUPTION", namespace, {"corrupt": step["corrupt"]}))
                    log.error("corrupt_blocks", namespace=namespace, count=step["corrupt"])
                yield admin_pb2.ScrubResponse(
                    verified=sums["verified"],
                    computed=sums["computed"],
                    corrupt=sums["corrupt"],
                    read_bytes=sums["bytes"],
                    total_bytes=total,
                    done=done,
                )
        finally:
            self._scrubbing.discard(namespace)

    @answered
    async def Integrity(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._threads.run(named(self._stores, request.namespace).check_integrity)
        return admin_pb2.IntegrityResponse()

    @answered
    async def Sessions(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return admin_pb2.SessionsResponse(
            sessions=[
                admin_pb2.Session(
                    session=session["session"],
                    pid=max(0, session["pid"]),
                    uid=session["uid"],
                    namespace=session["namespace"],
                    pins=session["pins"],
                    unsealed=session["unsealed"],
                    attached_ms=int(session["attached_s"] * 1000),
                    resumed=session["resumed"],
                    pinned_bytes=session["pinned_bytes"],
                    owner=session["owner"],
                    pin_deadline_ms=session["pin_deadline_ms"],
                    pin_limit_bytes=session["pin_limit_bytes"],
                    device=session["device"],
                )
                for session in self._sessions.sessions()
            ]
        )

    @answered
    async def Revoke(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        store = named(self._stores, request.namespace)
        found = await self._threads.run(lambda: store.ask_pins_back(request.session))
        return admin_pb2.RevokeResponse(found=found)

    @answered
    async def Peers(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        config = self._reload.config
        reply = admin_pb2.PeersResponse(node=config.node)
        if self._peers is None:
            return reply
        reply.listen = self._peers.listening
        reply.server.update(self._peers.server_stats())
        for namespace, found in self._peers.stats():
            texts = {name: found.pop(name) for name in ("node", "address", "state", "why")}
            reply.peers.add(namespace=namespace, **texts).counters.update(found)
        if config.cluster and (told := await self._threads.run(told_of_the_pool, config)):
            reply.cluster.CopyFrom(admin_pb2.Cluster(**told))
        return reply

    @answered
    async def Config(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return admin_pb2.ConfigResponse(
            entries=[admin_pb2.ConfigEntry(**entry) for entry in self._reload.sourced.entries()]
        )

    @answered
    async def Reload(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return admin_pb2.ReloadResponse(
            changes=[
                admin_pb2.ConfigChange(
                    name=change.name, before=change.before, after=change.after, applied=change.applied
                )
                for change in self._reload.again()
            ]
        )

    @streamed
    async def Events(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        interval_ms = request.interval_ms or 1000
        if not 100 <= interval_ms <= 60_000:
            raise InvalidArgument(f"interval_ms is {interval_ms}, the limits are 100 and 60000")
        sampler = Sampler({name: store.stats for name, store in self._stores.items()})
        async with contextlib.aclosing(self._events.subscribe(interval_ms / 1000, sampler)) as events:
            async for event in events:
                yield admin_pb2.EventsResponse(
                    kind=f"KIND_{event.kind}",
                    time_ms=event.time_ms,
                    namespace=event.namespace,
                    counts=event.counts,
                    text=event.text,
                    dropped=event.dropped,
                )
