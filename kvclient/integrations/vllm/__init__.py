"""vLLM on kvstored, three ways, each loaded by vLLM's own plug-in way from "kvclient.integrations.vllm": the
connector, the spec for vLLM's OffloadingConnector, and the tier beneath its TieringOffloadingSpec.

Owns the public names. Importing it imports vLLM. Written for vLLM 0.32; docs/engines.md has the flags and
limits.
"""

from kvclient.integrations.vllm.connector import KvstoredConnector
from kvclient.integrations.vllm.offload.spec import KvstoredOffloadingSpec
from kvclient.integrations.vllm.offload.tier import KvstoredTier

__all__ = ["KvstoredConnector", "KvstoredOffloadingSpec", "KvstoredTier"]
