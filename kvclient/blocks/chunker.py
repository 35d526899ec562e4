"""Where a text is cut: into blocks, as prompts are stored, and into parts that are computed each for itself.

Owns the rules. Never looks at KV. Invariants: a block is cut by what stands before its end and at most 17
tokens behind it, so texts that begin alike are cut alike (where tokens without a text follow, "sentence" and
"document" may look behind them: such texts may be cut apart, and miss); every part but an only one has at
least a block's tokens, and its first block a whole window: a shorter one would not be found.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS, MAX_BLOCK_TOKENS
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

SENTENCE_BLOCKS = 4  # tokens of a part cut at a sentence, in blocks
SLIDE = 16  # tokens that such a cut may move
MIN_REST = 8  # a part does not end less than a block / MIN_REST behind a block

ENDS = {
    "sentence": re.compile(r"[.!?][\"')\]]*(?=\s)"),
    "paragraph": re.compile(r"\n[ \t]*\n"),  # of several blank lines the first: how many follow is not known
    "document": re.compile(r"\f|^(?:-{3,}|={3,}|\*{3,})[ \t]*\n|(?=^# )", re.MULTILINE),
}
CHUNKERS = ("fixed", *ENDS)


class Chunker:
    """The rule that prompts are cut into blocks by. All who share blocks use the same one.

    "fixed": every block_tokens. "sentence": each cut moved by up to 16 tokens (an eighth of a block, if that
    is less) to the end of a sentence. "paragraph", "document": every block_tokens, and at the first end of a
    paragraph or document behind a block; a new part begins there. All but "fixed" need the tokenizer.
    """

    def __init__(
        self, name: str = "fixed", block_tokens: int = DEFAULT_BLOCK_TOKENS, tokenizer: Any = None
    ) -> None:
        if name not in CHUNKERS:
            raise InvalidArgument(f"chunker={name!r}; it must be one of {', '.join(CHUNKERS)}")
        check_bounds("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
        block_tokens, self.texts = int(block_tokens), Texts(tokenizer)
        if name != "fixed" and not self.texts.known:
            raise InvalidArgument(f"chunker={name!r} cuts by what tokens say: it needs tokenizer=")
        self.name, self.block_tokens = name, block_tokens
        self.slide = min(SLIDE, block_tokens // 8) if name == "sentence" else 0
        self.most = block_tokens + self.slide  # tokens of a block
        self.window = block_tokens - self.slide  # that its fingerprint is taken over, at most
        # Known tokens from a block's start on with which its end is certain.
        self.certain = block_tokens if name == "fixed" else self.most + 1

    def counts(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of each block of `ids` [tokens], as far as their ends are certain."""
        size, out, at = self.block_tokens, [], 0
        if self.name == "fixed":
            return [size] * (len(ids) // size)
        ends = self.texts.ends(self.name, ids)
        part = 0
        while len(ids) - at >= self.certain:
            if self.name == "sentence":
                count = _nearest(ends, at + size, self.slide) - at
            else:
                end = _first(ends, part, size)
                count = end - at if end <= at + size else size
                part = end if end <= at + size else part
            out.append(count)
            at += count
        return out

    def chain(
        self, identity: bytes, ids: Any, *, partial: bool = False, start: int = 0, root: bytes | None = None
    ) -> Any:
        """The keys of a text's blocks (kvclient.blocks.keys). partial: with what is left behind the last."""
        from kvclient._core import Chain  # as kvclient.blocks.keys.chain() makes it

        if self.name == "fixed":
            return Chain(identity, ids, self.block_tokens, None, partial, None, start, root, 0)
        counts = self.counts(ids)
        left = len(ids) - sum(counts)
        if partial and left:
            counts.append(left)
        return Chain(identity, ids, self.most, None, False, counts, start, root, self.window)


class Texts:
    """What each token adds to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[list[int]], str] | None = getattr(tokenizer, "decode", None)
        self._kept: dict[int, str] = {}

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer to ask."""
        return self._decode is not None

    def of(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The text of each token of `ids` [tokens]."""
        assert self._decode is not None, "Chunker refuses rules that need texts without a tokenizer"
        known = self._kept
        for token in {int(token) for token in ids}.difference(known):
            known[token] = self._told(token)
        return [known[int(token)] for token in ids]

    def _told(self, token: int) -> str:
        """Behind another token: alone many a tokenizer leaves out the space that the token begins with."""
        assert self._decode is not None
        alone, twice = self._decode([token]), self._decode([token, token])
        return twice[len(alone) :] if twice.startswith(alone) and twice != alone else alone

    def ends(self, rule: str, ids: Sequence[int] | np.ndarray) -> list[int]:
        """Behind which tokens of `ids` [tokens] the rule lets a block end, ascending."""
        return _ends(rule, self.of(ids))


def cuts(texts: Sequence[str], chunker: str, block_tokens: int) -> list[int]:
    """Where each part of a text ends, as a number of tokens. texts: what each token adds to it.

    "fixed": one part. "sentence": every four blocks, moved by up to 16 tokens to the end of a sentence.
    "paragraph", "document": at blank lines; at form feeds, rules and top-level headings.
    Raises InvalidArgument for a chunker that is not known.
    """
    if chunker not in CHUNKERS:
        raise InvalidArgument(f"chunker={chunker!r}; it must be one of {', '.join(CHUNKERS)}")
    if chunker == "fixed":
        return [len(texts)]
    ends = _ends(chunker, texts)
    if chunker == "sentence":
        ends = _every(ends, len(texts), max(SENTENCE_BLOCKS * block_tokens, block_tokens + SLIDE))
    out, last = [], 0
    for end in ends:
        if end - last >= block_tokens and len(texts) - end >= block_tokens:
            out.append(end)
            last = end
    return [*out, len(texts)]


def _ends(rule: str, texts: Sequence[str]) -> list[int]:
    """Numbers of tokens behind which something ends, ascending."""
    starts = list(accumulate(map(len, texts), initial=0))
    found = ENDS[rule].finditer("".join(texts))
    return sorted({bisect_left(starts, match.end()) for match in found})


def _nearest(ends: list[int], wanted: int, slide: int) -> int:
    """That of `ends` which is nearest, if it is near enough."""
    low, high = bisect_left(ends, wanted - slide), bisect_right(ends, wanted + slide)
    return min(ends[low:high], key=lambda end: abs(end - wanted), default=wanted)


def _first(ends: list[int], part: int, size: int) -> int:
    """The end of the part that begins at `part`: behind a block, and not so soon that its last is a mere bit.
    """
    for end in ends[bisect_left(ends, part + size) :]:
        rest = (end - part) % size
        if rest == 0 or rest * MIN_REST >= size:
            return end
    return 1 << 62


def _every(ends: list[int], length: int, step: int) -> list[int]:
    """A cut about every `step` tokens, at the nearest of `ends` that is near enough."""
    out, at = [], step
    while at < length:
        out.append(_nearest(ends, at, SLIDE))
        at = out[-1] + step
    return out
