"""A fixed pool of pages for keys and values that are not in the store, and tables that say whose they are.

Owns the pool's memory, the owners of each page, and who copies when: a page with several owners is
copied before one of them writes (rows of one prompt, beams, copies of a cache). Never grows, and never looks
into the daemon's blocks. Invariant: a page is free, or has as many owners as tables name it; a row writes
only to pages that it owns alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.errors import InvalidArgument, PagesExhausted

PAGE_TOKENS = 64  # as many as the kernels look at together
NOTHING = 0  # the page that rows of padding name: written, never read
MAX_POOL_TOKENS = 1 << 24


@dataclass(frozen=True)
class PagedStats:
    """Pages span all layers. `bytes` is address space: on a CPU memory that was never written is not there
    yet; a GPU's is taken whole, by the first call.
    """

    page_tokens: int
    pages: int
    used: int
    free: int
    peak: int  # most that were used at once
    shared: int  # of the used: with more than one owner
    copied: int  # since the beginning: before a write, because another owner had to keep what it was
    bytes: int
    bytes_used: int


class PagePool:
    """Thread-safe. `memory` is [pages, layers, K and V, heads, PAGE_TOKENS, head_dim] of one device."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, tokens: int
    ) -> None:
        if not isinstance(tokens, int) or not PAGE_TOKENS <= tokens <= MAX_POOL_TOKENS:
            raise InvalidArgument(
                f"paged_tokens={tokens!r}; it must be from {PAGE_TOKENS} to {MAX_POOL_TOKENS}"
            )
        self.pages = -(-tokens // PAGE_TOKENS)
        self.shape = (layers, heads, head_dim, dtype, device)
        size = (self.pages + 1, layers, 2, heads, PAGE_TOKENS, head_dim)
        with torch.inference_mode(False):  # which attach() may be called in, and calls need not be
            self.memory = torch.empty(size, dtype=dtype, device=device)
        self._owners = [0] * (self.pages + 1)
        self._free = list(range(self.pages, NOTHING, -1))
        self._lock = threading.RLock()  # a table may be collected, and give back, at any time
        self._peak = self._copied = 0
        self._streams: set[Any] = set()  # of a GPU, on which pages were read or written

    def follow(self) -> None:
        """The current stream waits for what the others have queued: a page may come from, or go to, one of
        them. To be called before pages are taken or written.
        """
        if self.memory.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.memory.device)
        with self._lock:
            others, self._streams = self._streams - {stream}, self._streams | {stream}
        for other in others:
            stream.wait_stream(other)

    def take(self) -> int:
        """A free page, with one holder. Raises PagesExhausted."""
        with self._lock:
            if not self._free:
                raise PagesExhausted(
                    f"all {self.pages} pages of {PAGE_TOKENS} tokens are in use; paged_tokens="
                    f"{self.pages * PAGE_TOKENS} is the limit of all calls at once"
                )
            page = self._free.pop()
            self._owners[page] = 1
            self._peak = max(self._peak, self.pages - len(self._free))
            return page

    def share(self, pages: Sequence[int], owners: int = 1) -> None:
        """So many owners more for each of these pages."""
        with self._lock:
            for page in pages:
                if page != NOTHING:
                    self._owners[page] += owners

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for each of these pages; without owners they are free."""
        with self._lock:
            for page in pages:
                if page == NOTHING:
                    continue
                self._owners[page] -= 1
                assert self._owners[page] >= 0, "a page was given back twice"
                if self._owners[page] == 0:
                    self._free.append(page)

    def own(self, page: int, tokens: int) -> int:
        """A page that the caller alone owns and that begins with the same tokens."""
        if page == NOTHING:
            return self.take()
        with self._lock:
            if self._owners[page] == 1:
                return page
        fresh = self.take()  # whoever else owns the old one does not write to it before it owns it alone
        if tokens:
            self.memory[fresh, :, :, :, :tokens] = self.memory[page, :, :, :, :tokens]
        with self._lock:
            self._copied += 1
        self.release([page])
        return fresh

    @property
    def stats(self) -> PagedStats:
        """Pages and bytes as they are now."""
        with self._lock:
            used, page_bytes = self.pages - len(self._free), self.memory[0].nbytes
            shared = sum(owners > 1 for owners in self._owners)
            return PagedStats(
                PAGE_TOKENS, self.pages, used, len(self._free), self._peak, shared, self._copied,
                self.memory.nbytes, used * page_bytes,
            )  # fmt: skip

    def __deepcopy__(self, memo: Any) -> PagePool:
        return self


class PageTable:
    """Which pages hold the columns from `origin` on, row by row; one for all layers of a cache.

    pads: per row, the columns of padding at its left. leaders: per row, the first row with the same tokens
    and padding, up to column `common`.
    """

    def __init__(self, pool: PagePool, pads: list[int], leaders: list[int], common: int) -> None:
        self.pool, self.pads, self.origin, self.stop = pool, list(pads), 0, 0
        self.rows: list[list[int]] = [[] for _ in pads]
        self.from_row = list(range(len(pads)))  # which row of the prompt each one descends from
        self.chosen = 0  # how often rows were chosen
        self.version = 0  # of `rows`: what was derived from another is of no use
        self._leaders, self._common = list(leaders), common
        self._may_share = False
        self._left = 0  # layers that have become tensors of their own
        self._ids: tuple[Any, torch.Tensor] | None = None

    def begin(self, origin: int) -> None:
        """Columns before `origin` are not in pages."""
        if not self.stop:
            self.origin = self.stop = origin

    def extend(self, start: int, stop: int) -> list[int]:
        """Makes room for columns start..stop. The rows that write them: within what rows have in common, only
        the first of those that say the same.
        """
        every = range(len(self.rows))
        alone = [row for row in every if stop > self._common or row == self._leaders[row]]
        if stop == self.stop:
            return alone  # another layer was here before
        self.pool.follow()
        if self._may_share and stop > self._common:
            self._part(start)
        while (column := self.origin + len(self.rows[0]) * PAGE_TOKENS) < stop:
            self._append(column, alone)
        self.stop = stop
        self._may_share |= len(alone) < len(self.rows)
        return alone

    def ids(self, index: int, rows: list[int]) -> torch.Tensor:
        """The index-th page of these rows, int64 [rows], as the pool's memory is indexed: made once for all
        layers.
        """
        key = (self.version, index, tuple(rows))
        if self._ids is None or self._ids[0] != key:
            pages = torch.tensor([self.rows[row][index] for row in rows])
            self._ids = (key, pages.to(self.pool.memory.device))
        return self._ids[1]

    def _append(self, column: int, alone: list[int]) -> None:
        """One page more for every row, from `column` on."""
        fresh: dict[int, int] = {}
        try:
            for row in alone:
                fresh[row] = NOTHING if self.pads[row] >= column + PAGE_TOKENS else self.pool.take()
        except PagesExhausted:
            self.pool.release(list(fresh.values()))
            raise
        for row, pages in enumerate(self.rows):
            page = fresh[row if row in fresh else self._leaders[row]]
            if row not in fresh:
                self.pool.share([page])
            pages.append(page)
        self.version += 1

    def _part(self, start: int) -> None:
        """Every row is about to write to the page that column `start` falls into."""
        index, tokens = divmod(start - self.origin, PAGE_TOKENS)
        for pages in self.rows:
            if index < len(pages):
                pages[index] = self.pool.own(pages[index], tokens)
        self._may_share = False
        self.version += 1

    def choose(self, rows: Sequence[int]) -> None:
        """The rows become copies of these ones."""
        chosen = [list(self.rows[row]) for row in rows]
        for pages in chosen:
            self.pool.share(pages)
        for pages in self.rows:
            self.pool.release(pages)
        self.rows = chosen
        self.pads = [self.pads[row] for row in rows]
        self.from_row = [self.from_row[row] for row in rows]
        self._leaders, self._common = list(range(len(chosen))), 0
        self._may_share = True
        self.chosen += 1
        self.version += 1

    def cut(self, stop: int) -> None:
        """Columns from `stop` on are gone."""
        if stop >= self.stop:
            return
        keep = -(-(stop - self.origin) // PAGE_TOKENS)
        for pages in self.rows:
            self.pool.release(pages[keep:])
            del pages[keep:]
        self.stop, self._common = stop, min(self._common, stop)
        self._may_share = True
        self.version += 1

    def fork(self) -> PageTable:
        """A table of its own over the same pages."""
        other = PageTable(self.pool, self.pads, self._leaders, self._common)
        other.origin, other.stop, other.from_row = self.origin, self.stop, list(self.from_row)
        other.chosen, other._left = self.chosen, self._left
        for ours, pages in zip(other.rows, self.rows, strict=True):
            ours.extend(pages)
            self.pool.share(pages)
        # Both write behind what they share, each row for itself.
        for table in (self, other):
            table._leaders, table._common, table._may_share = list(range(len(self.rows))), 0, True
        return other

    def leave(self) -> None:
        """One layer more has copied what it has here; behind the last, nobody reads these pages."""
        self._left += 1
        if self._left == self.pool.shape[0]:
            self.clear()

    def clear(self) -> None:
        """Gives all pages back; the rows are empty."""
        for pages in self.rows:
            self.pool.release(pages)
            pages.clear()
        self.origin = self.stop = 0
        self.version += 1

    def __deepcopy__(self, memo: Any) -> PageTable:
        memo[id(self)] = other = self.fork()
        return other

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a cache in pages cannot be pickled: they are this process's. Read `keys` of each of its layers "
            "first, which makes tensors of them; in this process copy.deepcopy() shares the pages"
        )

    def __del__(self) -> None:
        self.clear()
