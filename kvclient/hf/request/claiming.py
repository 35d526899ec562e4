"""What one request looks for and what it offers, as its served model and options want it.

Owns which chains and which publishers there are, one for each form of blocks, and which blocks are wanted.
Never computes or copies anything. Invariant: what is claimed lies behind what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.call import Clock, Group
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.claim import Claims
from kvclient.hf.connector.full_precision import FullPrecisionBlocks
from kvclient.hf.connector.layer_groups import GroupMatch
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.connector.save import Publisher
from kvclient.hf.connector.snapshots import Snapshots, StateMatch
from kvclient.hf.request.hit_end import ends_to_keep
from kvclient.hf.request.options import MAX_PRIORITY, Options
from kvclient.hf.request.served_model import ServedModel

ABOVE = 5  # priority of what a hit cannot do without, above that of the tokens it is about


def match(served: ServedModel, options: Options, group: Group) -> PrefixMatch:
    """One text, of which nothing was found yet."""
    ids, cut = group.tokens, options.chunker
    one = PrefixMatch(group, cut.chain(served.identity, ids), served.form, served.form.layers)
    one.groups = [GroupMatch(stored, cut.chain(stored.identity, ids), ids) for stored in served.groups]
    if served.states is not None:
        one.states = StateMatch(served.states, cut.chain(served.states.identity, ids), ids)
    return one


def make_claims(
    client: Any, served: ServedModel, options: Options, clock: Clock, same: Callable[[], bool]
) -> Claims:
    above = min(MAX_PRIORITY, options.priority + ABOVE)

    def publisher(layout_id: int | None, form: BlockFormat, priority: int = options.priority) -> Publisher:
        layout_id = -1 if layout_id is None else layout_id
        return Publisher(client, layout_id, form.layers, priority, options.ttl_s, clock, form)

    sinks = None
    if served.sinks is not None:
        first, last = (publisher(f.layout_id, f.form) for f in (served.sinks.first, served.sinks.last))
        sinks = FullPrecisionBlocks(
            served.sinks, client, options.chunker, first=first, last=last, priority=options.priority
        )
    groups = [(one, publisher(one.layout_id, one.form, above)) for one in served.groups]
    states = served.states
    snapshots = None if states is None else Snapshots(client, states, above, options.ttl_s)
    return Claims(
        client, served.identity, options.chunker, publisher(served.layout_id, served.form), sinks,
        priority=options.priority, step=served.form.step, same=same, groups=groups, snapshots=snapshots,
        every=options.state_every_blocks,
    )  # fmt: skip


def _stop(options: Options, one: PrefixMatch) -> int:
    """How many tokens of a text are stored."""
    most = options.publish_tokens
    return len(one.group.tokens) if most is None else min(len(one.group.tokens), most)


def claim_text(
    claims: Claims, served: ServedModel, options: Options, one: PrefixMatch, inside: Sequence[Segment],
    claimed: set[bytes], read: bool, follow: bool, shared: bool,
) -> None:  # fmt: skip
    """Claims what is missing of one text; `shared` and `claimed` as Claims.claim() has them."""
    stop = _stop(options, one)
    limit = min(inside[0].start, stop) if inside else stop
    claims.claim(one, read, follow, claimed, limit, shared)
    if claims.sinks is not None:  # not before the claim: it may find more blocks
        claims.sinks.offer(one, limit)
    if inside:
        claims.claim_gaps(one, inside, stop)
    elif served.keeps_tails(options.tails) and stop == len(one.group.tokens):
        claims.claim_tail(one)


def claim_ends(
    claims: Claims, served: ServedModel, options: Options, one: PrefixMatch, found: Sequence[PrefixMatch],
    column: int, most: int,
) -> None:  # fmt: skip
    """Claims what is missing of one of the texts of a batch whose hit ends at a column, and of groups and
    states what lets later hits end behind it."""
    hit, parted = column - one.group.pad, len(one.views)
    every = options.state_every_blocks if served.states is not None else 0
    common = min(most, *(other.group.pad + other.starts[-1] for other in found))
    claim_text(claims, served, options, one, (), set(), False, False, False)
    ends = ends_to_keep(one, _stop(options, one), hit, parted, every)
    claims.claim_ends(one, ends, hit, common - one.group.pad)
