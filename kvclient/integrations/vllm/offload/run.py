"""Which blocks vLLM is going to ask for: it asks a spec's manager for one block a call, in their order, until
one is a miss, and each call by itself would cost a question to the store.

Owns the answers to the request that is being asked for, in this step. Invariants: an answer is of this step,
and nothing was released since; of a key that vLLM did not name before nothing is answered.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvclient.integrations.vllm.offload.naming import GROUP_BYTES


class Run:
    """Of one manager. `context` is the request's whose `answers` these are."""

    def __init__(self, groups: int) -> None:
        self._several = groups > 1
        self._asked: set[bytes] = set()  # groups of its
        self.context: ReqContext | None = None
        self.answers: dict[OffloadKey, LookupResult] = {}

    def end(self) -> None:
        """What was answered may be another answer from now on."""
        self.context = None

    def behind(self, key: OffloadKey, context: ReqContext) -> list[OffloadKey]:
        """The key, and what vLLM asks for next unless one is a miss: the request's later keys of this group.
        Only once for a group: from a window's end vLLM goes backwards."""
        if context is not self.context:
            self.context, self.answers = context, {}
            self._asked.clear()
        group = bytes(key[-GROUP_BYTES:])
        positions: Any = getattr(context, "_offload_key_positions", ())  # in vLLM's order, of all groups
        if group in self._asked or key not in positions:
            return [key]
        self._asked.add(group)
        keys = list(positions)
        if self._several:
            keys = [each for each in keys if each[-GROUP_BYTES:] == group]
        return keys if keys[0] == key else keys[keys.index(key) :]
