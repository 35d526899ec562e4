"""What the spec's scheduler holds pinned, and for whom.

Owns nothing by itself: the manager fills it in. Invariant: a block of a request's `keys` is held, and names
that request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey


@dataclass
class Pins:
    """Of the blocks that the same requests asked for in one step: one batch for each rank."""

    batches: list[Any]
    blocks: int  # that are still held

    def release_one(self) -> None:
        """The last one releases the batches."""
        self.blocks -= 1
        if self.blocks <= 0:
            for batch in self.batches:
                batch.release()


@dataclass
class Held:
    """A block that is pinned for the requests that found it."""

    pins: Pins
    requests: set[str]
    loads: int = 0
    until: float = 0.0  # where nobody says that its loads have ended


@dataclass
class RequestState:
    """What is known of one of vLLM's."""

    keys: set[OffloadKey] = field(default_factory=set)  # held for it
    until: float = 0.0  # its lease on them
    missed: set[OffloadKey] = field(default_factory=set)  # found, and not to be had
    waited_until: float | None = None
    verified_until: float | None = None  # it waits for blocks to be compared; anew behind a load or a lease
