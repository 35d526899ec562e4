"""Writes what the model computes into blocks, layer by layer, while it computes.

Owns the blocks granted to one request until they are sealed or aborted. Never computes anything: what is
stored is the layer's own memory, copied once; from a GPU beside the model (outgoing.py). Invariant: a block
is sealed only when each of its layers has all its tokens; whatever else happens to the request, everything
granted is sealed or aborted at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.blocks.bfloat16 import bits
from kvclient.errors import BlockLost
from kvclient.hf.cache.layer import as_array
from kvclient.hf.call import Clock
from kvclient.hf.connector import outgoing
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.kernels import NotQuantisable, contract
from kvclient.kernels.transfer import extent


@dataclass
class Slot:
    """One granted block and the columns of the row it takes its tokens from."""

    writer: Any
    index: int  # in the writer
    block: Any
    row: int
    start: int
    stop: int
    filled: list[int]  # per layer: the columns from start to this one are there
    layers: int = 0  # marked so far
    done: bool = False
    broken: bool = False  # its codec cannot hold it


class Publisher:
    """The writing side of one request."""

    def __init__(
        self, client: Any, layout_id: int, layers: int, priority: int, ttl_s: float | None, clock: Clock,
        form: BlockFormat,
    ):  # fmt: skip
        self._client, self._layout_id, self._layers = client, layout_id, layers
        self._priority, self._ttl_s = priority, ttl_s
        self._clock, self._form = clock, form
        self.not_quantisable = 0
        self._slots: list[Slot] = []
        self.loaded = 0  # columns that the store's blocks fill: nobody tells of them
        self.published = 0
        self.no_space = self.unavailable = 0
        self.lost = 0
        self._outgoing: outgoing.Outgoing | None = None

    @property
    def holds_marks(self) -> bool:
        """Whether its blocks hold no layer, and only mark how far a prompt is stored."""
        return self._form.holds_marks

    @property
    def claimed(self) -> bool:
        """Whether it has blocks to fill."""
        return bool(self._slots)

    def claim(self, chain: Any, first: int, row: int, pad: int, priority: int | None = None) -> list[str]:
        """Claims the chain's blocks from `first` on for the text of `row`, behind `pad` columns. One word per
        block.
        """
        rest = chain[first:] if first else chain
        priority = self._priority if priority is None else priority
        writer = self._client.create(rest, self._layout_id, priority=priority, ttl_s=self._ttl_s)
        if writer.granted:
            starts = chain.start_tokens
            for index in writer.granted:
                block = writer[index]
                start = pad + starts[first + index]
                stop, filled = start + block.tokens, [start] * self._layers
                self._slots.append(Slot(writer, index, block, row, start, stop, filled))
        self.no_space += writer.results.count("no_space")
        self.unavailable += writer.results.count("unavailable")
        return writer.results

    def written(self, layer: int, start: int, stop: int, storage: torch.Tensor, origin: int) -> None:
        """Columns start..stop of that layer of the model are new, and stand in `storage` [arrays, rows,
        heads, columns, head_dim] from column `origin` on: copies those that belong to granted blocks.
        """
        if not self._slots or (layer := self._form.place(layer)) is None:
            return
        began = time.perf_counter()
        on_cpu = storage.device.type == "cpu"
        source = as_array(storage) if on_cpu else storage
        if start <= self.loaded:
            start = 0
        if storage.device.type in outgoing.DEVICES:
            for run in self._whole(layer, start, stop):
                self._send(run, layer, storage, origin)
        for slot in self._slots:
            low, high = max(slot.start, start), min(slot.stop, stop)
            # Behind a gap it stays incomplete: what lies before was loaded by somebody, or by nobody.
            if high <= slot.filled[layer] or low > slot.filled[layer] or slot.done:
                continue
            slot.filled[layer] = high
            if self._form.codec is not None:
                if high < slot.stop or not self._quantised(slot, layer, storage, origin):
                    continue
            else:
                target = bits(slot.block.layer(layer)) if on_cpu else slot.block.tensor(layer)
                columns = source[:, slot.row, :, low - origin : high - origin]
                target[:, :, low - slot.start : high - slot.start] = columns
            if high == slot.stop:
                self._mark(slot)
        self._clock.publish_s += time.perf_counter() - began

    @staticmethod
    def _mark(slot: Slot) -> None:
        while slot.layers < len(slot.filled) and slot.filled[slot.layers] >= slot.stop:
            slot.block.mark_layer(slot.layers)
            slot.layers += 1

    def _whole(self, layer: int, start: int, stop: int) -> Iterator[list[Slot]]:
        """Blocks that columns start..stop fill from their first token to their last: those side by side
        together.
        """
        run: list[Slot] = []
        for slot in self._slots:
            fresh = slot.filled[layer] == slot.start >= start and slot.stop <= stop
            if not fresh or slot.done or slot.broken:
                continue
            tokens = slot.stop - slot.start
            side_by_side = run and slot.start == run[-1].stop and tokens == run[-1].stop - run[-1].start
            if run and (slot.row != run[-1].row or not side_by_side):
                yield run
                run = []
            run.append(slot)
        if run:
            yield run

    def _send(self, run: list[Slot], layer: int, storage: torch.Tensor, origin: int) -> None:
        """Has the device bring that layer of these blocks. Where it cannot, nothing is done."""
        if contract.cuda_lacks(storage.device.index or 0) is not None:
            return
        self._outgoing = self._outgoing or outgoing.Outgoing()
        tokens = run[0].stop - run[0].start
        columns = storage[:, run[0].row, :, run[0].start - origin : run[-1].stop - origin]
        source, unfit = self._form.on_device(columns.unflatten(2, (-1, tokens)))
        starts = np.array([extent(slot.block.layer(layer))[0] for slot in run], np.int64)

        def arrived() -> None:
            fits = unfit is None or not int(unfit)
            for slot in run:
                slot.filled[layer] = slot.stop
                if fits or self._quantised(slot, layer, storage, origin):  # which of them it was
                    self._mark(slot)

        for slot in run:
            slot.filled[layer] = slot.start - 1  # neither there nor to be sent again
        self._outgoing.send(starts, source, arrived)

    def _settle(self) -> None:
        if self._outgoing is not None:
            self._outgoing.settle()

    def marked(self, stop: int) -> None:
        """Columns up to this one were computed: marks them in blocks that hold nothing else."""
        for slot in self._slots:
            if slot.stop <= stop and not slot.layers:
                bits(slot.block.layer(0))[:] = 0
                slot.block.mark_layer(0)
                slot.layers = 1

    def _quantised(self, slot: Slot, layer: int, storage: torch.Tensor, origin: int) -> bool:
        """Writes a whole layer of a block. False if its codec cannot hold it: then it is given up at the end.
        """
        if slot.broken:
            return False
        try:
            columns = storage[:, slot.row, :, slot.start - origin : slot.stop - origin]
            self._form.write(slot.block, layer, columns)
        except NotQuantisable:
            slot.broken = True
            self.not_quantisable += 1
        return not slot.broken

    def seal(self, ended: bool = True) -> None:
        """Seals every block that is complete. ended: the prompt is; without, what is on its way from a device
        is not waited for."""
        began = time.perf_counter()
        if ended:
            self._settle()
        for writer in {id(slot.writer): slot.writer for slot in self._slots}.values():
            slots = [slot for slot in self._slots if slot.writer is writer]
            complete = [slot for slot in slots if slot.layers == self._layers]
            if len(complete) == len(slots):
                self._seal(writer, None, len(slots))
            else:
                for slot in complete:
                    self._seal(writer, slot.index, 1)
            for slot in complete:
                slot.done = True
        self._slots = [slot for slot in self._slots if not slot.done]
        self._clock.publish_s += time.perf_counter() - began

    def publish(
        self, chain: Any, first: int, row: int, pad: int, storages: Sequence[tuple[int, torch.Tensor, int]],
        priority: int | None = None,
    ) -> None:  # fmt: skip
        """Claims, fills and seals the blocks from `first` on, all of whose tokens are in `storages`: the
        number in the model, the memory and the origin of each layer. Memory is [arrays, rows, heads,
        columns, head_dim].
        """
        self.claim(chain, first, row, pad, priority)
        blocks = chain[first:]
        start = pad + blocks.start_token
        stop = start + blocks.num_tokens
        for layer, storage, origin in storages:
            self.written(layer, start, stop, storage, origin)
        if self._form.holds_marks:
            self.marked(stop)
        self.seal()

    def abort(self) -> None:
        """Gives back what was not sealed. Never raises for a store that is gone: the claim went with the
        session.
        """
        slots, self._slots = self._slots, []
        try:
            self._settle()  # nobody writes into what is given back now
        finally:
            give_back({id(slot.writer): slot.writer for slot in slots}.values())

    def _seal(self, writer: Any, index: int | None, blocks: int) -> None:
        try:
            sealed = writer.seal() if index is None else writer.seal(index)
            if sealed is False:  # a tolerant client's, without its store
                self.lost += blocks
            else:
                self.published += blocks
        except BlockLost:
            self.lost += blocks  # the lease ended under us: nobody has seen the block, nothing is wrong


def give_back(writers: Iterable[Any]) -> None:
    """What they have not sealed, of all of them, whichever fails: of a store that is gone the claims went
    with the session. Raises what the last of those raised that failed otherwise.
    """
    with contextlib.ExitStack() as each:
        for writer in writers:
            each.callback(_abort, writer)


def _abort(writer: Any) -> None:
    with contextlib.suppress(ConnectionError):
        writer.abort()
