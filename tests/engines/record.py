"""The signatures of an engine's base classes, as JSON: run with the engines' Python, for vllm or lmcache;
prints what the drift tests compare."""

import importlib
import json
import sys

from tests.engines.signatures import called, signatures

BASES = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": [
            "KVConnectorBase_V1",
            "SupportsHMA",
            "KVConnectorMetadata",
            "KVConnectorWorkerMetadata",
        ],
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": [
            "KVConnectorStats",
            "KVConnectorPromMetrics",
        ],
        "vllm.v1.kv_offload.base": [
            "OffloadingSpec",
            "OffloadingManager",
            "OffloadingWorker",
            "OffloadingEvent",
            "LoadStoreSpec",
            "GPULoadStoreSpec",
            "TransferResult",
            "CanonicalKVCaches",
            "ReqContext",
            "ScheduleEndContext",
        ],
        "vllm.v1.kv_offload.tiering.base": ["SecondaryTierManager", "TransferJob", "JobResult"],
        "vllm.v1.kv_offload.tiering.backpressure": ["BackpressureDetector"],
        "vllm.distributed.kv_events": ["BlockStored", "BlockRemoved"],
        "vllm.v1.kv_offload.config": ["OffloadingConfig", "OffloadingParallelConfig"],
    },
    "lmcache": {
        "lmcache.v1.distributed.l2_adapters.base": ["L2AdapterInterface", "AdapterUsage"],
        "lmcache.v1.distributed.api": ["ObjectKey"],
        "lmcache.v1.storage_backend.connector.base_connector": ["RemoteConnector"],
    },
}

CALLED = {  # from outside, by the connector where a load has failed
    "vllm": {
        "vllm.v1.core.sched.scheduler": {
            "Scheduler": [
                "_preempt_request",
                "running",
                "prev_step_scheduled_req_ids",
                "kv_cache_manager",
            ]
        },
        "vllm.v1.core.kv_cache_manager": {"KVCacheManager": ["get_block_ids"]},
        "vllm.v1.core.block_pool": {"BlockPool": ["evict_blocks"]},
    }
}

found = {
    name: signatures(getattr(importlib.import_module(module), name))
    for module, names in BASES[sys.argv[1]].items()
    for name in names
}
for module, kinds in CALLED.get(sys.argv[1], {}).items():
    for name, members in kinds.items():
        found[name] = called(getattr(importlib.import_module(module), name), members)
print("SIGNATURES " + json.dumps(found))
