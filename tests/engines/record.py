"""The signatures of vLLM's base classes, as JSON: run with the engines' Python; prints what
test_vllm_drift.py compares."""

import json

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from tests.engines.signatures import signatures

print(
    "SIGNATURES "
    + json.dumps({kind.__name__: signatures(kind) for kind in (KVConnectorBase_V1, SupportsHMA)})
)
