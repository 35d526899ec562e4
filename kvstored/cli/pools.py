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


def run(arguments: argparse.Namespace) -> int:
    places = [os.path.abspath(arguments.pool_dir)] if arguments.pool_dir else []
    try:
        for place in places:  # what cannot be listed would look as if nothing lay there
            os.listdir(place)
    except OSError as error:
        return complain(f"--pool-dir: {error.filename}: {error.strerror}", Exit.USAGE, arguments)
    found = pool_list.pools(places, arguments.prefixes)
    if missing := sorted(set(arguments.prefixes) - {pool.prefix for pool in found}):
        return complain(f"no such pool: {', '.join(missing)}", Exit.NO, arguments)
    freed = {}
    if arguments.remove:
        freed = {pool: pool_list.remove(pool) for pool in found if pool.state == pool_list.ORPHAN}
    orphans = [pool for pool in found if pool.state == pool_list.ORPHAN and not freed.get(pool)]
    rows = [_row(pool, freed.get(pool, 0)) for pool in found]
    freed_bytes = sum(freed.values())
    show(arguments, {"pools": rows, "freed_bytes": freed_bytes}, _text(rows, freed_bytes, arguments.remove))
    return Exit.NO if arguments.remove and orphans else Exit.DONE


def _row(pool: pool_list.Found, freed_bytes: int) -> dict[str, Any]:
    return {
        "pool": pool.prefix,
        "user": _user(pool.uid),
        "size_bytes": pool.size_bytes,
        "state": "removed" if freed_bytes else pool.state,
        "directory": pool.home,
        "pid": pool.pid,
        "why": pool.why,
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
            (row["pool"], row["user"], approximate_size(row["size_bytes"]), row["state"], row["why"])
            for row in rows
        ],
        right=frozenset((2,)),
    )
    orphaned = sum(row["size_bytes"] for row in rows if row["state"] == pool_list.ORPHAN)
    if removing:
        return f"{table}\n{approximate_size(freed_bytes)} freed"
    more = f"\n{approximate_size(orphaned)} belong to nobody: kvstored pools --remove" if orphaned else ""
    return table + more
