"""The workers' half for TensorRT-LLM: copies blocks between its pool and the store.

Owns the copies of the step under way; never decides what is loaded or saved. Invariants: a load is done when
start_load_kv() returns; a load that fails, which the scheduler's pins exclude as long as the store's memory
is there, raises, because there is no way to have the block computed; none is asked for before the self-test
passed; a save that fails is a miss later.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorWorker
from tensorrt_llm._utils import mpi_rank

from kvclient.errors import BlockLost, InvalidArgument
from kvclient.integrations.health import Health
from kvclient.integrations.marks import Word, word_name
from kvclient.integrations.options import connected
from kvclient.integrations.self_test import Tried
from kvclient.integrations.tensor_pages import TensorPages
from kvclient.integrations.tensorrt_llm.identity import common, engine_name, of_rank
from kvclient.integrations.tensorrt_llm.scheduler import Step, Transfer

log = logging.getLogger("tensorrt_llm.kvstored")


class KvstoredWorker(KvCacheConnectorWorker):
    """One per rank. See docs/engines.md."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._common = common(llm_args)
        self._rank = mpi_rank()
        self._client = connected(self._common.options)
        self._health = Health(self._client, log, "trtllm")
        self._pages = TensorPages(self._client, self._health, float(self._common.options["wait_s"]))
        self._pool: torch.Tensor | None = None
        self._layout_id = 0
        self._word: Word | None = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """[blocks, ...]; tries its last block, which nobody uses yet.
        Raises InvalidArgument, NotPermitted."""
        if not kv_cache_tensor[0].is_contiguous():
            raise InvalidArgument("the blocks of the KV pool do not lie in one piece")
        self._pool = kv_cache_tensor
        last = len(kv_cache_tensor) - 1
        row = self._row(last)
        self._layout_id = self._pages.format([row.numel()])
        self._pages.try_one(lambda: self._tried(row), (self._layout_id, row.numel()))
        if self._rank == 0:  # the others hear the name with their first step
            self._give_word(engine_name(self._common.identity))

    def _give_word(self, engine: str) -> None:
        """To the scheduler, that it may promise what is to be loaded here."""
        if engine and self._pages.proven:
            if self._word is None:
                self._word = Word(self._client, word_name(engine, self._rank))
            self._word.give()

    def _tried(self, row: torch.Tensor) -> Tried:
        before, noise = row.clone(), torch.randint(0, 0x3C, (row.numel(),), dtype=torch.uint8).to(row.device)
        key = [os.urandom(32)]  # not of torch's generator: ranks have the same seed
        row.copy_(noise)
        stored = self._pages.put(key, self._layout_id, [[row]])[0]
        row.zero_()
        loaded = self._pages.get(key, [[row]])[0]
        tried = Tried(stored=stored, loaded=loaded, same=torch.equal(row, noise))
        self._pages.delete(key)
        row.copy_(before)
        return tried

    def _row(self, block: int) -> torch.Tensor:
        assert self._pool is not None, "the KV pool was not registered"
        return self._pool[block].view(-1).view(torch.uint8)

    def _rows(self, transfer: Transfer) -> list[list[torch.Tensor]]:
        return [[self._row(block)] for block in transfer.block_ids]

    def _step(self) -> Step:
        step = self.get_connector_meta()
        return step if isinstance(step, Step) else Step()

    def start_load_kv(self, stream: Any) -> None:
        """Loads what the scheduler promised, once the stream's work is done. Raises BlockLost if a block is
        gone.
        """
        loads = self._step().loads
        if loads:
            stream.synchronize()  # what still runs may use the blocks
        for load in loads:
            found = self._pages.get(of_rank(load.keys, self._rank), self._rows(load))
            if not all(found):
                missing = len(found) - sum(found)
                raise BlockLost(f"{missing} of {len(found)} blocks that were promised are gone")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """All layers are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Blocks are saved whole, at the end of the step."""

    def wait_for_save(self, stream: Any) -> None:
        saves = self._step().saves
        if saves:
            stream.synchronize()
        for save in saves:
            self._pages.put(of_rank(save.keys, self._rank), self._layout_id, self._rows(save))
        if saves or self._word is None:
            self._give_word(self._step().engine)
        if not saves:  # put() looks, too
            self._health.look()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []
