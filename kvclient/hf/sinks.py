"""The first tokens of a prompt in full, beside blocks that hold it quantised: what all others attend to most.

Owns the small blocks they lie in: as computed, under an identity of their own, one for all prompts that begin
alike. Never quantises. Invariant: what is stored was computed in full by the request that stores it, so a
request that loaded the beginning of its prompt stores no sinks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvclient.blocks import meta
from kvclient.blocks.chunker import Chunker
from kvclient.blocks.identity import Dimensions, reuse_identity
from kvclient.errors import NotPermitted, PinsExhausted
from kvclient.hf.form import Form
from kvclient.hf.prefix import Found
from kvclient.hf.publish import Publisher

SINK_TOKENS = 4


@dataclass(frozen=True)
class SinkForm:
    """What they are stored as: the model's own type, under this identity."""

    identity: bytes
    layout_id: int | None  # None: this client may only read
    form: Form

    @classmethod
    def of(cls, client: Any, form: Form, dimensions: Dimensions) -> SinkForm | None:
        """None if the blocks are stored as computed anyway."""
        if form.codec is None:
            return None
        own = dataclasses.replace(form, codec=None)
        layout = own.layout(SINK_TOKENS)
        identity = reuse_identity(dataclasses.replace(dimensions, codec=own.parameters, layout=bytes(layout)))
        try:
            return cls(identity, client.register_layout(layout), own)
        except NotPermitted:
            return cls(identity, None, own)

    def elsewhere(self, client: Any) -> SinkForm:
        """The same in another store."""
        return dataclasses.replace(self, layout_id=client.register_layout(self.form.layout(SINK_TOKENS)))


class Sinks:
    """Those of one request: taken for the groups whose prefix was found, published for the others."""

    def __init__(self, sinks: SinkForm, client: Any, publisher: Publisher) -> None:
        self._sinks, self._client, self.publisher = sinks, client, publisher

    def open(self, one: Found, write: bool) -> None:
        ids = one.group.tokens[:SINK_TOKENS]
        if len(ids) < SINK_TOKENS:
            return
        chain = Chunker("fixed", SINK_TOKENS).chain(self._sinks.identity, ids)
        if one.views:
            blocks = self._client.get(chain)
            one.handles.append(blocks)
            try:
                view = blocks[0]
            except PinsExhausted:
                return
            known = meta.unpack(view.meta, view.tokens) if view is not None else None
            last = self._sinks.form.layers - 1
            fits = known is not None and self._sinks.form.fits(view, SINK_TOKENS, last)
            if fits and known.token_ids == ids.tobytes():
                one.sinks = (view, self._sinks.form)
        elif write and self._sinks.layout_id is not None:
            self.publisher.claim(chain, 0, one.group.rows[0], one.group.pad)
