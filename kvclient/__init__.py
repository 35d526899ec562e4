"""kvclient: the library inference processes load to find, read and publish KV blocks of a kvstored daemon.

    client = kvclient.connect()
    chain = kvclient.chain(identity, token_ids)
    with client.get(chain[: client.lookup(chain).resident]) as blocks:
        blocks[0].layer(3)

Owns the list of public names, nothing else. Invariant: importing this package imports neither torch nor
transformers nor the native module; a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> the module that defines it
_HOME = {
    "BlockLost": "kvclient.errors",
    "Chain": "kvclient._core",
    "Closed": "kvclient.errors",
    "DeadlineExceeded": "kvclient.errors",
    "InMemoryClient": "kvclient.testing.in_memory",
    "IncompatibleVersion": "kvclient.errors",
    "InvalidArgument": "kvclient.errors",
    "KVClient": "kvclient.client.client",
    "KVClientError": "kvclient.errors",
    "Layout": "kvclient.blocks.layout",
    "NoSpace": "kvclient.errors",
    "NotPermitted": "kvclient.errors",
    "PagesExhausted": "kvclient.errors",
    "PinsExhausted": "kvclient.errors",
    "Unavailable": "kvclient.errors",
    "chain": "kvclient.blocks.keys",
    "connect": "kvclient.client.connect",
    "copy_into": "kvclient._core",
    "crc32c": "kvclient._core",
    "metrics": "kvclient.client.client",
}
_MODULES = ("hf",)

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"kvclient.{name}")
    raise AttributeError(f"module 'kvclient' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
