"""Where the reuse of a prefix ends, for models whose layers do not all need every token; and where it may end
for those who come later.

Owns both decisions. Never pins more than one end's blocks. Invariant: at the column that hit_end() answers
every group of layers of every text of the batch has what the next token sees, and every state is that of
the same token.

Ends that are kept, as in Marconi (Pan et al., MLSys 2025): the last of a prompt, the last of its answer, and
where a text turned out to part from one that was stored; states besides every few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvclient.hf.connector.load import PrefixMatch

TRIES = 4  # blocks that were there at the look and are gone


def hit_end(
    client: Any, found: Sequence[PrefixMatch], most: int, follow: bool,
    patience: Callable[[int, int], float], stall_s: float,
) -> int:  # fmt: skip
    """The column, at most `most`. What that needs is pinned, or copied; without an end nothing is: 0."""
    most = min(most, *(one.group.pad + one.tokens for one in found))
    ends = {min(most, one.group.pad + start) for one in found for start in one.starts[: len(one.views) + 1]}
    for one in found:
        for group in one.groups:
            group.look(client, len(one.views), follow)
        if one.states is not None:
            one.states.look(client, len(one.views), follow)
    tries = 0
    for column in sorted(ends, reverse=True):
        if column <= 0 or tries == TRIES:
            break
        if all(_covered(one, column - one.group.pad) for one in found):
            tries += 1
            if all(_taken(client, one, column - one.group.pad, follow, patience, stall_s) for one in found):
                return column
            for one in found:
                _released(one)
    return 0


def ends_to_keep(one: PrefixMatch, stop: int, hit: int, parted: int, every: int) -> list[int]:
    """Numbers of blocks behind which a hit shall be able to end: of `stop` tokens that are stored, behind the
    first `hit` of them. parted: blocks that were there of the layers that need all; every: blocks between two
    states, 0: there are none."""
    blocks = sum(start <= stop for start in one.starts) - 1
    ends = {blocks, min(parted, blocks)}
    if every:
        ends.update(range(every, blocks + 1, every))
        if one.starts[blocks] == len(one.group.tokens):
            ends.add(blocks - 1)  # the last token of the same prompt is computed again
    return sorted(end for end in ends if end > 0 and one.starts[end] > hit)


def _covered(one: PrefixMatch, stop: int) -> bool:
    return all(group.covers(stop) for group in one.groups) and (one.states is None or one.states.covers(stop))


def _taken(
    client: Any, one: PrefixMatch, stop: int, follow: bool, patience: Callable[[int, int], float],
    stall_s: float,
) -> bool:  # fmt: skip
    if not all(group.take(client, stop, follow, patience) for group in one.groups):
        return False
    return one.states is None or one.states.take(client, stop, follow, patience, stall_s)


def _released(one: PrefixMatch) -> None:
    for group in one.groups:
        group.release()
    if one.states is not None:
        one.states.tensors = None
