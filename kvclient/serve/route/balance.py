"""Who of several servers is asked: the one that holds most of the prompt, unless it has too much to do.

Owns the rule and nothing else: no clock, no socket. Invariant: a server that is chosen has at most
`imbalance` requests more under way than the one with the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_PIECES = 2  # a shorter beginning fills no block: not worth a queue


@dataclass(eq=False)
class Load:
    """A server as the rule sees it. store: what names the KV it reads; servers of one daemon share it."""

    name: str
    store: str = ""
    under_way: int = 0
    asked: int = 0  # so far: among equals the one that was asked least


def choose(servers: Sequence[Load], matched: Mapping[str, int], imbalance: int) -> Load | None:
    """matched: pieces of the prompt that each store holds. None: there is no server."""
    if not servers:
        return None
    fewest = min(server.under_way for server in servers)
    free = [server for server in servers if server.under_way <= fewest + imbalance]

    def worth(server: Load) -> tuple[int, int, int]:
        held = matched.get(server.store, 0)
        return (-held if held >= LEAST_PIECES else 0, server.under_way, server.asked)

    return min(free, key=worth)
