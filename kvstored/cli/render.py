"""What people see: tables and lines from plain data. Never talks to a daemon; what is printed as JSON is the
same data.

The only place that knows columns, bars and colours. Colours are for `top` on a terminal alone, and are put on
what is printable already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstored.config.units import approximate_size, format_duration
from kvstored.telemetry.metrics import PIN_OWNERS


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2)


def printable(text: str) -> str:
    """What another process or a file's name says may hold anything, a terminal's commands too."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Columns as wide as they must be; `right` are those of numbers."""
    listed = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in listed) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in listed
    )


def config_text(entries: list[dict[str, str]], as_json: bool) -> str:
    if as_json:
        return json.dumps(entries, indent=2)
    return table(
        ("field", "value", "source"),
        [(entry["name"], entry["value"] or "-", entry["source"]) for entry in entries],
    )


def peers_text(found: dict[str, Any]) -> str:
    served = found["server"]
    over = {0: " over TCP", 1: " over TLS"}.get(served.get("tls"), "")  # a daemon of before does not say
    head = (
        f"node {found['node'] or '-'}, listening on {found['listen'] or 'nothing'}{over}: "
        f"{served.get('connections', 0)} connections, {served.get('served_blocks', 0)} blocks "
        f"({approximate_size(served.get('served_bytes', 0))}) read there, {served.get('refused', 0)} refused"
    )
    rows = [
        (
            peer["namespace"],
            peer["node"],
            peer["address"],
            peer["state"] + (f": {peer['why']}" if peer["state"] == "down" else ""),
            f"{peer['rtt_us']} µs",
            f"{approximate_size(peer['bytes_per_s'])}/s",
            str(peer["fetched"]),
            str(peer["queued"]),
            str(peer["in_flight"]),
            approximate_size(peer["bytes_in_flight"]),
            str(sum(peer[name] for name in ("failed", "corrupt", "malformed", "stalled", "gone", "refused"))),
        )
        for peer in found["peers"]
    ]
    named = ("namespace", "peer", "address", "state")
    header = (*named, "round trip", "rate", "fetched", "waiting", "in flight", "of", "errors")
    lines = [head]
    if rows:
        lines.append(table(header, rows, frozenset((4, 5, 6, 7, 8, 9, 10))))
    return "\n".join([*lines, *_pool_lines(found.get("cluster"))])


def _pool_lines(pool: dict[str, Any] | None) -> list[str]:
    if pool is None:
        return []
    etcd = f"etcd away ({pool['etcd_away']})" if pool["etcd_away"] else "etcd answers"
    members = ", ".join(pool["members"])
    if not pool["master"]:
        return [f"cluster of {members}: no pool, {etcd}"]
    put = (
        f"{pool.get('puts', 0)} blocks put in {pool.get('replicas', 0)} replicas "
        f"({approximate_size(pool.get('put_bytes', 0))}), {pool.get('placed_elsewhere', 0)} elsewhere, "
        f"{pool.get('put_failed', 0)} failed, {pool.get('mended', 0)} made whole again, "
        f"{pool.get('short', 0)} on too few hosts"
    )
    got = (
        f"{pool.get('hits', 0)} found ({approximate_size(pool.get('hit_bytes', 0))}), "
        f"{pool.get('straight', 0)} straight to their place, "
        f"{pool.get('failed_over', 0)} at a second replica, {pool.get('misses', 0)} missing, "
        f"{pool.get('late', 0)} late, {pool.get('corrupt', 0)} corrupt"
    )
    return [f"pool of {members}: master at {pool['master']}, {pool['transport']}, {etcd}", put, got]


def changes_text(changes: list[dict[str, Any]]) -> str:
    if not changes:
        return "nothing has changed"
    rows = [
        (
            change["name"],
            change["before"] or "-",
            change["after"] or "-",
            "applied" if change["applied"] else "after a restart",
        )
        for change in changes
    ]
    return table(("field", "before", "now", "in effect"), rows)


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def status_text(
    status: dict[str, Any], rates: dict[str, dict[str, float]] | None = None, bars: bool = False
) -> str:
    """`rates`: per namespace and counter, increase a second; `bars`: how full memory is (both for top)."""
    up = format_duration(status["uptime_ms"] / 1000)
    lines = [
        f"kvstored {status['version']}   pid {status['pid']}   up {up}   "
        f"own memory {approximate_size(status['rss_bytes'])}   gRPC writers {status['leases']}"
        + ("   DRAINING" if status["draining"] else "")
    ]
    for state in status["degraded"]:
        where = f" ({state['namespace']})" if state["namespace"] else ""
        lines.append(f"DEGRADED  {state['state']}{where}: {state['text']}")
    for namespace in status["namespaces"]:
        lines.extend(_namespace_lines(namespace, (rates or {}).get(namespace["namespace"])))
        if bars:
            lines.extend(_bar_lines(namespace["counters"].get, namespace["disk_quota_bytes"]))
    return "\n".join(lines)


def _namespace_lines(namespace: dict[str, Any], rates: dict[str, float] | None) -> list[str]:
    lines = [
        "",
        f"namespace {namespace['namespace']}"
        + ("   (taken over from an earlier daemon)" if namespace["adopted"] else ""),
    ]
    if namespace["problem"]:
        lines.append(f"  PROBLEM   {namespace['problem']}")
    of = namespace["counters"].get
    used, capacity, faulted = of("used_bytes", 0), of("capacity_bytes", 0), of("faulted_bytes", 0)
    hits, misses = of("hits", 0), of("misses", 0)
    made = of("huge_bytes", 0) if not namespace["huge_pages"] else 0
    huge = f"{approximate_size(made)} of it huge pages, " if made else ""
    lines.append(
        f"  memory    {approximate_size(used)} of {approximate_size(capacity)} used "
        f"({percent(used, capacity)}), {approximate_size(faulted)} faulted in, {huge}"
        f"{'huge pages ' if namespace['huge_pages'] else ''}in {namespace['place']}"
    )
    lines.append(
        f"  blocks    {of('blocks', 0)} sealed, {of('unsealed', 0)} being written, "
        f"{of('zombies', 0)} deleted but pinned, {of('quarantined', 0)} quarantined; "
        f"at most {of('max_blocks', 0)}"
    )
    lines.append(f"  quota     {_quota(namespace)}")
    lines.append(f"  open to   {_open_to(namespace)}")
    lines.append(f"  readers   {of('sessions', 0)} sessions, {of('pins', 0)} pins{_held(of)}")
    lines.append(f"  gets      {hits} hits, {misses} misses ({percent(hits, hits + misses)} hits)")
    lines.append(
        "  so far    "
        + ", ".join(
            f"{of(name, 0)} {word}"
            for name, word in (
                ("seals", "sealed"),
                ("evictions", "evicted"),
                ("deletes", "deleted"),
                ("expired", "expired"),
                ("no_space", "refused for space"),
                ("corrupt", "corrupt"),
            )
        )
    )
    if namespace["disk_quota_bytes"]:
        lines.append(
            f"  disk      {of('disk_files', 0)} files, {approximate_size(of('disk_bytes', 0))}, "
            f"{of('disk_loaded', 0)} loaded, {of('disk_written', 0)} written, "
            f"{of('pending_writes', 0)} waiting, {of('disk_corrupt', 0)} corrupt, "
            f"{of('evictions_unwritten', 0) + of('writes_dropped', 0)} lost before they were written"
            + (", being listed" if of("disk_indexing", 0) else "")
        )
    if rates is not None:
        lines.append(
            "  a second  "
            + ", ".join(
                f"{rates.get(name, 0):.0f} {name}" for name in ("hits", "misses", "seals", "evictions")
            )
        )
    return lines


def _bar_lines(of: Any, disk_quota_bytes: int) -> list[str]:
    hits, misses = of("hits", 0), of("misses", 0)
    rows = [("memory", of("used_bytes", 0), of("capacity_bytes", 0)), ("hits", hits, hits + misses)]
    if disk_quota_bytes:
        rows.append(("disk", of("disk_bytes", 0), disk_quota_bytes))
    return [f"  {name:9} {bar(part, whole)} {percent(part, whole):>7}" for name, part, whole in rows]


def bar(part: int, whole: int, width: int = 40) -> str:
    filled = min(width, width * part // whole) if whole else 0
    return f"[{'#' * filled}{'.' * (width - filled)}]"


_BOLD, _RED, _YELLOW, _GREEN, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
FULL_AT = 36  # of a bar's 40: nearly full is yellow


def painted(text: str) -> str:
    """Colours for a terminal. `text` is printable: what a daemon says can command nothing."""

    def bar_of(found: re.Match[str]) -> str:
        full = found[1] in ("memory", "disk") and found[0].count("#") >= FULL_AT
        return f"{found[0][: found.start(2) - found.start()]}{_YELLOW if full else _GREEN}{found[2]}{_PLAIN}"

    text = re.sub(r"^(DEGRADED  .*|  PROBLEM   .*)$", rf"{_RED}\1{_PLAIN}", text, flags=re.MULTILINE)
    text = re.sub(r"^(namespace \S+)", rf"{_BOLD}\1{_PLAIN}", text, flags=re.MULTILINE)
    text = re.sub(r"^  (memory|hits|disk) +(\[[#.]{40}\])", bar_of, text, flags=re.MULTILINE)
    return text.replace("DRAINING", f"{_YELLOW}DRAINING{_PLAIN}")


def _quota(namespace: dict[str, Any]) -> str:
    disk = namespace["disk_quota_bytes"]
    return f"{approximate_size(namespace['memory_quota_bytes'])} of memory, " + (
        f"{approximate_size(disk)} on disk" if disk else "no disk tier"
    )


def _open_to(namespace: dict[str, Any]) -> str:
    lists = [
        (word, namespace[list_name]) for word, list_name in (("reading", "readers"), ("writing", "writers"))
    ]
    said = "; ".join(f"{word}: {', '.join(listed)}" for word, listed in lists if listed)
    return (said or "nobody but the daemon's own user and root") + ("; salted" if namespace["salted"] else "")


def _or_dash(value: int | None, text: Callable[[int], str] = str) -> str:
    """What is not known of a block on disk before it is loaded."""
    return "-" if value is None else text(value)


def blocks_text(blocks: list[dict[str, Any]], now_ms: int) -> str:
    rows = [
        (
            block["key"],
            block["state"],
            _or_dash(block["token_count"]),
            _or_dash(block["length_bytes"], approximate_size),
            _or_dash(block["layout_id"]),
            _or_dash(block["priority"]),
            format_duration(max(0, now_ms - block["created_ms"]) / 1000) if block["created_ms"] else "-",
        )
        for block in blocks
    ]
    return table(
        ("key", "state", "tokens", "size", "layout", "priority", "age"),
        rows,
        right=frozenset((2, 3, 4, 5, 6)),
    )


def block_text(block: dict[str, Any], now_ms: int) -> str:
    """One block, a line a fact."""
    age = format_duration(max(0, now_ms - block["created_ms"]) / 1000) if block["created_ms"] else "-"
    facts = {
        "key": block["key"],
        "state": block["state"],
        "tokens": _or_dash(block["token_count"], lambda n: f"{n}, from position {block['base_position']}"),
        "size": _or_dash(block["length_bytes"], lambda n: f"{approximate_size(n)} ({n} bytes)"),
        "layout": _or_dash(block["layout_id"]),
        "priority": _or_dash(block["priority"]),
        "age": age,
        "ttl": format_duration(block["ttl_ms"] / 1000) if block["ttl_ms"] else "none",
        "generation": block["generation"],
    }
    return "\n".join(f"{name:11} {value}" for name, value in facts.items())


def _held(of: Any) -> str:
    """How much memory whose pins hold, where it is any."""
    held = {owner: of(f"pinned_{owner}_bytes", 0) for owner in PIN_OWNERS}
    words = [f"{approximate_size(size)} for {owner}s" for owner, size in held.items() if size]
    return f" ({', '.join(words)})" if words else ""


SESSION_FACTS = (
    "session", "pid", "uid", "namespace", "pins", "unsealed", "attached_ms", "resumed", "pinned_bytes",
    "owner", "pin_deadline_ms", "pin_limit_bytes", "device",
)  # fmt: skip


def _terms(session: dict[str, Any]) -> str:
    """Whose the pins of a session are, and when they are asked back."""
    words = [session["owner"]]
    if session["pin_deadline_ms"]:
        words.append(format_duration(session["pin_deadline_ms"] / 1000))
    if session["pin_limit_bytes"]:
        words.append(approximate_size(session["pin_limit_bytes"]))
    return ", ".join([*words, "device"] if session["device"] else words)


def sessions_text(sessions: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(session["session"]),
            str(session["pid"]),
            str(session["uid"]),
            session["namespace"],
            str(session["pins"]),
            approximate_size(session["pinned_bytes"]),
            _terms(session),
            str(session["unsealed"]),
            format_duration(session["attached_ms"] / 1000),
            "yes" if session["resumed"] else "no",
        )
        for session in sessions
    ]
    header = (
        "session", "pid", "uid", "namespace", "pins", "holds", "for", "unsealed", "attached", "resumed",
    )  # fmt: skip
    return table(header, rows, right=frozenset((0, 1, 2, 4, 5, 7, 8)))


def progress_line(done: int, whole: int, width: int = 30) -> str:
    filled = min(width, width * done // whole) if whole else width
    return f"[{'#' * filled}{'.' * (width - filled)}] {approximate_size(done)} of {approximate_size(whole)}"
