"""A bound on how many of a thing there are at a time, and on how many of them one other user holds.

Owns the count. Invariant: one user alone never has all there are, so that nobody else is shut out by it.
"""

from __future__ import annotations

from collections import Counter

from kvstored.errors import NoSpace


class Bound:
    def __init__(self, most: int, text: str) -> None:
        """`text`: a refusal's, with {total} and {most}."""
        self.most = most
        self._text = text
        self._total = 0
        self._held: Counter[int] = Counter()  # by user id; no larger than what there is

    def take(self, user: int | None) -> None:
        """One more. `user`: None for the daemon's own and root, who may have all. Raises NoSpace."""
        if self._total >= self.most:
            raise NoSpace(self._text.format(total=self._total, most=self.most))
        share = max(1, self.most // 2)
        if user is not None and self._held[user] >= share:
            raise NoSpace(
                f"this user has {share} of {self.most}, the most: "
                + self._text.format(total=self._total, most=self.most)
            )
        self._total += 1
        if user is not None:
            self._held[user] += 1

    def give(self, user: int | None) -> None:
        self._total -= 1
        if user is not None:
            self._held[user] -= 1
            if not self._held[user]:
                del self._held[user]
