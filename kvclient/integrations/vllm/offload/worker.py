"""The workers' half of the offloading spec: copies blocks between vLLM's KV tensors and the store.

Owns the jobs under way, on threads of its own; never decides what is loaded or stored. Invariants: each job
is reported once; a store that fails is reported as done, for it is only a miss later; a load reads what the
scheduler holds pinned and verified, and is reported as failed if that should not be there: vLLM 0.32 ends the
engine then, rather than answer from wrong KV. A worker whose self-test has not passed is asked for no load.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.marks import Word
from kvclient.integrations.self_test import Tried
from kvclient.integrations.tensor_pages import Rows, TensorPages
from kvclient.integrations.vllm.identity import each_of_rank
from kvclient.integrations.vllm.offload.scheduling import StoredBlocks

log = logging.getLogger("vllm.kvstored")
THREADS = 2


class KvstoredWorker(OffloadingWorker):
    """One per worker process. vLLM calls it from the thread that runs the model."""

    def __init__(
        self,
        client: Any,
        caches: CanonicalKVCaches,
        rank: int,
        ranks: int,
        blocks_per_chunk: int,
        wait_s: float,
        word: bytes,
    ) -> None:
        self._client, self._caches, self._rank, self._ranks = client, caches, rank, ranks
        self._blocks_per_chunk = blocks_per_chunk
        self._health = Health(client, log)
        self._pages = TensorPages(client, self._health, wait_s)
        self._formats = [
            self._pages.format([ref.page_size_bytes for ref in refs] * blocks_per_chunk)
            for refs in caches.group_data_refs
        ]
        self._pool = ThreadPoolExecutor(THREADS, "kvstored-copy")
        self._lock = threading.Lock()
        self._running: dict[int, Future[None]] = {}
        self._finished: list[TransferResult] = []
        self._taking_up: Future[None] | None = None
        self._try_one_block()
        self._word_name, self._word = word, Word(client, word)
        self._give_word()

    # ---------------------------------------------------------------- vLLM's calls

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, StoredBlocks)
        ready = self._recorded()
        store = partial(self._store, dst_spec.names, src_spec, ready)
        if self._pages.untried:  # here nobody else uses the blocks, through which the first one is compared
            self._run(job_id, store)
        else:
            self._submit(job_id, store)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, StoredBlocks)
        self._submit(job_id, lambda: self._load(src_spec.names, dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        if not self._client.attached and (self._taking_up is None or self._taking_up.done()):
            self._taking_up = self._pool.submit(self._take_up)
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        with self._lock:
            running = [future for job, future in self._running.items() if job in job_ids]
        wait(running)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._client.close()

    # ---------------------------------------------------------------- jobs

    def _submit(self, job_id: int, work: Callable[[], tuple[bool, int]]) -> None:
        with self._lock:
            self._running[job_id] = self._pool.submit(self._run, job_id, work)

    def _run(self, job_id: int, work: Callable[[], tuple[bool, int]]) -> None:
        start = time.monotonic()
        try:
            success, size = work()
        except Exception:
            log.exception("kvstored: a job failed")
            success, size = False, 0
        with self._lock:
            self._finished.append(TransferResult(job_id, success, size, time.monotonic() - start))
            self._running.pop(job_id, None)

    def _recorded(self) -> torch.cuda.Event | None:
        """What a store must wait for: the model still writes the blocks on its stream."""
        if not any(cache.tensor.is_cuda for cache in self._caches.tensors):
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _chunks(self, spec: GPULoadStoreSpec) -> Iterator[tuple[int, list[int | None]]]:
        """A group and the engine's blocks for each of its chunks; None: not of this transfer."""
        at, per_chunk = 0, self._blocks_per_chunk
        for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
            blocks = spec.block_ids[at : at + size].tolist()
            at += size
            row: list[int | None] = [None] * (first % per_chunk) + blocks
            row += [None] * (-len(row) % per_chunk)
            for start in range(0, len(row), per_chunk):
                yield group, row[start : start + per_chunk]

    def _rows(self, group: int, blocks: list[int | None]) -> list[torch.Tensor | None]:
        rows: list[torch.Tensor | None] = []
        for block in blocks:
            for ref in self._caches.group_data_refs[group]:
                tensor = self._caches.tensors[ref.tensor_idx].tensor
                rows.append(None if block is None else tensor[block, : ref.page_size_bytes])
        return rows

    def _by_group(
        self, names: list[bytes], spec: GPULoadStoreSpec
    ) -> dict[int, tuple[list[bytes], list[Rows]]]:
        found: dict[int, tuple[list[bytes], list[Rows]]] = {}
        for name, (group, blocks) in zip(
            each_of_rank(names, self._rank, self._ranks), self._chunks(spec), strict=True
        ):
            keys, rows = found.setdefault(group, ([], []))
            keys.append(name)
            rows.append(self._rows(group, blocks))
        return found

    def _store(self, names: list[bytes], spec: GPULoadStoreSpec, ready: Any) -> tuple[bool, int]:
        if ready is not None:
            ready.synchronize()
        size = 0
        for group, (keys, rows) in self._by_group(names, spec).items():
            whole = [i for i, buffers in enumerate(rows) if all(row is not None for row in buffers)]
            done = self._pages.put([keys[i] for i in whole], self._formats[group], [rows[i] for i in whole])
            size += sum(self._bytes(rows[i]) for i, success in zip(whole, done, strict=True) if success)
        self._give_word()
        return True, size

    def _take_up(self) -> None:
        """Tells a daemon that began anew this engine's layouts, which attaching does. Until then it loads
        nothing of them from its disk for the scheduler, which so would send nothing here that attaches."""
        with contextlib.suppress(*FAILURES):
            self._client.lookup([self._word_name])
        self._give_word()

    def _give_word(self) -> None:
        """To the scheduler, that it may promise what is to be loaded here."""
        if self._pages.proven:
            self._word.give()

    def _load(self, names: list[bytes], spec: GPULoadStoreSpec) -> tuple[bool, int]:
        success, size = True, 0
        for keys, rows in self._by_group(names, spec).values():
            found = self._pages.get(keys, rows)
            success = success and all(found)
            size += sum(self._bytes(row) for row, there in zip(rows, found, strict=True) if there)
        return success, size

    @staticmethod
    def _bytes(rows: Rows) -> int:
        return sum(row.numel() * row.element_size() for row in rows if row is not None)

    # ---------------------------------------------------------------- the start

    def _try_one_block(self) -> None:
        """Stores, finds, loads and compares the last block of each group, which nobody uses yet. Raises
        InvalidArgument for a difference."""
        for group, refs in enumerate(self._caches.group_data_refs):
            last = self._caches.tensors[refs[0].tensor_idx].tensor.shape[0] - 1
            rows = [row for row in self._rows(group, [last] * self._blocks_per_chunk) if row is not None]
            attempt = partial(self._tried, group, rows, len(refs))
            self._pages.try_one(attempt, (self._formats[group], self._bytes(rows)))

    def _tried(self, group: int, rows: list[torch.Tensor], count: int) -> Tried:
        """The first `count` rows are the block, and the others the same once more."""
        before = [row.clone() for row in rows]
        noise = [
            torch.randint(0, 0x3C, (row.numel(),), dtype=torch.int8).to(row.device) for row in rows[:count]
        ]
        for row, content in zip(rows, noise, strict=False):
            row.copy_(content)
        key = [np.random.default_rng().bytes(32)]
        stored = self._pages.put(key, self._formats[group], [rows])[0]
        for row in rows:
            row.zero_()
        loaded = self._pages.get(key, [rows])[0]
        same = all(torch.equal(row, content) for row, content in zip(rows, noise, strict=False))
        self._pages.delete(key)
        for row, content in zip(rows, before, strict=True):
            row.copy_(content)
        return Tried(stored=stored, loaded=loaded, same=same)
