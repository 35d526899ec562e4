"""SGLang on kvstored: the storage backend that `--hicache-storage-backend dynamic` loads.

Owns the public name. Importing it imports SGLang. Written for SGLang 0.5.23; docs/engines.md has the flags
and limits.
"""

from kvclient.integrations.sglang.storage import KvstoredHiCache

__all__ = ["KvstoredHiCache"]
