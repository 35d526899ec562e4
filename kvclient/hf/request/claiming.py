"""How a request's claims are made: of what the served model is, and of what attach() was told.

Owns nothing. Never talks to the store. Invariant: all publishers of one request count on one clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvclient.hf.call import Clock
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.claim import Claims
from kvclient.hf.connector.full_precision import FullPrecisionBlocks
from kvclient.hf.connector.save import Publisher
from kvclient.hf.request.options import Options
from kvclient.hf.request.served_model import ServedModel


def make_claims(
    client: Any, served: ServedModel, options: Options, clock: Clock, same: Callable[[], bool]
) -> Claims:
    """same: whether the model is still the one whose identity the blocks would have."""

    def publisher(layout_id: int | None, form: BlockFormat) -> Publisher:
        layout_id = -1 if layout_id is None else layout_id
        return Publisher(client, layout_id, form.layers, options.priority, options.ttl_s, clock, form)

    sinks = None
    if served.sinks is not None:
        first, last = (publisher(f.layout_id, f.form) for f in (served.sinks.first, served.sinks.last))
        sinks = FullPrecisionBlocks(
            served.sinks, client, options.chunker, first=first, last=last, priority=options.priority
        )
    return Claims(
        client, served.identity, options.chunker, publisher(served.layout_id, served.form), sinks,
        priority=options.priority, step=served.form.step, same=same,
    )  # fmt: skip
