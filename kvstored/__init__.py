"""kvstored: a daemon that owns the KV cache of large language models on a host.

Its native half is kvstored._core (the store and the session server); the rest of the package composes,
configures and shows it. Never imports torch, numpy or kvclient.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "_core":
        raise AttributeError(f"module 'kvstored' has no attribute {name!r}")
    try:  # `from kvstored import _core` looks for an attribute first
        return importlib.import_module("kvstored._core")
    except ModuleNotFoundError as error:
        if error.name != "kvstored._core":
            raise
    # A clone shadows an installed package in every Python that is started in it.
    raise ImportError(
        f"{__path__[0]} is source code whose native part is not built: `make build` there, or, to use the "
        "installed kvstored, start it in another directory",
        name="kvstored._core",
    )
