"""One HTTP/1.1 request to a server and its answer, over a connection that may serve many.

Owns the connection. Never retries and never reads an answer's meaning. Invariant: a connection goes back to
be used again only when its answer was read to the end; whatever else happens closes it, and a server whose
answer nobody reads any more sees that its client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import h11

CONNECT_S = 3.0
READ_BYTES = 1 << 16
Headers = Sequence[tuple[bytes, bytes]]


class ServerLost(ConnectionError):
    """It cannot be reached, or went away in the middle."""


class Exchange:
    """Raises ServerLost from everything. Cancelled, it is to be closed by whoever cancels."""

    def __init__(self, host: str, port: int) -> None:
        self._place = (host, port)
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.used = 0

    async def open(self) -> None:
        """Connects. Raises ServerLost."""
        try:
            async with asyncio.timeout(CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(*self._place)
        except (OSError, TimeoutError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from error

    async def ask(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> h11.Response:
        """Sends a request; returns the head of its answer. headers: without Host and Content-Length. Raises
        ServerLost.
        """
        assert self._writer is not None, "open() comes first"
        host, port = self._place
        fields = [(b"host", f"{host}:{port}".encode()), *headers]
        if body or method == b"POST":
            fields.append((b"content-length", str(len(body)).encode()))
        self.used += 1
        try:
            sent = self._http.send(h11.Request(method=method, target=target, headers=fields))
            sent = (sent or b"") + (self._http.send(h11.Data(data=body)) or b"" if body else b"")
            self._writer.write(sent + (self._http.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
            while not isinstance(event := await self._event(), h11.Response):
                if isinstance(event, h11.ConnectionClosed):
                    raise ServerLost("it closed the connection before it answered")
            return event
        except (OSError, h11.ProtocolError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from error

    async def data(self) -> AsyncIterator[bytes]:
        """The answer's bytes as they come. Raises ServerLost."""
        try:
            while not isinstance(event := await self._event(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise ServerLost("it closed the connection in the middle of an answer")
                yield bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from error

    def again(self) -> bool:
        """Ready for another request; False: it is closed instead."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        self.close()
        return False

    @property
    def stale(self) -> bool:
        """The server has closed it meanwhile."""
        if self._reader is None or self._writer is None:
            return True
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        """At once: what is unsent is not waited for."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        assert self._reader is not None
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(READ_BYTES))
        return event
