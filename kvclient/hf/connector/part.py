"""The shorter blocks that there may be behind the whole ones of a prompt, and the one that is taken while it
and they are still being written, or because it agrees most.

Owns their keys and the choice. Never waits longer than it is worth. Invariant: what is followed is the
prompt's as a whole by its key, and its tokens are compared when its last layer has come, as those of the
blocks before it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvclient.blocks.keys import chain
from kvclient.blocks.match import common_length, verified
from kvclient.blocks.meta import NO_PARENT
from kvclient.errors import PinsExhausted

MISSING, PENDING, RESIDENT, ON_DISK, ON_PEER = range(5)  # a look-up's states
MIN_TAIL = 1 / 8  # of a block: what is left behind the last whole one is worth a block of its own


def tail_tokens(left: int, step: int, block_tokens: int) -> int:
    """How many of the tokens left behind whole blocks get a block of their own; a multiple of step."""
    whole = left // step * step
    return whole if whole >= MIN_TAIL * block_tokens else 0


def parent(prefix: Any) -> bytes:
    """The key that those of the blocks behind the last one had go on from."""
    return prefix.part_chain[len(prefix.views) - 1] if prefix.views else NO_PARENT


def extend_part(prefix: Any, client: Any, patience: Callable[[int, int, int], float]) -> None:
    """Takes along what agrees of a block behind the last one had: KV depends on nothing that follows it. One
    that agrees with more, as a whole, is brought here from disk or another host if it is worth the wait.
    Behind blocks that are still being written there may be one that is, too: it is followed. `patience` as
    PrefixMatch.extend_from_below() has it.
    """
    rest = prefix.group.tokens[prefix.starts[len(prefix.views)] :]
    if prefix.groups:
        return None if prefix.pending else whole_part(prefix, client, rest, patience)
    if prefix.pending:
        return follow_part(prefix, client, rest, patience)
    if keys := client.children(parent(prefix)) if prefix.views and len(rest) else []:
        agreeing_part(prefix, rest, keys, client.get(keys))
    return whole_part(prefix, client, rest, patience)


def part_keys(prefix: Any, rest: Any) -> tuple[list[bytes], range]:
    """Of the tokens `rest` behind the last whole block that was found: keys and lengths of the shorter blocks
    with more than was had, the longest first."""
    count = len(prefix.views)
    size = prefix.chain.token_counts[count - 1] if count else prefix.part_size
    lengths = range(min(len(rest), size - 1), max(prefix.part_tokens, int(MIN_TAIL * size) - 1), -1)
    where = {"start": prefix.starts[count], "root": parent(prefix) if count else None}
    of = prefix.part_chain.identity
    return [chain(of, rest[:n], n, **where).keys[0] for n in lengths], lengths


def whole_part(
    prefix: Any, client: Any, rest: Any, patience: Callable[[int, int, int], float]
) -> None:  # fmt: skip
    """Takes the longest of these blocks that is whole in the prompt, wherever it is. What lies on disk is
    known by its key alone, of many blocks behind one a few are told, and where layers do not all need every
    token, what they need is stored for an end only. So all lengths are asked for.
    """
    keys, lengths = part_keys(prefix, rest)
    states = client.lookup(keys, peers=True).states if keys else b""
    refused = False  # a longer one was not worth the wait
    for key, tokens, state in zip(keys, lengths, states, strict=True):
        below = state in (ON_DISK, ON_PEER)
        if state in (MISSING, PENDING) or (below and refused):
            continue
        wait_s = patience(tokens, 1, int(state == ON_PEER)) if below else 0.0
        if refused := below and not wait_s:
            continue
        if agreeing_part(prefix, rest, [key], client.get([key], wait_s=wait_s)):
            prefix.peer_tokens += tokens if state == ON_PEER else 0
            prefix.disk_tokens += tokens if state == ON_DISK else 0
            return


def agreeing_part(prefix: Any, rest: Any, keys: list[bytes], blocks: Any) -> bool:
    """Takes the one of these blocks that agrees most with the tokens `rest`. False: none with more than what
    was had.
    """
    prefix.handles.append(blocks)
    form, identity = prefix.part_form, prefix.part_chain.identity
    before, behind = prefix.part_tokens, parent(prefix)
    for index, key in enumerate(keys):
        try:
            view = blocks[index]
        except PinsExhausted:
            break
        known = verified(identity, key, view)
        if known is None or known.parent_key != behind:
            continue
        count = common_length(known.ids, rest)
        if count > prefix.part_tokens and form.fits(view, view.tokens, form.layers - 1):
            prefix.part, prefix.part_tokens = view, count
    return prefix.part_tokens > before


def tokens_behind(client: Any, identity: bytes, key: bytes, keys: Sequence[bytes], rest: Any) -> int:
    """How many of the tokens `rest` [tokens] are the first of one of these sealed blocks behind that of a
    key."""
    most = 0
    if not keys:
        return 0
    with client.get(list(keys)) as blocks:
        for index, behind in enumerate(keys):
            try:
                known = verified(identity, behind, blocks[index])
            except PinsExhausted:
                break
            if known is not None and known.parent_key == key:
                most = max(most, common_length(known.ids, rest))
    return most


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
    return prefix.part.holds(prefix.group.tokens[start : start + prefix.part_tokens])
