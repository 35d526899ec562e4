"""The scheduler's half of the offloading spec: which blocks are there, and pins until they are loaded.

Owns the pins; never touches the engine's tensors. vLLM 0.32 ends the engine when a load fails. So a block
counts as a hit only after another thread has brought it into memory, pinned it and compared its checksums,
and stays pinned until its load has ended: then it is in memory, whatever becomes of the daemon. Invariants: a
look-up waits for nobody; no pin outlives its request or `lease_s` without a load; a store that is away is an
empty one; of a request that has KV of before a reset nothing is stored behind it; other hosts are asked once
for what a request finds nowhere here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvclient.errors import KVClientError
from kvclient.integrations.health import Health
from kvclient.integrations.marks import all_gave_their_word
from kvclient.integrations.pages import MISSING, ON_DISK, PENDING, RESIDENT
from kvclient.integrations.vllm.identity import each_of_rank
from kvclient.integrations.vllm.offload.claims import Claims
from kvclient.integrations.vllm.offload.naming import OffloadNames, Resets
from kvclient.integrations.watched import Watched

log = logging.getLogger("vllm.kvstored")
FETCHES = 4  # requests for which other hosts are asked at a time
QUEUE_S = 5.0  # beyond wait_s: how long a request waits while others' blocks are brought and compared


class StoredBlocks(LoadStoreSpec):
    """What the scheduler tells the workers: the blocks' names, not yet of a rank, in vLLM's order."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = names


@dataclass
class _Pins:
    """Of the blocks that the same requests asked for in one step: one batch for each rank."""

    batches: list[Any]
    blocks: int  # that are still held

    def release_one(self) -> None:
        self.blocks -= 1
        if self.blocks <= 0:
            for batch in self.batches:
                batch.release()


@dataclass
class _Held:
    """A block that is pinned for the requests that found it."""

    pins: _Pins
    requests: set[str]
    until: float
    loads: int = 0


@dataclass
class _Request:
    keys: set[OffloadKey] = field(default_factory=set)  # held for it
    missed: set[OffloadKey] = field(default_factory=set)  # found, and not to be had
    waited_until: float | None = None
    verified_until: float | None = None


class KvstoredManager(OffloadingManager):
    """One per engine core. vLLM calls it from one thread; `_verify` runs on another."""

    def __init__(
        self, client: Any, names: OffloadNames, wait_s: float, wait_pending_s: float, lease_s: float,
        max_held: int, events: bool, fetch_wait_s: float = 0.0, words: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        self._client, self._names, self._health = client, names, Health(client, log)
        self._wait_s, self._wait_pending_s = wait_s, wait_pending_s
        self._lease_s, self._max_held, self._fetch_wait_s = lease_s, max_held, fetch_wait_s
        self._claims = Claims(client, self._health, lease_s)
        self._words = words  # of the workers, until all have said that what is promised can be loaded
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._held: dict[OffloadKey, _Held] = {}
        self._leaving: list[_Held] = []  # being loaded at a reset: vLLM never says when that has ended
        self._resets = Resets()
        self._wanted: dict[OffloadKey, set[str]] = {}  # of this step, to be verified
        self._sought: dict[OffloadKey, set[str]] = {}  # of this step, to be asked of other hosts
        self._verifying: dict[OffloadKey, set[str]] = {}
        self._pool = ThreadPoolExecutor(1, "kvstored-verify")
        self._fetches = ThreadPoolExecutor(FETCHES, "kvstored-fetch")
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._told: Watched[OffloadKey] = Watched()

    # ---------------------------------------------------------------- look-ups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._names.usable(key) or (self._words and not self._may_promise()):
            return LookupResult.MISS
        with self._lock:
            request = self._requests.setdefault(req_context.req_id, _Request())
            if (held := self._held.get(key)) is not None:
                held.requests.add(req_context.req_id)
                held.until = time.monotonic() + self._lease_s
                request.keys.add(key)
                return LookupResult.HIT
            if key in request.missed:
                return LookupResult.MISS
            if key in self._verifying:
                if request.verified_until is not None and time.monotonic() >= request.verified_until:
                    request.missed.add(key)
                    return LookupResult.MISS
                self._verifying[key].add(req_context.req_id)
                return LookupResult.RETRY
            held_now = len(self._held) + len(self._leaving)
            coming = len(self._verifying) + len(self._wanted) + len(self._sought)
            full = held_now + coming >= self._max_held
        state = self._state(key)
        if (state == PENDING or (state == MISSING and self._is_claimed(key))) and self._may_wait(request):
            return LookupResult.HIT_PENDING
        ask = self._wanted if state in (RESIDENT, ON_DISK) else self._sought
        if full or state == PENDING or (ask is self._sought and not self._fetch_wait_s):
            return LookupResult.MISS
        ask.setdefault(key, set()).add(req_context.req_id)
        if request.verified_until is None:
            request.verified_until = time.monotonic() + self._wait_s + self._fetch_wait_s + QUEUE_S
        return LookupResult.RETRY

    def _may_promise(self) -> bool:
        """A load that fails ends the engine: nothing is promised before every worker's self-test passed."""
        if all_gave_their_word(self._client, self._words):
            self._words = ()
        return not self._words

    def _is_claimed(self, key: OffloadKey) -> bool:
        """Whether an engine computes it, which waits for nobody to wait."""
        if not self._wait_pending_s:
            return False
        try:
            return self._claims.elsewhere(self._names.whole([key])[0])
        except KVClientError as error:
            self._health.failed("a look-up", error)
            return False

    def _state(self, key: OffloadKey) -> int:
        """Of the rank that has least of it."""
        (name,) = self._names.whole([key])
        ranks = self._names.ranks
        try:
            names = [each_of_rank([name], rank, ranks)[0] for rank in range(ranks)]
            states = self._client.lookup(names).states
        except KVClientError as error:
            self._health.failed("a look-up", error)
            return MISSING
        order = (MISSING, PENDING, ON_DISK, RESIDENT)
        return min(states, key=order.index)

    def _may_wait(self, request: _Request) -> bool:
        now = time.monotonic()
        if request.waited_until is None:
            request.waited_until = now + self._wait_pending_s
        return now < request.waited_until

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._expire()
        self._resets.scheduled(context)
        wanted, self._wanted = self._wanted, {}
        sought, self._sought = self._sought, {}
        self._ask(wanted, self._pool, self._wait_s)
        self._ask(sought, self._fetches, self._fetch_wait_s)
        self._health.look()

    def _ask(self, wanted: dict[OffloadKey, set[str]], pool: ThreadPoolExecutor, wait_s: float) -> None:
        with self._lock:
            self._verifying.update(wanted)
        together: dict[frozenset[str], list[OffloadKey]] = {}
        for key, requests in wanted.items():
            together.setdefault(frozenset(requests), []).append(key)
        for keys in together.values():
            pool.submit(self._verify, keys, wait_s)

    def _verify(self, keys: list[OffloadKey], wait_s: float) -> None:
        """Pins what is there and right, of all ranks, and drops the rest. What lies on disk or, where other
        hosts are asked, there, is brought first.

        One call a rank: vLLM's thread asks again without a pause, and each call between would wait for the
        interpreter's lock until that thread is made to give it up, 5 ms each time.
        """
        pins = _Pins([], len(keys))
        good = [True] * len(keys)
        until = time.monotonic() + wait_s
        whole = self._names.whole(keys)
        try:
            for rank in range(self._names.ranks):
                names = each_of_rank(whole, rank, self._names.ranks)
                left_s = max(0.0, until - time.monotonic())
                batch = self._client.get(names, wait_s=left_s, verify=True)
                pins.batches.append(batch)
                if batch.hits < len(keys):
                    good = [was and self._is_there(batch, i) for i, was in enumerate(good)]
        except Exception as error:  # an answer must come: vLLM asks again until it does
            self._health.failed("a load", error)
            good = [False] * len(keys)
        with self._lock:
            if whole != self._names.whole(keys):  # names of before a reset
                good = [False] * len(keys)
            for i, key in enumerate(keys):
                requests = {r for r in self._verifying.pop(key, set()) if r in self._requests}
                if good[i] and requests:
                    self._held[key] = _Held(pins, requests, time.monotonic() + self._lease_s)
                    for request in requests:
                        self._requests[request].keys.add(key)
                    continue
                for request in requests:
                    self._requests[request].missed.add(key)
                pins.release_one()

    @staticmethod
    def _is_there(batch: Any, index: int) -> bool:
        try:
            return batch[index] is not None
        except KVClientError:  # no pin was left for it
            return False

    def _expire(self) -> None:
        """Of requests that wait for room longer than a lease lasts; they ask again."""
        now = time.monotonic()
        with self._lock:
            for key in [k for k, held in self._held.items() if held.until <= now and not held.loads]:
                for request in self._held[key].requests:
                    if request in self._requests:
                        self._requests[request].keys.discard(key)
                self._release(key)
            for held in [held for held in self._leaving if held.until <= now]:
                self._leaving.remove(held)
                held.pins.release_one()

    def _release(self, key: OffloadKey) -> None:
        self._held.pop(key).pins.release_one()

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._verifying or self._wanted or self._sought)

    # ---------------------------------------------------------------- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        with self._lock:
            for key in keys:
                self._held[key].loads += 1  # vLLM loads what it was told is a hit
        self._resets.loads(req_context.req_id)
        return StoredBlocks(self._names.whole(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        with self._lock:
            for key in keys:
                held = self._held[key]
                held.loads -= 1
                held.requests.discard(req_context.req_id)
                if request := self._requests.get(req_context.req_id):
                    request.keys.discard(key)
                if not held.loads and not held.requests:
                    self._release(key)

    # ---------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        old = req_context.req_id in self._resets
        new = [key for key in keys if not old and self._names.usable(key) and self._state(key) == MISSING]
        names = self._names.whole(new)
        if len(names) > 1 and self._wait_pending_s:  # of a prompt: they are computed in the step that begins
            self._claims.computing(names)
        return PrepareStoreOutput(new, StoredBlocks(names), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        names = self._names.whole(keys)
        self._claims.done(names)
        if self._events is None or not success:
            return
        there = self._there(names)  # a worker's store that failed is no failure to vLLM
        if stored := [key for key, is_there in zip(keys, there, strict=True) if is_there]:
            self._events.append(OffloadingEvent(stored, Medium.CPU, False))
        for name, key, is_there in zip(names, keys, there, strict=True):
            if is_there:
                self._told.add(name, key)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Also of blocks that were told as stored and have gone since, as the engine's steps find them."""
        if self._events is None:
            return ()
        gone = self._told.gone(self._there)
        events, self._events = self._events, []
        return [*events, OffloadingEvent(gone, Medium.CPU, True)] if gone else events

    def _there(self, names: Sequence[bytes]) -> list[bool]:
        """Of each rank."""
        try:
            parts = [
                self._client.lookup(each_of_rank(list(names), rank, self._names.ranks)).states
                for rank in range(self._names.ranks)
            ]
        except KVClientError as error:
            self._health.failed("a look-up", error)
            return [False] * len(names)
        return [MISSING not in states for states in zip(*parts, strict=True)]

    # ---------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        with self._lock:
            self._requests.setdefault(req_context.req_id, _Request())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            request = self._requests.pop(req_context.req_id, None)
            for key in request.keys if request else ():
                if (held := self._held.get(key)) is not None:
                    held.requests.discard(req_context.req_id)
                    if not held.loads and not held.requests:
                        self._release(key)
        self._resets.finished(req_context.req_id)
        for wanted in (*self._wanted.values(), *self._sought.values()):
            wanted.discard(req_context.req_id)

    def reset_cache(self) -> None:
        """vLLM forgets its KV, as when its weights change: the store is shared and keeps what it has, but
        this engine finds nothing of it any more, and shares with no other. vLLM resets us also where requests
        go on with the KV that they have, and then offers all of it to be stored once more.
        """
        self._claims.lift_all()
        with self._lock:
            self._names.begin_anew()
            self._resets.reset()
            until = time.monotonic() + self._lease_s
            for key in list(self._held):
                if not self._held[key].loads:
                    self._release(key)
                    continue
                held = self._held.pop(key)
                held.until = until
                self._leaving.append(held)
            for request in self._requests.values():
                request.keys.clear()

    def shutdown(self) -> None:
        self._fetches.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._claims.close()
        with self._lock:
            for key in list(self._held):
                self._release(key)
            for held in self._leaving:
                held.pins.release_one()
        self._client.close()
