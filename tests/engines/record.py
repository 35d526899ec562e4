"""The signatures of an engine's base classes, as JSON: run with the engines' Python, for vllm or lmcache;
prints what the drift tests compare."""

import importlib
import json
import sys

from tests.engines.signatures import signatures

BASES = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": ["KVConnectorBase_V1", "SupportsHMA"],
    },
    "lmcache": {
        "lmcache.v1.distributed.l2_adapters.base": ["L2AdapterInterface", "AdapterUsage"],
        "lmcache.v1.distributed.api": ["ObjectKey"],
    },
}

found = {
    name: signatures(getattr(importlib.import_module(module), name))
    for module, names in BASES[sys.argv[1]].items()
    for name in names
}
print("SIGNATURES " + json.dumps(found))
