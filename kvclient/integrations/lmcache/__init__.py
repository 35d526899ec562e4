"""LMCache on kvstored: the L2 adapter that `{"type": "plugin"}` loads.

Owns the public name. Importing it imports LMCache. Written for LMCache 0.5.6; docs/engines.md has the flags
and limits.
"""

from kvclient.integrations.lmcache.l2 import KvstoredL2Adapter

__all__ = ["KvstoredL2Adapter"]
