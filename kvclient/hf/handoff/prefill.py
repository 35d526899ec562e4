"""Begins the prefill of prompts that are handed over, and says what was handed over.

Owns the pins of their blocks. Never sends KV: blocks come by the store, layer by layer as they are computed.
Invariant: what is held is let go when the lease ends, whatever the prefill did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvclient.checks import MOST_NODE_BYTES
from kvclient.errors import InvalidArgument, KVClientError
from kvclient.hf.handoff.first_token import First, choice_of, chosen, sampler_state
from kvclient.hf.handoff.lease import outlast
from kvclient.hf.handoff.prompts import MARK_BYTES, Handoff, chains_of, packed
from kvclient.hf.handoff.thread import Prefill

CLAIM_S = 30.0  # for the prefill to begin; a long digest of the model may come before it


def rows_of(inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The prompts of a batch without their padding, which is on the left. Raises InvalidArgument."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or 0 in ids.shape:
        raise InvalidArgument("a handoff is of input_ids of shape [prompts, tokens]")
    if mask is None:
        return tuple(tuple(row) for row in ids.tolist())
    kept = mask.bool()
    if kept.shape != ids.shape or bool((kept[:, :-1] & ~kept[:, 1:]).any()) or not bool(kept[:, -1].all()):
        raise InvalidArgument("a handoff's prompts are padded on the left: generate() goes on on the right")
    return tuple(tuple(row[keep].tolist()) for row, keep in zip(ids, kept, strict=True))


def hand_off(
    attachment: Any, model: torch.nn.Module, lease_s: float, to: str | None, inputs: dict[str, Any]
) -> Handoff:
    """Begins the prefill, and returns once its blocks can be found, and were pushed to the node `to`; of a
    batch that is computed row by row, once the first row's can. `inputs`: with the options that the first
    token is chosen by, if it is to be used. Raises InvalidArgument for padding on the right, no host's name,
    and what is beyond a handoff's limits."""
    if to is not None and not (isinstance(to, str) and 1 <= len(to.encode()) <= MOST_NODE_BYTES):
        raise InvalidArgument(f"to={to!r:.80}: a host's name has 1 to {MOST_NODE_BYTES} bytes")
    rows, mark = rows_of(inputs), os.urandom(MARK_BYTES)
    size = attachment.chunker.block_tokens
    Handoff(attachment.identity, rows, size, mark, lease_s).check()
    chains, client = chains_of(attachment, model, rows), attachment.client
    keys, node = packed(chains), ""
    with contextlib.suppress(KVClientError):  # without a store there is no block either
        node = client.stats().get("node", "")
    settings = dataclasses.replace(attachment._local.settings, static=False)

    how = choice_of(model, inputs, rows)
    state = sampler_state(model, how)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": how is not None}

    def compute(begun: Callable[[bytes], None]) -> First | None:
        attachment._local.settings = settings
        attachment._local.begun = lambda report: begun(b"" if report is None else report.inside_keys)
        alone = {} if how is not None else {"do_sample": False}
        with attachment.keeping(tails=True):  # one more token than is kept: generate() wants to make one
            out = model.generate(**{**inputs, **options, **alone})
        return chosen(out, how, rows, state)

    def hold(over: threading.Event, inside: bytes) -> None:
        handles = [client.get(keys) for keys in (*chains, inside)]
        try:
            outlast(client, mark, lease_s, over)
        finally:
            for handle in handles:
                handle.release()

    prefill = Prefill(compute, hold)
    prefill.begun.wait(CLAIM_S)  # a decoder that asks for a block before it is claimed is told there is none
    pushed = 0
    with contextlib.suppress(KVClientError):  # it is asked for there all the same, once it is resumed
        for chain in (*chains, *([prefill.inside] if prefill.inside else [])) if to is not None else ():
            pushed += client.push(chain, to)
    return Handoff(
        attachment.identity, rows, size, mark, lease_s, node, pushed=pushed, _keys=keys, _prefill=prefill
    )
