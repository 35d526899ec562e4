"""The way back to a client of the router.

Owns what was sent to it. Never reads an answer but for where an event of a stream ends. Invariant: of a
stream whole events go back, so what is said where its server dies is an event by itself.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from kvclient.serve.errors import ApiError
from kvclient.serve.route.asked import NOT_PASSED

NOT_RETURNED = NOT_PASSED - {b"content-length"} | {b"date", b"server"}
MOST_EVENT_BYTES = 1 << 20  # of one that is held until it is whole
ENDS = (b"\n\n", b"\r\n\r\n")


def streams(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers is one of events."""
    return any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)


class Events:
    """Of one stream, in pieces cut anywhere. held: the beginning of an event whose end has not come."""

    def __init__(self) -> None:
        self.held = b""

    def add(self, data: bytes) -> bytes:
        """The events that are whole now; one that is too long as it comes."""
        text = self.held + data
        end = max(at + len(mark) if (at := text.rfind(mark)) >= 0 else 0 for mark in ENDS)
        if len(text) - end > MOST_EVENT_BYTES:
            end = len(text)
        self.held = text[end:]
        return text[:end]


class Back:
    """The way back to one client. busy: an answer that said `not now`, kept while others are asked."""

    def __init__(self, send: Any, ident: str, path: str) -> None:
        self._send, self._path, self.begun, self._streams = send, path, False, False
        self._ident = ident if ident.isprintable() and 0 < len(ident) <= 128 else uuid.uuid4().hex
        self.busy: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the head of the answer."""
        self.begun = True
        self._streams = streams(headers)
        if not any(name == b"x-request-id" for name, _ in headers):
            headers = [*headers, (b"x-request-id", self._ident.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, data: bytes, more: bool = True) -> None:
        """Sends a piece of the body; more: others follow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def raw(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Answers in one piece."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [*(h for h in headers if h[0] != b"content-length"), length])
        await self.more(body, False)

    async def json(self, status: int, told: Any, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answers with JSON."""
        await self.raw(status, [(b"content-type", b"application/json"), *more], json.dumps(told).encode())

    async def text(self, told: str) -> None:
        """Answers with figures as Prometheus reads them."""
        await self.raw(200, [(b"content-type", b"text/plain; version=0.0.4")], told.encode())

    async def give_busy(self) -> None:
        """Answers what a full server said."""
        assert self.busy is not None
        await self.raw(*self.busy)

    async def error(self, error: ApiError) -> None:
        """Answers with an error, in the shape of the path's API."""
        again = error.retry_after_s
        more = [(b"retry-after", str(again).encode())] if again else []
        await self.json(error.status, error.body_at(self._path), more)

    async def broken(self, text: str) -> None:
        """In the middle of an answer: told as an event of a stream; another ends before its end. Raises
        ConnectionError for that one.
        """
        if not self._streams:
            raise ConnectionError(text)
        said = ApiError(502, text, "server_error", "server_lost").event_at(self._path)
        await self.more(said.encode(), False)
