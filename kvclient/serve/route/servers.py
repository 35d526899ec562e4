"""The servers behind a router: whether each is there, what it serves, and connections to it.

Owns the probing and the idle connections. Never chooses. Invariant: a server counts as there only while its
last probes say that it computes, and one that is lost has no connection left open.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvclient.serve.route.balance import Load
from kvclient.serve.route.exchange import Exchange, Headers, ServerLost

MOST_IDLE = 64
IDLE_S = 15.0  # the servers close theirs after 30
MOST_SMALL_BYTES = 1 << 20  # of an answer that the router reads for itself


@dataclass(frozen=True)
class Probing:
    """A server is lost when it refuses a connection, or after `misses` probes without an answer in time."""

    every_s: float = 1.0
    timeout_s: float = 5.0
    misses: int = 3


@dataclass(eq=False)
class Server:
    """One. url: http://host:port. prefills: it computes prompts for others and answers only where nobody else
    is there. model: what it serves; None: not known yet. missed: probes that failed, one after the other.
    """

    url: str
    prefills: bool = False
    load: Load = field(init=False)
    up: bool = False
    model: str | None = None
    lost_total: int = 0
    missed: int = 0
    _idle: list[tuple[float, Exchange]] = field(default_factory=list)
    _open: set[Exchange] = field(default_factory=set)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{self.url!r} is no server; write http://host:port")
        self.host, self.port = parts.hostname, parts.port or 80
        self.load = Load(f"{self.host}:{self.port}")

    async def connection(self, fresh: bool = False) -> Exchange:
        """To be given back with done(). fresh: a new one. Raises ServerLost."""
        now = time.monotonic()
        while self._idle and not fresh:
            since, exchange = self._idle.pop()
            if now - since < IDLE_S and not exchange.stale:
                self._open.add(exchange)
                return exchange
            exchange.close()
        exchange = Exchange(self.host, self.port)
        await exchange.open()
        self._open.add(exchange)
        return exchange

    def done(self, exchange: Exchange) -> None:
        """Kept where its answer was read to the end, closed where not."""
        self._open.discard(exchange)
        if exchange.again():
            self._idle.append((time.monotonic(), exchange))
            while len(self._idle) > MOST_IDLE:
                self._idle.pop(0)[1].close()

    async def small(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """(status, body) of a short answer. Raises ServerLost, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            exchange = await self.connection()
            try:
                head, read = await exchange.ask(method, target, headers, body), b""
                async for part in exchange.data():
                    read += part
                    if len(read) > MOST_SMALL_BYTES:
                        raise ServerLost(f"an answer to {target!r} of more than {MOST_SMALL_BYTES} bytes")
                return head.status_code, read
            finally:
                self.done(exchange)

    def lose(self) -> None:
        """It is not there: whoever waits for an answer of it hears ServerLost."""
        self.lost_total += self.up
        self.up = False
        for exchange in [*self._open, *(idle for _, idle in self._idle)]:
            exchange.close()
        self._idle.clear()

    async def probe(self, timeout_s: float) -> bool:
        """Whether it computes now. Learns its model and its store. Raises ServerLost, TimeoutError."""
        status, body = await self.small(b"GET", b"/health", [], b"", timeout_s)
        told = json.loads(body) if status == 200 else {}
        if not isinstance(told, dict) or told.get("status") != "ready":
            return False
        self.model, self.load.store = str(told.get("model")), str(told.get("store") or self.url)
        return True

    async def watch(self, probing: Probing, changed: Callable[[Server, str], None]) -> None:
        """Until cancelled. changed: called when it came, went, or has another store (its old one's name)."""
        while True:
            before, store = self.up, self.load.store
            try:
                self.up, self.missed, refused = await self.probe(probing.timeout_s), 0, False
            except (ServerLost, TimeoutError, ValueError) as error:
                self.missed, refused = self.missed + 1, isinstance(error, ServerLost)
            if refused or self.missed >= probing.misses or (before and not self.up):
                self.lose()
            if (self.up, self.load.store) != (before, store):
                changed(self, store)
            await asyncio.sleep(probing.every_s)
