"""TensorRT-LLM on kvstored: the two halves that KvCacheConnectorConfig names.

Owns the public names. Importing it imports TensorRT-LLM. Written from its sources; **never run** with it:
docs/engines.md says what was tested instead.
"""

from kvclient.integrations.tensorrt_llm.scheduler import KvstoredScheduler
from kvclient.integrations.tensorrt_llm.worker import KvstoredWorker

__all__ = ["KvstoredScheduler", "KvstoredWorker"]
