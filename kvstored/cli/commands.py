"""What the operator's commands do: one function each, over gRPC on the daemon's Unix socket.

Owns the connection for the time of one command. Prints to standard output; errors go to standard error as one
line. Never imports the server: a command works without the native part.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvstored.cli import render, stop
from kvstored.cli.answers import complain, show
from kvstored.cli.connection import Connection, TooLate, complain_of, each_within, no_answer
from kvstored.cli.facts import block_facts, layout_facts, layouts_text, peer_facts
from kvstored.errors import ConfigError, Exit
from kvstored.v1 import admin_pb2, store_pb2

MAX_KEYS = 1024
CLEAR = "\x1b[H\x1b[J"


def run(arguments: argparse.Namespace, directory: str) -> int:
    """Runs one command. The exit code."""
    if (why := _forbidden(directory)) is not None:
        return complain(why, Exit.REFUSED, arguments)
    if arguments.command == "stop":
        return stop.run(arguments, directory)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines would stand beside ours
    command: Callable[[Connection, argparse.Namespace], int] = COMMANDS[arguments.command]
    if not os.path.exists(os.path.join(directory, "grpc.sock")):
        return complain(stop.nobody_in(directory), Exit.UNREACHABLE, arguments)
    try:
        with Connection(directory, arguments.timeout_s) as daemon:
            return command(daemon, arguments)
    except TooLate:
        return no_answer(directory, arguments)
    except grpc.RpcError as error:
        return complain_of(error, directory, arguments)


def _forbidden(directory: str) -> str | None:
    """Why this user cannot ask the daemon that is there, if there is one; else it would seem not to be."""
    socket = os.path.join(directory, "grpc.sock")
    try:
        owner = os.stat(socket).st_uid
    except PermissionError as error:
        return f"{error.filename}: {error.strerror}: only the daemon's own user and root may look"
    except OSError:
        return None
    if os.geteuid() in (0, owner) and os.access(socket, os.W_OK, effective_ids=True):
        return None  # another user's that is open to all is no daemon's: who made it may be anybody
    return f"the daemon in {directory} is user {owner}'s: only that user and root may ask it"


# ---- looking


def _status(daemon: Connection) -> dict[str, Any]:
    reply = daemon.admin.Stats(admin_pb2.StatsRequest(), timeout=daemon.timeout_s)
    return {
        "version": reply.version,
        "pid": reply.pid,
        "uptime_ms": reply.uptime_ms,
        "rss_bytes": reply.rss_bytes,
        "draining": reply.draining,
        "leases": reply.leases,
        "degraded": [
            {name: getattr(state, name) for name in ("state", "namespace", "text", "since_ms")}
            for state in reply.degraded
        ],
        "namespaces": [
            {
                "namespace": namespace.namespace,
                "adopted": namespace.adopted,
                "place": namespace.place,
                "huge_pages": namespace.huge_pages,
                "problem": namespace.problem,
                "memory_quota_bytes": namespace.memory_quota_bytes,
                "disk_quota_bytes": namespace.disk_quota_bytes,
                "readers": list(namespace.readers),
                "writers": list(namespace.writers),
                "salted": namespace.salted,
                "counters": dict(sorted(namespace.counters.items())),
            }
            for namespace in reply.namespaces
        ],
    }


def ping(daemon: Connection, arguments: argparse.Namespace) -> int:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    began = time.monotonic()
    reply = health_pb2_grpc.HealthStub(daemon.channel).Check(
        health_pb2.HealthCheckRequest(), timeout=daemon.timeout_s
    )
    took_ms = (time.monotonic() - began) * 1000
    serves = reply.status == health_pb2.HealthCheckResponse.SERVING
    words = "serves" if serves else "answers, and no namespace serves: kvstored status says why"
    show(arguments, {"serving": serves, "took_ms": round(took_ms, 3)}, f"{words}; {took_ms:.1f} ms")
    return Exit.DONE if serves else Exit.NO


def status(daemon: Connection, arguments: argparse.Namespace) -> int:
    found = _status(daemon)
    text = render.status_text(found)
    if arguments.sessions:
        reply = daemon.admin.Sessions(admin_pb2.SessionsRequest(), timeout=daemon.timeout_s)
        found["sessions"] = [
            {name: getattr(session, name) for name in render.SESSION_FACTS} for session in reply.sessions
        ]
        text += "\n\n" + render.sessions_text(found["sessions"])
    show(arguments, found, text)
    return Exit.DONE


def top(daemon: Connection, arguments: argparse.Namespace) -> int:
    found = _status(daemon)
    if arguments.once:
        show(arguments, found, render.status_text(found))
        return Exit.DONE
    try:
        while True:
            before, began = found, time.monotonic()
            _pause(arguments.interval_s)
            found = _status(daemon)
            rates = _rates(before, found, time.monotonic() - began)
            if arguments.json:
                print(render.as_json({**found, "rates": rates}), flush=True)
            else:
                text = render.printable(render.status_text(found, rates, bars=True))
                print(CLEAR + (render.painted(text) if coloured(sys.stdout) else text), flush=True)
    except KeyboardInterrupt:
        return Exit.DONE


def _pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def coloured(stream: Any) -> bool:
    """A terminal, unless its user wants none (no-color.org)."""
    dumb = os.environ.get("TERM", "dumb") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return stream.isatty() and not dumb


def _rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, dict[str, float]]:
    earlier = {namespace["namespace"]: namespace["counters"] for namespace in before["namespaces"]}
    return {
        namespace["namespace"]: {
            name: max(0, value - earlier.get(namespace["namespace"], {}).get(name, value)) / seconds
            for name, value in namespace["counters"].items()
        }
        for namespace in after["namespaces"]
    }


def config(daemon: Connection, arguments: argparse.Namespace) -> int:
    reply = daemon.admin.Config(admin_pb2.ConfigRequest(), timeout=daemon.timeout_s)
    entries = [
        {name: getattr(entry, name) for name in ("name", "value", "source", "unit", "doc")}
        for entry in reply.entries
    ]
    print(render.printable(render.config_text(entries, as_json=arguments.json)))
    return Exit.DONE


def reload(daemon: Connection, arguments: argparse.Namespace) -> int:
    reply = daemon.admin.Reload(admin_pb2.ReloadRequest(), timeout=daemon.timeout_s)
    changes = [
        {name: getattr(change, name) for name in ("name", "before", "after", "applied")}
        for change in reply.changes
    ]
    show(arguments, changes, render.changes_text(changes))
    return Exit.DONE


def _pages(daemon: Connection, arguments: argparse.Namespace, most: int) -> Iterator[dict[str, Any]]:
    token, left = "", most
    while left > 0:
        request = admin_pb2.ListRequest(
            namespace=arguments.namespace, page_token=token, limit=min(left, 1000),
            key_prefix=arguments.prefix,
        )  # fmt: skip
        reply = daemon.admin.List(request, timeout=daemon.timeout_s)
        yield from map(block_facts, reply.blocks)
        left -= len(reply.blocks)
        token = reply.next_page_token
        if not token:
            return


def _described(daemon: Connection, arguments: argparse.Namespace) -> dict[str, Any] | None:
    request = admin_pb2.DescribeRequest(namespace=arguments.namespace, key=arguments.key)
    try:
        return block_facts(daemon.admin.Describe(request, timeout=daemon.timeout_s).block)
    except grpc.RpcError as error:
        # An unknown namespace is NOT_FOUND too, and is the caller's error, not the answer no.
        if error.code() is not grpc.StatusCode.NOT_FOUND or "namespace" in error.details():
            raise
        return None


def describe(daemon: Connection, arguments: argparse.Namespace) -> int:
    if (found := _described(daemon, arguments)) is None:
        return complain(f"no such block in namespace {arguments.namespace!r}", Exit.NO, arguments)
    show(arguments, found, render.block_text(found, int(time.time() * 1000)))
    return Exit.DONE


def ls(daemon: Connection, arguments: argparse.Namespace) -> int:
    if arguments.key is not None:
        if (found := _described(daemon, arguments)) is None:
            return complain("no such block", Exit.NO, arguments)
        blocks = [found]
    else:
        blocks = list(_pages(daemon, arguments, arguments.limit + 1))
        if len(blocks) > arguments.limit:  # said, so that nobody takes the part for the whole
            blocks.pop()
            print(f"kvstored: there are more than these {arguments.limit}: --limit N", file=sys.stderr)
    if arguments.quiet and not arguments.json:
        sys.stdout.write("".join(block["key"] + "\n" for block in blocks))
    else:
        show(arguments, blocks, render.blocks_text(blocks, int(time.time() * 1000)))
    return Exit.DONE


# ---- changing


def rm(daemon: Connection, arguments: argparse.Namespace) -> int:
    deleted: list[bool] = []
    for start in range(0, len(arguments.keys), MAX_KEYS):
        request = store_pb2.DeleteRequest(
            namespace=arguments.namespace, keys=arguments.keys[start : start + MAX_KEYS]
        )
        deleted.extend(daemon.store.Delete(request, timeout=daemon.timeout_s).deleted)
    found = {
        "deleted": sum(deleted),
        "missing": [key.hex() for key, gone in zip(arguments.keys, deleted, strict=True) if not gone],
    }
    show(arguments, found, f"{found['deleted']} deleted, {len(found['missing'])} not there")
    return Exit.NO if found["missing"] else Exit.DONE


def push(daemon: Connection, arguments: argparse.Namespace) -> int:
    told = 0
    for start in range(0, len(arguments.keys), MAX_KEYS):
        keys = arguments.keys[start : start + MAX_KEYS]
        request = store_pb2.PushRequest(namespace=arguments.namespace, keys=keys, to=arguments.to)
        told += daemon.store.Push(request, timeout=daemon.timeout_s).told
    found = {"told": told, "left_out": len(arguments.keys) - told}
    words = f"; {found['left_out']} left out, too many wait for it" if found["left_out"] else ""
    show(arguments, found, f"{arguments.to} is told to come for {told}{words}")
    return Exit.NO if found["left_out"] else Exit.DONE


def flush(daemon: Connection, arguments: argparse.Namespace) -> int:
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ConfigError("flush deletes every sealed block: confirm with --yes")
        question = f"Delete every sealed block of namespace {arguments.namespace!r}? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)  # standard output is the answer's
        answer = sys.stdin.readline()
        if not answer:
            raise ConfigError("flush was not answered: confirm with y, or with --yes")
        if answer.strip().lower() not in ("y", "yes"):
            return Exit.NO
    request = admin_pb2.FlushRequest(namespace=arguments.namespace)
    deleted = daemon.admin.Flush(request, timeout=daemon.timeout_s).deleted
    show(arguments, {"deleted": deleted}, f"{deleted} deleted")
    return Exit.DONE


def revoke(daemon: Connection, arguments: argparse.Namespace) -> int:
    request = admin_pb2.RevokeRequest(namespace=arguments.namespace, session=arguments.session)
    found = daemon.admin.Revoke(request, timeout=daemon.timeout_s).found
    words = f"asked for the blocks of session {arguments.session}" if found else "there is no such session"
    show(arguments, {"session": arguments.session, "found": found}, words)
    return Exit.DONE if found else Exit.NO


def drain(daemon: Connection, arguments: argparse.Namespace) -> int:
    request = admin_pb2.DrainRequest(
        on=not arguments.off, wait_ms=0 if arguments.off else int(arguments.wait_s * 1000)
    )
    reply = daemon.admin.Drain(request, timeout=daemon.timeout_s + arguments.wait_s)
    words = "refusing new blocks" if reply.draining else "accepting new blocks"
    show(
        arguments,
        {"draining": reply.draining, "unsealed": reply.unsealed},
        f"{words}; {reply.unsealed} being written",
    )
    return Exit.NO if reply.draining and reply.unsealed else Exit.DONE


def scrub(daemon: Connection, arguments: argparse.Namespace) -> int:
    live = sys.stderr.isatty() and not arguments.json
    last = admin_pb2.ScrubResponse()
    steps = daemon.admin.Scrub(admin_pb2.ScrubRequest(namespace=arguments.namespace))
    try:
        for last in each_within(steps, daemon.timeout_s):
            if live:
                line = render.progress_line(last.read_bytes, last.total_bytes)
                print("\r" + line, end="", file=sys.stderr, flush=True)
    finally:
        if live:  # what went wrong has a line of its own
            print(file=sys.stderr)
    request = admin_pb2.IntegrityRequest(namespace=arguments.namespace)
    daemon.admin.Integrity(request, timeout=daemon.timeout_s)
    found = {name: getattr(last, name) for name in ("verified", "computed", "corrupt", "read_bytes")}
    show(
        arguments,
        found,
        f"{last.verified} verified, {last.computed} had no checksum and got one, "
        f"{last.corrupt} corrupt and dropped; the index is consistent",
    )
    return Exit.NO if last.corrupt else Exit.DONE


def layouts(daemon: Connection, arguments: argparse.Namespace) -> int:
    request = store_pb2.ListLayoutsRequest(namespace=arguments.namespace)
    found = [
        layout_facts(layout) for layout in daemon.store.ListLayouts(request, timeout=daemon.timeout_s).layouts
    ]
    show(arguments, found, layouts_text(found))
    return Exit.DONE


def peers(daemon: Connection, arguments: argparse.Namespace) -> int:
    reply = daemon.admin.Peers(admin_pb2.PeersRequest(), timeout=daemon.timeout_s)
    found = peer_facts(reply)
    show(arguments, found, render.peers_text(found))
    return Exit.DONE if all(peer["state"] == "up" for peer in found["peers"]) else Exit.NO


COMMANDS: dict[str, Callable[[Connection, argparse.Namespace], int]] = {
    "ping": ping,
    "status": status,
    "ls": ls,
    "describe": describe,
    "rm": rm,
    "flush": flush,
    "revoke": revoke,
    "drain": drain,
    "scrub": scrub,
    "top": top,
    "config": config,
    "reload": reload,
    "layouts": layouts,
    "peers": peers,
    "push": push,
}
