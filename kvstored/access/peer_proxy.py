"""The gate before the gRPC server for other users: who is let in, and how many connections a user has.

Owns guests.sock and what is connected to it; passes each connection's bytes on to the server's own socket,
and reads none of them. gRPC bounds the connections of all users together, asks nobody who they are, and its
Python API takes no connection that somebody else has accepted. Invariants: who is on no list costs nothing
that lasts, and one user alone never has all connections there are; a connection is counted until both its
sockets are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import cast

from kvstored.access.quota import Bound
from kvstored.config.config import Config
from kvstored.errors import NoSpace, StartupError

MAX_CALLS = 16_384  # of all connections, also refused ones: some 20 KB each until that is read
HANDSHAKE_MS = 5_000
IDLE_MS = 60_000
DESCRIPTORS = 3  # of a connection: the client's, the server's two
KNOCKS = 16  # taken before everybody else in the loop has a turn
NO_DESCRIPTOR_WAIT_S = 0.1
READ_OUT_S = (
    5.0  # what a client that does not read has of the answers when the server has ended its connection
)


def bounds(config: Config) -> tuple[tuple[str, int], ...]:
    """The server's: what the gate lets in can hold a bounded number of calls, and no connection long without
    one. A refused call is held until its refusal is read, which a client may never do; beyond a connection's
    part of all that may be held, a well-behaved client waits and another's are dropped without a word."""
    return (
        ("grpc.max_concurrent_streams", min(2 * config.max_calls, MAX_CALLS // config.max_sessions)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
    )


class Gate:
    def __init__(self, path: str, inner: str, most: int, admit: Callable[[int], int | None]) -> None:
        """`inner`: the server's socket. `admit`: a peer's user id, or None: not let in."""
        self._inner = inner
        self._admit = admit
        self._connections = Bound(
            most, "{total} connections, the limit is {most} (max_sessions, LimitNOFILE)"
        )
        self._opened: set[asyncio.Task[None]] = set()
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def start(self) -> None:
        """Raises StartupError."""
        try:
            self._listener.bind(self._path)
            self._listener.listen(socket.SOMAXCONN)
        except OSError as error:
            self._listener.close()
            raise StartupError(f"{self._path}: {error.strerror}") from error
        asyncio.get_running_loop().add_reader(self._listener, self._answer)

    def close(self) -> None:
        """Nobody is let in any more; who is inside stays until the server ends it."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _answer(self) -> None:
        for _ in range(KNOCKS):
            try:
                knocking, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: who knocks waits, and the loop is not to turn meanwhile
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(NO_DESCRIPTOR_WAIT_S, self._again)
                return
            self._let_in(knocking)

    def _again(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._answer)

    def _let_in(self, knocking: socket.socket) -> None:
        uid = self._admit(knocking.fileno())
        user = None if uid in (0, os.geteuid()) else uid
        try:
            if uid is None:
                raise NoSpace("nobody's connection")
            self._connections.take(user)
        except NoSpace:
            knocking.close()
            return
        task = asyncio.get_running_loop().create_task(self._join(knocking, user))
        self._opened.add(task)  # the loop itself keeps none
        task.add_done_callback(self._opened.discard)

    async def _join(self, client: socket.socket, user: int | None) -> None:
        """Connects the client to the server, and ends when both their connections have."""
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        try:
            with contextlib.closing(client), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
                server.setblocking(False)
                server.connect(self._inner)  # at once, or the server's backlog is full
                near, far = _End(loop), _End(loop)
                near.other, far.other = far, near
                await loop.connect_accepted_socket(lambda: far, server)
                await loop.connect_accepted_socket(lambda: near, client)
                await asyncio.gather(near.closed, far.closed)
        except OSError:
            pass  # the client sees the end of its connection
        finally:
            self._connections.give(user)


class _End(asyncio.Protocol):
    """One of the two: what it hears the other says, and it does not listen while the other cannot."""

    other: _End

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.closed: asyncio.Future[None] = loop.create_future()
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # heard before the other was there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other.closed.done():
            self.transport.abort()
        elif self.other.transport is None:
            self.transport.pause_reading()  # until there is somebody to say it to
        else:
            self.other.tell(self.transport)
            self.other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)
        else:  # Python 3.11.2 goes on reading what was paused in connection_made()
            self._early.append(data)

    def tell(self, listener: asyncio.Transport) -> None:
        """Says what it has heard so far."""
        for data in self._early:
            listener.write(data)
        self._early.clear()

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed.set_result(None)
        if self.other.transport is not None and not self.other.closed.done():
            self.other.transport.close()  # when what is on its way has gone
            self._loop.call_later(READ_OUT_S, self.other.transport.abort)
