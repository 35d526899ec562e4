"""Which stores hold which beginnings of prompts, as far as this router has seen.

Owns a bounded table of what was sent where, newest use last. Never holds a prompt: pieces are hashes, chained
from who asks. Invariant: two who share no KV (another key, salt or model) share no entry.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

PIECE_BYTES = 128
MOST_PIECES = 8192  # of one prompt: 1 MiB
MOST_ENTRIES = 1 << 17


class Prefixes:
    """most: pieces that are remembered."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self._held: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def matched(self, pieces: Sequence[bytes]) -> Counter[str]:
        """How many of the first pieces each store holds, without a gap."""
        out: Counter[str] = Counter()
        going: set[str] | None = None
        for count, piece in enumerate(pieces, 1):
            holders = self._held.get(piece, set())
            going = set(holders) if going is None else going & holders
            if not going:
                break
            out.update(dict.fromkeys(going, 1))
            assert max(out.values()) == count
        return out

    def note(self, pieces: Sequence[bytes], store: str) -> None:
        """The store has these pieces of a prompt. Its first are forgotten last: without them the others say
        nothing.
        """
        for piece in reversed(pieces):
            self._held.setdefault(piece, set()).add(store)
            self._held.move_to_end(piece)
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def forget(self, store: str) -> None:
        """It has lost what it held."""
        for piece in [piece for piece, holders in self._held.items() if store in holders]:
            self._held[piece].discard(store)
            if not self._held[piece]:
                del self._held[piece]


def pieces_of(body: dict[str, Any], who: str) -> list[bytes]:
    """A request's prompt as hashes of its pieces, each of all before it; the last, unfinished one left out.
    who: the header that says whose KV it may use.
    """
    cache = body.get("cache")
    salt = cache.get("salt", "") if isinstance(cache, dict) else ""
    scope = json.dumps([who, str(salt), str(body.get("model"))])
    digest, text, out = hashlib.sha256(scope.encode()).digest(), _prompt(body), []
    for at in range(0, min(len(text), MOST_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        digest = hashlib.sha256(digest + text[at : at + PIECE_BYTES]).digest()[:16]
        out.append(digest)
    return out


def _prompt(body: dict[str, Any]) -> bytes:
    """What a template makes the prompt of, in its order; of several prompts the first."""
    if "messages" in body:
        content: Any = [body.get("tools") or None, body.get("system"), body["messages"]]
    elif "input" in body:
        content = [body.get("instructions"), body["input"]]
    elif "state" in body:
        content = body["state"]
    else:
        content = body.get("prompt")
        several = isinstance(content, list) and content and not isinstance(content[0], int)
        content = content[0] if several else content
    # Values only, and no closing brackets but at the end: a longer list begins with the bytes of a shorter.
    return "\0".join(_leaves(content)).encode(errors="surrogatepass")


def _leaves(content: Any) -> Iterable[str]:
    left = [content]
    while left:  # as deep as it may be
        part = left.pop()
        if isinstance(part, dict):
            names = sorted(part, key=lambda name: (name != "role", name), reverse=True)
            left += [part[name] for name in names]
        elif isinstance(part, list):
            left += reversed(part)
        elif part is not None:
            yield str(part)
