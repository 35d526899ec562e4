"""What a model thinks aloud, apart from its answer: the text between <think> and </think>, as it grows.

Owns the cut. Never drops a character but the marks and the white space beside them. Invariant: the pieces of
each part, put together, are that part of the whole text, wherever the pieces were cut.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
BEFORE, INSIDE, ANSWER = range(3)


class Reasoning:
    """opened: the prompt ends with the opening mark, as some templates have it. One part, at the start."""

    def __init__(self, opened: bool = False) -> None:
        self._place, self._held = INSIDE if opened else BEFORE, ""
        self._blank = opened  # white space behind a mark is still to come
        self.met = opened  # whether there is reasoning

    @property
    def over(self) -> bool:
        """Whether the answer has begun."""
        return self._place == ANSWER

    def add(self, text: str) -> tuple[str, str]:
        """(of the reasoning, of the answer): what may be shown now."""
        self._held += text
        thought = ""
        if self._place == BEFORE:
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._place, self._held, self._blank = INSIDE, begun[len(OPEN) :], True
                self.met = True
            elif not OPEN.startswith(begun):
                self._place = ANSWER
        if self._place == INSIDE:
            at = self._held.find(CLOSE)
            if at >= 0:
                thought = self._taken(at, at + len(CLOSE)).rstrip()
                self._place, self._blank = ANSWER, True
            else:
                shown = len(self._held) - self._kept()
                thought = self._taken(shown, shown)
        answer = self._taken(len(self._held), len(self._held)) if self._place == ANSWER else ""
        return thought, answer

    def end(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held.rstrip() if self._place == INSIDE else self._held, ""
        return (held, "") if self._place == INSIDE else ("", held)

    def _taken(self, count: int, gone: int) -> str:
        """The first `count` characters; `gone` of them are not held any more."""
        part, self._held = self._held[:count], self._held[gone:]
        if self._blank:
            part = part.lstrip()
            self._blank = not part
        return part

    def _kept(self) -> int:
        """Characters at the end that may be white space before the mark, or the mark's first."""
        most = min(len(CLOSE) - 1, len(self._held))
        near = next((n for n in range(most, 0, -1) if CLOSE.startswith(self._held[-n:])), 0)
        return near + len(before := self._held[: len(self._held) - near]) - len(before.rstrip())


def parted(text: str, opened: bool) -> tuple[str | None, str]:
    """(the reasoning, the answer) of a whole text; None where it has none."""
    reasoning = Reasoning(opened)
    first, then = reasoning.add(text), reasoning.end()
    return first[0] + then[0] or None, first[1] + then[1]
