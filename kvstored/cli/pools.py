"""`kvstored pools`: what lies in shared memory, whose it is, and the removal of what nobody owns.

Owns what is printed and the exit code; the verdict is tiers/pool_list.py's. Never talks to a daemon.
Invariant: without --remove nothing changes.
"""

from __future__ import annotations

import argparse
import os
import pwd
from typing import Any

from kvstored.cli import render
from kvstored.cli.answers import complain, show
from kvstored.config.units import approximate_size
from kvstored.errors import Exit
from kvstored.tiers import pool_list


def run(given: argparse.Namespace) -> int:
    places = [os.path.abspath(given.pool_dir)] if given.pool_dir else []
    found = pool_list.pools(places, given.prefixes)
    if missing := sorted(set(given.prefixes) - {one.prefix for one in found}):
        return complain(f"no such pool: {', '.join(missing)}", Exit.NO, given)
    freed = {}
    if given.remove:
        freed = {one.prefix: pool_list.remove(one) for one in found if one.state == pool_list.ORPHAN}
    orphans = [one for one in found if one.state == pool_list.ORPHAN and not freed.get(one.prefix)]
    rows = [_row(one, freed.get(one.prefix, 0)) for one in found]
    freed_bytes = sum(freed.values())
    show(given, {"pools": rows, "freed_bytes": freed_bytes}, _text(rows, freed_bytes, given.remove))
    return Exit.NO if given.remove and orphans else Exit.DONE


def _row(one: pool_list.Found, freed_bytes: int) -> dict[str, Any]:
    return {
        "pool": one.prefix,
        "user": _user(one.uid),
        "size_bytes": one.size_bytes,
        "state": "removed" if freed_bytes else one.state,
        "directory": one.home,
        "pid": one.pid,
        "why": one.why,
    }


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _text(rows: list[dict[str, Any]], freed_bytes: int, removing: bool) -> str:
    if not rows:
        return "no pool lies in shared memory"
    table = render.table(
        ("pool", "user", "size", "state", "why"),
        [
            (one["pool"], one["user"], approximate_size(one["size_bytes"]), one["state"], one["why"])
            for one in rows
        ],
        right=frozenset((2,)),
    )
    orphaned = sum(one["size_bytes"] for one in rows if one["state"] == pool_list.ORPHAN)
    if removing:
        return f"{table}\n{approximate_size(freed_bytes)} freed"
    more = f"\n{approximate_size(orphaned)} belong to nobody: kvstored pools --remove" if orphaned else ""
    return table + more
