"""A prompt computed by a server that answers nobody, so that those who answer are not held up by it.

Owns who is asked for that, and the waiting. Never fails a request. Invariant: whatever becomes of a prefill,
the server that answers gets the request as it came: what it does not find in its store it computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvclient.serve.route.balance import Load, choose
from kvclient.serve.route.exchange import Headers, ServerLost
from kvclient.serve.route.prefixes import PIECE_BYTES
from kvclient.serve.route.servers import Server

PATHS = {
    b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/v1/systemone",
}  # fmt: skip
TIMEOUT_S = 600.0  # the servers' own for a request


def worth(path: bytes, pieces: int, held: int, least_bytes: int) -> bool:
    """Whether so much of a prompt is missing, in pieces, where it is to be answered."""
    return path in PATHS and (pieces - held) * PIECE_BYTES >= least_bytes


def prefiller(servers: Sequence[Server], answers: Load) -> Server | None:
    """Who computes a prompt for this one: of its own store, if there is such a one; the least busy."""
    nearest = [server for server in servers if server.load.store == answers.store] or list(servers)
    load = choose([server.load for server in nearest], {}, 0)
    return next((server for server in nearest if server.load is load), None)


async def prefill(server: Server, path: bytes, headers: Headers, body: bytes) -> bool:
    """Whether it computed the prompt. Cancelled, the server hears that nobody waits."""
    server.load.under_way += 1
    server.load.asked += 1
    try:
        target = path.replace(b"/v1/", b"/v1/prefill/", 1)
        status, told = await server.small(b"POST", target, headers, body, TIMEOUT_S)
        return status == 200 and "prompt_tokens" in json.loads(told)
    except (ServerLost, TimeoutError, ValueError):
        return False
    finally:
        server.load.under_way -= 1
