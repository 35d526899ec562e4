"""What a client asks of the router: its body, its headers, and whom it is for.

Owns the reading and its bounds. Never answers. Invariant: whatever a body holds, reading it fails with
nothing but an ApiError: what is wrong with it is said by the server that gets it.
"""

from __future__ import annotations

import json
from typing import Any

from kvclient.serve.errors import ApiError

MOST_BODY_BYTES = 8 << 20  # the servers' own bound
MODELS = "/v1/models/"
NOT_PASSED = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"host", b"content-length", b"expect",
}  # fmt: skip


def passed_headers(scope: Any) -> list[tuple[bytes, bytes]]:
    """Those that a server gets."""
    return [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED]


def header(scope: Any, name: bytes) -> str:
    """Of that name, in lower case; "": there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def parsed(body: bytes) -> dict[str, Any]:
    """Empty where it is no JSON: the server that gets it says so."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def model_of(path: str, asked: dict[str, Any]) -> str | None:
    """Which model has to answer; None: any, if it were to say what is wrong."""
    named = path.removeprefix(MODELS) if path.startswith(MODELS) else asked.get("model")
    return named if isinstance(named, str) else None


async def body_of(scope: Any, receive: Any) -> bytes | None:
    """None: the client left before it was whole. Raises ApiError."""
    length = header(scope, b"content-length")
    if scope["method"] not in ("GET", "HEAD") and not length.isdigit():
        raise ApiError(411, "Content-Length is needed")
    if header(scope, b"transfer-encoding"):  # a length beside it says nothing of the body
        raise ApiError(411, "Content-Length is needed, and it alone")
    if length.isdigit() and int(length) > MOST_BODY_BYTES:
        raise ApiError(413, f"a body of {length} bytes; the limit is {MOST_BODY_BYTES}")
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            return None
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)


async def gone(receive: Any) -> None:
    """Until the client is."""
    while (await receive())["type"] != "http.disconnect":
        pass
