"""The self-test of an engine's start: a block of its own is stored, found, loaded and compared.

Owns what each outcome means; copies nothing itself. Invariants: a block that comes back changed, that is not
found though it was stored, or that this user or this pool never takes, ends the start; a store that takes
nothing just now (away, draining, full of what is in use) does not: a line says so, and whoever asked compares
the first block that it stores later, and takes Refusing for its client if that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvclient.errors import InvalidArgument
from kvclient.integrations.health import Health

WRONG_LATER = "self-test: the first block that was stored did not come back as it was"
TRIES = 3  # what somebody deletes between a store and its load is no fault


class Tried(NamedTuple):
    """What became of one block. What was not loaded is not the same."""

    stored: bool
    loaded: bool
    same: bool
    where: str = ""  # it differs


class Refusing:
    """In a client's place once a block came back wrong: whatever is asked fails, and so is a miss."""

    def __init__(self, why: str) -> None:
        self._why = why

    def register_layout(self, layout: Any) -> int:
        """Of no use to anybody."""
        return 0

    def __getattr__(self, name: str) -> Any:
        raise InvalidArgument(self._why)


def try_at_start(
    client: Any,
    health: Health,
    attempt: Callable[[], Tried],
    block: tuple[int, int],
    token_counts: Sequence[int] | None = None,
    who: str = "the engine",
) -> bool:
    """Whether a block came back as it was; False where the store keeps none just now. `block`: the layout's
    id and a block's bytes. Raises InvalidArgument for what does not pass by itself, NotPermitted where this
    user may not write.
    """
    evicted, what = True, "was not stored"
    for _ in range(TRIES):
        before = client.stats()["evictions"]
        tried = attempt()
        if tried.loaded:
            if tried.same:
                return True
            where = f" in {tried.where}" if tried.where else ""
            raise InvalidArgument(f"self-test: a block that was stored came back changed{where}")
        if not health.at_start(who):
            return False
        evicted = evicted and client.stats()["evictions"] > before
        if tried.stored:
            what = "that was stored was not found again"
        elif why := _takes_nothing(client, block, token_counts):
            return _put_off(health, who, why)
    if evicted:  # in each try
        return _put_off(health, who, "what it takes is evicted at once: all else in the pool is in use")
    raise InvalidArgument(f"self-test: a block {what}")


def _put_off(health: Health, who: str, why: str) -> bool:
    if health.at_start(who):
        health.not_tried(who, why)
    return False


def _takes_nothing(client: Any, block: tuple[int, int], token_counts: Sequence[int] | None) -> str:
    """Why the store takes no block just now; "" if it does."""
    layout_id, block_bytes = block
    writer = client.create([os.urandom(32)], layout_id, token_counts=token_counts)
    answer = writer.results[0]
    writer.abort()
    if answer == "granted":
        return ""
    stats = client.stats()
    if 0 < stats["capacity_bytes"] < block_bytes:
        raise InvalidArgument(f"a block of {block_bytes} bytes; the pool has {stats['capacity_bytes']}")
    return "the daemon drains" if stats.get("draining") else f"{answer}: all of the pool is in use"
