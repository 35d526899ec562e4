"""The shorter blocks that there may be behind the whole ones of a prompt, and the one that is taken while it
and they are still being written.

Owns their keys and the choice. Never waits longer than it is worth. Invariant: what is followed is the
prompt's as a whole by its key, and its tokens are compared when its last layer has come, as those of the
blocks before it are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvclient.blocks import meta
from kvclient.blocks.keys import chain
from kvclient.errors import PinsExhausted

MISSING, PENDING, ON_PEER = 0, 1, 4  # a look-up's states
MIN_TAIL = 1 / 8  # of a block: what is left behind the last whole one is worth a block of its own


def part_keys(prefix: Any, rest: Any) -> tuple[list[bytes], range]:
    """Of the tokens `rest` behind the last whole block that was found: keys and lengths of the shorter blocks
    with more than was had, the longest first."""
    last = len(prefix.views) - 1
    size = prefix.chain.token_counts[last]
    lengths = range(min(len(rest), size - 1), max(prefix.part_tokens, int(MIN_TAIL * size) - 1), -1)
    where = {"start": prefix.starts[last + 1], "root": prefix.chain[last]}
    return [chain(prefix.chain.identity, rest[:n], n, **where).keys[0] for n in lengths], lengths


def follow_part(
    prefix: Any, client: Any, rest: Any, patience: Callable[[int, int, int], float]
) -> None:  # fmt: skip
    """Takes the longest of these blocks that is there or on its way. `patience` as extend_from_below() has
    it."""
    keys, lengths = part_keys(prefix, rest)
    states = client.lookup(keys, peers=True).states if keys else b""
    found = zip(keys, lengths, states, strict=True)
    key, tokens, state = next((place for place in found if place[2] != MISSING), (b"", 0, MISSING))
    wait_s = patience(tokens, 1, int(state == ON_PEER)) if tokens and state != PENDING else 0.0
    if not tokens or (state == ON_PEER and not wait_s):
        return
    blocks = client.get([key], follow=True, wait_s=wait_s)
    prefix.handles.append(blocks)
    try:
        view = blocks[0]
    except PinsExhausted:
        return
    if view is not None:
        prefix.part, prefix.part_tokens, prefix.part_pending = view, tokens, True
        prefix.peer_tokens += tokens if state == ON_PEER else 0


def confirmed_part(prefix: Any) -> bool:
    """Whether what was followed holds the tokens that its key says."""
    start = prefix.starts[len(prefix.views)]
    wanted = prefix.group.tokens[start : start + prefix.part_tokens].tobytes()
    known = meta.unpack(prefix.part.meta, prefix.part.tokens)
    return known is not None and known.token_ids == wanted
