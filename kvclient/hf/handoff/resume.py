"""Decoding of prompts that were handed over.

Owns nothing. Never computes what has come, nor waits for what cannot come. Invariant: resume() answers as
generate() of the same prompts does, whatever has become of the prefill; what does not come is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from kvclient.errors import InvalidArgument, KVClientError
from kvclient.hf.handoff.first_token import continued
from kvclient.hf.handoff.prompts import KEY_BYTES, Handoff, chains_of

FETCH_S = 5.0  # for the first layer, beside what this host has


def batch(rows: tuple[tuple[int, ...], ...], pad: int, device: Any) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of shape [rows, longest], padded on the left."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.tensor(row)
        mask[i, longest - len(row) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def resume(attachment: Any, model: torch.nn.Module, handoff: Handoff, options: dict[str, Any]) -> Any:
    """generate() of the handed prompts, which takes what has been computed of them, the first token too if
    the handoff has it and it was chosen by the same options. Raises InvalidArgument where the model, its
    dtype, the codec or the way it is cut is another than where it was handed off, or blocks of its tokens are
    not among the keys."""
    if handoff.identity != attachment.identity:
        raise InvalidArgument(
            f"the handoff is of identity {handoff.identity.hex()[:16]}…, this model's is "
            f"{attachment.identity.hex()[:16]}…: its KV would not be this model's"
        )
    if handoff.block_tokens != attachment.chunker.block_tokens:
        raise InvalidArgument(
            f"the handoff has blocks of {handoff.block_tokens} tokens, here they have "
            f"{attachment.chunker.block_tokens}: attach with block_tokens={handoff.block_tokens}"
        )
    keys = _keys_of(attachment, model, handoff)
    pad = options.get("pad_token_id", getattr(model.generation_config, "pad_token_id", None))
    inputs = batch(handoff.rows, pad if isinstance(pad, int) else 0, model.device)
    behind = continued(model, handoff.first, handoff.rows, inputs, options)
    if behind is not None:
        behind.begin()
        inputs, options = behind.inputs, behind.options
        if behind.ended:
            return inputs["input_ids"]
    told = attachment.keeping(tails=True)
    with handoff.lease(attachment.client), _held(attachment.client, keys, handoff.node), told:
        return model.generate(**inputs, **options)


def _keys_of(attachment: Any, model: torch.nn.Module, handoff: Handoff) -> list[Any]:
    """Of the blocks that are asked for, in parts: those that it names, if they are those of its tokens, or
    else what its tokens make. Raises InvalidArgument."""
    served, named = attachment._current(model), handoff.keys
    if not named or served is None:
        return chains_of(attachment, model, handoff.rows)
    known = {named[at : at + KEY_BYTES] for at in range(0, len(named), KEY_BYTES)}
    for number, row in enumerate(handoff.rows):
        if not known.issuperset(attachment.chunker.chain(served.identity, row).keys):
            raise InvalidArgument(
                f"prompt {number} of the handoff has blocks that it does not name: its keys are not those of "
                "its tokens, or its prompts are cut by another chunker="
            )
    return [named]


@contextlib.contextmanager
def _held(client: Any, keys: list[Any], node: str) -> Iterator[None]:
    """Has the blocks brought here, from that host before any other, and holds them, so that nothing of them
    is evicted before generate() has it; of those that are still computed it waits for the first layer."""
    handles: list[Any] = []
    try:
        with contextlib.suppress(KVClientError):
            for part in keys:
                client.prefetch(part, node=node)
            for part in keys:
                handles.append(client.get(part, follow=True, wait_s=FETCH_S))
        yield
    finally:
        for handle in handles:
            handle.release()
