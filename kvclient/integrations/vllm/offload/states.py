"""What the store says of blocks, for the spec's scheduler: of every rank in one answer, all of a question in
one call.

Owns nothing; reads shared memory. Invariants: a block is there only if each rank's part is; a store that is
away is an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.pages import MISSING, ON_DISK, PENDING, RESIDENT
from kvclient.integrations.vllm.identity import each_of_rank
from kvclient.integrations.vllm.offload.claims import Claims
from kvclient.integrations.vllm.offload.naming import OffloadNames

FOUND = bytes([RESIDENT, ON_DISK])
_LEAST_FIRST = (MISSING, PENDING, ON_DISK, RESIDENT)


class States:
    """Of one engine's scheduler."""

    def __init__(self, client: Any, names: OffloadNames, health: Health, claims: Claims) -> None:
        self._client, self._names, self._health, self._claims = client, names, health, claims

    def of(self, keys: Sequence[bytes]) -> bytes:
        """A state for each of vLLM's keys: of the rank that has least of it."""
        return self._of(self._names.whole(keys))

    def there(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each rank has, or writes, its part, by names that are not yet of a rank."""
        return [state != MISSING for state in self._of(list(names))]

    def claimed(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether an engine computes them, which waits for nobody to wait."""
        try:
            return self._claims.elsewhere(self._names.whole(keys))
        except FAILURES as error:
            self._health.failed("a look-up", error)
            return [False] * len(keys)

    def _of(self, names: list[bytes]) -> bytes:
        ranks = self._names.ranks
        try:
            parts = [self._client.lookup(each_of_rank(names, rank, ranks)).states for rank in range(ranks)]
        except FAILURES as error:
            self._health.failed("a look-up", error)
            return bytes(len(names))
        if ranks == 1:
            return bytes(parts[0])
        return bytes(min(states, key=_LEAST_FIRST.index) for states in zip(*parts, strict=True))
