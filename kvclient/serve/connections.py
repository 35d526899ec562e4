"""Connections that ask for nothing, or take for ever to: how long and how many of them are borne.

Owns those that wait for a whole request. Never answers. Invariant: a request is whole within `whole_s` of the
connection's start or its last answer's end, or the connection is closed; of those that wait at most `most`
are open, the oldest go first: so they cannot keep others from being served. One above the most that may be
open at all is answered once, 503; what is no HTTP, 400: both in the shape of all errors.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvclient.serve.errors import ApiError

RETRY_AFTER_S = 2


@dataclass
class Waiting:
    """Of one server process."""

    most: int
    whole_s: float
    closed: int = 0
    _held: dict[H11Protocol, asyncio.TimerHandle] = field(default_factory=dict)

    def add(self, connection: H11Protocol) -> None:
        """From now on it has whole_s. Idempotent: its time begins anew."""
        self.drop(connection)
        self._held[connection] = connection.loop.call_later(self.whole_s, self._close, connection)
        while len(self._held) > self.most:
            self._close(next(iter(self._held)))

    def drop(self, connection: H11Protocol) -> None:
        """The connection is no longer waited for."""
        if (timer := self._held.pop(connection, None)) is not None:
            timer.cancel()

    def _close(self, connection: H11Protocol) -> None:
        self.drop(connection)
        self.closed += 1
        connection.transport.abort()


def protocol(waiting: Waiting, connections: int) -> type[H11Protocol]:
    """uvicorn's own, which says here what its connections wait for. connections: that may be open."""

    class Watched(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            waiting.add(self)
            answers, refuses = self.app, refusing(connections)

            async def app(*asked: Any) -> None:
                await (refuses if len(self.connections) > connections else answers)(*asked)

            self.app = app

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answers():
                waiting.drop(self)

        def on_response_complete(self) -> None:
            super().on_response_complete()  # which begins with the next request, where one came behind it
            if not (self.transport.is_closing() or self._answers()):
                waiting.add(self)

        def _answers(self) -> bool:
            """Whether a whole request has come whose answer has not ended."""
            cycle = self.cycle
            return cycle is not None and not (cycle.more_body or cycle.response_complete)

        def send_400_response(self, msg: str) -> None:
            """Of what is no HTTP, or has too long a head."""
            told = json.dumps(ApiError(400, msg).body).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(told))),
                       ("connection", "close")]  # fmt: skip
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=told), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.drop(self)
            super().connection_lost(exc)

    return Watched


def refusing(connections: int) -> Any:
    """An ASGI application that has no room for another connection than so many."""
    text = f"{connections} connections are open already"
    error = ApiError(503, text, "server_error", "too_many_connections")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told = json.dumps(error.body_at(scope["path"])).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(told)),
                   (b"retry-after", b"%d" % RETRY_AFTER_S), (b"connection", b"close")]  # fmt: skip
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    return app


def heads(app: Any) -> Any:
    """The same ASGI application, to which HEAD is GET: the server leaves the body out."""

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)

    return answers
