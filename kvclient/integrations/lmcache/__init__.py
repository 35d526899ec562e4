"""LMCache on kvstored: the L2 adapter of its multi-process mode, which `{"type": "plugin"}` loads, and the
connector of its older, remote backend.

Owns the public names. Importing it imports LMCache. Written for LMCache 0.5.6; docs/engines.md has the flags
and limits.
"""

from kvclient.integrations.lmcache.l2 import KvstoredL2Adapter
from kvclient.integrations.lmcache.remote import KvstoredRemoteConnector

__all__ = ["KvstoredL2Adapter", "KvstoredRemoteConnector"]
