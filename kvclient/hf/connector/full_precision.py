"""Tokens kept as computed, beside blocks that hold them quantised: the first of a prompt, which all others
attend to most, and its last whole block, which the answer attends to most.

Owns the blocks they lie in, under identities of their own: one of the first tokens for all prompts that begin
alike, one of the last for each prompt. Never quantises. Invariant: what is stored was computed in full by the
request that stores it, so a request that loaded those tokens stores none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.identity import Dimensions, reuse_identity
from kvclient.errors import NotPermitted, PinsExhausted
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.connector.save import Publisher

SINK_TOKENS = 4
BELOW_S = 1.0  # for a block whose text's others were worth the wait


@dataclass(frozen=True)
class FullPrecisionFormat:
    """What they are stored as: the model's own type, under this identity."""

    identity: bytes
    layout_id: int | None  # None: this client may only read
    form: BlockFormat
    tokens: int  # of a block, at most

    @classmethod
    def of(cls, client: Any, form: BlockFormat, dimensions: Dimensions, tokens: int) -> FullPrecisionFormat:
        """The unquantised format beside `form`, its layout registered with the store."""
        plain = dataclasses.replace(form, codec=None)
        layout = plain.layout(tokens)
        of_plain = dataclasses.replace(dimensions, codec=plain.parameters, layout=bytes(layout))
        identity = reuse_identity(of_plain)
        try:
            return cls(identity, client.register_layout(layout), plain, tokens)
        except NotPermitted:
            return cls(identity, None, plain, tokens)

    def elsewhere(self, client: Any) -> FullPrecisionFormat:
        """The same in another store."""
        return dataclasses.replace(self, layout_id=client.register_layout(self.form.layout(self.tokens)))


@dataclass(frozen=True)
class FullPrecisionFormats:
    """Those of the first tokens and of the last."""

    first: FullPrecisionFormat
    last: FullPrecisionFormat

    @classmethod
    def of(
        cls, client: Any, form: BlockFormat, dimensions: Dimensions, block_tokens: int
    ) -> FullPrecisionFormats | None:
        """None if the blocks are stored as computed anyway."""
        if form.codec is None:
            return None
        sizes = (SINK_TOKENS, block_tokens)
        return cls(*(FullPrecisionFormat.of(client, form, dimensions, size) for size in sizes))

    def elsewhere(self, client: Any) -> FullPrecisionFormats:
        """The same formats, registered with another client."""
        return FullPrecisionFormats(self.first.elsewhere(client), self.last.elsewhere(client))

    def keys(self, chunker: Chunker, tokens: Any) -> list[bytes]:
        """Of the first tokens and of any block of prompts that begin so."""
        first = Chunker("fixed", SINK_TOKENS).chain(self.first.identity, tokens[:SINK_TOKENS])
        return [*first.keys, *chunker.chain(self.last.identity, tokens).keys]

    def get(self, client: Any, chunker: Chunker, tokens: Any) -> Any:
        """What there is of them, pinned."""
        return client.get(self.keys(chunker, tokens))


class FullPrecisionBlocks:
    """Those of one request: taken for the groups whose prefix was found, published for the others."""

    def __init__(
        self, forms: FullPrecisionFormats, client: Any, chunker: Chunker, *, first: Publisher,
        last: Publisher, priority: int,
    ) -> None:  # fmt: skip
        self._forms, self._client, self._chunker, self._priority = forms, client, chunker, priority
        self._first, self.last = first, last
        self._grown: dict[int, Any] = {}  # per row the last whole block of its answer, as stored
        self.publishers = (first, last)

    @property
    def published(self) -> int:
        """How many of its blocks were sealed."""
        return sum(publisher.published for publisher in self.publishers)

    def take(self, prefix: PrefixMatch) -> None:
        """Has the found prefix begin, and end, with what was computed."""
        if not prefix.views:
            return
        last = len(prefix.views) - 1
        ids = prefix.group.tokens[:SINK_TOKENS]
        chain = Chunker("fixed", SINK_TOKENS).chain(self._forms.first.identity, ids)
        prefix.sinks = self._get(prefix, chain, self._forms.first) if len(chain) else None
        if last not in prefix.pending:
            ids = prefix.group.tokens[: prefix.starts[last + 1]]
            chain = self._chunker.chain(self._forms.last.identity, ids)
            if (tail := self._get(prefix, chain[last:], self._forms.last)) is not None:
                prefix.tail = (last, *tail)

    def offer(self, prefix: PrefixMatch, stop: int) -> None:
        """Claims the first tokens, and the last whole block within the first `stop`, if they are computed
        here.
        """
        row, pad = prefix.group.rows[0], prefix.group.pad
        ids = prefix.group.tokens[:SINK_TOKENS]
        if not prefix.views and stop >= len(ids) == SINK_TOKENS and self._forms.first.layout_id is not None:
            chain = Chunker("fixed", SINK_TOKENS).chain(self._forms.first.identity, ids)
            self._first.claim(chain, 0, row, pad)
        chain = self._chunker.chain(self._forms.last.identity, prefix.group.tokens[:stop])
        first = len(prefix.views) + (prefix.part is not None)  # the first block of which nothing was loaded
        if len(chain) > first and self._forms.last.layout_id is not None:
            self.last.claim(chain, len(chain) - 1, row, pad, self._priority // 2)

    def grow(self, tokens: Any, row: int, pad: int, storages: Any, loaded: int) -> None:
        """The last whole block of a row's answer in the place of the one before. loaded: columns that were
        not computed here.
        """
        chain = self._chunker.chain(self._forms.last.identity, tokens)
        last = chain[len(chain) - 1 :] if len(chain) else None
        if last is None or pad + last.start_token < loaded or self._forms.last.layout_id is None:
            return
        before, self._grown[row] = self._grown.get(row), last
        self.last.publish(chain, len(chain) - 1, row, pad, storages, self._priority // 2)
        if before is not None:
            self._client.delete(before)

    def _get(
        self, prefix: PrefixMatch, chain: Any, kind: FullPrecisionFormat
    ) -> tuple[Any, BlockFormat] | None:
        """The chain's only block, if it holds these tokens as computed."""
        below = prefix.disk_tokens + prefix.peer_tokens > 0  # these lie where the others were
        blocks = self._client.get(chain, wait_s=BELOW_S if below else 0.0)
        prefix.handles.append(blocks)
        try:
            view = blocks[0]
        except PinsExhausted:
            return None
        if view is None or not view.holds(chain.token_ids):
            return None
        return (view, kind.form) if kind.form.fits(view, chain.num_tokens, kind.form.layers - 1) else None
