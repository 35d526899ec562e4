"""The signatures of vLLM's base classes, as JSON: run with the engines' Python; prints what
test_vllm_drift.py compares."""

import inspect
import json

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


def signatures(kind: type) -> dict[str, str]:
    """Public methods by name; `abstract` stands before those that must be there."""
    found = {}
    for name, member in inspect.getmembers(kind):
        if (name.startswith("_") and name != "__init__") or not callable(member):
            continue
        mark = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
        found[name] = mark + ", ".join(
            str(p).split(":")[0].split(" =")[0] for p in inspect.signature(member).parameters.values()
        )
    return found


print(
    "SIGNATURES "
    + json.dumps({kind.__name__: signatures(kind) for kind in (KVConnectorBase_V1, SupportsHMA)})
)
