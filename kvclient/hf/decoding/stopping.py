"""What hears each new token of a generate() call: limits per row, stop strings, ends of sentences, callbacks.

Owns the tokens and the text of the answers as they grow. Never chooses a token. Invariant: a row that has
ended gets no further token, whatever generate() pads it with.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from kvclient.errors import InvalidArgument

UNFINISHED = "\ufffd"  # what a tokenizer shows for a character whose last bytes are still to come
# Of a text that ends with a sentence. A point behind a digit may be that of a number that goes on.
SENTENCE = re.compile(r"(?:[!?。！？]|(?<!\d)\.)[\"')\]]*\s*$")


class Listener(StoppingCriteria):
    """A StoppingCriteria: transformers calls it with every new token of each row."""

    def __init__(
        self, limits: Sequence[int], tokenizer: Any, ends: frozenset[int], stops: Sequence[str] = (),
        on_token: Callable[[int, str], None] | None = None, began: float = 0.0, soft_stop: float = 1.0,
    ) -> None:  # fmt: skip
        """soft_stop: from this share of its limit on, a row ends with a sentence."""
        if not 0 < soft_stop <= 1:
            raise InvalidArgument(f"soft_stop={soft_stop!r}; it must be above 0 and at most 1")
        rows = len(limits)
        self._limits, self._tokenizer, self._ends = limits, tokenizer, ends
        special = _special(tokenizer) if stops else ()
        # Of the stop strings, those that hold a special token: the text that is shown does not.
        self._marks = [stop for stop in stops if any(token in stop for token in special)]
        self._stops = [stop for stop in stops if stop not in self._marks]
        self._on_token, self._soft_stop = on_token, soft_stop
        self.first_at = began
        self._heard = False
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._texts = [""] * rows
        self._told = 0  # characters of the first row that on_token was given
        self._finish: list[str | None] = [None] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        new = input_ids[:, -1].tolist()
        if not self._heard:
            self._heard, self.first_at = True, time.perf_counter()
        for row, token in enumerate(new):
            if self._finish[row] is None:
                self._hear(row, token)
        done = [finish is not None for finish in self._finish]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def answer(self, row: int) -> tuple[list[int], str, str]:
        """(tokens, text, why it ended)."""
        text = self._texts[row] if self._follows else self._decoded(row)
        return self._tokens[row], text, self._finish[row] or "length"

    @property
    def _follows(self) -> bool:
        """Whether the text is needed while it grows."""
        return bool(self._stops or self._marks) or self._on_token is not None or self._soft_stop < 1

    def _decoded(self, row: int, count: int | None = None, marks: bool = False) -> str:
        return self._tokenizer.decode(self._tokens[row][:count], skip_special_tokens=not marks)

    def _hear(self, row: int, token: int) -> None:
        self._tokens[row].append(token)
        if token in self._ends:
            self._finish[row] = "stop"
        elif len(self._tokens[row]) >= self._limits[row]:
            self._finish[row] = "length"
        if not self._follows:
            return
        text = self._decoded(row)
        marked = self._decoded(row, marks=True) if self._marks else ""
        cuts = [text.find(stop) for stop in self._stops if stop in text]
        cuts += [self._shown(row, marked.find(stop)) for stop in self._marks if stop in marked]
        if cuts:
            text, self._finish[row] = text[: min(cuts)], "stop"
        soft = len(self._tokens[row]) >= self._soft_stop * self._limits[row]
        if soft and self._finish[row] is None and SENTENCE.search(text):
            self._finish[row] = "sentence"
        self._texts[row] = text
        if self._on_token is not None and row == 0:
            self._tell(token, text, marked)

    def _shown(self, row: int, at: int) -> int:
        """How many characters are shown of the first `at` of the text with its special tokens."""
        count, whole = 0, ""
        while len(whole) < at:
            count += 1
            whole = self._decoded(row, count, marks=True)
        return len(self._decoded(row, count)) - (len(whole) - at)

    def _tell(self, token: int, text: str, marked: str) -> None:
        assert self._on_token is not None
        upto = len(text)
        if self._finish[0] is None:
            # It may become a stop string.
            held = [_overlap(text, stop) for stop in self._stops]
            held += [_overlap(marked, stop) for stop in self._marks]
            unfinished = len(text) - len(text.rstrip(UNFINISHED))  # some tokenizers show one for each byte
            upto -= max([*held, unfinished])
        piece, self._told = text[self._told : max(upto, self._told)], max(upto, self._told)
        self._on_token(token, piece)


def end_tokens(eos: Any) -> list[int]:
    """What a generation's eos_token_id says: None, a number, some in a list, a tuple or a tensor."""
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    return [] if eos is None else [int(end) for end in eos] if isinstance(eos, (list, tuple)) else [int(eos)]


def _special(tokenizer: Any) -> set[str]:
    """The texts that decode() leaves out of what is shown."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(t) for t in added if t.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return names - {""}


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters a stop string begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
