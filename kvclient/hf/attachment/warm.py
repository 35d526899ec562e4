"""Computing a text ahead, so that its KV is in the store when a prompt holds it.

Owns how a text is taken apart and in what context each part is computed. Never keeps KV: a stock generate()
publishes it. Invariant: what warm() computes stands behind nothing but true tokens, so every block of it is
somebody's prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvclient.blocks.chunker import CHUNKERS, cuts
from kvclient.blocks.reuse_plan import MOST_TOKENS
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument
from kvclient.hf.connector.part import tail_tokens
from kvclient.hf.proof.attached import Attached


class Stored(NamedTuple):
    """What warm() left in the store."""

    parts: int  # that the text was computed in
    blocks: int  # published by this call
    last: int  # tokens of the last part, with what was put in front of it
    tail: int  # of those: behind its last whole block
    lost: int  # tokens at the ends of parts, of all of them, that are in no block
    missing: int  # whole blocks, of all parts, that the store does not have all the same


def check_overlap(overlap_tokens: int) -> int:
    """The same number of tokens. Raises InvalidArgument beyond the limit."""
    check_bounds("overlap_tokens", overlap_tokens, 0, MOST_TOKENS)
    return overlap_tokens


def warm(
    kv: Attached, model: torch.nn.Module, ids: list[int], before: list[int], chunker: str | None,
    overlap_tokens: int,
) -> Stored:  # fmt: skip
    """chunker: what the text is taken apart by (kvclient.blocks.chunker.cuts); "fixed", and none, computes it
    whole, so that a prompt that begins with it finds all of it. before: tokens the first part stands behind;
    the others stand behind overlap_tokens of the text before them.
    Raises InvalidArgument without a token, or for a chunker that needs a tokenizer.
    """
    check_overlap(overlap_tokens)
    if not ids:
        raise InvalidArgument("there is no token to warm")
    rule = chunker or "fixed"
    if rule not in CHUNKERS or rule == "fixed":
        told = [""] * len(ids)
    elif not kv.chunker.texts.known:
        raise InvalidArgument(f"chunker={rule!r} cuts by what tokens say: attach() needs tokenizer=")
    else:
        told = kv.chunker.texts.of(ids)
    start, blocks, part, tail, lost, missing = 0, 0, ids, 0, 0, 0
    stops = cuts(told, rule, kv.chunker.block_tokens)
    for stop in stops:
        part = [*(ids[max(0, start - overlap_tokens) : start] if start else before), *ids[start:stop]]
        with kv.limited(inside=False):
            _compute(model, part)
        start, blocks = stop, blocks + kv.last_here.published_blocks
        chain = kv.chunker.chain(kv.identity, part)
        tail = len(part) - sum(chain.token_counts)
        lost += _lost(kv, len(part), tail)
        missing += bytes(kv.client.lookup(chain).states).count(0) if len(chain) else 0
    return Stored(len(stops), blocks, len(part), tail, lost, missing)


def _lost(kv: Attached, tokens: int, tail: int) -> int:
    """How many of the tokens behind a part's last whole block are in none."""
    if tail == tokens or kv.repair is None:
        return tail
    return tail - tail_tokens(tail, kv.form.step, kv.chunker.block_tokens)


def _compute(model: torch.nn.Module, ids: list[int]) -> None:
    rows = torch.tensor([ids], device=model.device)
    model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=1, do_sample=False, num_beams=1,
        pad_token_id=0,
    )  # fmt: skip
