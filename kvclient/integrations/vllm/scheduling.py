"""The scheduler's half: how much of a prompt is stored, and which blocks the workers load and save in a
step.

Owns the requests that run; never touches KV. Invariant: only blocks all of whose ranks are in the store are
promised; what a step saves follows from what the request has computed, so that a request that was set back
by a failed load or a preemption saves again what it computes again. A load that fails on one rank spoils what
all of them compute, in its step and in those that vLLM has sent off meanwhile: what such a step writes is
sealed by the word of a later one, when all loads have come, other than by a worker that is the only one and
sees for itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.leases import Lease, Leases
from kvclient.integrations.pages import ON_DISK, PENDING
from kvclient.integrations.unsure import Doubts
from kvclient.integrations.vllm.adapters import Adapters
from kvclient.integrations.vllm.events import Events
from kvclient.integrations.vllm.identity import KEY_BYTES, RequestKeys, anew, of_rank

log = logging.getLogger("vllm.kvstored")
THERE = b"\2\3"  # in memory, on disk
FETCHES = 4  # requests for which other hosts are asked at a time
LEASE_S = 30.0  # how long what was brought is kept for a request that waits for room
MAX_BROUGHT = 32_768  # blocks of all requests, of the client's 65,536 pins


@dataclass
class Transfer:
    """Blocks of one request: a key and vLLM's block number each. The keys are 32 bytes each in one piece."""

    keys: bytes
    block_ids: list[int]


@dataclass
class Step(KVConnectorMetadata):
    """What the workers do in one step."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    number: int = 0  # to be told of when its loads have ended, and to be named by; 0: neither
    unsure: bool = False  # what it writes is sealed when a later step names it as right
    right: list[int] = field(default_factory=list)  # earlier ones
    wrong: list[int] = field(default_factory=list)


@dataclass
class Ended(KVConnectorWorkerMetadata):
    """Steps whose loads have ended, and those of which one failed: vLLM hears of it in the same message, or
    an earlier one, which blocks failed."""

    steps: set[int]
    failed: set[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Ended:
        assert isinstance(other, Ended)
        return Ended(self.steps | other.steps, self.failed | other.failed)


@dataclass
class _Running:
    keys: RequestKeys
    block_ids: list[int] = field(default_factory=list)
    saved: int = 0  # leading blocks that need no saving
    waited_until: float | None = None
    fetch: Future[list[Lease]] | None = None  # brings blocks from disk and from other hosts
    fetched: bool = False  # and gave them back: once a request
    may_load: bool = True  # until a load of it has failed: what fails again is not asked for for ever

    def transfer(self, start: int, stop: int) -> Transfer:
        """Of those of its full blocks whose keys are known."""
        keys = self.keys.between(start, stop)
        return Transfer(keys, self.block_ids[start : start + len(keys) // KEY_BYTES])


class Scheduling:
    """One per engine core. Not thread-safe: vLLM calls it from one thread."""

    def __init__(
        self, client: Any, identity: bytes, block_tokens: int, hash_tokens: int, ranks: int,
        wait_pending_s: float, fetch_wait_s: float, loads: bool, saves: bool, events: bool = False,
    ) -> None:  # fmt: skip
        self._client, self._identity, self._ranks = client, identity, ranks
        self._health = Health(client, log)
        self._block_tokens, self._hashes_per_block = block_tokens, block_tokens // hash_tokens
        self._wait_pending_s, self._loads, self._saves = wait_pending_s, loads, saves
        self._fetch_wait_s = fetch_wait_s
        self._pool = ThreadPoolExecutor(FETCHES, "kvstored-fetch") if fetch_wait_s > 0 else None
        self._brought = Leases(LEASE_S, MAX_BROUGHT)
        self._adapters = Adapters()
        self._events = Events(self._whole, KEY_BYTES, block_tokens) if events else None
        self._running: dict[str, _Running] = {}
        self._with_old_kv: set[str] = set()  # requests that have KV of before begin_anew
        self._promised: dict[str, int] = {}  # blocks that the request is to load in this step
        self._steps, self._doubts = 0, Doubts()
        self._left: list[list[int]] = []  # vLLM's blocks of requests that ended before their loads had
        self._first_saved: dict[str, int] = {}  # in the step that is made: of each request

    def _of(self, request: Any) -> _Running:
        if (known := self._running.get(request.request_id)) is None:
            keys = RequestKeys(self._identity, request, self._hashes_per_block, self._adapters)
            known = self._running[request.request_id] = _Running(keys)
        return known

    def arrived(self, request: Any) -> None:
        """It waits in vLLM's queue from now on: what lies on disk of its prompt comes meanwhile."""
        if not self._loads or getattr(request, "skip_reading_prefix_cache", False):
            return
        keys = self._of(request).keys.between(0, (request.num_tokens - 1) // self._block_tokens)
        below: list[bytes] = []
        for rank in range(self._ranks if keys else 0):
            states, parts = self._states(keys, rank), of_rank(keys, rank, self._ranks)
            leading = len(states) - len(states.lstrip(THERE))
            places = [i * KEY_BYTES for i, state in enumerate(states[:leading]) if state == ON_DISK]
            below += [parts[at : at + KEY_BYTES] for at in places]
        if not below:
            return
        try:
            self._client.prefetch(below)
        except FAILURES as error:
            self._health.failed("a prefetch", error)

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond those computed that can be loaded. None: others are computing them, ask again."""
        if not self._loads or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        running = self._of(request)
        if not running.may_load:
            return 0
        first = computed_tokens // self._block_tokens
        last = (request.num_tokens - 1) // self._block_tokens  # the last token is always computed
        keys = running.keys.between(first, last)
        if not keys:
            return 0
        there, pending = self._present(keys)
        if there < len(keys) // KEY_BYTES and not pending and self._pool is not None:
            if running.fetch is None and not running.fetched:
                wanted, until = self._of_all_ranks(keys[there * KEY_BYTES :]), time.monotonic()
                running.fetch = self._pool.submit(self._bring, wanted, until + self._fetch_wait_s)
            if running.fetch is not None:
                if not running.fetch.done():
                    return None
                there, pending = self._present(keys)
        if pending and self._wait_pending_s > 0:
            now = time.monotonic()
            if running.waited_until is None:
                running.waited_until = now + self._wait_pending_s
            if now < running.waited_until:
                return None
        return max(0, (first + there) * self._block_tokens - computed_tokens)

    def _present(self, keys: bytes) -> tuple[int, bool]:
        """How many leading blocks every rank has, and whether the next is being written."""
        count, pending = len(keys) // KEY_BYTES, False
        for rank in range(self._ranks):
            states = self._states(keys[: count * KEY_BYTES], rank)
            leading = len(states) - len(states.lstrip(THERE))
            if leading < len(states):
                pending = states[leading] == PENDING
                count = leading
        return count, pending

    def _states(self, keys: bytes, rank: int) -> bytes:
        """Of a rank's parts; all are missing where the store refuses to answer."""
        try:
            return self._client.lookup(of_rank(keys, rank, self._ranks)).states
        except FAILURES as error:
            self._health.failed("a look-up", error)
            return bytes(len(keys) // KEY_BYTES)

    def _of_all_ranks(self, keys: bytes) -> list[bytes]:
        parts = b"".join(of_rank(keys, rank, self._ranks) for rank in range(self._ranks))
        return [parts[at : at + KEY_BYTES] for at in range(0, len(parts), KEY_BYTES)]

    def _bring(self, names: list[bytes], until: float) -> list[Lease]:
        """On a thread of its own: has what lies elsewhere brought into this host's memory, and pins it. Its
        time runs while those of other requests are brought, too."""
        try:
            left_s = max(0.0, until - time.monotonic())
            return [self._brought.hold(names, self._client.get(names, wait_s=left_s))]
        except FAILURES as error:
            log.warning("kvstored: blocks of other hosts could not be asked for: %s", error)
            return []

    def _let_go(self, running: _Running) -> None:
        if running.fetch is not None:
            running.fetch.add_done_callback(lambda done: self._brought.end(done.result()))
            running.fetch, running.fetched = None, True

    def allocated(self, request: Any, external_tokens: int) -> None:
        """vLLM has made room; may be told twice."""
        self._of(request)
        if external_tokens:
            self._promised[request.request_id] = external_tokens // self._block_tokens

    def step(self, output: Any) -> Step:
        """Of vLLM's SchedulerOutput, which is left as it is."""
        self._steps += 1
        if untold := self._doubts.untold(self._steps):
            self.ended(untold, untold)
        step, self._first_saved = Step(), {}
        step.right, step.wrong = self._doubts.take()
        for new in output.scheduled_new_reqs:
            running = self._running.get(new.req_id)
            if running is not None:
                running.block_ids = list(new.block_ids[0])
                self._add(step, output, new.req_id, new.num_computed_tokens, first=True)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            running = self._running.get(req_id)
            if running is None:
                continue
            if running.fetch is not None:
                self._let_go(running)  # what was brought was loaded in an earlier step
            resumed, new_ids = req_id in cached.resumed_req_ids, cached.new_block_ids[i]
            if resumed:
                running.block_ids = []
                self._with_old_kv.discard(req_id)
            if new_ids is not None:
                running.block_ids.extend(new_ids[0])
            computed = cached.num_computed_tokens[i]
            before = computed // self._block_tokens
            behind = (computed + output.num_scheduled_tokens[req_id]) // self._block_tokens
            if before == behind <= running.saved and not resumed and not self._promised:
                continue  # no block ends in this step, as in nearly each
            self._add(step, output, req_id, computed, first=resumed)
        self._promised.clear()
        self._number(step)
        if self._health.away:  # of what failed here: the workers say when the daemon goes
            self._health.look()
        return step

    def _number(self, step: Step) -> None:
        step.unsure = bool(self._doubts)
        if step.loads:
            self._doubts.loads(self._steps)
            step.unsure = step.unsure or self._ranks > 1
        if step.loads or (step.saves and step.unsure):
            step.number = self._steps
            self._doubts.writes(step.number, self._first_saved)

    def ended(self, steps: set[int], failed: set[int]) -> None:
        """Their loads have ended, of some not well: vLLM has set back what stood on those, which saves again
        what it computes again, and so does what was not set back and was saved in vain."""
        for first in self._doubts.ended(steps, failed):
            for req_id, block in first.items():
                if (running := self._running.get(req_id)) is not None:
                    running.saved = min(running.saved, block)
        if not self._doubts:
            self._left.clear()

    def spoilt(self, failed: set[int]) -> set[int]:
        """vLLM's blocks that stand on those whose load failed, and those. Their requests load no more."""
        found = set(failed)
        for running in self._running.values():
            running.may_load = running.may_load and failed.isdisjoint(running.block_ids)
        for numbers in [*(running.block_ids for running in self._running.values()), *self._left]:
            first = next((i for i, number in enumerate(numbers) if number in failed), len(numbers))
            found.update(numbers[first:])
        return found

    @property
    def waits(self) -> bool:
        """Whether a step is to come that says what is to be sealed."""
        return self._doubts.waits

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What was stored and removed since the last call."""
        return () if self._events is None else self._events.take()

    def _whole(self, keys: bytes) -> bytes:
        """A one for each block that every rank has."""
        parts = [self._states(keys, rank) for rank in range(self._ranks)]
        return bytes(all(state in THERE for state in states) for states in zip(*parts, strict=True))

    def _add(self, step: Step, output: Any, req_id: str, computed_tokens: int, first: bool) -> None:
        running, size = self._running[req_id], self._block_tokens
        if first:
            running.saved = 0
        # Not from computed_tokens on: blocks before it may be of tokens known only now, or written in vain
        start = min(running.saved, computed_tokens // size)
        stop = (computed_tokens + output.num_scheduled_tokens[req_id]) // size
        loaded = range(0)
        if promised := self._promised.get(req_id):
            end = computed_tokens // size  # vLLM counts what is loaded as computed
            loaded = range(end - promised, end)
            step.loads.append(running.transfer(loaded.start, end))
        if start >= stop or not self._saves or req_id in self._with_old_kv:
            return
        for part in ((start, loaded.start), (loaded.stop, stop)) if loaded else ((start, stop),):
            if (save := running.transfer(*part)).keys:
                step.saves.append(save)
        if keys := running.keys.between(start, stop):
            count = len(keys) // KEY_BYTES
            running.saved, self._first_saved[req_id] = start + count, start
            if self._events is not None:
                parent = running.keys.hashes(start - 1, start)[0] if start else None
                self._events.saved(keys, running.keys.hashes(start, start + count), parent)

    def finished(self, request: Any) -> None:
        """The request has ended: what was promised to it is let go."""
        if (running := self._running.pop(request.request_id, None)) is not None:
            self._let_go(running)
            if self._doubts:
                self._left.append(running.block_ids)
        self._promised.pop(request.request_id, None)
        self._with_old_kv.discard(request.request_id)

    def begin_anew(self) -> None:
        """Nothing of before is found or saved any more, and nothing is shared with other engines: vLLM
        forgets its KV, as when its weights change under it, and nobody knows which it has from now on.
        """
        self._identity = anew(self._identity)
        for req_id, running in self._running.items():
            self._let_go(running)
            if running.block_ids:  # a session that waits for more input keeps them, and is named anew
                self._with_old_kv.add(req_id)
        self._running.clear()
        self._promised.clear()

    def close(self) -> None:
        """Waits for what is being brought."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for running in self._running.values():
            self._let_go(running)
        self._brought.close()
