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
    prefix = PrefixMatch(group, cut.chain(served.identity, ids), served.form, served.form.layers)
    prefix.groups = [GroupMatch(stored, cut.chain(stored.identity, ids), ids) for stored in served.groups]
    if served.states is not None:
        prefix.states = StateMatch(served.states, cut.chain(served.states.identity, ids), ids)
    return prefix


def make_claims(
    client: Any, served: ServedModel, options: Options, clock: Clock, same: Callable[[], bool]
) -> Claims:
    """What the call may publish: the prompt's blocks, groups, states and unquantised ends."""
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
    groups = [(group, publisher(group.layout_id, group.form, above)) for group in served.groups]
    states = served.states
    snapshots = None if states is None else Snapshots(client, states, above, options.ttl_s)
    return Claims(
        client, served.identity, options.chunker, publisher(served.layout_id, served.form), sinks,
        priority=options.priority, step=served.form.step, same=same, groups=groups, snapshots=snapshots,
        every=options.state_every_blocks,
    )  # fmt: skip


def _stop(options: Options, prefix: PrefixMatch) -> int:
    """How many tokens of a text are stored."""
    most = options.publish_tokens
    return len(prefix.group.tokens) if most is None else min(len(prefix.group.tokens), most)


def claim_text(
    claims: Claims, served: ServedModel, options: Options, prefix: PrefixMatch, inside: Sequence[Segment],
    claimed: set[bytes], read: bool, follow: bool, shared: bool,
) -> None:  # fmt: skip
    """Claims what is missing of one text; `shared` and `claimed` as Claims.claim() has them."""
    stop = _stop(options, prefix)
    limit = min(inside[0].start, stop) if inside else stop
    claims.claim(prefix, read, follow, claimed, limit, shared)
    if claims.sinks is not None:  # not before the claim: it may find more blocks
        claims.sinks.offer(prefix, limit)
    if inside:
        claims.claim_gaps(prefix, inside, stop)
    elif served.keeps_tails(options.tails) and stop == len(prefix.group.tokens):
        claims.claim_tail(prefix)


def claim_ends(
    claims: Claims, served: ServedModel, options: Options, prefix: PrefixMatch, found: Sequence[PrefixMatch],
    column: int, most: int, inside: Sequence[Segment] = (),
) -> None:  # fmt: skip
    """Claims what is missing of one of the texts of a batch whose hit ends at a column, and of groups and
    states what lets later hits end behind it. inside: what is reused behind it, which nothing goes on from.
    """
    hit, parted = column - prefix.group.pad, len(prefix.views)
    every = options.state_every_blocks if served.states is not None else 0
    common = min(most, *(other.group.pad + other.starts[-1] for other in found))
    stop = _stop(options, prefix)
    if inside:
        stop = min(stop, inside[0].start)
        common = min(common, prefix.group.pad + stop)
        claims.claim(prefix, False, False, set(), stop, False)
    else:
        claim_text(claims, served, options, prefix, (), set(), False, False, False)
    ends = ends_to_keep(prefix, stop, hit, parted, every)
    claims.claim_ends(prefix, ends, hit, common - prefix.group.pad)
