"""Which store an Engine has: the caller's client, this host's daemon, or one inside the process.

Owns that choice and the warning that there is no daemon. Never starts one. Invariant: what an Engine opened
it closes; a client that was handed in stays open.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from kvclient.client.connect import connect, default_directory
from kvclient.errors import InvalidArgument
from kvclient.hf.engine.in_process import InProcessClient

MEMORY = "memory"


def open_store(
    client: Any, memory_bytes: int | None = None, disk_dir: str | os.PathLike[str] | None = None,
    disk_bytes: int | None = None,
) -> tuple[Any, bool]:  # fmt: skip
    """(the client, whether it is the engine's own). client: one; None: of this host's daemon, which goes on
    without while there is none, with a warning; "memory": of a store inside this process, as the other
    arguments say. Raises InvalidArgument.
    """
    limits = {"memory_bytes": memory_bytes, "disk_dir": disk_dir, "disk_bytes": disk_bytes}
    limits = {name: value for name, value in limits.items() if value is not None}
    if client == MEMORY:
        return InProcessClient(**limits), True
    if limits:
        names = ", ".join(f"{name}=" for name in limits)
        raise InvalidArgument(f'{names} without client="memory": the daemon\'s budgets are its own')
    if client is not None:
        return client, False
    found = connect(on_error="miss")
    if found.degraded:
        warnings.warn(
            f"no kvstored daemon answers in {default_directory()}: nothing is reused until one does. Start "
            '`kvstored serve`, or say client="memory" for a store inside this process',
            stacklevel=4,  # the caller of Engine(), whose arguments are looked at first
        )
    return found, True
