"""Which bytes of a granted block its writer has sent.

Owns the stretches of one block; never touches its memory. Invariants: a byte counts only once it was written;
the stretches are sorted, apart, and at most MAX_STRETCHES.
"""

from __future__ import annotations

from bisect import bisect_left

from kvstored.errors import InvalidArgument

MAX_STRETCHES = 1024  # written in any order, a block's pieces must join to fewer


class Written:
    def __init__(self, length_bytes: int, layers: list[tuple[int, int]]) -> None:
        """`layers`: offset and length of each."""
        self._length_bytes = length_bytes
        self.layers = layers
        self._stretches: list[tuple[int, int]] = []  # (begin, end)

    def add(self, offset: int, length: int) -> None:
        """Raises InvalidArgument for a piece too many that lies apart from all others."""
        begin, end = offset, offset + length
        if begin == end:
            return
        first = bisect_left(self._stretches, begin, key=lambda stretch: stretch[1])
        last = first
        while last < len(self._stretches) and self._stretches[last][0] <= end:
            last += 1
        if first == last and len(self._stretches) >= MAX_STRETCHES:
            raise InvalidArgument(f"a piece beside {MAX_STRETCHES} that all lie apart, the limit")
        for stretch in self._stretches[first:last]:
            begin, end = min(begin, stretch[0]), max(end, stretch[1])
        self._stretches[first:last] = [(begin, end)]

    def missing(self, layers: int | None = None) -> list[int]:
        """Of the first so many layers (of all) those that were not written whole."""
        return [
            number
            for number, (offset, length) in enumerate(self.layers[:layers])
            if not self._covers(offset, offset + length)
        ]

    def _covers(self, begin: int, end: int) -> bool:
        at = bisect_left(self._stretches, end, key=lambda stretch: stretch[1])
        return at < len(self._stretches) and self._stretches[at][0] <= begin

    def gaps(self) -> list[tuple[int, int]]:
        """(begin, end) of everything in between and behind."""
        edges = [0, *(edge for stretch in self._stretches for edge in stretch), self._length_bytes]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
