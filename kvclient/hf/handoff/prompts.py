"""What is said of prompts that are handed over.

Owns the text of it. Never has KV: that comes by the store. Invariant: from_json(to_json()) is equal, and what
to_json() cannot have said is refused by name.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvclient.checks import check_bounds, check_real
from kvclient.errors import InvalidArgument
from kvclient.hf.handoff.first_token import First
from kvclient.hf.handoff.lease import Lease
from kvclient.hf.handoff.thread import Prefill

VERSION = 2
MOST_TOKENS = 1 << 20
MOST_ROWS = 1024
MOST_JSON_BYTES = 36 << 20
MOST_LISTS = 1 << 16  # and objects, in a text
MARK_BYTES = 32
KEY_BYTES = 32
MOST_KEYS = 1 << 16  # of more blocks none is named: they are derived
NODE = re.compile(r"[a-z0-9_.-]{0,63}")  # as a daemon's configuration wants it
LEASE_S = 30.0
LEASE_BOUNDS_S = (3.0, 3600.0)  # blocks live for whole seconds; a lease is some of them


@dataclass(frozen=True)
class Handoff:
    """Prompts whose KV is, or is being, computed under this identity."""

    identity: bytes  # 32 bytes: what must be the same where they are resumed
    rows: tuple[tuple[int, ...], ...]  # token ids of each prompt of the batch, without padding
    block_tokens: int  # of whole blocks
    mark: bytes  # 32 random bytes: what a host that decodes them says that it does by
    lease_s: float = LEASE_S  # without a word of who decodes, until the blocks are held no more
    node: str = ""  # the name of the host that prefills, among its peers; "": it has none
    pushed: int = field(default=0, compare=False)  # blocks that the node `to` was told to come for
    _keys: bytes = field(default=b"", compare=False, repr=False)
    _first: First | None = field(default=None, compare=False)
    _prefill: Prefill | None = field(default=None, compare=False, repr=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first prompt."""
        return self.rows[0]

    @property
    def keys(self) -> bytes:
        """The keys of the blocks that the prefill leaves, 32 bytes each, the prompts' first. Behind them
        those of other prompts' blocks that it uses inside of these, as far as there is room; where they are
        computed one by one, of those that have begun. b"": who decodes derives the prompts', as of more than
        MOST_KEYS."""
        if not self._keys or self._prefill is None:
            return self._keys
        return (self._keys + self._prefill.inside)[: MOST_KEYS * KEY_BYTES]

    @property
    def first(self) -> First | None:
        """The first token of each prompt, and the sampler's state behind it: once the prefill has ended, and
        if it chose by options that both ends can compare."""
        return self._first if self._prefill is None else self._prefill.first

    def to_json(self) -> str:
        """A text for the other host: the identity, the block size, the mark, this host's node, the keys, the
        token ids, which the keys are made of, and the first token, if it is there by now."""
        said = {"version": VERSION, "identity": self.identity.hex(), "block_tokens": self.block_tokens}
        said |= {"mark": self.mark.hex(), "lease_s": self.lease_s, "node": self.node}
        said |= {"keys": base64.b64encode(self.keys).decode()}
        if (first := self.first) is not None:
            said["first"] = first.said()
        return json.dumps({**said, "rows": [list(row) for row in self.rows]})

    @classmethod
    def from_json(cls, text: str | bytes) -> Handoff:
        """Raises InvalidArgument for what to_json() cannot have said."""
        if len(text) > MOST_JSON_BYTES:
            raise InvalidArgument(f"a handoff of {len(text)} bytes, the limit is {MOST_JSON_BYTES}")
        try:
            text = text if isinstance(text, str) else text.decode()
            if (opened := text.count("[") + text.count("{")) > MOST_LISTS:
                raise InvalidArgument(f"a handoff of {opened} lists, the limit is {MOST_LISTS}")
            said = json.loads(text)
            if said["version"] != VERSION:
                raise InvalidArgument(f"a handoff of version {said['version']!r}; this is {VERSION}")
            rows, size = tuple(tuple(row) for row in said["rows"]), said["block_tokens"]
            identity, mark = bytes.fromhex(said["identity"]), bytes.fromhex(said["mark"])
            lease_s, first = said["lease_s"], said.get("first")
            # A handoff of before 2026-11-30 has neither.
            node, keys = said.get("node", ""), base64.b64decode(said.get("keys", ""), validate=True)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"no handoff: {error!r:.200}") from None
        if len(identity) != 32 or len(mark) != MARK_BYTES or type(size) is not int:
            raise InvalidArgument("no handoff: identity and mark have 32 bytes, and a block a size")
        if type(lease_s) not in (int, float) or not isinstance(node, str):
            raise InvalidArgument(f"no handoff: lease_s={lease_s!r:.40}, node={node!r:.80}")
        check_real("lease_s", lease_s, *LEASE_BOUNDS_S)  # before float(): a whole number may be too large
        first = None if first is None else First.of(first)
        handoff = cls(identity, rows, size, mark, float(lease_s), node, _keys=keys, _first=first)
        handoff.check()
        return handoff

    def check(self) -> None:
        """Raises InvalidArgument for what is beyond the limits."""
        check_bounds("prompts", len(self.rows), 1, MOST_ROWS)
        check_bounds("block_tokens", self.block_tokens, 1, MOST_TOKENS)
        check_real("lease_s", self.lease_s, *LEASE_BOUNDS_S)
        if not NODE.fullmatch(self.node):
            raise InvalidArgument(f"no handoff: {self.node!r:.80} is no host's name")
        check_bounds("bytes of a key", len(self._keys) % KEY_BYTES, 0, 0)
        check_bounds("keys", len(self._keys) // KEY_BYTES, 0, MOST_KEYS)
        for row in self.rows:
            check_bounds("token_ids", len(row), 1, MOST_TOKENS)
            if not all(type(token) is int and 0 <= token < 1 << 31 for token in row):
                raise InvalidArgument("no handoff: a token id is a whole number of 31 bits")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the prefill has ended, waited for so long; where it runs. Raises what it raised."""
        return self._prefill is None or self._prefill.wait(timeout_s)

    @property
    def held(self) -> bool:
        """Whether the blocks are held for who decodes them; where the prefill ran."""
        return self._prefill is not None and self._prefill.held

    def release(self) -> None:
        """Holds the blocks no more: nobody will decode them. They stay in the store like any others."""
        if self._prefill is not None:
            self._prefill.release()

    def lease(self, client: Any) -> Lease:
        """Says from here on, where it will be decoded, that it is still wanted: while it waits for its turn,
        say. resume() does so by itself. `with handoff.lease(client): …`, or close() it."""
        return Lease(client, self.mark, self.lease_s)


def packed(chains: Sequence[Any]) -> bytes:
    """Their keys, 32 bytes each; b"" if they are more than a handoff names."""
    keys = b"".join(b"".join(c) if isinstance(c, list) else c.packed_keys for c in chains)
    return keys if len(keys) <= MOST_KEYS * KEY_BYTES else b""


def chains_of(attachment: Any, model: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    """The blocks of each prompt, with what is left behind the last whole one where that is stored; behind
    those of all prompts the blocks of layers that do not need every token, of states, and of tokens kept as
    computed beside quantised ones."""
    served, chunker = attachment._current(model), attachment.chunker
    if served is None:
        return []
    chains, beside = [], list[Any]()
    for row in rows:
        chain = chunker.chain(served.identity, row)
        kept, left = row, 0
        if (served.tails and len(chain)) or served.plain:
            left = served.tail_tokens(len(row) - chain.num_tokens, chunker.block_tokens)
        if left:
            parts, kept = served.parts, row[: chain.num_tokens + left]
            if parts is None:
                chain = chunker.chain(served.identity, kept, partial=True)
            else:
                beside.append(chunker.chain(parts.identity, kept, partial=True)[len(chain) :])
        chains.append(chain)
        beside += served.beside(chunker, kept, bool(left))
    chains += beside
    for row in rows:
        if served.sinks is not None:
            chains.append(served.sinks.keys(chunker, list(row)))
    return [chain for chain in chains if len(chain)]
