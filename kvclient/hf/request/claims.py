"""What one request offers to the store of what it computes: its prompt's missing blocks, and its answer's.

Owns which blocks are claimed, under which keys, and the publishers that fill them, one for each form of
blocks. Never copies KV (publishers do) and never looks for any. Invariants: what is claimed lies behind what
was found; a block has its prefix key only if every token before it was computed, or reused exactly, by the
model that the key stands for: where that is changed in a call, nothing is published from then on. What is
computed behind approximate tokens has a root of its own, so that it is found by its content and nobody takes
it for a prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.call import Clock, Group, Report
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.full_precision import FullPrecisionBlocks
from kvclient.hf.connector.layer_groups import StoredGroup
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.connector.save import Publisher
from kvclient.hf.connector.snapshots import Snapshots
from kvclient.hf.decoding.stopping import end_tokens
from kvclient.hf.model.states import capture
from kvclient.hf.request.hit_end import ends_to_keep
from kvclient.hf.request.inside import Inside
from kvclient.hf.request.options import MAX_PRIORITY, Options
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.reuse.rounded import RoundedRest

ABOVE = 5  # priority of what a hit cannot do without, above that of the tokens it is about


def approximate_root(identity: bytes) -> bytes:
    """What stands before a text's first block if it was computed behind approximate tokens."""
    return hashlib.sha256(b"kvstored approximate\0" + identity).digest()


@dataclass
class Stretch:
    """A row's text from token `start` on, as far as it is cut into blocks; it grows as tokens are chosen."""

    row: int
    pad: int
    start: int
    root: bytes | None  # None: exact
    offered: int  # blocks
    next_at: int  # tokens of the row's text with which the next block's end is certain
    loaded: int = 0  # tokens that the store's blocks may stand for: of a window, what is seen behind them
    tokens: Any = None  # of the row's text, up to the last block that was published of its answer
    kept: list[torch.Tensor] | None = None  # the state behind that block, if it is not stored


class Claims:
    """The claims of one request. Its publishers are made when there is something to publish."""

    def __init__(
        self, client: Any, served: ServedModel, options: Options, clock: Clock, same: Callable[[], bool]
    ) -> None:
        """same: whether the model is still the one that `served` stands for."""
        self._client, self._served, self._options, self._clock = client, served, options, clock
        self._same, self._chunker = same, options.chunker
        self._main: Publisher | None = None
        self._loaded = 0  # columns that the store's blocks fill
        self._stretches: list[Stretch] = []
        above = min(MAX_PRIORITY, options.priority + ABOVE)
        self.sinks: FullPrecisionBlocks | None = None
        if (forms := served.sinks) is not None:
            first, last = (self._made(kind.layout_id, kind.form) for kind in (forms.first, forms.last))
            self.sinks = FullPrecisionBlocks(
                forms, client, self._chunker, first=first, last=last, priority=options.priority
            )
        # Of layers that do not need all tokens.
        self.groups = [(group, self._made(group.layout_id, group.form, above)) for group in served.groups]
        made = None if served.states is None else Snapshots(client, served.states, above, options.ttl_s)
        self.snapshots, self.awaited = made, False  # awaited: another computes what a text misses first

    def _made(self, layout_id: int | None, form: BlockFormat, priority: int | None = None) -> Publisher:
        priority = self._options.priority if priority is None else priority
        layout_id = -1 if layout_id is None else layout_id
        ttl_s, clock = self._options.ttl_s, self._clock
        return Publisher(self._client, layout_id, form.layers, priority, ttl_s, clock, form)

    @property
    def _publisher(self) -> Publisher:
        """Of the layers that need all tokens."""
        if self._main is None:
            self._main = self._made(self._served.layout_id, self._served.form)
            self._main.loaded = self._loaded
        return self._main

    @property
    def _publishers(self) -> list[Publisher]:
        main = [] if self._main is None else [self._main]
        sinks = self.sinks.publishers if self.sinks is not None else ()
        return [*main, *sinks, *(publisher for _, publisher in self.groups)]

    @property
    def claimed(self) -> bool:
        """Whether there are blocks of all layers to be filled."""
        return self._main is not None and self._main.claimed

    # ---------------------------------------------------------------- before the forward pass

    def claim_text(
        self, prefix: PrefixMatch, inside: Sequence[Segment], claimed: set[bytes], read: bool, follow: bool,
        shared: bool, rounded: RoundedRest | None = None,
    ) -> None:  # fmt: skip
        """Claims what is missing of one text; `shared` and `claimed` as _claim() has them. inside: what is
        reused behind the prefix. rounded: behind which all is computed so.
        """
        stop = self._stop(prefix)
        limit = min(inside[0].start, stop) if inside else stop
        self._claim(prefix, read, follow, claimed, limit, shared)
        if self.sinks is not None:  # not before the claim: it may find more blocks
            self.sinks.offer(prefix, limit)
        tails = self._served.tails or (self._options.tails and self._served.plain)
        if rounded is not None:
            self._claim_rounded(prefix, rounded, len(inside[0].pieces), stop)
        elif inside:
            self._claim_gaps(prefix, inside, stop)
        elif tails and stop == len(prefix.group.tokens):
            self._claim_tail(prefix)

    def claim_ends(
        self, prefix: PrefixMatch, found: Sequence[PrefixMatch], column: int, most: int,
        inside: Sequence[Segment] = (),
    ) -> None:  # fmt: skip
        """Claims what is missing of one of the texts of a batch whose hit ends at a column, and of groups and
        states what lets later hits end behind it. inside: what is reused behind it, which nothing goes on
        from.
        """
        hit, parted = column - prefix.group.pad, len(prefix.views)
        every = self._options.state_every_blocks if self._served.states is not None else 0
        common = min(most, *(other.group.pad + other.starts[-1] for other in found))
        stop = self._stop(prefix)
        if inside:
            stop = min(stop, inside[0].start)
            common = min(common, prefix.group.pad + stop)
            self._claim(prefix, False, False, set(), stop, False)
        else:
            self.claim_text(prefix, (), set(), False, False, False)
        ends = ends_to_keep(prefix, stop, hit, parted, every)
        self._claim_ends(prefix, ends, hit, common - prefix.group.pad)
        tails = self._options.tails and self._served.plain and not inside
        if tails and stop == len(prefix.group.tokens):
            self._claim_group_tails(prefix, hit)

    def _stop(self, prefix: PrefixMatch) -> int:
        """How many tokens of a text are stored."""
        most, tokens = self._options.publish_tokens, len(prefix.group.tokens)
        return tokens if most is None else min(tokens, most)

    def _claim(
        self, prefix: PrefixMatch, read: bool, follow: bool, claimed: set[bytes], limit: int, shared: bool
    ) -> None:
        """Claims what is missing of the blocks within the first `limit` tokens. What others hold or just
        sealed is taken along instead. shared: the groups of this batch that share blocks name them in
        `claimed`.
        """
        first, blocks = len(prefix.views), bisect_right(prefix.starts, limit) - 1
        if shared:
            keys = prefix.chain.keys
            while first < len(keys) and keys[first] in claimed:
                first += 1  # an earlier row of this batch computes it
        if first >= blocks:
            return
        results = self._publisher.claim(prefix.chain[:blocks], first, prefix.group.rows[0], prefix.group.pad)
        run = next((i for i, word in enumerate(results) if word not in ("exists", "pending")), len(results))
        self.awaited |= next((word for word in results if word != "exists"), "") == "pending"
        if read and run and first == len(prefix.views):
            prefix.extend(self._client, first + run, follow)
        if shared:
            claimed.update(keys[first + i] for i, word in enumerate(results) if word == "granted")

    def _claim_ends(self, prefix: PrefixMatch, ends: Sequence[int], hit: int, common: int) -> None:
        """Claims what layers of groups, and states, need for a hit to end behind so many blocks. hit: tokens
        that were found: what is behind them is computed. common: tokens behind which a hit of the whole batch
        could end."""
        row, pad = prefix.group.rows[0], prefix.group.pad
        for match, (stored, publisher) in zip(prefix.groups, self.groups, strict=True):
            regular = stored.regular(prefix.starts, max(ends, default=0))
            also = [end for end in regular if prefix.starts[end] > hit]
            end = common if common > hit else 0
            for run in stored.kept(prefix.starts, {*ends, *also}, end, max(hit, 0)):
                publisher.claim(match.chain[: run.stop], run.start, row, pad)
        if self.snapshots is not None and prefix.states is not None:
            for end in ends:
                self.snapshots.claim(prefix.states.chain, end, row)

    def _claim_group_tails(self, prefix: PrefixMatch, hit: int) -> None:
        """What layers of groups need for a hit to end with the shorter block behind the whole ones."""
        tokens, row, pad = prefix.group.tokens, prefix.group.rows[0], prefix.group.pad
        left = self._served.tail_tokens(len(tokens) - prefix.starts[-1], self._chunker.block_tokens)
        if not left:
            return
        starts = [*prefix.starts, prefix.starts[-1] + left]
        for stored, publisher in self.groups:
            chain = self._chunker.chain(stored.identity, tokens[: starts[-1]], partial=True)
            for run in stored.kept(starts, [len(chain)], 0, max(hit, 0)):
                publisher.claim(chain[: run.stop], run.start, row, pad)

    def _claim_tail(self, prefix: PrefixMatch) -> None:
        """Claims a shorter block for the tokens behind the last whole one: what is found at any shift ends
        anywhere. It goes first when memory is short: a longer text makes it superfluous.
        """
        group, parts = prefix.group, self._served.parts
        worth = len(prefix.chain) or self._options.tails
        behind = len(prefix.group.tokens) - prefix.starts[-1]
        left = self._served.tail_tokens(behind, self._chunker.block_tokens)
        # It is there; a longer one that says the same goes by its own time and priority.
        there = prefix.tokens >= prefix.starts[-1] + left and prefix.part is not None
        worth = worth and not (there and prefix.part.tokens == left)
        if worth and (parts is None or parts.layout_id is not None):
            of = (group.tokens, len(prefix.chain), prefix.starts[-1], group.rows[0], group.pad)
            self._claim_rest(*of, identity=self._served.identity if parts is None else parts.identity)

    def _claim_gaps(self, prefix: PrefixMatch, inside: Sequence[Segment], stop: int) -> None:
        """Claims what is computed behind approximate tokens, up to token `stop`, where it fills a block."""
        root, row, pad = approximate_root(self._served.identity), prefix.group.rows[0], prefix.group.pad
        ends = [*(segment.start for segment in inside[1:]), len(prefix.group.tokens)]
        for segment, end in zip(inside, ends, strict=True):
            tokens = prefix.group.tokens[segment.stop : min(end, stop)]
            chain = self._chunker.chain(self._served.identity, tokens, start=segment.stop, root=root)
            if len(chain):
                self._publisher.claim(chain, 0, row, pad)
                used = chain.num_tokens
                where = {"identity": self._served.identity, "start": segment.stop, "root": root}
                self._claim_rest(tokens, len(chain), used, row, pad, **where)

    def _claim_rounded(self, prefix: PrefixMatch, rest: RoundedRest, held: int, stop: int) -> None:
        """Claims what is computed behind so many blocks of it, up to token `stop`."""
        chain = rest.chain(self._chunker, self._served.identity, prefix.group.tokens[:stop])
        if len(chain) > held:
            self._publisher.claim(chain, held, prefix.group.rows[0], prefix.group.pad)

    def _claim_rest(self, tokens: Any, blocks: int, used: int, row: int, pad: int, **where: Any) -> None:
        if left := self._served.tail_tokens(len(tokens) - used, self._chunker.block_tokens):
            chain = self._chunker.chain(ids=tokens[: used + left], partial=True, **where)
            into = self._publisher if self._served.parts is None or self.sinks is None else self.sinks.last
            into.claim(chain, blocks, row, pad, self._options.priority // 2)

    def written(self) -> Callable[..., None] | None:
        """Who is told of new columns."""
        told = [publisher.written for publisher in self._publishers if publisher.claimed]
        if len(told) < 2:
            return told[0] if told else None

        def written(*columns: Any) -> None:
            for tell in told:
                tell(*columns)

        return written

    # ---------------------------------------------------------------- after it

    def seal(self, ended: bool = True) -> None:
        """Publishes what was filled, or nothing if the model has changed since. ended: as Publisher's."""
        if any(publisher.claimed for publisher in self._publishers) and not self._same():
            self.abort()
        for publisher in self._publishers:
            publisher.seal(ended)

    def abort(self) -> None:
        """Gives back what is not sealed."""
        with contextlib.ExitStack() as each:  # all of them, whichever fails
            for publisher in self._publishers:
                each.callback(publisher.abort)
            if self.snapshots is not None:
                each.callback(self.snapshots.abort)

    def note_published(self, report: Report) -> None:
        """Writes into the report what came of the claims."""
        main, sinks, none = self._main, self.sinks, (0, 0, 0, 0, 0)
        counts = none if main is None else (
            main.published, main.lost, main.no_space, main.unavailable, main.not_quantisable
        )  # fmt: skip
        report.published_blocks, report.lost_blocks, report.no_space, *rest = counts
        report.unavailable, report.not_quantisable = rest
        report.published_full_blocks = sinks.published if sinks is not None else 0
        report.published_group_blocks = sum(publisher.published for _, publisher in self.groups)
        if self.snapshots is not None:
            report.published_group_blocks += self.snapshots.published

    def loaded(self, columns: int) -> None:
        """So many columns are the store's: nobody tells of them."""
        self._loaded = columns
        for publisher in self._publishers:
            publisher.loaded = columns

    def computed(self, cache: Any, column: int) -> None:
        """The tokens up to this column are: states are those behind them, and marks can be set."""
        if self._served.form.holds_marks:
            self._publisher.marked(column)
        if self.snapshots is not None and column in self.snapshots.columns and self._same():
            self.snapshots.take(cache, column)

    def follow(self, found: Sequence[PrefixMatch], inside: Inside | None) -> None:
        """From here on generated() is told of what the rows say."""
        start, root = 0, None
        if inside is not None and inside.rounded is not None:
            start, root = inside.rounded.start, inside.rounded.root
        elif inside is not None and inside.segments:
            start, root = inside.segments[-1].stop, approximate_root(self._served.identity)
        for prefix in found:
            counts = self._chunker.counts(prefix.group.tokens[start:])
            next_at = start + sum(counts) + self._chunker.certain
            for row in prefix.group.rows:
                loaded = max(0, self._loaded - prefix.group.pad)
                self._stretches.append(
                    Stretch(row, prefix.group.pad, start, root, len(counts), next_at, loaded)
                )

    def go_on(self, groups: Sequence[Group], columns: int, origin: int) -> None:
        """generated() is told of rows whose first columns an earlier call offered; what it had loaded ends at
        column `origin`."""
        for group in groups:
            counts = self._chunker.counts(group.tokens[: columns - group.pad])
            offered = len(counts) + (origin - group.pad > sum(counts))
            next_at = sum(counts) + self._chunker.certain
            for row in group.rows:
                loaded = columns - group.pad  # at most; what it was is not known any more
                self._stretches.append(Stretch(row, group.pad, 0, None, offered, next_at, loaded))

    def generated(
        self, input_ids: torch.Tensor, prompt_columns: int, eos: Any, layers: Sequence[StoreLayer],
        cache: Any,
    ) -> None:  # fmt: skip
        """Publishes the blocks that the tokens chosen so far, input_ids [batch, columns], have filled. eos:
        generate()'s eos_token_id.
        """
        columns = input_ids.shape[1] - 1  # the newest token has no KV yet
        for stretch in self._stretches:
            if columns - stretch.pad < stretch.next_at:
                continue
            tokens = input_ids[stretch.row, stretch.pad + stretch.start : columns].to("cpu", torch.int32)
            chain = self._chunker.chain(
                self._served.identity, tokens.numpy(), start=stretch.start, root=stretch.root
            )
            first, stretch.offered = stretch.offered, max(stretch.offered, len(chain))
            stretch.next_at = stretch.start + chain.num_tokens + self._chunker.certain
            if first >= len(chain):
                continue
            new = input_ids[stretch.row, prompt_columns : stretch.pad + stretch.start + chain.num_tokens]
            ended = not set(new.tolist()).isdisjoint(end_tokens(eos))
            storages = [(layer.index, layer.storage, layer.origin) for layer in layers]
            if ended or any(s is None or s.shape[1] != input_ids.shape[0] for _, s, _ in storages):
                continue  # behind the end of its text, or the cache is no longer row by row ours
            if not self._same():
                return
            self._publisher.publish(chain, first, stretch.row, stretch.pad, storages)
            stretch.tokens = tokens.numpy()
            if self.snapshots is not None:
                stretch.kept = None
                if columns - stretch.pad == chain.num_tokens:  # else the state is that of a later token
                    stretch.kept = capture(cache, self.snapshots.stored.states, stretch.row)
                    if len(chain) % self._options.state_every_blocks == 0:
                        self._put(stretch)
            if self.sinks is not None and stretch.root is None:
                self.sinks.grow(tokens.numpy(), stretch.row, stretch.pad, storages, self._loaded)

    def ended(self, layers: Sequence[StoreLayer]) -> None:
        """The answers are whole: a hit shall be able to end behind the last block of each."""
        for stretch in self._stretches:
            if stretch.tokens is None or not self._same():
                continue
            for stored, publisher in self.groups:
                self._keep_end(stretch, stored, publisher, layers)
            self._put(stretch)

    def _keep_end(
        self, stretch: Stretch, stored: StoredGroup, publisher: Publisher, layers: Sequence[StoreLayer]
    ) -> None:
        kept = [layer for layer in layers if layer.index in stored.group.layers and layer.storage is not None]
        if len(kept) != len(stored.group.layers):
            return
        chain = self._chunker.chain(stored.identity, stretch.tokens)
        starts = [*chain.start_tokens, chain.num_tokens]
        origin = max(layer.origin for layer in kept)  # before it, blocks lie in the store
        # A hit loads no block before what is seen behind it: there the layers hold zeros.
        there = max(bisect_left(starts, origin - stretch.pad), stored.needed(starts, stretch.loaded).start)
        for run in stored.kept(starts, [len(chain)]):
            first = max(run.start, there)
            if first < run.stop:
                storages = [(layer.index, layer.storage, layer.origin) for layer in kept]
                publisher.publish(chain[: run.stop], first, stretch.row, stretch.pad, storages)

    def _put(self, stretch: Stretch) -> None:
        kept, stretch.kept = stretch.kept, None
        if kept is not None and self.snapshots is not None:
            chain = self._chunker.chain(self.snapshots.stored.identity, stretch.tokens)
            self.snapshots.put(chain, len(chain), kept)
