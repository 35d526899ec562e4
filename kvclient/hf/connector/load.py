"""The blocks of a prompt that another request has computed, or is computing now, as a Source for StoreLayers.

Owns the pins of one request's blocks until they are loaded. Never hands over a block whose token ids, kept in
its meta area, are not the prompt's: a key is a hash, and a hit is confirmed, not trusted. Invariant: load()
either fills every column it promised or raises Lost or LoadFailed; there is no third outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvclient.blocks.chunker import Chunker
from kvclient.errors import BlockLost, Closed, DeadlineExceeded, InvalidArgument, PinsExhausted
from kvclient.hf.cache.layer import as_array
from kvclient.hf.call import Clock, Group, Lost, loads
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.layer_groups import GroupMatch
from kvclient.hf.connector.part import confirmed_part
from kvclient.hf.connector.snapshots import StateMatch
from kvclient.hf.connector.sought import Sought

MISSING, RESIDENT, ON_DISK, ON_PEER = 0, 2, 3, 4  # a look-up's states


class BlockSpan(NamedTuple):
    """Tokens first..first + tokens of a block, for columns column.. of a row."""

    row: int
    column: int
    block: Any  # K and V as BlockFormat.in_place gives them
    tokens: int
    first: int = 0


@dataclass
class PrefixMatch:
    """The leading blocks of one group's chain."""

    group: Group
    chain: Any
    form: BlockFormat
    layers: int
    views: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)  # what to release
    pending: set[int] = field(default_factory=set)  # indices of views that were still being written
    disk_tokens: int = 0  # of the views: what this request had loaded
    peer_tokens: int = 0  # and what came from other hosts
    part: Any = None  # the view of a block behind these whose first part_tokens are the prompt's too
    part_tokens: int = 0
    part_pending: bool = False  # it was still being written, and is the prompt's as a whole
    part_chain: Any = None  # of the blocks before it, as its keys go on from them; None: the chain
    part_form: BlockFormat = None  # type: ignore[assignment]  # None: the form
    part_size: int = 0  # of a whole block
    sinks: Any = None  # (view, form) of the first tokens as computed, where the blocks are quantised
    # (index, view, form) of a block as computed, where they are quantised: the last that was found at first.
    tail: Any = None
    groups: list[GroupMatch] = field(default_factory=list)  # of layers that do not need all tokens
    states: StateMatch | None = None
    starts: list[int] = field(init=False)  # of the chain's blocks, and behind the last

    def __post_init__(self) -> None:
        self.starts = list(accumulate(self.chain.token_counts, initial=0))
        self.part_chain, self.part_form = self.part_chain or self.chain, self.part_form or self.form

    @classmethod
    def of(cls, group: Group, chunker: Chunker, served: Sought) -> PrefixMatch:
        """Of one text, of which nothing was found yet."""
        ids, states = group.tokens, served.states
        match = cls(group, chunker.chain(served.identity, ids), served.form, served.form.layers)
        match.part_size = chunker.block_tokens
        if (parts := served.parts) is not None:
            match.part_chain, match.part_form = chunker.chain(parts.identity, ids), parts.form
        match.groups = [GroupMatch(part, chunker, chunker.chain(part.identity, ids), ids)
                        for part in served.groups]  # fmt: skip
        if states is not None:
            match.states = StateMatch(states, chunker.chain(states.identity, ids), ids)
        return match

    @property
    def tokens(self) -> int:
        """How many leading tokens of its rows are stored."""
        return self.starts[len(self.views)] + self.part_tokens

    def extend(self, client: Any, stop: int, follow: bool) -> None:
        """Gets the blocks from the last one had to `stop`; ends at the first that cannot be used."""
        if (start := len(self.views)) < stop:
            self._take(client.get(self.chain[start:stop], follow=follow), start, stop)

    def extend_from_below(
        self, client: Any, follow: bool, patience: Callable[[int, int, int], float]
    ) -> None:
        """Has what lies behind the last block on disk or on other hosts brought here, and takes it if that is
        worth the wait for so many tokens in so many blocks, of which so many are not on this host."""
        start = len(self.views)
        if self.pending or start == len(self.chain):
            return
        states = client.lookup(self.chain[start:], peers=True).states
        elsewhere = (MISSING, ON_PEER) if client.peers_up() else (ON_PEER,)
        hopeful = (RESIDENT, ON_DISK, *elsewhere)
        count = next((i for i, state in enumerate(states) if state not in hopeful), len(states))
        absent = count - states[:count].count(RESIDENT)
        if not absent:
            return
        stop = start + count
        tokens = self.starts[stop] - self.starts[start]
        wait_s = patience(tokens, absent, absent - states[:count].count(ON_DISK))
        if wait_s == 0:
            return
        self._take(client.get(self.chain[start:stop], follow=follow, wait_s=wait_s), start, stop)
        taken = self.chain.token_counts[start : len(self.views)]
        self.disk_tokens += sum(n for n, state in zip(taken, states, strict=False) if state == ON_DISK)
        self.peer_tokens += sum(n for n, state in zip(taken, states, strict=False) if state in elsewhere)

    def _take(self, blocks: Any, start: int, stop: int) -> None:
        self.drop_part()
        self.handles.append(blocks)
        for offset in range(stop - start):
            try:
                view = blocks[offset]
            except PinsExhausted:
                return
            if view is None:
                return
            if not view.sealed:
                self.pending.add(start + offset)
            elif not self.confirmed(start + offset, view):
                return
            self.views.append(view)

    def group_of(self, layer: int) -> GroupMatch | None:
        """The group that has this layer of the model; None: it is one of those that need all tokens."""
        return next((group for group in self.groups if layer in group.stored.group.layers), None)

    def ends_at(self, stop: int) -> None:
        """Forgets what was still being written and lies behind token `stop`: nobody waits for it."""
        late = [index for index in self.pending if self.starts[index] >= stop]
        if late:
            self.drop_part()
            del self.views[min(late) :]
            self.pending.difference_update(late)
        if stop <= self.starts[len(self.views)]:
            self.drop_part()

    def drop_pending(self) -> None:
        """Leaves out the blocks whose writers are not done, and what follows them."""
        if self.pending:
            self.drop_part()
            del self.views[min(self.pending) :]
            self.pending.clear()

    def drop_part(self) -> None:
        """Leaves out the part behind the last whole block."""
        self.part, self.part_tokens, self.part_pending = None, 0, False

    def confirmed(self, index: int, view: Any) -> bool:
        """Whether the block's meta area has the very tokens that are asked for."""
        start, stop = self.starts[index : index + 2]
        if view.tokens != stop - start or not self.form.fits(view, stop - start, self.layers - 1):
            return False
        return view.holds(self.group.tokens[start:stop])

    def release(self) -> None:
        """Gives all pins back."""
        self.views.clear()
        self.drop_part()
        self.sinks, self.tail = None, None
        for group in self.groups:
            group.release()
        for handle in self.handles:
            handle.release()
        self.handles.clear()


class PrefixSource:
    """Source of the first `columns` columns of every row."""

    def __init__(self, found: list[PrefixMatch], columns: int, stall_s: float, clock: Clock) -> None:
        self.found, self.columns = found, columns
        of = found[0]
        whole = range(of.form.layers) if of.form.of is None else of.form.of
        self._kept = {*whole, *(layer for group in of.groups for layer in group.stored.group.layers)}
        self._absent = set(self._kept)  # that were not asked for yet
        self._stall_s, self._clock = stall_s, clock
        self._kinds: tuple[list[tuple[BlockFormat, int]], np.ndarray] | None = None  # of arrays()' blocks

    @property
    def followed_tokens(self) -> int:
        """How many of the loaded tokens came from blocks still being written."""
        count = 0
        for found in self.found:
            stretches = [found.starts[index : index + 2] for index in found.pending]
            if found.part_pending:
                start = found.starts[len(found.views)]
                stretches.append([start, start + found.part_tokens])
            held = self.columns - found.group.pad
            count += sum(max(0, min(held, stop) - start) for start, stop in stretches) * len(found.group.rows)
        return count

    @property
    def largest(self) -> int:
        """The layer whose blocks take the most bytes."""

        def size(layer: int) -> int:
            total = 0
            for found in self.found:
                group = found.group_of(layer)
                form, blocks = found.form, len(found.views)
                if group is not None:
                    form, blocks = group.stored.form, len(group.views)
                total += blocks * form.bytes_per_token // form.layers * (form.place(layer) is not None)
            return total

        grouped = any(found.groups for found in self.found)
        return max(sorted(self._kept), key=size) if grouped else 0

    @property
    def tokens(self) -> int:
        """Prompt tokens handed over, all rows."""
        return sum(max(0, self.columns - f.group.pad) * len(f.group.rows) for f in self.found)

    @property
    def full_tokens(self) -> int:
        """Of `tokens`, those that were stored as computed although blocks are quantised."""
        count = 0
        for found in self.found:
            held = max(0, min(self.columns - found.group.pad, found.starts[len(found.views)]))
            sinks = min(found.sinks[0].tokens, held) if found.sinks is not None else 0
            tail = 0
            if found.tail is not None:
                start, stop = found.starts[found.tail[0] : found.tail[0] + 2]
                tail = max(0, min(held, stop) - start)
            behind = self.columns - found.group.pad - found.starts[len(found.views)]
            part = 0 if found.part_form is found.form else max(0, min(behind, found.part_tokens))
            count += (min(sinks + tail, held) + part) * len(found.group.rows)
        return count

    @loads
    def load(self, layer: int, storage: torch.Tensor) -> None:
        """Copies the blocks into a dense cache's storage [arrays, rows, heads, columns, head_dim]."""
        on_cpu = storage.device.type == "cpu"
        target = as_array(storage) if on_cpu else storage
        for found in self.found:
            self._await(found, layer)
            started = time.perf_counter()
            if first := self._first(found, layer):
                target[:, found.group.rows, :, :first] = 0  # attended to by nobody, but 0 x NaN is NaN
            read = BlockFormat.read if on_cpu else BlockFormat.read_tensor
            for row, start, block, count in self._blocks(found, layer, read):
                columns = block if count == block.shape[2] else block[:, :, :count]
                target[:, row, :, start : start + count] = columns
            self._place_sinks(found, layer, storage)
            self._clock.load_s += time.perf_counter() - started
        self._loaded(layer)

    def _place_sinks(self, found: PrefixMatch, layer: int, storage: torch.Tensor) -> None:
        if found.sinks is None or (place := found.form.place(layer)) is None:
            return
        view, form = found.sinks
        pad = found.group.pad
        stop = min(pad + view.tokens, self.columns)
        if stop <= pad:
            return  # another row has so little that nothing of this one is handed over
        sink_columns = form.read_tensor(view, place)[:, None, :, : stop - pad]
        storage[:, found.group.rows, :, pad:stop] = sink_columns.to(storage.device)

    @loads
    def arrays(self, layer: int) -> list[BlockSpan]:
        """The blocks where they lie, in order of columns. Each array holds its block's pin, also after
        release().
        """
        return self._spans(layer, BlockFormat.in_place)

    @loads
    def offsets(self, layer: int) -> np.ndarray | None:
        """int64 [blocks]: where in its block that layer begins, of each that arrays() has. None where some
        layers keep other tokens than others.
        """
        if self._kinds is None:
            forms = [form for found in self.found for form in (found.form, found.part_form)]
            if any(found.groups for found in self.found) or any(form.of is not None for form in forms):
                return None
            spans = self._spans(layer, lambda form, view, _: (form, view.tokens))
            kinds = list(dict.fromkeys(span.block for span in spans))
            self._kinds = kinds, np.array([kinds.index(span.block) for span in spans], np.int64)
        self._loaded(layer)
        kinds, index = self._kinds
        begins = [form.layout(tokens).layer_offset(layer, tokens) for form, tokens in kinds]
        return np.array(begins, np.int64)[index]

    def _spans(self, layer: int, read: Callable[[BlockFormat, Any, int], Any]) -> list[BlockSpan]:
        all_blocks: list[BlockSpan] = []
        for found in self.found:
            self._await(found, layer)
            started = time.perf_counter()
            parts = [BlockSpan(*part) for part in self._blocks(found, layer, read)]
            sinks = found.sinks is not None and found.form.place(layer) is not None
            all_blocks += self._with_sinks(found, layer, parts, read) if sinks else parts
            self._clock.load_s += time.perf_counter() - started
        self._loaded(layer)
        return all_blocks

    def _with_sinks(
        self, found: PrefixMatch, layer: int, parts: list[BlockSpan], read: Callable[..., Any]
    ) -> list[BlockSpan]:
        """The first tokens in full, in the place of the same ones of the first block."""
        view, form = found.sinks
        place = form.place(layer)
        count = min(view.tokens, self.columns - found.group.pad)
        out = []
        for part in parts:
            if part.column == found.group.pad:
                out.append(BlockSpan(part.row, part.column, read(form, view, place), count))
                part = BlockSpan(part.row, part.column + count, part.block, part.tokens - count, count)
            if part.tokens:
                out.append(part)
        return out

    def _first(self, found: PrefixMatch, layer: int) -> int:
        """The first column of these rows that is loaded for this layer."""
        pad = min(found.group.pad, self.columns)
        if (group := found.group_of(layer)) is None:
            return pad
        return min(self.columns, pad + group.starts[min(group.views)]) if group.views else self.columns

    def _await(self, found: PrefixMatch, layer: int) -> None:
        group = found.group_of(layer)
        if group is not None and group.pending:
            self._wait(group, group.stored.form, layer)
        elif group is None and found.pending:
            self._wait(found, found.form, layer)

    def _loaded(self, layer: int) -> None:
        self._absent.discard(layer)
        if not self._absent:
            self._finish()

    def _wait(self, found: PrefixMatch | GroupMatch, form: BlockFormat, layer: int) -> None:
        started = time.perf_counter()
        place = form.place(layer)
        assert place is not None
        try:
            for index in sorted(found.pending):
                found.views[index].wait_layer(place, self._stall_s)
                if not form.fits(found.views[index], found.chain.token_counts[index], place):
                    raise Lost(f"block {index} has another layout than its key says")
            if isinstance(found, PrefixMatch) and found.part_pending:
                found.part.wait_layer(place, self._stall_s)
                if not found.part_form.fits(found.part, found.part_tokens, place):
                    raise Lost("the part behind has another layout than its key says")
        except (BlockLost, DeadlineExceeded) as error:
            raise Lost(str(error)) from error
        finally:
            self._clock.wait_s += time.perf_counter() - started

    def _blocks(
        self, found: PrefixMatch, layer: int, read: Callable[[BlockFormat, Any, int], Any]
    ) -> Iterator[tuple[int, int, Any, int]]:
        pad, group = found.group.pad, found.group_of(layer)
        if group is not None:
            form, parts, tail = group.stored.form, sorted(group.views.items()), None
            sizes = list(group.found.token_counts)
        else:
            form, parts, tail = found.form, list(enumerate([*found.views, found.part])), found.tail
            sizes = [*found.chain.token_counts[: len(found.views)], found.part_tokens]
        if (place := form.place(layer)) is None:
            return  # a layer that keeps nothing
        for row in found.group.rows:
            for index, view in parts:
                start = pad + found.starts[index]
                count = min(sizes[index], self.columns - start)
                if count <= 0 or view is None:
                    break
                block_format = found.part_form if group is None and index == len(found.views) else form
                if tail is not None and index == tail[0]:
                    _, view, block_format = tail
                try:
                    block = read(block_format, view, place)
                except (BlockLost, Closed, InvalidArgument) as error:
                    raise Lost(str(error)) from error
                yield row, start, block, count

    def _finish(self) -> None:
        """All layers are here. Followed blocks could not be confirmed before."""
        try:
            for found in (part for prefix in self.found for part in (prefix, *prefix.groups)):
                for index in found.pending:
                    if not found.confirmed(index, found.views[index]):
                        raise Lost(f"block {index} holds other tokens than its key says")
            if not all(confirmed_part(found) for found in self.found if found.part_pending):
                raise Lost("the part behind holds other tokens than its key says")
        except BlockLost as error:
            raise Lost(str(error)) from error
