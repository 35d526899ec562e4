"""Layers that do not need all tokens: where their blocks are, and how much of a prefix they can serve.

Owns the identities of groups of layers and the pins of their blocks. Never computes, and never decides where
a hit ends: it says whether one can end there. Invariant: what covers() said of a token, take() either pins,
with the tokens of every block compared, or denies.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.identity import Dimensions, reuse_identity
from kvclient.errors import NotPermitted, PinsExhausted
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.groups import LayerGroup

WINDOWS_APART = 8  # a window of tokens is stored of every eight, at least
# Behind what prompts share stands a question. A quarter of a window more than the last one is stored, at
# least a block, so that another question finds it: hits can end so many tokens before the end.
SLACK, MOST_SLACK = 1 / 4, 256  # of a window; tokens
MISSING, PENDING, RESIDENT, ON_DISK, ON_PEER = range(5)  # a look-up's states


@dataclass(frozen=True)
class StoredGroup:
    """One group: under which identity and in which form its blocks lie."""

    group: LayerGroup
    form: BlockFormat
    identity: bytes
    layout_id: int | None  # None: this client may only read

    @classmethod
    def of(
        cls, group: LayerGroup, form: BlockFormat, client: Any, dimensions: Dimensions, tokens: int
    ) -> StoredGroup:
        """dimensions: the model's, whatever their codec and layout. tokens: of a block, at most."""
        layout = form.layout(tokens)
        codec = {**form.parameters, "layers": list(group.layers), "window": group.window}
        codec["chunked"] = group.chunked
        identity = reuse_identity(dataclasses.replace(dimensions, codec=codec, layout=bytes(layout)))
        try:
            return cls(group, form, identity, client.register_layout(layout))
        except NotPermitted:
            return cls(group, form, identity, None)

    def elsewhere(self, client: Any, tokens: int) -> StoredGroup:
        """The same in another store."""
        return dataclasses.replace(self, layout_id=client.register_layout(self.form.layout(tokens)))

    def needed(self, starts: list[int], stop: int) -> range:
        """The blocks that must be there for what comes behind token `stop`."""
        if stop <= 0:
            return range(0)
        first = bisect_right(starts, self.group.first_seen(stop)) - 1
        return range(first, max(first, bisect_left(starts, stop)))

    def regular(self, starts: list[int], blocks: int) -> list[int]:
        """Every so many windows a hit can end anyhow: numbers of blocks, of the first so many."""
        step = WINDOWS_APART * self.group.window
        return [n for n in range(1, blocks + 1) if step and starts[n] // step > starts[n - 1] // step]

    def kept(self, starts: list[int], ends: Iterable[int], stop: int = 0, hit: int = 0) -> list[range]:
        """The blocks to store so that hits can end behind these blocks, or behind token `stop`; and anywhere
        in the slack before the last, as far as there is what a hit that ended at token `hit` had."""
        wanted, last = set(self.needed(starts, stop)), 0
        for end in ends:
            wanted.update(self.needed(starts, starts[end]))
            last = max(last, end)
        if last:
            slack = min(MOST_SLACK, int(SLACK * self.group.window))
            earliest = max(0, min(starts[last] - slack, starts[last - 1]))
            first = self.needed(starts, earliest).start if earliest else 0
            wanted.update(range(max(first, self.needed(starts, hit).start if hit else 0), last))
        runs: list[range] = []
        for index in sorted(wanted):
            if runs and runs[-1].stop == index:
                runs[-1] = range(runs[-1].start, index + 1)
            else:
                runs.append(range(index, index + 1))
        return runs


@dataclass
class GroupMatch:
    """The blocks of one group for one text."""

    stored: StoredGroup
    chunker: Chunker
    chain: Any
    tokens: Any  # int32, of the text
    views: dict[int, Any] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)  # indices of views that were still being written
    handles: list[Any] = field(default_factory=list)
    found: Any = field(init=False)  # the chain up to where a hit may end: a shorter block may be its last
    starts: list[int] = field(init=False)  # of its blocks, and behind the last
    _states: bytes = b""

    def __post_init__(self) -> None:
        self._finds(self.chain)

    def _finds(self, chain: Any) -> None:
        self.found, self.starts = chain, list(accumulate(chain.token_counts, initial=0))

    def look(self, client: Any, blocks: int, follow: bool, part: int = 0) -> None:
        """Asks which of the first so many blocks there are, and whether the shorter one of `part` tokens
        behind them is.
        """
        if part:
            ids = self.tokens[: self.starts[blocks] + part]
            self._finds(self.chunker.chain(self.stored.identity, ids, partial=True))
            blocks += 1
        states = bytes(client.lookup(self.found[:blocks], peers=True).states) if blocks else b""
        self._states = states if follow else states.replace(bytes([PENDING]), bytes([MISSING]))

    def covers(self, stop: int) -> bool:
        """Whether a hit can end behind token `stop`, as far as look() saw."""
        return stop % self.stored.group.stride == 0 and all(
            index < len(self._states) and self._states[index] != MISSING
            for index in self.stored.needed(self.starts, stop)
        )

    def take(
        self, client: Any, stop: int, follow: bool, patience: Callable[[int, int, int], float]
    ) -> bool:
        """Pins what a hit that ends behind token `stop` needs. False if it is not there, or not worth the
        wait."""
        blocks = self.stored.needed(self.starts, stop)
        if not len(blocks):
            return True
        states, wait_s = self._states[blocks.start : blocks.stop], 0.0
        on_disk, on_peers = states.count(ON_DISK), states.count(ON_PEER)
        if on_disk or on_peers:
            tokens = self.starts[blocks.stop] - self.starts[blocks.start]
            if (wait_s := patience(tokens, on_disk + on_peers, on_peers)) == 0:
                return False
        keys = self.found[blocks.start : blocks.stop]
        got = client.get(keys, follow=follow, wait_s=wait_s) if wait_s else client.get(keys, follow=follow)
        self.handles.append(got)
        for offset, index in enumerate(blocks):
            try:
                view = got[offset]
            except PinsExhausted:
                view = None
            if view is None or (view.sealed and not self.confirmed(index, view)):
                self.release()
                return False
            if not view.sealed:
                self.pending.add(index)
            self.views[index] = view
        return True

    def confirmed(self, index: int, view: Any) -> bool:
        """Whether a block holds the tokens that its key says."""
        start, stop = self.starts[index : index + 2]
        form = self.stored.form
        if view.tokens != stop - start or not form.fits(view, stop - start, form.layers - 1):
            return False
        return view.holds(self.tokens[start:stop])

    def release(self) -> None:
        """Gives its pins back."""
        self.views.clear()
        self.pending.clear()
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.release()
