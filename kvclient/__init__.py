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

__version__ = "0.1.0"  # kvstored's: one distribution (tests/unit/house/test_public_names.py compares)

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
    "LayoutLost": "kvclient.errors",
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


def _imported(module: str) -> Any:
    """A clone shadows an installed package in every Python that is started in it: that is said."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "kvclient._core":
            raise
    raise ImportError(
        f"{__path__[0]} is source code whose native part is not built: `make build` there, or, to use the "
        "installed kvstored, start Python in another directory",
        name="kvclient._core",
    )


def __getattr__(name: str) -> Any:
    if name == "_core":  # `from kvclient import _core` looks for an attribute first
        return _imported("kvclient._core")
    if name in _HOME:
        value = getattr(_imported(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"kvclient.{name}")
    raise AttributeError(f"module 'kvclient' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
