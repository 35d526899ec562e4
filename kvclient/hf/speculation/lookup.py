"""Prompt look-up: what followed these tokens before, in the same text, may follow them again.

Owns the index of a text's runs of tokens. Never computes. Invariant: a draft is a continuation that stands in
the text, of the longest run that the text ends with.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvclient.checks import check_bounds
from kvclient.hf.speculation.draft import NOTHING, Draft

LONGEST, BRANCHES = 16, 8


class PromptLookup:
    """run: the longest run of tokens that is looked for, `least` the shortest. branches: so many different
    continuations, the latest first, make a tree; 1 makes a chain.
    """

    def __init__(self, run: int = 4, least: int = 2, branches: int = 1) -> None:
        check_bounds("run", run, 1, LONGEST)
        check_bounds("least", least, 1, run)
        check_bounds("branches", branches, 1, BRANCHES)
        self._lengths, self._branches = range(run, least - 1, -1), branches

    def begin(self, vocabulary: int) -> _Text:
        """A drafter of a new text."""
        return _Text(self._lengths, self._branches)


class _Text:
    def __init__(self, lengths: range, branches: int) -> None:
        self._lengths, self._branches = lengths, branches
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of a run, where it ended, oldest first
        self._known = 0  # tokens whose runs are in it

    def draft(self, ids: Sequence[int], depth: int, nodes: int, sample: float | None) -> Draft:
        for end in range(self._known + 1, len(ids)):  # not the newest: it would find itself
            for length in self._lengths:
                if length <= end:
                    held = self._ends.setdefault(tuple(ids[end - length : end]), [])
                    held.append(end)
                    del held[: -self._branches]
        self._known = max(self._known, len(ids) - 1)
        tree = _Tree(nodes)
        for length in self._lengths:
            for end in reversed(self._ends.get(tuple(ids[len(ids) - length :]), [])):
                tree.add(_repeated(ids, end, depth))
            if tree.tokens:  # a shorter run says less
                return Draft(tuple(tree.tokens), tuple(tree.parents))
        return NOTHING


def _repeated(ids: Sequence[int], start: int, count: int) -> list[int]:
    """What follows, and past the end of the text once more from `start`: a text in a loop goes on in it."""
    found = list(ids[start : start + count])
    period = len(ids) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


class _Tree:
    def __init__(self, nodes: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._most, self._places = nodes, dict[tuple[int, int], int]()

    def add(self, chain: Sequence[int]) -> None:
        node = 0
        for token in chain:
            found = self._places.get((node, token))
            if found is None:
                if len(self.tokens) == self._most:
                    return
                self.tokens.append(token)
                self.parents.append(node)
                found = self._places[node, token] = len(self.tokens)
            node = found
