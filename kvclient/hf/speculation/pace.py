"""Whether drafting pays.

Owns the seconds of passes with and without a draft. Never drafts. Invariant: with drafts that are never right
all but a bounded share of the passes are plain.
"""

from __future__ import annotations

NEWEST = 0.2  # share of the newest measurement in a mean
TRIAL = 8  # drafted passes before the first judgement
LEAST_GAIN = 1.02
REST, MOST_REST = 32, 1024  # plain passes after a judgement against it: twice as many each time
CHECKED = 64  # every so many drafted passes one is plain, to know what that takes now


class Pace:
    def __init__(self) -> None:
        self.plain_s: float | None = None
        self._drafted_s = self._tokens = 0.0
        self._trials = self._left = self._since = 0
        self._rest = REST

    def drafts(self) -> bool:
        """Whether the next pass should have a draft."""
        if self.plain_s is None or self._since >= CHECKED:
            return False
        if self._left:
            self._left -= 1
            return False
        return True

    def plain(self, seconds: float) -> None:
        """A step without a draft took so many seconds."""
        self._since = 0
        self.plain_s = seconds if self.plain_s is None else _mean(self.plain_s, seconds)

    def drafted(self, seconds: float, tokens: int) -> None:
        """seconds: of drafting, the pass, and the acceptance of so many tokens, at least one."""
        self._since += 1
        self._trials += 1
        first = self._trials == 1
        self._drafted_s = seconds if first else _mean(self._drafted_s, seconds)
        self._tokens = tokens if first else _mean(self._tokens, tokens)
        if self._trials >= TRIAL and self.gain < LEAST_GAIN:
            self._left, self._rest = self._rest, min(2 * self._rest, MOST_REST)
            self._trials = 0
        elif self._trials >= 2 * TRIAL:
            self._rest = REST

    @property
    def gain(self) -> float:
        """Tokens of a drafted pass over those that plain passes give in its time."""
        if not self._drafted_s or not self.plain_s:  # a clock that stands: all passes take the same
            return self._tokens
        return self._tokens * self.plain_s / self._drafted_s

    @property
    def resting(self) -> bool:
        """Whether no drafts are tried for now."""
        return self._left > 0


def _mean(before: float, new: float) -> float:
    return (1 - NEWEST) * before + NEWEST * new
