"""Where a text is cut before its parts are computed, each for itself.

Owns the rules. Never looks at KV. Invariant: the cuts tile the text in order, and every part but an only one
has at least a block's tokens: a shorter one would not be found.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from kvclient.errors import InvalidArgument

SENTENCE_BLOCKS = 4  # tokens of a part cut at a sentence, in blocks
SLIDE = 16  # tokens that such a cut may move

ENDS = {
    "sentence": re.compile(r"[.!?][\"')\]]*\s+"),
    "paragraph": re.compile(r"\n[ \t]*\n\s*"),
    "document": re.compile(r"\f|^(?:-{3,}|={3,}|\*{3,})[ \t]*\n|(?=^# )", re.MULTILINE),
}
CHUNKERS = ("fixed", *ENDS)


def cuts(texts: Sequence[str], chunker: str, block_tokens: int) -> list[int]:
    """Where each part ends, as a number of tokens. texts: what each token adds to the text.

    "fixed": one part; its blocks are cut by their size alone. "sentence": every four blocks, moved by up to
    16 tokens to the end of a sentence. "paragraph", "document": at blank lines; at form feeds, rules and
    top-level headings.
    """
    if chunker not in CHUNKERS:
        raise InvalidArgument(f"chunker={chunker!r}; it must be one of {', '.join(CHUNKERS)}")
    if chunker == "fixed":
        return [len(texts)]
    starts = list(accumulate(map(len, texts), initial=0))
    found = ENDS[chunker].finditer("".join(texts))
    ends = sorted({bisect_left(starts, match.end()) for match in found})
    if chunker == "sentence":
        ends = _near(ends, len(texts), max(SENTENCE_BLOCKS * block_tokens, block_tokens + SLIDE))
    out, last = [], 0
    for end in ends:
        if end - last >= block_tokens and len(texts) - end >= block_tokens:
            out.append(end)
            last = end
    return [*out, len(texts)]


def _near(ends: list[int], length: int, step: int) -> list[int]:
    """A cut about every `step` tokens, at the nearest of `ends` that is near enough."""
    out, at = [], step
    while at < length:
        near = min(ends, key=lambda end, at=at: abs(end - at), default=at)
        out.append(near if abs(near - at) <= SLIDE else at)
        at = out[-1] + step
    return out
