"""vLLM on kvstored: the connector that vLLM loads with
kv_connector_module_path="kvclient.integrations.vllm".

Owns the public name. Importing it imports vLLM. Written for vLLM 0.32; docs/engines.md has the flags and
limits.
"""

from kvclient.integrations.vllm.connector import KvstoredConnector

__all__ = ["KvstoredConnector"]
