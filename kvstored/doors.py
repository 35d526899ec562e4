"""What a gRPC call may do, by the socket it came through: the owner's, or the one for other users.

Owns the rule and the words of its refusals. Never decodes a request. A handler sees no peer on a Unix socket,
so the owner's socket is the owner's by its mode, and on the other every call shows a token that the session
socket issued (design §3). Invariant: what lies in a namespace that the caller may not use is answered like a
namespace that does not exist, by the same lines of code.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

import grpc

from kvstored.errors import NotPermitted, Unauthenticated, unknown_namespace

DEFAULT = "default"
SCHEME = "Bearer "
NO_TOKEN = (
    "this socket wants the token of a living session with every call: "
    "authorization: Bearer <client.grpc_token()>"
)
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Door(Protocol):
    def admit(
        self, context: grpc.aio.ServicerContext, namespace: str, write: bool = False
    ) -> tuple[str, Any]:
        """The namespace's name and store. Raises Unauthenticated, NotFound, NotPermitted."""
        ...

    def user(self, context: grpc.aio.ServicerContext) -> int | None:
        """In whose share of what is bounded a call counts; None: nobody's."""
        ...


class OwnersDoor:
    """Whoever can open the socket is the daemon's own user or root: every namespace, reading and writing."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self._stores = stores

    def admit(
        self, context: grpc.aio.ServicerContext, namespace: str, write: bool = False
    ) -> tuple[str, Any]:
        return _visible(self._stores, namespace or DEFAULT)

    def user(self, context: grpc.aio.ServicerContext) -> int | None:
        return None


class GuestsDoor:
    """Each call has the right of the living session whose token it shows, and no other."""

    def __init__(self, stores: Mapping[str, Any], sessions: Any) -> None:
        self._stores = stores
        self._sessions = sessions

    def admit(
        self, context: grpc.aio.ServicerContext, namespace: str, write: bool = False
    ) -> tuple[str, Any]:
        granted = self._sessions.token(_shown(context.invocation_metadata()))
        if granted is None:
            raise Unauthenticated(NO_TOKEN)
        own, read_only, _ = granted
        found = _visible({own: self._stores[own]}, namespace or DEFAULT)
        if write and read_only:
            raise NotPermitted(f"the session of namespace {own} is read-only")
        return found

    def user(self, context: grpc.aio.ServicerContext) -> int | None:
        granted = self._sessions.token(_shown(context.invocation_metadata()))
        return None if granted is None or granted[2] in (0, os.geteuid()) else granted[2]


def _visible(stores: Mapping[str, Any], namespace: str) -> tuple[str, Any]:
    store = stores.get(namespace)
    if store is None:
        raise unknown_namespace(namespace)
    return namespace, store


class Shares(grpc.aio.ServerInterceptor):
    """One other user holds half of the calls at most, and who shows no token none: the rest are served. The
    daemon's own user and root may use them up."""

    def __init__(self, sessions: Any, max_calls: int) -> None:
        self._sessions = sessions
        self._most = max(1, max_calls // 2)
        self._held: Counter[int | None] = Counter()  # by user id; bounded by the calls in progress

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        granted = self._sessions.token(_shown(details.invocation_metadata))
        user = None if granted is None else granted[2]
        if user in (0, os.geteuid()):
            return handler
        kind = next(kind for kind in KINDS if getattr(handler, kind) is not None)
        method = getattr(handler, kind)

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._share(user, context):
                return await method(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._share(user, context), contextlib.aclosing(method(request, context)) as messages:
                async for message in messages:
                    yield message

        return handler._replace(**{kind: stream if handler.response_streaming else answer})

    @contextlib.asynccontextmanager
    async def _share(self, user: int | None, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        if user is None:  # at once: a stream that nothing comes through would be held for as long
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        elif self._held[user] >= self._most:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"this user has {self._most} calls in progress, the most"
            )
        self._held[user] += 1
        try:
            yield
        finally:
            self._held[user] -= 1
            if not self._held[user]:
                del self._held[user]


def _shown(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """The token's bytes; none if the call shows none, several, or something else."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(SCHEME):
        return b""
    try:
        return bytes.fromhex(values[0].removeprefix(SCHEME))
    except ValueError:
        return b""
