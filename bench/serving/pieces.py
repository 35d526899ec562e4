"""A run in pieces: what one measured beside what earlier ones did.

Owns how rows are put together. Never measures. Invariant: a figure that is there stays; the same load again
is another round.
"""

from __future__ import annotations

from typing import Any

LOADS = ["a", "b", "c", "d"]


def earlier(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a file has, if it is of this model. Raises SystemExit."""
    if before["model"] != now["model"]:
        raise SystemExit(f"the file is of {before['model']}, this run of {now['model']}: give another --json")
    return {**now, "rounds": before["rounds"], "own": before["own"]}


def add(rounds: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Into the first round of its contender that has none of its loads, or as one more."""
    loads, same = {*LOADS} & row.keys(), [other for other in rounds if other["contender"] == row["contender"]]
    for other in same:
        if loads and not loads & other.keys() and "not_there" not in other:
            other.update({name: value for name, value in row.items() if name in loads or name not in other})
            other.update({name: row[name] for name in ("pss_mib", "pss_at_rest_mib", "pool_mib")})
            return
    rounds.append({**row, "round": len(same)})
