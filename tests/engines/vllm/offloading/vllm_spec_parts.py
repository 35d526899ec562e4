"""The scheduler's half of the offloading spec with vLLM's own types, beside the daemon of sys.argv[1].
Imported by scenes, with the engines' Python."""

import os
import sys

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvclient
from kvclient.integrations.health import Health
from kvclient.integrations.pages import Pages
from kvclient.integrations.vllm.offload.naming import OffloadNames
from kvclient.integrations.vllm.offload.scheduling import KvstoredManager, log

DIRECTORY, ROW = sys.argv[1], 3000
CONFIG = OffloadingConfig(
    groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),), worker_kv_bytes_per_block=ROW,
    enable_kv_cache_events=True, extra_config={}, engine_id="e",
    model=OffloadingModelConfig(name="model", dtype="float32"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    ),
    kv_cache_layout="LBNHC",
)  # fmt: skip
KEYS = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(6)]
CONTEXT = ReqContext(req_id="r")


def names(config=CONFIG, seed=None, whole_rows=False, **options):
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    merged = {"weights_digest": "w1", "model_version": "", **options}
    made = OffloadNames(config, None, merged, "rows", whole_rows)
    os.environ.pop("PYTHONHASHSEED", None)
    return made


def manager(naming, max_held=100, lease_s=30.0, wait_s=0.5, wait_pending_s=0.0, words=(), fetch_wait_s=0.0):
    client = kvclient.connect(DIRECTORY, on_error="miss", timeout_s=1.0)
    return KvstoredManager(
        client, naming, wait_s, wait_pending_s, lease_s, max_held, True, fetch_wait_s, words
    )


def step(offloading, new=(), preempted=()):
    offloading.on_schedule_end(ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=list(preempted)))


def answers(offloading, keys, request="r"):
    """What vLLM gets once nothing is being verified any more."""
    for _ in range(100):
        found = [offloading.lookup(key, ReqContext(req_id=request)) for key in keys]
        if LookupResult.RETRY not in found:
            return [answer is LookupResult.HIT for answer in found]
        step(offloading)
        offloading._pool.submit(int).result()
    raise AssertionError("the look-up does not end")


client = kvclient.connect(DIRECTORY)
pages = Pages(client, Health(client, log), 1.0)
layout = pages.format([ROW])
content = np.random.default_rng(1).integers(0, 256, (len(KEYS), ROW), np.uint8)


def put(naming):
    whole = naming.whole(KEYS)
    assert all(pages.put(whole, layout, [[row] for row in content]))
    return whole
