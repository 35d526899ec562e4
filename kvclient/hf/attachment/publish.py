"""Leaves in the store what a caller's own loop computed: the blocks of a text whose KV one row's cache holds.

Owns nothing: it borrows the cache. Never computes. Invariant: only for a text whose every token was computed,
or reused exactly, by the model as it is now; the caller knows that, and calls it for no other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.hf.cache.indexed import every_part
from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.call import Clock
from kvclient.hf.connector.layer_groups import StoredGroup
from kvclient.hf.connector.save import Publisher
from kvclient.hf.proof.attached import Attached
from kvclient.hf.request.served_model import ServedModel


def keeps_of(cache: Any) -> bool:
    """Whether it is the cache of a call that went by an attachment, as generate() gives it back: one of a
    call without the store is the model's own, of which nothing is kept.
    """
    layers = getattr(cache, "layers", None)
    kept_here = isinstance(layers, list) and all(isinstance(layer, StoreLayer) for layer in layers)
    return kept_here and bool(layers)


def publish(attachment: Attached, model: Any, tokens: Sequence[int], cache: Any, behind: int = 0) -> int:
    """How many blocks it published. Those that are there already, and those whose tokens lie in the store's
    blocks, are left as they are. 0 too for a model that is refused by now or keeps states, and for a cache
    with nothing of its own, or that gradients flow through. behind: of a text that grows, the tokens whose
    whole blocks are not asked for again, were they evicted or not. Raises InvalidArgument for one that is not
    of a call with the store (keeps_of()), or has more rows than one. What a call of which `last.exact` is
    False has computed is nobody's prefix: its cache must not be published.
    """
    served, options = attachment._current(model), attachment._model_state.options
    options = attachment._local.settings.over(options)
    if served is None or served.states is not None:
        return 0
    if not keeps_of(cache):
        name = type(cache).__name__
        raise InvalidArgument(
            f"cache={name}; it must be of a call that went by the store (last.bypassed says why not)"
        )
    layers = every_part(cache.layers)
    if any(kept.storage is None for kept in layers):
        return 0
    if (rows := max(kept.storage.shape[1] for kept in layers)) != 1:
        raise InvalidArgument(f"a cache of {rows} rows; publish() keeps the text of one")
    held = min(layer.get_seq_length() for layer in layers)
    chain = options.chunker.chain(served.identity, list(tokens[:held]))
    origin = max(layer.origin for layer in layers)
    starts = list(chain.start_tokens)
    first = max(bisect_left(starts, origin), bisect_right(starts, behind) - 1)
    wanted = (served.tails and len(chain)) or (options.tails and served.plain)
    kept = wanted and chain.num_tokens >= origin  # else a tail would begin in front of what the layers hold
    left = served.tail_tokens(held - chain.num_tokens, options.chunker.block_tokens) if kept else 0
    if first >= len(chain) and not left:
        return 0
    storages = [(layer.index, layer.storage, layer.origin) for layer in layers]
    form = served.form
    layout = -1 if served.layout_id is None else served.layout_id
    publisher = Publisher(
        attachment.client, layout, form.layers, options.priority, options.ttl_s, Clock(), form
    )  # fmt: skip
    try:
        if first < len(chain):
            publisher.publish(chain, first, 0, 0, storages)
    finally:
        publisher.abort()
    published = publisher.published
    if left:
        published += _publish_tail(attachment, served, list(tokens[: chain.num_tokens + left]), storages)
    for stored in served.groups:
        _publish_end(attachment, stored, list(tokens[: chain.num_tokens + left]), storages, held)
    return published


def _publish_tail(
    attachment: Attached, served: ServedModel, tokens: Sequence[int],
    storages: Sequence[tuple[int, Any, int]],
) -> int:  # fmt: skip
    """A shorter block for the tokens behind the last whole one."""
    options, parts = attachment._local.settings.over(attachment._model_state.options), served.parts
    of = (served.identity, served.layout_id, served.form)
    identity, layout, form = of if parts is None else (parts.identity, parts.layout_id, parts.form)
    chain, layout = options.chunker.chain(identity, tokens, partial=True), -1 if layout is None else layout
    publisher = Publisher(
        attachment.client, layout, form.layers, options.priority, options.ttl_s, Clock(), form
    )  # fmt: skip
    try:
        publisher.publish(chain, len(chain) - 1, 0, 0, storages, options.priority // 2)
    finally:
        publisher.abort()
    return publisher.published


def _publish_end(
    attachment: Attached, stored: StoredGroup, tokens: Sequence[int],
    storages: Sequence[tuple[int, Any, int]], held: int,
) -> None:  # fmt: skip
    """What layers that do not need all tokens need for a hit to end with the text. held: tokens that the
    cache holds. Where its hit ended is not known: only what is seen behind all of them was surely loaded.
    """
    options = attachment._model_state.options
    mine = [stored_layer for stored_layer in storages if stored_layer[0] in stored.group.layers]
    chain = options.chunker.chain(stored.identity, tokens, partial=True)
    starts = [*chain.start_tokens, chain.num_tokens]
    origin = max(first for _, _, first in mine)
    layout = -1 if stored.layout_id is None else stored.layout_id
    publisher = Publisher(
        attachment.client, layout, stored.form.layers, options.priority, options.ttl_s, Clock(), stored.form
    )  # fmt: skip
    try:
        there = max(bisect_left(starts, origin), stored.needed(starts, held).start)
        for run in stored.kept(starts, [len(chain)]):
            if (first := max(run.start, there)) < run.stop:
                publisher.publish(chain[: run.stop], first, 0, 0, mine)
    finally:
        publisher.abort()
