"""Snapshots of recurrent layers: the state behind the last token of a block, in a block of its own.

Owns how states lie in a block, and the blocks that one request claims for them. Never decides behind which
tokens a snapshot is taken. Invariant: a snapshot that is found is that of exactly these tokens, from the
first to the last of its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvclient.blocks.bfloat16 import bits
from kvclient.blocks.identity import Dimensions, reuse_identity
from kvclient.blocks.layout import Layout, round_up
from kvclient.errors import BlockLost, Closed, DeadlineExceeded, InvalidArgument, NotPermitted, PinsExhausted
from kvclient.hf.connector.layer_groups import MISSING, ON_DISK, ON_PEER, PENDING
from kvclient.hf.connector.save import give_back
from kvclient.hf.model.states import StateTensor, capture

ALIGN = 16  # bytes of a tensor in a layer


@dataclass(frozen=True)
class StoredStates:
    """The states of one model: under which identity and in which form their blocks lie."""

    states: tuple[StateTensor, ...]
    block_tokens: int
    identity: bytes
    layout_id: int | None  # None: this client may only read

    @classmethod
    def of(
        cls, states: tuple[StateTensor, ...], client: Any, dimensions: Dimensions, tokens: int
    ) -> StoredStates:
        """dimensions: the model's, whatever their codec and layout. tokens: of every block. states: of one
        row, each with its shape.
        """
        stored = cls(states, tokens, b"", None)
        layout = stored.layout
        codec = {"name": "none", "states": [dataclasses.astuple(s)[:4] for s in states]}
        codec["types"] = [str(state.dtype) for state in states]
        identity = reuse_identity(dataclasses.replace(dimensions, codec=codec, layout=bytes(layout)))
        try:
            return dataclasses.replace(stored, identity=identity, layout_id=client.register_layout(layout))
        except NotPermitted:
            return dataclasses.replace(stored, identity=identity)

    def elsewhere(self, client: Any, tokens: int) -> StoredStates:
        """The same in another store."""
        stored = dataclasses.replace(self, block_tokens=tokens)
        return dataclasses.replace(stored, layout_id=client.register_layout(stored.layout))

    @cached_property
    def layers(self) -> list[list[int]]:
        """Per layer with a state, which of the states are its."""
        alike: dict[int, list[int]] = {}
        for number, state in enumerate(self.states):
            alike.setdefault(state.layer, []).append(number)
        return list(alike.values())

    @property
    def nbytes(self) -> int:
        """Of one snapshot."""
        return sum(round_up(state.nbytes, ALIGN) for state in self.states)

    @property
    def layout(self) -> Layout:
        """One layer per layer of the model that has states, of as many bytes a token as they need."""
        sizes = [sum(round_up(self.states[n].nbytes, ALIGN) for n in numbers) for numbers in self.layers]
        per_token = tuple(-(-size // self.block_tokens) for size in sizes)
        return Layout(
            len(sizes), 1, 1, "uint8", self.block_tokens, kv_per_layer=1, layer_bytes_per_token=per_token
        )

    def write(self, block: Any, tensors: list[torch.Tensor]) -> None:
        """Copies tensors of the shapes of `states`, in their order, into a granted block."""
        for place, numbers in enumerate(self.layers):
            target, at = bits(block.layer(place)).reshape(-1), 0
            for number in numbers:
                source = tensors[number].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
                target[at : at + source.numel()] = source.numpy()
                at += round_up(source.numel(), ALIGN)
            target[at:] = 0
            block.mark_layer(place)

    def read(self, view: Any) -> list[torch.Tensor]:
        """Copies of the shapes of `states`, in their order."""
        out: dict[int, torch.Tensor] = {}
        for place, numbers in enumerate(self.layers):
            source, at = np.array(bits(view.layer(place))).reshape(-1), 0
            for number in numbers:
                state = self.states[number]
                flat = torch.from_numpy(source[at : at + state.nbytes].copy())
                out[number] = flat.view(state.dtype).reshape(state.shape)
                at += round_up(state.nbytes, ALIGN)
        return [out[number] for number in range(len(self.states))]

    def fits(self, view: Any) -> bool:
        """Whether a block has the sizes of this layout."""
        per_token = self.layout.geometry.layer_bytes_per_token
        try:
            sizes = [bits(view.layer(place)).nbytes for place in range(len(per_token))]
        except (Closed, InvalidArgument):
            return False
        return view.tokens == self.block_tokens and sizes == [n * self.block_tokens for n in per_token]


class StateMatch:
    """The snapshots of one text."""

    def __init__(self, stored: StoredStates, chain: Any, tokens: Any) -> None:
        self.stored, self.chain, self._tokens = stored, chain, tokens
        self._states = b""
        self.tensors: list[torch.Tensor] | None = None  # of the snapshot that was taken

    def look(self, client: Any, blocks: int, follow: bool) -> None:
        """Asks which of the first so many blocks have one."""
        states = bytes(client.lookup(self.chain[:blocks], peers=True).states) if blocks else b""
        self._states = states if follow else states.replace(bytes([PENDING]), bytes([MISSING]))

    def covers(self, stop: int) -> bool:
        """Whether there is one behind token `stop`, as far as look() saw."""
        index, rest = divmod(stop, self.stored.block_tokens)
        known = index <= len(self._states)
        return rest == 0 and (stop == 0 or (known and self._states[index - 1] != MISSING))

    def take(
        self, client: Any, stop: int, follow: bool, patience: Callable[[int, int, int], float], stall_s: float
    ) -> bool:
        """Copies the one behind token `stop`. False if it is not there, or not worth the wait."""
        self.tensors = None
        if stop <= 0:
            return True
        index, wait_s = stop // self.stored.block_tokens - 1, 0.0
        below = self._states[index]
        if below in (ON_DISK, ON_PEER) and (wait_s := patience(stop, 1, int(below == ON_PEER))) == 0:
            return False
        keys = self.chain[index : index + 1]
        got = client.get(keys, follow=follow, wait_s=wait_s) if wait_s else client.get(keys, follow=follow)
        try:
            view = got[0]
            if view is None:
                return False
            view.wait_layer(len(self.stored.layers) - 1, stall_s)
            tokens = self._tokens[stop - self.stored.block_tokens : stop]
            if not view.holds(tokens) or not self.stored.fits(view):
                return False
            self.tensors = self.stored.read(view)
        except (PinsExhausted, BlockLost, DeadlineExceeded, Closed):
            return False
        finally:
            got.release()
        return True


class Snapshots:
    """What one request offers of its states."""

    def __init__(self, client: Any, stored: StoredStates, priority: int, ttl_s: float | None) -> None:
        self._client, self.stored, self._priority, self._ttl_s = client, stored, priority, ttl_s
        self._claimed: dict[int, list[tuple[int, Any]]] = {}  # column -> (row, writer)
        self.published = self.no_space = 0

    def claim(self, chain: Any, end: int, row: int) -> None:
        """Offers the state of that row behind the chain's first `end` blocks."""
        if self.stored.layout_id is None:
            return
        writer = self._client.create(
            chain[end - 1 : end], self.stored.layout_id, priority=self._priority, ttl_s=self._ttl_s
        )
        self.no_space += writer.results.count("no_space")
        if writer.granted:
            self._claimed.setdefault(end * self.stored.block_tokens, []).append((row, writer))

    @property
    def columns(self) -> list[int]:
        """Behind which a snapshot was claimed, in order."""
        return sorted(self._claimed)

    def take(self, cache: Any, column: int) -> None:
        """The cache's states are now those behind so many columns: stores what was claimed of them."""
        self._store(column, lambda row: capture(cache, self.stored.states, row))

    def put(self, chain: Any, end: int, tensors: list[torch.Tensor]) -> None:
        """Stores the state behind the chain's first `end` blocks: tensors of the shapes of its states."""
        self.claim(chain, end, 0)
        self._store(end * self.stored.block_tokens, lambda _: tensors)

    def abort(self) -> None:
        """Gives back what was not stored."""
        claimed, self._claimed = self._claimed, {}
        for snapshots in claimed.values():
            give_back(writer for _, writer in snapshots)

    def _store(self, column: int, states_of: Callable[[int], list[torch.Tensor]]) -> None:
        """What was claimed behind that column, by its row. What cannot be stored is given back at once: who
        wants it waits as long as it is claimed.
        """
        claimed = self._claimed.pop(column, [])
        try:
            while claimed:
                row, writer = claimed[0]
                self.stored.write(writer[0], states_of(row))
                self._seal(writer)
                del claimed[0]
        finally:
            give_back(writer for _, writer in claimed)

    def _seal(self, writer: Any) -> None:
        try:
            self.published += writer.seal() is not False
        except BlockLost:
            pass  # the lease ended under us: nobody has seen the block, nothing is wrong
