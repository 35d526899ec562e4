"""The door of a server process: where it listens, and that it asks before others can reach it.

Owns the socket and uvicorn's bounds. Never answers. Invariant: an address beyond loopback needs to be asked
for twice.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import resource
import socket
import sys
from typing import Any

BACKLOG = 1024  # who asks while a model is loaded waits
CONNECTIONS = 2048
WAITING = 1024  # of those, without a whole request
WHOLE_S = 60.0  # for a request to be whole
OWN_FILES = 256  # descriptors that are not connections
GRACE_S = 5  # for answers under way when the server ends


def add_flags(out: argparse.ArgumentParser) -> None:
    """Where to listen, for a command line."""
    add = out.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="default: %(default)s; 0 takes a free one")
    add("--listen-beyond-loopback", action="store_true", help="needed for a --host that others can reach")


def check(made: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Ends the process with 2 where others could reach what nobody asked to show them."""
    if not 0 <= chosen.port < 1 << 16:
        made.error(f"--port={chosen.port}; it must be 0 to 65535")
    if not chosen.listen_beyond_loopback and not _loopback(chosen.host):
        said = "say --listen-beyond-loopback, and --api-key-file"
        made.error(f"--host {chosen.host} can be reached by others: {said}")


def bound(program: str, host: str, port: int) -> socket.socket | None:
    """Listening; None, with the reason on stderr, where that cannot be."""
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
        door.listen(BACKLOG)
    except OSError as error:
        door.close()
        print(f"{program}: cannot listen on {host}:{port}: {error}", file=sys.stderr)
        return None
    return door


def address(host: str, door: socket.socket) -> str:
    """The URL of what listens there."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{door.getsockname()[1]}"


def serve(app: Any, door: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    import uvicorn

    from kvclient.serve.connections import Waiting, heads, protocol

    most = min(CONNECTIONS, max(64, _descriptors() - OWN_FILES))
    config = uvicorn.Config(
        heads(app), log_level="error", access_log=False, timeout_keep_alive=30,
        http=protocol(Waiting(min(WAITING, most // 2), WHOLE_S), most),
        h11_max_incomplete_event_size=64 << 10, timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
        uvicorn.Server(config).run(sockets=[door])


def _descriptors() -> int:
    """How many files this process may have open, having asked for enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + OWN_FILES
    if soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
