"""The scheduler's half for TensorRT-LLM: how much of a prompt is stored, and what the workers load and save.

Owns the pins of what was promised; never touches KV. TensorRT-LLM has no word for a load that failed, so
blocks are pinned and their checksums compared before they are promised, and stay pinned until the request
ends or `lease_s` have passed. Invariants: only blocks that all ranks have are promised, and none before all
ranks' self-tests passed; the last token is always computed; a request with an adapter or media is left alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler

import kvclient
from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.leases import Lease, Leases
from kvclient.integrations.marks import all_gave_their_word, word_name
from kvclient.integrations.options import connected
from kvclient.integrations.tensorrt_llm.identity import common, engine_name, of_rank, of_request

log = logging.getLogger("tensorrt_llm.kvstored")
MAX_HELD = 32_768
ALONE = ("lora_task_id", "multimodal_hashes", "prompt_embedding_table", "encoder_tokens")


@dataclass
class Transfer:
    """Keys, not yet of a rank, and the engine's block for each."""

    keys: list[bytes]
    block_ids: list[int]


@dataclass
class Step:
    """What the workers do in one step; broadcast to them."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    engine: str = ""  # the name under which workers give their word


@dataclass
class _Running:
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    salt: str | None = None
    saved: int = 0  # leading blocks that need no saving any more
    shared: bool = True


class KvstoredScheduler(KvCacheConnectorScheduler):
    """On rank 0 only. See docs/engines.md."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._common = common(llm_args)
        self._client = connected(self._common.options)
        self._health = Health(self._client, log, "trtllm")
        self._name = engine_name(self._common.identity)
        self._words = [word_name(self._name, rank) for rank in range(self._common.ranks)]
        self._leases = Leases(float(self._common.options["lease_s"]), MAX_HELD)
        self._running: dict[int, _Running] = {}
        self._promised: dict[int, tuple[int, int]] = {}  # request -> first block and how many
        self._held: dict[int, list[Lease]] = {}
        self._alone: set[int] = set()  # requests whose KV depends on more than tokens and salt

    def _keys(self, tokens: list[int], salt: str | None, count: int) -> list[bytes]:
        size = self._common.block_tokens
        identity = of_request(self._common.identity, salt)
        return kvclient.chain(identity, tokens[: count * size], block_tokens=size).keys if count > 0 else []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """May be asked again of a request that found no room: what was promised before is void then, and its
        pins go once those of this answer are held."""
        self._promised.pop(request.request_id, None)
        before = self._held.pop(request.request_id, [])
        count = self._matched(request, num_computed_tokens)
        self._leases.end(before)
        return count * self._common.block_tokens, False

    def _matched(self, request: Any, num_computed_tokens: int) -> int:
        """Blocks behind those that are computed."""
        size = self._common.block_tokens
        if not _shared(request):
            self._alone.add(request.request_id)
            return 0
        tokens = list(request.get_tokens(0))
        first, last = num_computed_tokens // size, (len(tokens) - 1) // size
        if num_computed_tokens % size or last <= first:
            return 0
        if self._words and not all_gave_their_word(self._client, self._words):
            return 0
        self._words = []
        keys = self._keys(tokens, request.cache_salt, last)[first:]
        count = self._pinned(request.request_id, keys)
        if count:
            self._promised[request.request_id] = (first, count)
        return count

    def _pinned(self, request_id: int, keys: list[bytes]) -> int:
        """How many leading blocks are pinned, of every rank."""
        count = len(keys)
        try:
            states = self._client.lookup(of_rank(keys, 0)).states
            count = next((i for i, state in enumerate(states) if state not in (2, 3)), count)
            for rank in range(self._common.ranks):
                names = of_rank(keys[:count], rank)
                if not names:
                    return 0
                blocks = self._client.get(names, wait_s=float(self._common.options["wait_s"]), verify=True)
                found = [block is not None for block in blocks]
                count = found.index(False) if False in found else count
                self._held.setdefault(request_id, []).append(self._leases.hold(names, blocks))
        except FAILURES as error:
            self._health.failed("a look-up", error)
            return 0
        return count

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The blocks come with the step's output, too."""

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step = Step(engine=self._name)
        for data in scheduler_output.new_requests:
            self._running[data.request_id] = _Running(salt=data.cache_salt)
            self._add(step, data)
        for data in scheduler_output.cached_requests:
            if data.request_id in self._running:
                self._add(step, data)
        self._health.look()
        return step

    def _add(self, step: Step, data: Any) -> None:
        running, size = self._running[data.request_id], self._common.block_tokens
        running.tokens.extend(data.new_tokens)
        running.block_ids.extend(data.new_block_ids)
        running.shared = running.shared and data.request_id not in self._alone
        computed = data.computed_position
        if promised := self._promised.pop(data.request_id, None):
            first, count = promised
            keys = self._keys(running.tokens, running.salt, first + count)[first:]
            step.loads.append(Transfer(keys, running.block_ids[first : first + count]))
            computed += count * size
            running.saved = first + count
        stop = min(computed + data.num_scheduled_tokens, len(running.tokens)) // size
        if running.shared and stop > running.saved:
            keys = self._keys(running.tokens, running.salt, stop)[running.saved :]
            step.saves.append(Transfer(keys, running.block_ids[running.saved : stop]))
            running.saved = stop

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._running.pop(request.request_id, None)
        self._promised.pop(request.request_id, None)
        self._alone.discard(request.request_id)
        self._leases.end(self._held.pop(request.request_id, []))
        return False  # nothing is saved behind the request's back


def _shared(request: Any) -> bool:
    values = [getattr(request, name, None) for name in ALONE]
    return all(value is None or (hasattr(value, "__len__") and len(value) == 0) for value in values)
