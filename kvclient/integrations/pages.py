"""Pages of bytes in the store, for engines that keep their KV themselves and name it by a hash of their own.

Owns how a page of several buffers becomes a block (a layer for each buffer, no token meta) and which failures
become a miss; never makes a key. Invariants: get() fills either all buffers of a page with the checksummed
bytes that put() was given, or says False for it, and of a page that is wrong leaves zeros; no failure of the
store leaves this module as an exception; between two calls no grant is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvclient.blocks.layout import MAX_BLOCK_TOKENS, MAX_LAYER_BYTES_PER_TOKEN, MAX_LAYERS, Layout
from kvclient.errors import InvalidArgument
from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.self_test import TRIES, WRONG_LATER, Refusing, Tried, try_at_start

MISSING, PENDING, RESIDENT, ON_DISK, ON_PEERS = range(5)  # a look-up's states
Buffers = Sequence[np.ndarray]  # of one page: contiguous bytes each


class Pages:
    """Thread-safe, as its client is; calls of several threads run side by side."""

    _verify_first = False  # checksums are compared while pages are copied

    def __init__(self, client: Any, health: Health, wait_s: float) -> None:
        """`wait_s` bounds what put() waits for another writer and get() for the disk."""
        self._client, self._health, self._wait_s = client, health, wait_s
        self._untried = 0  # how often a page that is stored is to be read back, until one is
        self._lock = threading.Lock()
        self._layouts: dict[tuple[int, ...], int] = {}

    def format(self, sizes: Sequence[int]) -> int:
        """The layout of pages with buffers of so many bytes. Raises InvalidArgument for sizes that no block
        can have."""
        wanted = tuple(int(size) for size in sizes)
        with self._lock:
            if wanted not in self._layouts:
                self._layouts[wanted] = self._client.register_layout(page_layout(wanted))
            return self._layouts[wanted]

    def states(self, keys: Sequence[bytes], peers: bool = False) -> bytes:
        """0 missing, 1 being written, 2 in memory, 3 on disk, of each. Reads shared memory only; with `peers`
        the daemon is asked for those that are missing: 4, another host has it."""
        try:
            return self._client.lookup(list(keys), peers=peers).states
        except FAILURES as error:
            self._health.failed("a look-up", error)
            return bytes(len(keys))

    def put(
        self,
        keys: Sequence[bytes],
        layout_id: int,
        sources: Sequence[Any],
        token_counts: Sequence[int] | None = None,
    ) -> list[bool]:
        """Stores each page that is not there yet. True: the page is in the store, whoever wrote it."""
        stored = [state in (RESIDENT, ON_DISK) for state in self.states(keys)]
        new = [i for i, there in enumerate(stored) if not there]
        if new:
            try:
                counts = None if token_counts is None else [token_counts[i] for i in new]
                done = self._write([keys[i] for i in new], layout_id, [sources[i] for i in new], counts)
            except FAILURES as error:
                self._health.failed("a store", error)
                done = [False] * len(new)
            for i, success in zip(new, done, strict=True):
                stored[i] = success
        self._health.look()
        return stored

    def _write(
        self, keys: list[bytes], layout_id: int, sources: list[Any], token_counts: list[int] | None
    ) -> list[bool]:
        writer = self._client.create(keys, layout_id, token_counts=token_counts)
        sealed: set[int] = set()
        try:
            self._fill(writer, sources, sealed)
            if "pending" in writer.results and writer.wait_pending(self._wait_s):
                self._fill(writer, sources, sealed)  # those whose other writer gave up
        finally:
            writer.abort()
        if self._untried and sealed and self._is_wrong(keys[min(sealed)], sources[min(sealed)]):
            self._refuse([keys[i] for i in sealed])
            return [result == "exists" for result in writer.results]
        return [i in sealed or result == "exists" for i, result in enumerate(writer.results)]

    def _fill(self, writer: Any, sources: list[Any], sealed: set[int]) -> None:
        mine = [i for i in writer.granted if i not in sealed]
        self._copy_all_in(writer, mine, sources)
        if mine and writer.seal() is not False:
            sealed.update(mine)

    def _copy_all_in(self, writer: Any, mine: list[int], sources: Sequence[Any]) -> None:
        for layer in range(len(sources[mine[0]]) if mine else 0):
            writer.copy_in(layer, [sources[i][layer] for i in mine], mine)

    def try_one(
        self,
        attempt: Callable[[], Tried],
        block: tuple[int, int],
        token_counts: Sequence[int] | None = None,
        who: str = "the engine",
    ) -> None:
        """The self-test of an engine's start (kvclient.integrations.self_test), or of the first page that is
        stored where the store takes none just now. Raises InvalidArgument, NotPermitted."""
        if not try_at_start(self._client, self._health, attempt, block, token_counts, who):
            self.try_later()

    def try_later(self) -> None:
        """The first page that is stored is compared: there was nothing to try with."""
        self._untried = TRIES

    @property
    def untried(self) -> bool:
        """Whether the first page that is stored is still to be compared."""
        return self._untried > 0

    @property
    def proven(self) -> bool:
        """Whether a page came back as it was, and none came back wrong."""
        return not self._untried and not isinstance(self._client, Refusing)

    def _is_wrong(self, key: bytes, source: Any) -> bool:
        """The self-test that the start had to put off."""
        loaded, same = self._back(key, source)
        if loaded:
            self._untried = 0
            return not same
        if self.states([key])[0] == RESIDENT:  # it may have gone since, or no pin was left
            self._untried -= 1
            return not self._untried
        return False

    def _back(self, key: bytes, source: Any) -> tuple[bool, bool]:
        """Whether that page was loaded, and is as its source: beside it, for others may use the source."""
        back = self._unlike(source)
        loaded = self.get([key], [back])[0]
        return loaded, loaded and self._same(source, back)

    def _refuse(self, stored: list[bytes]) -> None:
        """From now on. Nobody is to find what was stored beside a wrong one: its checksums are right."""
        self.delete(stored)
        self._health.end(WRONG_LATER)
        self._client = Refusing(WRONG_LATER)

    def _unlike(self, source: Any) -> Any:
        """Buffers of its size that differ in each byte."""
        return [~buffer for buffer in source]

    def _same(self, source: Any, back: Any) -> bool:
        return all(bytes(mine) == bytes(its) for mine, its in zip(source, back, strict=True))

    def get(self, keys: Sequence[bytes], targets: Sequence[Any]) -> list[bool]:
        """Copies each page into its buffers. What is on disk is loaded first, `wait_s` at most."""
        try:
            with self._client.get(list(keys), wait_s=self._wait_s, verify=self._verify_first) as blocks:
                found = self._copy_all(blocks, targets)
        except FAILURES as error:
            self._health.failed("a load", error)
            found = [False] * len(keys)
        self._health.look()
        return found

    def _copy_all(self, blocks: Any, targets: Sequence[Any]) -> list[bool]:
        there = [i for i, target in enumerate(targets) if self._fits(blocks, i, target)]
        try:
            wrong = self._copy_out(blocks, there, [targets[i] for i in there])
        except FAILURES:  # of which, nobody knows: each by itself
            there, wrong = self._one_by_one(blocks, there, targets)
        if wrong:
            self._report([blocks[i].key for i in wrong])
        good = set(there) - wrong
        return [i in good for i in range(len(targets))]

    def _one_by_one(
        self, blocks: Any, there: list[int], targets: Sequence[Any]
    ) -> tuple[list[int], set[int]]:
        """Those that could be copied, and which of them are not what their checksum says."""
        copied: list[int] = []
        wrong: set[int] = set()
        for i in there:
            try:
                wrong |= self._copy_out(blocks, [i], [targets[i]])
                copied.append(i)
            except FAILURES as error:
                self._health.failed("a load", error)
        return copied, wrong

    def _fits(self, blocks: Any, index: int, target: Any) -> bool:
        try:
            if (block := blocks[index]) is None:
                return False
            fits = self._is_of(block, target)
        except FAILURES as error:  # no pin was left, or it is a page of fewer buffers
            self._health.failed("a load", error)
            return False
        if not fits:
            self._health.failed("a load", "a page of another size or kind lies under this key")
        return fits

    def _is_of(self, block: Any, buffers: Buffers) -> bool:
        sizes = [buffer.nbytes for buffer in buffers]
        return block.layout_id == self._layouts.get(tuple(sizes)) or sizes == [
            block.layer(layer).nbytes for layer in range(len(sizes))
        ]

    def _copy_out(self, blocks: Any, there: list[int], targets: Sequence[Any]) -> set[int]:
        """Copies those blocks, all pages of one shape. Which of them are not what their checksum says."""
        wrong: set[int] = set()
        for layer, buffers in enumerate(zip(*targets, strict=True)):
            wrong.update(there[place] for place in blocks.copy_out(layer, buffers, there))
        for i, buffers in zip(there, targets, strict=True):
            for buffer in buffers if i in wrong else ():
                buffer[:] = 0  # nor is what came of it anybody's to see
        return wrong

    def _report(self, suspects: list[bytes]) -> None:
        """The daemon looks at them itself, and takes out what is wrong: the next look-up misses them."""
        self._health.failed("a load", f"{len(suspects)} blocks have a wrong checksum")
        with contextlib.suppress(*FAILURES):  # it looks by itself in time
            self._client.get(suspects, verify=True).release()

    def pin(self, keys: Sequence[bytes], wait_s: float = 0.0) -> Any | None:
        """The pinned blocks of what is in memory, to be released by the caller; None if the store failed.
        With `wait_s` also of what comes from the disk or from other hosts by then."""
        try:
            return self._client.get(list(keys), wait_s=wait_s)
        except FAILURES as error:
            self._health.failed("a pin", error)
            return None

    @staticmethod
    def pinned(blocks: Any) -> list[bool]:
        """Of each that pin() was asked for, whether it is."""
        if blocks.hits == len(blocks):
            return [True] * len(blocks)
        held = [False] * len(blocks)
        for i in range(len(blocks)):
            with contextlib.suppress(*FAILURES):  # no pin was left for it
                held[i] = blocks[i] is not None
        return held

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Asks the store to load these from below. A failure is counted, not raised."""
        try:
            self._client.prefetch(list(keys))
        except FAILURES as error:
            self._health.failed("a prefetch", error)

    def delete(self, keys: Sequence[bytes]) -> int:
        """How many blocks went; 0 where the store failed, which is counted, not raised."""
        try:
            return self._client.delete(list(keys))
        except FAILURES as error:
            self._health.failed("a delete", error)
            return 0


def page_layout(sizes: tuple[int, ...]) -> Layout:
    """A layer for each buffer. Blocks have "tokens" only to divide buffers above 16 MiB. Raises
    InvalidArgument.
    """
    if not 1 <= len(sizes) <= MAX_LAYERS:
        raise InvalidArgument(f"a page of {len(sizes)} buffers; it must have 1 to {MAX_LAYERS}")
    if min(sizes) < 1:
        raise InvalidArgument(f"a buffer of {min(sizes)} bytes")
    parts = next(
        (
            n
            for n in range(-(-max(sizes) // MAX_LAYER_BYTES_PER_TOKEN), MAX_BLOCK_TOKENS + 1)
            if all(size % n == 0 for size in sizes)
        ),
        None,
    )
    if parts is None:
        raise InvalidArgument(f"buffers of {max(sizes)} bytes cannot be divided evenly")
    return Layout(
        num_layers=len(sizes), num_kv_heads=1, head_dim=1, dtype="uint8", kv_per_layer=1, block_tokens=parts,
        meta_fixed=0, meta_per_token=0, layer_bytes_per_token=tuple(size // parts for size in sizes),
        name="pages",
    )  # fmt: skip
