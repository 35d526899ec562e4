"""The daemon's life: build, start, serve, drain, stop. The composition root: everything is made here and
handed down.

Owns the process: its lock, segments, stores, session server, gRPC server, metrics and signals. Holds no
policy. Invariant: the lock is the first thing taken and the last thing given back, so nothing below it ever
sees a second daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from kvstored import __version__, _core, log
from kvstored.access import peer_proxy, tenants
from kvstored.access.authorization import GuestsDoor, OwnersDoor
from kvstored.cluster.sidecar import Left, Sidecar
from kvstored.config.config import Config
from kvstored.config.sources import Sourced
from kvstored.errors import ConfigError, StartupError, StoreError
from kvstored.process import runtime_dir
from kvstored.process.limits import (
    SESSION_DESCRIPTORS,
    connections_within,
    cpu_seconds,
    end_within,
    own_memory_bytes,
)
from kvstored.process.notify import notify
from kvstored.process.reload import Reload
from kvstored.rpc.admin import AdminService
from kvstored.rpc.calls import CallCounts, Threads
from kvstored.rpc.leases import Leases
from kvstored.rpc.reflection import LazyReflection
from kvstored.rpc.servers import Servers
from kvstored.telemetry.events import Event, Events
from kvstored.telemetry.histogram import Histogram
from kvstored.telemetry.metrics_server import MetricsServer
from kvstored.telemetry.prometheus import Figures, render
from kvstored.tiers.disk import Tiers
from kvstored.tiers.peers import Peers
from kvstored.tiers.pools import Pool, Segments
from kvstored.tiers.shared import Shared
from kvstored.tiers.stores import geometry, new_store, older, retire
from kvstored.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    store_pb2,
    transfer_pb2,
)
from kvstored.watch import Watch

STOP_S = 5.0  # after drain_timeout_s; a disk that hangs would hold the daemon for ever
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(sourced: Sourced, fresh: bool, discard: bool, started_ns: int) -> None:
    """Runs until SIGTERM or SIGINT. Raises StartupError if it cannot begin."""
    config = sourced.config
    log.set_level(config.log_level)
    os.umask(0o077)
    early: list[int] = []  # its pid can be read from here on, and SIGHUP is sent to that
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))
    signal.signal(signal.SIGTERM, _stopped_while_starting)
    made = runtime_dir.prepare(config.dir)
    lock = runtime_dir.Lock(config.dir)
    try:
        daemon = Daemon(sourced, made, fresh, discard, started_ns)
        try:
            # Not asyncio.run(): it would take gRPC's servers down (rpc.servers).
            asyncio.new_event_loop().run_until_complete(daemon.run(early))
        finally:
            daemon.close()
    finally:
        lock.close()


def _stopped_while_starting(*_: object) -> None:
    """What the start has made is undone, as where it fails: the signal's default would leave a pool."""
    raise SystemExit(0)


class Daemon:
    """One daemon: built by the constructor, then run() once, then close()."""

    def __init__(self, sourced: Sourced, made: bool, fresh: bool, discard: bool, started_ns: int) -> None:
        """`made`: the runtime directory."""
        self._started_ns, self._discard = started_ns, discard
        self._served = False  # a start that fails discards nothing of an earlier daemon
        config = sourced.config
        self._tenants = self._next_tenants = tenants.tenants(config)
        self._made_directory = made
        self._opening = tenants.openness(config, self._tenants)
        tenants.open_directory(config.dir, self._opening, made)
        self._left = Left(config.dir, bool(config.cluster))  # before anything is adopted
        geometries = [geometry(config, namespace.name) for namespace in config.namespaces]
        self._segments = Segments(config, geometries, retire=retire, older=older)
        self._stores: dict[str, Any] = {}
        self._pools: dict[str, Pool] = {}
        self._sessions: Any = None
        with self._segments.undone_if_it_fails():
            try:
                for pool in self._segments.open(fresh):
                    self._open_store(config, pool)
                huge = {name for name, pool in self._pools.items() if pool.huge_pages}
                self._peers = Peers(config, self._stores, [tenant.salt for tenant in self._tenants])
                self._shared = Shared(config, self._stores, self._peers.tiers)  # claims before the tier opens
                self._tiers = Tiers(config, self._stores, huge)
                self._sessions = _core.SessionServer(
                    config.in_dir("kvstored.sock"),
                    list(self._stores.values()),
                    connections_within(config, SESSION_DESCRIPTORS),
                    config.max_pins,
                    self._tenants,
                )
            except StoreError as error:
                raise StartupError(str(error)) from error
            services = (
                module.DESCRIPTOR.services_by_name.values() for module in (admin_pb2, store_pb2, transfer_pb2)
            )
            self._counts = CallCounts(method.name for (service,) in services for method in service.methods)
            self._threads = Threads(config.io_threads)
            self._events = Events(config.max_subscribers, config.event_queue)
            self._leases = Leases(config.max_leases, config.lease_timeout_s, self._lease_expired)
            watched = (self._tiers, self._peers)
            self._watch = Watch(
                self._stores, watched, self._events, self._threads, config.in_dir("kvstored.sock")
            )
            self._reload = Reload(sourced, self._watch.degraded)
            self._allow_changes()
            self._admin = AdminService(
                self._stores,
                self._tiers,
                self._pools,
                self._sessions,
                self._reload,
                self._leases,
                self._events,
                self._threads,
                self._counts,
                self._watch.degraded,
                self._peers,
            )
            self._grpc = Servers(config, self._stores, self._leases, self._threads, self._counts)
            self._fabric: Sidecar | None = None
            self._metrics: MetricsServer | None = None
            self._gate: peer_proxy.Gate | None = None

    async def run(self, early: Sequence[int] = ()) -> None:
        """`early`: SIGHUPs that came before there was anything to reload."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stopped.set)
        with self._segments.undone_if_it_fails():
            await self._start()
        self._segments.settle()
        self._served = True
        self._watch.start(lambda: self._reload.config.scrub_rate)
        for name in self._stores:
            self._watch.degraded.put(not self._segments.kept, "pool_not_kept", name)
        notify(f"READY=1\nSTATUS=serving {self._reload.config.dir}\nMAINPID={os.getpid()}")
        loop.add_signal_handler(signal.SIGHUP, self._reload_on_signal)
        if early:
            self._reload_on_signal()
        await stopped.wait()
        began_ns = time.monotonic_ns()
        notify("STOPPING=1")
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # its default would kill before what is to go is removed
        drain_s = self._reload.config.drain_timeout_s
        log.info("stopping", drain_timeout_s=drain_s)
        end_within(drain_s + STOP_S, lambda: self._segments.give_up(self._discard))
        self._watch.stop()
        await self._stop()
        log.info("stopped", took_ms=(time.monotonic_ns() - began_ns) / 1e6)

    def close(self) -> None:
        self._sessions.stop()
        self._threads.close()
        if self._fabric is not None:
            self._fabric.close()
        self._shared.close()
        self._peers.close()
        self._tiers.close()
        for store in self._stores.values():
            store.close()
        self._segments.give_up(self._discard and self._served)
        self._segments.close()
        self._left.close()

    def _allow_changes(self) -> None:
        """What `kvstored reload` may change; everything else is of the start."""
        can = self._reload.can
        can("drain_timeout_s", "scrub_rate")  # read when they are used
        can("log_level", apply=lambda config: log.set_level(config.log_level))
        can("disk_quota", apply=self._tiers.resize)
        can("max_leases", apply=lambda config: self._leases.limit(config.max_leases))
        can(
            "max_subscribers", "event_queue",
            apply=lambda config: self._events.limit(config.max_subscribers, config.event_queue),
        )  # fmt: skip

        def only_others(before: str, after: str) -> str:  # none to some, or some to none, is of the start
            return after if before and after else before

        can("tls_cert", "tls_key", "tls_ca", part=only_others)
        self._reload.reads(self._peers.read_certificates)
        can("namespaces", part=self._resolve_lists, apply=self._use_lists)

    def _resolve_lists(self, before: Any, after: Any) -> Any:
        try:
            namespaces = tenants.with_lists(before, after)
            self._next_tenants = tenants.relisted(self._tenants, namespaces)
        except StartupError as error:
            raise ConfigError(str(error)) from error
        return namespaces

    def _use_lists(self, config: Config) -> None:
        self._tenants = self._next_tenants
        self._sessions.set_tenants(self._tenants)
        self._opening = tenants.openness(config, self._tenants)
        # What is gone was removed by somebody, or by gRPC as the daemon stops: a right that was taken ends
        # all the same.
        try:
            tenants.open_directory(config.dir, self._opening, self._made_directory)
        except StartupError as error:
            log.warning("directory_left_as_it_is", why=str(error))
        for name in ("kvstored.sock", "guests.sock"):
            try:
                self._opening.apply(config.in_dir(name), self._opening.socket_mode)
            except StartupError as error:
                log.warning("socket_left_as_it_is", why=str(error))

    def _reload_on_signal(self) -> None:
        try:
            self._reload.again()
        except (StoreError, StartupError) as error:
            log.error("reload_refused", why=str(error))

    async def _start(self) -> None:
        config = self._reload.config
        self._tiers.start()
        try:
            self._peers.start()
            self._shared.start()
            if config.cluster:
                self._fabric = Sidecar(config, self._peers, self._pools, self._left)
                self._fabric.start()
            self._sessions.start()
        except StoreError as error:
            raise StartupError(str(error)) from error
        self._opening.apply(config.in_dir("kvstored.sock"), self._opening.socket_mode)
        if config.metrics_port:
            await self._start_metrics(config.metrics_port)
        await self._start_grpc(config)
        log.info(
            "ready",
            version=__version__,
            dir=config.dir,
            pid=os.getpid(),
            memory_bytes=config.memory,
            max_blocks=config.all_blocks,
            namespaces=len(self._stores),
            adopted=sum(pool.adopted for pool in self._pools.values()),
            took_ms=(time.time_ns() - self._started_ns) / 1e6,
        )

    async def _start_grpc(self, config: Config) -> None:
        """The owner's socket, and one for other users if any is configured: it has no admin calls."""
        owners = self._grpc.add("grpc.sock", OwnersDoor(self._stores))
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, owners)
        self._watch.health.add_to(owners)
        owners.add_generic_rpc_handlers((LazyReflection(),))
        if config.open_to_others:
            door = GuestsDoor(self._stores, self._sessions)
            self._grpc.add("guarded.sock", door, peer_proxy.bounds(config))
        for name in ("guests.sock", "guarded.sock"):  # also where no other user is configured any more
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(config.in_dir(name))
            except OSError as error:
                raise StartupError(f"{config.in_dir(name)}: {error.strerror}") from error
        await self._grpc.start()
        if config.open_to_others:
            path = config.in_dir("guests.sock")
            self._gate = peer_proxy.Gate(
                path, config.in_dir("guarded.sock"), connections_within(config, peer_proxy.DESCRIPTORS),
                lambda socket: _core.peer(socket, self._tenants),
            )  # fmt: skip
            self._gate.start()
            self._opening.apply(path, self._opening.socket_mode)

    async def _start_metrics(self, port: int) -> None:
        self._metrics = MetricsServer(
            self._metrics_text, self._watch.health.answers, tenants.metrics_token(self._reload.config)
        )
        try:
            log.info("metrics", address="127.0.0.1", port=await self._metrics.start(port))
        except OSError as error:
            raise StartupError(f"metrics_port: 127.0.0.1:{port}: {error.strerror}") from error

    async def _stop(self) -> None:
        self._watch.health.stopping = True
        if self._metrics is not None:
            self._metrics.close()
        if self._gate is not None:
            self._gate.close()
        self._events.stop()
        await self._grpc.stop(self._reload.config.drain_timeout_s)
        self._leases.end_all()
        self._sessions.stop()
        self._watch.health.close()

    def _open_store(self, config: Config, pool: Pool) -> None:
        """A store on the pool. What it cannot adopt is replaced by an empty one, and said so."""
        name = pool.geometry.namespace
        try:
            self._stores[name] = new_store(config, pool)
        except StoreError as error:
            if not pool.adopted:
                raise
            log.warning("pool_discarded", namespace=name, why=str(error))
            pool = self._segments.replace(name)
            self._stores[name] = new_store(config, pool)
        self._pools[name] = pool
        stats = self._stores[name].stats()
        log.info(
            "namespace",
            name=name,
            adopted=pool.adopted,
            blocks=stats.get("blocks", 0),
            capacity_bytes=pool.geometry.capacity_bytes,
            max_blocks=pool.geometry.max_blocks,
            place=pool.place,
            huge_pages=pool.huge_pages,
        )

    def _lease_expired(self, namespace: str, aborted: int) -> None:
        self._events.publish(Event("LEASE_EXPIRED", namespace, {"aborted": aborted}))
        log.warning("lease_expired", namespace=namespace, aborted=aborted)

    async def _figures(self, namespace: str) -> dict[str, object]:
        figures = await self._threads.run(self._stores[namespace].stats)
        tiers = {**self._tiers.stats(namespace), **self._shared.stats(namespace)}
        return {**figures, **tiers, **await self._tiers.aside(namespace)}

    async def _all_figures(self) -> dict[str, dict[str, object]]:
        """All at one time: a disk that does not answer costs each a second, and a scrape has five."""
        found = await asyncio.gather(*map(self._figures, self._stores))
        return dict(zip(self._stores, found, strict=True))

    async def _metrics_text(self) -> str:
        process = {
            "leases": len(self._leases),
            "leases_expired": self._leases.expired,
            "draining": int(self._admin.draining),
            "subscribers": len(self._events),
            "resident_bytes": own_memory_bytes(),
            "cpu_seconds": cpu_seconds(),
            "session_cpu_seconds": self._sessions.thread_cpu_s,
            "reloads": self._reload.applied_total,
            "reloads_refused": self._reload.refused_total,
            "start_time_seconds": self._started_ns / 1e9,
            "sessions_refused": self._sessions.refused,
        }
        degraded = self._watch.degraded
        return render(
            Figures(
                version=__version__,
                stores=await self._all_figures(),
                process=process,
                calls=self._counts.by_status,
                call_seconds=self._counts.took,
                session_seconds={
                    (took.namespace, took.operation): Histogram(took.counts, took.sum_s)
                    for took in self._sessions.latencies()
                },
                disk_seconds=self._tiers.latencies(),
                peers=self._peers.stats(),
                peer_server=self._peers.server_stats(),
                pool=await self._threads.run(self._fabric.figures) if self._fabric else {},
                degraded=degraded.gauges(self._stores),
                serving={name: degraded.serves(name) for name in self._stores},
                adopted={name: pool.adopted for name, pool in self._pools.items()},
            )
        )
