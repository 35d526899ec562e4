"""A KvstoredTier as vLLM's own factory makes it over plain memory, and jobs for it. Imported by scenes, with
the engines' Python."""

import sys
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

ROWS, ROW = 8, 3000
CONTEXT = ReqContext(req_id="r")
NAMED = {"type": "KvstoredTier", "module_path": "kvclient.integrations.vllm"}  # to vLLM's factory
PARALLEL = {
    "rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1,
    "data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None,
    "is_parallelism_agnostic": False,
}  # fmt: skip


def tier(directory, parallel=None, dtype="float32", **options):
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),), worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=True, extra_config={}, engine_id="e",
        model=OffloadingModelConfig(name="model", dtype=dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(**{**PARALLEL, **(parallel or {})}),
    )  # fmt: skip
    spec = SimpleNamespace(config=config, kv_events_config=OffloadingKVEventsConfig(True, False))
    memory = np.zeros((ROWS, ROW), np.int8)
    made = SecondaryTierFactory.create_secondary_tier(
        {**NAMED, "dir": directory, "weights_digest": "w1", "timeout_s": 0.5, "wait_s": 0.5, **options},
        memoryview(memory), spec,
    )  # fmt: skip
    return made, memory


def keys(first, count):
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)]


def job(storage, names, rows, load, context=CONTEXT):
    submit = storage.submit_load if load else storage.submit_store
    submit(TransferJob(len(names), names, np.array(rows), load, context))
    storage.drain_jobs()
    (result,) = storage.get_finished_jobs()
    assert not list(storage.get_finished_jobs()), "a job is reported once"
    return result


def found(storage, names):
    return [storage.lookup(name, CONTEXT) is LookupResult.HIT for name in names]


def need(what):
    print("NEED " + what, flush=True)
    sys.stdin.readline()


def content(numbers):
    return np.stack([np.random.default_rng(number).integers(-128, 128, ROW, np.int8) for number in numbers])
