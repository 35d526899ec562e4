"""What a gRPC call may do, by the socket it came through: the owner's, or the one for other users.

Owns the rule and the words of its refusals. Never decodes a request. A handler sees no peer on a Unix socket,
so the owner's socket is the owner's by its mode, and on the other every call shows a token that the session
socket issued (docs/design.md §9). Invariant: what lies in a namespace that the caller may not use is answered
like a namespace that does not exist, by the same lines of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import grpc

from kvstored.errors import NotPermitted, Unauthenticated, unknown_namespace

DEFAULT = "default"
SCHEME = "Bearer "
NO_TOKEN = (
    "this socket wants the token of a living session with every call: "
    "authorization: Bearer <client.grpc_token()>"
)


class Door(Protocol):
    def admit(
        self, context: grpc.aio.ServicerContext, namespace: str, write: bool = False
    ) -> tuple[str, Any]:
        """The namespace's name and store. Raises Unauthenticated, NotFound, NotPermitted."""
        ...

    def user(self, context: grpc.aio.ServicerContext) -> int | None:
        """In whose share of what is bounded a call counts; None: nobody's. Raises Unauthenticated."""
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
        granted = self._granted(context)
        name = granted.namespace
        found = _visible({name: self._stores[name]}, namespace or DEFAULT)
        if write and granted.read_only:
            raise NotPermitted(f"the session of namespace {name} is read-only")
        return found

    def user(self, context: grpc.aio.ServicerContext) -> int | None:
        user: int = self._granted(context).uid
        return None if user in (0, os.geteuid()) else user

    def _granted(self, context: grpc.aio.ServicerContext) -> Any:
        """The TokenGrant of the session whose token is shown: namespace, read_only, uid."""
        granted = self._sessions.token(_shown(context.invocation_metadata()))
        if granted is None:
            raise Unauthenticated(NO_TOKEN)
        return granted


def _visible(stores: Mapping[str, Any], namespace: str) -> tuple[str, Any]:
    store = stores.get(namespace)
    if store is None:
        raise unknown_namespace(namespace)
    return namespace, store


def _shown(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """The token's bytes; none if the call shows none, several, or something else."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(SCHEME):
        return b""
    try:
        return bytes.fromhex(values[0].removeprefix(SCHEME))
    except ValueError:
        return b""
