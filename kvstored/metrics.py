"""Prometheus metrics over HTTP on the loopback address, only when asked for.

Owns the listening socket and the names: kvstored_<noun>_<unit>[_total]. Labels are namespaces, methods and
statuses, from fixed sets; never a key, a salt or a token. Answers GET /metrics and GET /healthz and nothing
else, in bounded time and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
CONTENT_TYPE = "Content-Type: text/plain; version=0.0.4; charset=utf-8"

# The store's counter -> (metric, type, help).
STORE_METRICS: dict[str, tuple[str, str, str]] = {
    "capacity_bytes": ("kvstored_pool_capacity_bytes", "gauge", "Size the pool may grow to."),
    "frontier_bytes": ("kvstored_pool_frontier_bytes", "gauge", "Size the pool has grown to."),
    "faulted_bytes": ("kvstored_pool_faulted_bytes", "gauge", "Part of the pool that is faulted in."),
    "used_bytes": ("kvstored_pool_used_bytes", "gauge", "Memory that blocks occupy, whatever their state."),
    "blocks": ("kvstored_blocks", "gauge", "Sealed blocks in memory."),
    "max_blocks": ("kvstored_blocks_limit", "gauge", "Most blocks at a time."),
    "unsealed": ("kvstored_blocks_unsealed", "gauge", "Blocks being written."),
    "zombies": ("kvstored_blocks_zombie", "gauge", "Deleted blocks whose memory a reader still holds."),
    "quarantined": (
        "kvstored_blocks_quarantined",
        "gauge",
        "Blocks whose writer ended but may still touch the memory.",
    ),
    "pins": ("kvstored_pins", "gauge", "Blocks held by readers."),
    "sessions": ("kvstored_sessions", "gauge", "Processes attached through shared memory."),
    "hits": ("kvstored_hits_total", "counter", "Gets that found their block."),
    "misses": ("kvstored_misses_total", "counter", "Gets that did not."),
    "creates": ("kvstored_creates_total", "counter", "Blocks granted to writers."),
    "seals": ("kvstored_seals_total", "counter", "Blocks sealed."),
    "aborts": ("kvstored_aborts_total", "counter", "Blocks given up by their writers, or lost with them."),
    "deletes": ("kvstored_deletes_total", "counter", "Blocks deleted on request."),
    "evictions": ("kvstored_evictions_total", "counter", "Blocks evicted to make room."),
    "expired": ("kvstored_expirations_total", "counter", "Blocks whose time to live ended."),
    "no_space": ("kvstored_no_space_total", "counter", "Creates refused for want of memory."),
    "fenced": ("kvstored_namespace_fenced", "gauge", "1 if a client harmed the memory and it is refused."),
    "corrupt": ("kvstored_corrupt_total", "counter", "Blocks dropped because a checksum did not match."),
}
OWN_METRICS: dict[str, tuple[str, str, str]] = {
    "leases": ("kvstored_leases", "gauge", "gRPC writers that hold unsealed blocks."),
    "leases_expired": ("kvstored_leases_expired_total", "counter", "Leases that reached their deadline."),
    "draining": ("kvstored_draining", "gauge", "1 while creates are refused on request."),
    "subscribers": ("kvstored_event_subscribers", "gauge", "Listeners of Events."),
    "resident_bytes": (
        "kvstored_process_resident_bytes",
        "gauge",
        "The daemon's own memory, beside pool and index.",
    ),
    "cpu_seconds": ("kvstored_process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    "session_cpu_seconds": (
        "kvstored_session_cpu_seconds_total",
        "counter",
        "CPU time of the session server.",
    ),
    "sessions_refused": ("kvstored_sessions_refused_total", "counter", "Clients refused at attach."),
}


def render(
    stores: Mapping[str, Mapping[str, object]],
    own: Mapping[str, float],
    calls: Mapping[tuple[str, str], int],
) -> str:
    """The exposition text. Namespaces are plain words by configuration, methods and statuses by
    construction: nothing to escape."""
    lines: list[str] = []

    def metric(about: tuple[str, str, str], samples: list[tuple[str, object]]) -> None:
        if samples:
            name, kind, text = about
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{labels} {value}" for labels, value in samples)

    for counter, about in STORE_METRICS.items():
        metric(
            about,
            [
                (f'{{namespace="{name}"}}', stats[counter])
                for name, stats in stores.items()
                if counter in stats
            ],
        )
    for name, about in OWN_METRICS.items():
        if name in own:
            metric(about, [("", own[name])])
    metric(
        ("kvstored_grpc_calls_total", "counter", "gRPC calls that have ended."),
        [
            (f'{{method="{method}",status="{status}"}}', count)
            for (method, status), count in sorted(calls.items())
        ],
    )
    return "\n".join(lines) + "\n"


class MetricsServer:
    """A tiny HTTP server: one request per connection."""

    def __init__(self, metrics: Callable[[], Awaitable[str]], healthy: Callable[[], Awaitable[bool]]) -> None:
        self._metrics = metrics
        self._healthy = healthy
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, port: int) -> int:
        """Listens on 127.0.0.1 only. The port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if self._connections > MAX_CONNECTIONS:
                    status, body = "503 Service Unavailable", f"the limit is {MAX_CONNECTIONS} connections\n"
                else:
                    status, body = await self._answer(await self._request_line(reader))
                data = body.encode()
                head = (
                    f"HTTP/1.1 {status}",
                    CONTENT_TYPE,
                    f"Content-Length: {len(data)}",
                    "Connection: close",
                )
                writer.write("\r\n".join((*head, "", "")).encode() + data)
                await writer.drain()
        except (TimeoutError, OSError):
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _request_line(self, reader: asyncio.StreamReader) -> str | None:
        """The first line, once the whole head was read; None if it is too long or cut off."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            return None
        return head.split(b"\r\n", 1)[0].decode("latin-1")

    async def _answer(self, request_line: str | None) -> tuple[str, str]:
        words = (request_line or "").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "400 Bad Request", f"a request of at most {MAX_REQUEST_BYTES} bytes is wanted\n"
        if words[0] != "GET":
            return "405 Method Not Allowed", "GET only\n"
        if words[1] == "/metrics":
            return "200 OK", await self._metrics()
        if words[1] == "/healthz":
            return (
                ("200 OK", "serving\n")
                if await self._healthy()
                else ("503 Service Unavailable", "not serving\n")
            )
        return "404 Not Found", "/metrics and /healthz only\n"
