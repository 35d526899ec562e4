"""The text of an answer as it grows: whole characters only, and nothing of a stop string.

Owns what was shown already. Never chooses a token. Invariant: the pieces that were shown, one after the
other, are the answer's text up to its end or its first stop string, however the tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows for a character whose last bytes are still to come
CONTEXT = 8  # tokens decoded again with each new one: some tokenizers join a word to the one before


class Text:
    """special: whether special tokens are shown. behind: the tokens that this text goes on from, of which
    nothing is shown: a tokenizer that sets a space before words leaves out that of a text's first.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), special: bool = False, behind: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stops, self._special = tokenizer, [s for s in stops if s], special
        self._longest = max(map(len, self._stops), default=1) - 1
        self._tokens: list[int] = []
        self._from = 0  # the first token of the part that is decoded again
        self._held = ""  # decoded, not shown yet
        self._told = 0  # characters of the part that are in _held or were shown
        self._go_on(behind)
        self._read = len(self._tokens)  # that are told
        self.stopped: str | None = None

    def add(self, token: int) -> str:
        """What may be shown now. `stopped` is the stop string that was met, behind which nothing comes."""
        self._tokens.append(token)
        part = self._decode(self._from)
        if not part.endswith(UNFINISHED) or len(self._tokens) - self._read > 4 * CONTEXT:
            self._read = len(self._tokens)
            self._held += part[self._told :]
            self._told = len(part)
            if len(self._tokens) - self._from >= 2 * CONTEXT:
                self._move(part)
        return self._show()

    def end(self) -> str:
        """What was held back, now that nothing follows: up to a stop string, if one is in it."""
        if self.stopped is not None:
            return ""
        self._held += self._decode(self._from)[self._told :]
        shown = self._show()
        if self.stopped is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _move(self, part: str) -> None:
        """Decodes less of what was told from now on: from a token on behind which the text is what it was. In
        the middle of a character it is not, and of letters spelled in single bytes all would be unreadable.
        Nor where only tokens that are not shown are left: the next would be decoded as the first of a text.
        So many starts are tried, not all: where none will do the part grows, and each token comes here.
        """
        last = len(self._tokens) - CONTEXT
        for start in range(last, max(self._from, last - 2 * CONTEXT), -1):
            shorter = self._decode(start)
            if shorter and part.endswith(shorter):
                self._from, self._told = start, len(shorter)
                return

    def _go_on(self, behind: Sequence[int]) -> None:
        """From the first of so many last tokens that begins with a whole character; from none else."""
        for count in range(min(CONTEXT, len(behind)), min(3 * CONTEXT, len(behind)) + 1) if behind else ():
            self._tokens = list(behind[-count:])
            part = self._decode(0)
            if (part or count == len(behind)) and not part.startswith(UNFINISHED):
                self._told = len(part.rstrip(UNFINISHED))
                return
        self._tokens = []

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._tokens[start:], skip_special_tokens=not self._special)

    def _show(self) -> str:
        met = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if met:
            at, self.stopped = min(met)
            shown, self._held = self._held[:at], ""
            return shown
        kept = next(
            (n for n in range(min(self._longest, len(self._held)), 0, -1)
             if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0,
        )  # fmt: skip
        cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown
