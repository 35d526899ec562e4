"""The text side of the store: chunks, keys, layouts, plan(), which finds a prompt's stored stretches, and
Evictions, which tells when blocks left memory. Never opens a connection and never maps memory.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Evictions":
        from kvclient.blocks.evictions import Evictions

        return Evictions
    if name == "plan":  # loads NumPy and the native part: only for who asks
        from kvclient.blocks.reuse_plan import plan

        return plan
    raise AttributeError(f"module 'kvclient.blocks' has no attribute {name!r}")
