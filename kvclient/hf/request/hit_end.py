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
    patience: Callable[[int, int, int], float], stall_s: float,
) -> int:  # fmt: skip
    """The column, at most `most`. What that needs is pinned, or copied; without an end nothing is: 0."""
    most = min(most, *(prefix.group.pad + prefix.tokens for prefix in found))
    ends = {
        min(most, prefix.group.pad + start)
        for prefix in found
        for start in [*prefix.starts[: len(prefix.views) + 1], prefix.tokens]
    }
    for prefix in found:
        for group in prefix.groups:
            group.look(client, len(prefix.views), follow, prefix.part_tokens)
        if prefix.states is not None:
            prefix.states.look(client, len(prefix.views), follow)
    tries = 0
    for column in sorted(ends, reverse=True):
        if column <= 0 or tries == TRIES:
            break
        if all(_covered(prefix, column - prefix.group.pad) for prefix in found):
            tries += 1
            if all(
                _taken(client, prefix, column - prefix.group.pad, follow, patience, stall_s)
                for prefix in found
            ):
                return column
            for prefix in found:
                _released(prefix)
    return 0


def ends_to_keep(prefix: PrefixMatch, stop: int, hit: int, parted: int, every: int) -> list[int]:
    """Numbers of blocks behind which a hit shall be able to end: of `stop` tokens that are stored, behind the
    first `hit` of them. parted: blocks that were there of the layers that need all; every: blocks between two
    states, 0: there are none."""
    blocks = sum(start <= stop for start in prefix.starts) - 1
    ends = {blocks, min(parted, blocks)}
    if every:
        ends.update(range(every, blocks + 1, every))
        if prefix.starts[blocks] == len(prefix.group.tokens):
            ends.add(blocks - 1)  # the last token of the same prompt is computed again
    return sorted(end for end in ends if end > 0 and prefix.starts[end] > hit)


def _covered(prefix: PrefixMatch, stop: int) -> bool:
    of_states = prefix.states is None or prefix.states.covers(stop)
    return of_states and all(group.covers(stop) for group in prefix.groups)


def _taken(
    client: Any, prefix: PrefixMatch, stop: int, follow: bool,
    patience: Callable[[int, int, int], float],
    stall_s: float,
) -> bool:  # fmt: skip
    if not all(group.take(client, stop, follow, patience) for group in prefix.groups):
        return False
    return prefix.states is None or prefix.states.take(client, stop, follow, patience, stall_s)


def _released(prefix: PrefixMatch) -> None:
    for group in prefix.groups:
        group.release()
    if prefix.states is not None:
        prefix.states.tensors = None
