"""The signatures of an engine's base classes, as JSON: run with the engines' Python, for vllm or lmcache;
prints what the drift tests compare."""

import importlib
import json
import sys

from tests.engines.signatures import signatures

BASES = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": ["KVConnectorBase_V1", "SupportsHMA"],
        "vllm.v1.kv_offload.base": [
            "OffloadingSpec",
            "OffloadingManager",
            "OffloadingWorker",
            "OffloadingEvent",
        ],
        "vllm.v1.kv_offload.tiering.base": ["SecondaryTierManager", "TransferJob", "JobResult"],
        "vllm.v1.kv_offload.config": ["OffloadingConfig", "OffloadingParallelConfig"],
    },
    "lmcache": {
        "lmcache.v1.distributed.l2_adapters.base": ["L2AdapterInterface", "AdapterUsage"],
        "lmcache.v1.distributed.api": ["ObjectKey"],
        "lmcache.v1.storage_backend.connector.base_connector": ["RemoteConnector"],
    },
}

found = {
    name: signatures(getattr(importlib.import_module(module), name))
    for module, names in BASES[sys.argv[1]].items()
    for name in names
}
print("SIGNATURES " + json.dumps(found))
