"""vLLM's TieringOffloadingSpec with a worker that copies on a CPU, so that tiers run in an engine here: run
with the engines' Python, loaded by vLLM as a spec from its module.

vLLM 0.32 has no worker for its memory on the host but one of streams and events on a GPU. All else is its
own: its spec, its manager, its memory on the host (/dev/shm), its tiers, its connector. With
KVSTORED_TEST_FAULT=zero what was loaded is zeroed.
"""

import contextlib
import os
import time
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ZEROES = os.environ.get("KVSTORED_TEST_FAULT") == "zero"


class CopyingWorker(OffloadingWorker):
    """Between the engine's blocks and the chunks of vLLM's memory on the host, at once."""

    def __init__(self, caches, region, blocks_per_chunk):
        self._region, self._per_chunk, self._groups = region, blocks_per_chunk, caches.group_data_refs
        self._blocks = [cache.tensor for cache in caches.tensors]
        self._chunks = [
            region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            for cache in caches.tensors
        ]
        self._finished = []

    def _pairs(self, blocks, chunks):
        """The engine's bytes and the host's, of each layer of each block."""
        block_at = chunk_at = 0
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = first % self._per_chunk
            for i in range(size):
                block, (chunk, part) = blocks.block_ids[block_at + i], divmod(skipped + i, self._per_chunk)
                for ref in refs:
                    page = self._chunks[ref.tensor_idx].shape[1] // self._per_chunk
                    row, length = self._chunks[ref.tensor_idx], ref.page_size_bytes
                    at = part * page
                    yield (
                        self._blocks[ref.tensor_idx][block, :length],
                        row[chunks.block_ids[chunk_at + chunk], at : at + length],
                    )
            block_at += size
            chunk_at += -(-(skipped + size) // self._per_chunk) if size else 0

    def _done(self, job_id, begun, copied):
        self._finished.append(TransferResult(job_id, True, copied, time.monotonic() - begun))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        begun, copied = time.monotonic(), 0
        for block, host in self._pairs(src_spec, dst_spec):
            host.copy_(block)
            copied += host.numel()
        return self._done(job_id, begun, copied)

    def submit_load(self, job_id, src_spec, dst_spec):
        begun, copied = time.monotonic(), 0
        for block, host in self._pairs(dst_spec, src_spec):
            block.zero_() if ZEROES else block.copy_(host)
            copied += host.numel()
        return self._done(job_id, begun, copied)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        """They are done."""

    def shutdown(self):
        self._chunks.clear()
        self._region.cleanup()


class TierOnCpu(TieringOffloadingSpec):
    """vLLM's, with that worker."""

    def get_manager(self):
        made = super().get_manager()
        with contextlib.suppress(FileNotFoundError):  # its workers have it: one that is killed leaves no file
            Path(self._scheduler_mmap.mmap_path).unlink()
        return made

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
