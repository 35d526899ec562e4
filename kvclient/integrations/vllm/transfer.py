"""The worker's half: copies blocks between vLLM's KV tensors and the store, layer by layer.

Owns the pins and grants of the step under way; never decides what is loaded or saved. Invariants: a block
that was not wholly loaded, or has a layer whose checksum is wrong, is reported by its number and nothing
computed in that step is saved; between two steps no pin is held, and no grant but of what waits for the
scheduler's word, IDLE_S at most; no failure of the store leaves this module as an exception.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.blocks.layout import Layout
from kvclient.errors import InvalidArgument
from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.pages import ON_DISK, RESIDENT
from kvclient.integrations.self_test import WRONG_LATER, Refusing, Tried, try_at_start
from kvclient.integrations.unsure import Unsealed
from kvclient.integrations.vllm.identity import KEY_BYTES, of_rank
from kvclient.integrations.vllm.scheduling import Ended, Step, Transfer

log = logging.getLogger("vllm.kvstored")
MISSING = 0
IDLE_S = 2.0  # an engine that makes no step for so long has no other engine wait for what it did not seal


@dataclass
class _Moved:
    """Blocks of the step under way, pinned or granted, and where they go to or come from."""

    blocks: Any  # the store's Blocks, or a Writer
    indices: list[int]  # of those that are there, or were granted
    numbers: list[int]  # vLLM's block of each
    keys: bytes  # all that were asked for

    def key(self, place: int) -> bytes:
        index = self.indices[place]
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


class Worker:
    """One per worker process. vLLM calls it from the thread that runs the model."""

    def __init__(
        self,
        client: Any,
        rank: int,
        ranks: int,
        layer_names: list[str],
        block_tokens: int,
        block_count: int,
        load_wait_s: float,
    ) -> None:
        self._client, self._rank, self._ranks = client, rank, ranks
        self._names, self._load_wait_s = layer_names, load_wait_s
        self._block_tokens, self._block_count = block_tokens, block_count
        self.health = self._health = Health(client, log)
        self._tensors: list[torch.Tensor] = []
        self._rows: list[_Rows] = []
        self._verify_first = True  # where layers cannot be verified while they are copied
        self._suspects: list[bytes] = []  # keys of blocks whose checksum was wrong
        self._index = {name: i for i, name in enumerate(layer_names)}
        self._layout_id = 0
        self._untried = False  # the first block that is stored and found is compared
        self.loads = False  # whether layers have work in the step under way; else it is saved at its end
        self._loading: list[_Moved] = []
        self._saving: list[_Moved] = []
        self._loaded_layers: set[int] = set()
        self._saved_layers: set[int] = set()
        self.failed_blocks: set[int] = set()
        self._spoilt = False  # a load of this step failed, though vLLM may have heard of it before its end
        self._step = Step()  # under way
        self._ended, self._ended_badly = set[int](), set[int]()
        self._unsealed = Unsealed(IDLE_S, lambda error: self._health.failed("a seal", error))

    # ---------------------------------------------------------------- the engine's tensors

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's tensors, one per layer, [block, …], and tries one block through the store.
        Raises InvalidArgument for tensors that are no such, of blocks that lie in pieces for an attention
        kernel say, and if what comes back differs, and NotPermitted."""
        self._tensors = [caches[name] for name in self._names]
        sizes = []
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if (rows := tensor.shape[0]) != self._block_count:
                pieces, rest = divmod(rows, self._block_count)
                change = "" if rest else f"; use --block-size {self._block_tokens // pieces}"
                raise InvalidArgument(
                    f"{name}: {rows} rows for {self._block_count} blocks of {self._block_tokens} tokens: the "
                    f"attention's kernel wants others{change}"
                )
            size = tensor[0].numel() * tensor.element_size()
            if size % self._block_tokens:
                raise InvalidArgument(
                    f"{name}: {size} bytes a block; it must be a multiple of {self._block_tokens}"
                )
            sizes.append(size // self._block_tokens)
        layout = Layout(
            num_layers=len(sizes), num_kv_heads=1, head_dim=sizes[0], dtype="uint8", kv_per_layer=1,
            block_tokens=self._block_tokens, meta_fixed=0, meta_per_token=0,
            layer_bytes_per_token=tuple(sizes), name="vllm",
        )  # fmt: skip
        self._layout_id = self._client.register_layout(layout)
        self._rows = [_Rows(tensor) for tensor in self._tensors]
        self._verify_first = any(rows.memory is None for rows in self._rows)
        self._untried = not try_at_start(
            self._client, self._health, self._tried,
            (self._layout_id, sum(sizes) * self._block_tokens),
        )  # fmt: skip

    def _tried(self) -> Tried:
        """Stores, finds, loads and compares the last block, which nobody uses yet."""
        last, key = self._tensors[0].shape[0] - 1, os.urandom(KEY_BYTES)
        name = of_rank(key, self._rank, self._ranks)
        was = [tensor[last].clone() for tensor in self._tensors]
        probes = [_random_like(tensor[last]) for tensor in self._tensors]
        for tensor, probe in zip(self._tensors, probes, strict=True):
            tensor[last].copy_(probe)
        self.begin(Step(saves=[Transfer(key, [last])]))
        self.finish()
        stored = self._client.lookup(name).states[0] in (RESIDENT, ON_DISK)
        for tensor in self._tensors:
            tensor[last].zero_()
        self.begin(Step(loads=[Transfer(key, [last])]))
        self.finish()
        wrong = [
            name
            for name, tensor, probe in zip(self._names, self._tensors, probes, strict=True)
            if not torch.equal(_as_bytes(tensor[last]), _as_bytes(probe))
        ]
        loaded = not self.failed_blocks
        self.failed_blocks = set()
        for tensor, before in zip(self._tensors, was, strict=True):
            tensor[last].copy_(before)
        self._client.delete(name)
        return Tried(stored=stored, loaded=loaded, same=not wrong, where=", ".join(wrong))

    def _compare(self, moved: _Moved) -> None:
        """The self-test that the start had to put off: the first block that was stored, back through vLLM's
        own memory, which nobody uses between two steps, and there as it was."""
        key, number = moved.key(0), moved.numbers[0]
        was = [tensor[number].clone() for tensor in self._tensors]
        try:
            with self._client.get(key, verify=self._verify_first) as found:
                if found[0] is None:
                    return  # it has gone since
                for tensor in self._tensors:
                    tensor[number].zero_()
                back = _Moved(found, [0], [number], key)
                for layer, rows in enumerate(self._rows):
                    self._copy_out(rows, layer, back)
                pairs = zip(self._tensors, was, strict=True)
                same = all(
                    torch.equal(_as_bytes(tensor[number]), _as_bytes(before)) for tensor, before in pairs
                )
        except FAILURES as error:
            self._health.failed("a load", error)
            return
        finally:
            for tensor, before in zip(self._tensors, was, strict=True):
                tensor[number].copy_(before)
        self._untried = False
        if not same or number in self.failed_blocks:
            self.failed_blocks.discard(number)  # vLLM has what it computed
            self._suspects.clear()
            self._spoilt = False
            self._refuse()

    def _refuse(self) -> None:
        """From now on. Nobody is to find what was stored beside a wrong one: its checksums are right."""
        try:
            self._client.delete([moved.key(i) for moved in self._saving for i in range(len(moved.indices))])
        except FAILURES as error:
            self._health.failed("a delete", error)
        self._health.end(WRONG_LATER)
        self._client = Refusing(WRONG_LATER)

    # ---------------------------------------------------------------- one step

    def begin(self, step: Step) -> None:
        """Pins what is loaded, claims what is saved."""
        self._end()
        self._unsealed.begin(step.right, step.wrong)
        self._spoilt, self._step = bool(self.failed_blocks), step
        for load in step.loads:
            self._pin(load)
        self.loads = bool(self._loading)
        if self._spoilt:
            return  # what this step computes may stand on what is not there
        if step.saves:
            self._claim(step.saves)

    def _pin(self, load: Transfer) -> None:
        keys = of_rank(load.keys, self._rank, self._ranks)
        try:
            blocks = self._client.get(keys, wait_s=self._load_wait_s, verify=self._verify_first)
        except FAILURES as error:
            self._health.failed("a load", error)
            self._fail(*load.block_ids)
            return
        there = range(len(blocks)) if blocks.hits == len(blocks) else self._found(blocks)
        moved = _Moved(blocks, list(there), [load.block_ids[i] for i in there], keys)
        self._fail(*set(load.block_ids).difference(moved.numbers))
        self._loading.append(moved)

    def _found(self, blocks: Any) -> list[int]:
        found = []
        for i in range(len(blocks)):
            try:
                if blocks[i] is not None:
                    found.append(i)
            except FAILURES as error:  # no pin was left for it
                self._health.failed("a load", error)
        return found

    def _claim(self, saves: list[Transfer]) -> None:
        """Of all requests of the step at once: one question to the daemon, and one at the seal."""
        keys = of_rank(b"".join(save.keys for save in saves), self._rank, self._ranks)
        numbers = [number for save in saves for number in save.block_ids]
        try:
            states = self._client.lookup(keys).states
            if MISSING not in states:
                return
            new = {}  # key -> block: what two requests of one step compute is saved once
            for i, state in enumerate(states):
                if state == MISSING:
                    new.setdefault(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], numbers[i])
            writer = self._client.create(b"".join(new), self._layout_id)
        except FAILURES as error:
            self._health.failed("a save", error)
            return
        blocks = list(new.values())
        if granted := list(writer.granted):
            self._saving.append(_Moved(writer, granted, [blocks[i] for i in granted], b"".join(new)))

    def load_layer(self, name: str) -> None:
        """Before the layer's attention: its part of every pinned block is in vLLM's tensor then."""
        layer = self._index.get(name)
        if layer is None or layer in self._loaded_layers:
            return
        self._loaded_layers.add(layer)
        for moved in self._loading:
            try:
                self._copy_out(self._rows[layer], layer, moved)
            except FAILURES as error:  # asked back by the daemon, or blocks of another kind
                self._health.failed("a load", error)
                self._fail(*moved.numbers)

    def _copy_out(self, rows: _Rows, layer: int, moved: _Moved) -> None:
        if rows.memory is not None:
            places = [number * rows.stride for number in moved.numbers]
            compare = not self._verify_first
            for wrong in moved.blocks.copy_layer(layer, rows.memory, moved.indices, places, verify=compare):
                self._fail(moved.numbers[wrong])
                self._suspects.append(moved.key(wrong))
            return
        for i, number in zip(moved.indices, moved.numbers, strict=True):
            target = rows.tensor[number]
            target.copy_(moved.blocks[i].tensor(layer).reshape(-1).view(target.dtype).view(target.shape))

    def _fail(self, *numbers: int) -> None:
        if numbers:
            self.failed_blocks.update(numbers)
            self._spoilt = True

    def save_layer(self, name: str) -> None:
        """Behind the layer's attention."""
        layer = self._index.get(name)
        if layer is None or layer in self._saved_layers:
            return
        self._saved_layers.add(layer)
        rows = self._rows[layer]
        for moved in self._saving:
            with contextlib.suppress(*FAILURES):  # its seal says so
                if rows.memory is not None:
                    places = [number * rows.stride for number in moved.numbers]
                    moved.blocks.copy_layer(layer, rows.memory, moved.indices, places)
                    continue
                for i, number in zip(moved.indices, moved.numbers, strict=True):
                    moved.blocks[i].copy_layer(layer, _as_bytes(rows.tensor[number]))

    def finish(self, computed: bool = True) -> None:
        """Loads and saves what no layer asked for, seals, and gives everything back. Of a step that was not
        computed nothing is sealed."""
        self._spoilt = self._spoilt or not computed
        for name in self._names if self._loading or self._saving else ():
            self.load_layer(name)
            self.save_layer(name)
        if self._suspects:
            self._report_suspects()
        waiting: list[Any] = []
        if not self._spoilt:
            if self._step.unsure:
                waiting = [moved.blocks for moved in self._saving]
            else:
                self._seal()
                if self._untried and self._saving:
                    self._compare(self._saving[0])
            self._saving.clear()
        self._end()
        self._unsealed.end(self._step.number, waiting)
        if self._step.loads and self._step.number:
            self._ended.add(self._step.number)
            if self._spoilt:
                self._ended_badly.add(self._step.number)
        self._health.look()

    def _seal(self) -> None:
        for moved in self._saving:
            try:
                moved.blocks.seal()
            except FAILURES as error:
                self._health.failed("a seal", error)
                moved.blocks.abort()  # whoever waits for it computes it

    def _report_suspects(self) -> None:
        """The daemon looks at them itself, and takes out what is wrong: the next look-up misses them."""
        suspects, self._suspects = b"".join(dict.fromkeys(self._suspects)), []
        log.warning(
            "kvstored: %d blocks have a wrong checksum; they are computed again", len(suspects) // KEY_BYTES
        )
        try:
            self._client.get(suspects, verify=True).release()
        except FAILURES as error:
            self._health.failed("a load", error)

    def _end(self) -> None:
        if not (self._loading or self._saving or self._loaded_layers or self._saved_layers):
            return
        for moved in self._loading:
            moved.blocks.release()
        for moved in self._saving:
            moved.blocks.abort()
        self.loads = False
        self._loading.clear()
        self._saving.clear()
        self._loaded_layers.clear()
        self._saved_layers.clear()

    def take_failed(self) -> set[int]:
        """The ids of vLLM's blocks whose load failed since the last call."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_ended(self) -> Ended | None:
        """The steps with loads that ended since the last call; None: none did."""
        if not self._ended:
            return None
        ended = Ended(self._ended, self._ended_badly)
        self._ended, self._ended_badly = set(), set()
        return ended

    def close(self) -> None:
        """Gives back what is still held."""
        self._end()
        self._unsealed.close()


class _Rows:
    """A layer's blocks in memory. On a CPU, where each is dense, all are rows of one piece of bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.memory, self.stride = tensor, None, 0
        if tensor.is_cpu and tensor[0].is_contiguous():
            itemsize = tensor.element_size()
            self.stride = tensor.stride(0) * itemsize
            elements = (tensor.shape[0] - 1) * tensor.stride(0) + tensor[0].numel()
            flat = tensor.as_strided((elements,), (1,))
            self.memory = flat.view(torch.uint8).numpy()


def _as_bytes(block: torch.Tensor) -> torch.Tensor:
    return block.contiguous().cpu().reshape(-1).view(torch.uint8)


def _random_like(block: torch.Tensor) -> torch.Tensor:
    count = block.numel() * block.element_size()
    # bytes below 0x3C: finite numbers in every floating type, so that no copy may quiet a NaN
    noise = torch.randint(0, 0x3C, (count,), dtype=torch.uint8)
    return noise.view(block.dtype).view(block.shape).to(block.device)
