"""Prometheus metrics over HTTP on the loopback address, only when asked for.

Owns the listening socket. Answers GET /metrics and GET /healthz and nothing else, in bounded time and memory.
The text is prometheus.py's. Invariant: who connects and asks nothing keeps nobody from being answered: of
those the oldest goes when there are too many.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable

from kvstored import log

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
CONTENT_TYPE = "Content-Type: text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """A tiny HTTP server: one request per connection."""

    def __init__(
        self,
        metrics: Callable[[], Awaitable[str]],
        healthy: Callable[[], Awaitable[bool]],
        token: str = "",
    ) -> None:
        """With a `token`, /metrics is for those that show it: any local user reaches the loopback address."""
        self._metrics = metrics
        self._token = token
        self._healthy = healthy
        self._server: asyncio.Server | None = None
        self._waiting: dict[asyncio.StreamWriter, None] = {}  # has not asked yet; oldest first
        self._answering = 0

    async def start(self, port: int) -> int:
        """Listens on 127.0.0.1 only. The port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._waiting[writer] = None
        oldest = next(iter(self._waiting))
        if len(self._waiting) + self._answering > MAX_CONNECTIONS and oldest is not writer:
            del self._waiting[oldest]
            oldest.transport.abort()
        asked = False
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                lines = await self._head(reader)
                if writer not in self._waiting:
                    return  # it was let go meanwhile
                del self._waiting[writer]
                if self._answering < MAX_CONNECTIONS:
                    self._answering, asked = self._answering + 1, True
                    status, body = await self._answer(lines)
                else:
                    status, body = "503 Service Unavailable", f"the limit is {MAX_CONNECTIONS} at a time\n"
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
            writer.transport.abort()  # close() would keep the descriptor until the answer is read
        finally:
            self._waiting.pop(writer, None)
            self._answering -= asked
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> list[str] | None:
        """The lines of the request's head; None if it is too long or cut off."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError, ConnectionError):
            return None
        return head.decode("latin-1").split("\r\n")

    def _admitted(self, head: list[str]) -> bool:
        shown = [
            value
            for line in head[1:]
            for name, _, value in [line.partition(":")]
            if name.lower() == "authorization"
        ]
        if not self._token:
            return True
        scheme, _, token = (shown[0] if len(shown) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(token.strip().encode("latin-1"), self._token.encode())  # as bytes
        return same and scheme.lower() == "bearer"

    async def _answer(self, head: list[str] | None) -> tuple[str, str]:
        words = head[0].split(" ") if head else []
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "400 Bad Request", f"a request of at most {MAX_REQUEST_BYTES} bytes is wanted\n"
        if words[0] != "GET":
            return "405 Method Not Allowed", "GET only\n"
        path = words[1].partition("?")[0]
        if path == "/metrics" and not self._admitted(head or []):
            return "401 Unauthorized", "the token of metrics_token_file is wanted\n"
        try:
            if path == "/metrics":
                return "200 OK", await self._metrics()
            if path == "/healthz":
                serving = await self._healthy()
                return ("200 OK", "serving\n") if serving else ("503 Service Unavailable", "not serving\n")
        except Exception as error:  # no thread or descriptor is left; or a bug: a scrape says so, and the log
            log.error("scrape_failed", path=path, error=f"{type(error).__name__}: {error}")
            return "500 Internal Server Error", "the daemon's log has why\n"
        return "404 Not Found", "/metrics and /healthz only\n"
