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
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.pages import MISSING
from kvclient.integrations.vllm.figures import Reporter, offload_stats
from kvclient.integrations.vllm.identity import each_of_rank
from kvclient.integrations.vllm.offload.claims import Claims
from kvclient.integrations.vllm.offload.held import Held, Pins, RequestState
from kvclient.integrations.vllm.offload.lookups import Lookups
from kvclient.integrations.vllm.offload.naming import GROUP_BYTES, OffloadNames, Resets
from kvclient.integrations.vllm.offload.states import FOUND, States
from kvclient.integrations.watched import Watched

log = logging.getLogger("vllm.kvstored")
FETCHES = 4  # requests for which other hosts are asked at a time


class StoredBlocks(LoadStoreSpec):
    """What the scheduler tells the workers: the blocks' names, not yet of a rank, in vLLM's order."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = names


class KvstoredManager(Lookups):
    """One per engine core. vLLM calls it from one thread; `_verify` runs on another."""

    def __init__(
        self, client: Any, names: OffloadNames, wait_s: float, wait_pending_s: float, lease_s: float,
        max_held: int, events: bool, fetch_wait_s: float = 0.0, words: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        self._health = Health(client, log)
        self._claims = Claims(client, self._health, lease_s)
        states = States(client, names, self._health, self._claims)
        super().__init__(
            client, names, states, wait_s, wait_pending_s, lease_s, max_held, fetch_wait_s, words
        )
        self._resets = Resets()
        self._pool = ThreadPoolExecutor(1, "kvstored-verify")
        self._fetches = ThreadPoolExecutor(FETCHES, "kvstored-fetch")
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._told: Watched[OffloadKey] = Watched()
        self._reporter = Reporter(self._health)

    def get_stats(self) -> OffloadingConnectorStats | None:
        return offload_stats(self._reporter)

    # ---------------------------------------------------------------- pins

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._end()
        self._expire()
        self._resets.scheduled(context)
        wanted, self._wanted = self._wanted, {}
        sought, self._sought = self._sought, {}
        self._ask(wanted, self._pool, self._wait_s, self._found)
        self._ask(sought, self._fetches, self._fetch_wait_s, list)
        self._health.look()

    def _ask(
        self, wanted: dict[OffloadKey, set[str]], pool: ThreadPoolExecutor, wait_s: float,
        chosen: Callable[[list[OffloadKey]], list[OffloadKey]],
    ) -> None:  # fmt: skip
        with self._lock:
            self._verifying.update(wanted)
        of_set: dict[int, list[OffloadKey]] = {}  # by one request's question, which all have one set
        together: dict[frozenset[str], list[OffloadKey]] = {}
        sets = list(wanted.values())
        if sets and sets.count(sets[0]) == len(sets):  # as nearly always
            together[frozenset()] = list(wanted)
            wanted = {}
        for key, requests in wanted.items():
            if (keys := of_set.get(id(requests))) is None:
                keys = of_set[id(requests)] = together.setdefault(frozenset(requests), [])
            keys.append(key)
        for keys in together.values():
            pool.submit(self._verify, keys, wait_s, chosen)

    def _found(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Those that are there, up to a group's first that is not: only some were looked for."""
        ended, found = set(), []
        for key, state in zip(keys, self._states.of(keys), strict=True):
            group = key[-GROUP_BYTES:]
            if state not in FOUND:
                ended.add(group)
            elif group not in ended:
                found.append(key)
        return found

    def _verify(
        self, keys: list[OffloadKey], wait_s: float, chosen: Callable[[list[OffloadKey]], list[OffloadKey]]
    ) -> None:
        """Pins what is there and right, of all ranks, and drops the rest. What lies on disk or, where other
        hosts are asked, there, is brought first. Of those that are not chosen nothing is known afterwards.

        One call a rank: vLLM's thread asks again without a pause, and each call between would wait for the
        interpreter's lock until that thread is made to give it up, 5 ms each time.
        """
        batches: list[Any] = []
        until = time.monotonic() + wait_s
        with self._lock:
            identity = self._names.identity
        try:
            tried = chosen(keys)
            good = dict.fromkeys(tried, True)
            whole = self._names.whole(tried)
            for rank in range(self._names.ranks if tried else 0):
                names = each_of_rank(whole, rank, self._names.ranks)
                left_s = max(0.0, until - time.monotonic())
                batches.append(batch := self._client.get(names, wait_s=left_s, verify=True))
                if batch.hits < len(tried):
                    good = {key: good[key] and self._is_there(batch, i) for i, key in enumerate(tried)}
        except Exception as error:  # an answer must come: vLLM asks again until it does
            self._health.failed("a load", error)
            good = dict.fromkeys(keys, False)
        pins = Pins(batches, len(good))
        with self._lock:
            if identity != self._names.identity:  # names of before a reset
                good = dict.fromkeys(good, False)
            until = time.monotonic() + self._lease_s
            for key in keys:
                requests = {r for r in self._verifying.pop(key, set()) if r in self._requests}
                is_good = good.get(key)
                if is_good is None:
                    continue
                if is_good and requests:
                    self._held[key] = Held(pins, requests)
                    for request in requests:
                        self._requests[request].keys.add(key)
                        self._requests[request].until = until
                    continue
                for request in requests:
                    self._requests[request].missed.add(key)
                pins.release_one()

    @staticmethod
    def _is_there(batch: Any, index: int) -> bool:
        try:
            return batch[index] is not None
        except FAILURES:  # no pin was left for it
            return False

    def _expire(self) -> None:
        """Of requests that wait for room longer than a lease lasts; they ask again."""
        now = time.monotonic()
        with self._lock:
            late = {name for name, request in self._requests.items() if request.keys and request.until <= now}
            for name in late:
                self._requests[name].verified_until = None
            for key in set().union(*(self._requests[name].keys for name in late)):
                held = self._held[key]
                if not held.loads and held.requests <= late:
                    self._let_go(key, held)
            for held in [held for held in self._leaving if held.until <= now]:
                self._leaving.remove(held)
                held.pins.release_one()

    def _let_go(self, key: OffloadKey, held: Held) -> None:
        for request in held.requests:
            self._requests[request].keys.discard(key)
        self._release(key)

    def _release(self, key: OffloadKey) -> None:
        self._held.pop(key).pins.release_one()

    def has_pending_work(self) -> bool:
        self._settle()
        with self._lock:
            return bool(self._verifying or self._wanted or self._sought)

    # ---------------------------------------------------------------- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._settle()
        with self._lock:
            for key in keys:
                self._held[key].loads += 1  # vLLM loads what it was told is a hit
        self._resets.loads(req_context.req_id)
        return StoredBlocks(self._names.whole(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._end()
        with self._lock:
            for key in keys:
                held = self._held[key]
                held.loads -= 1
                held.requests.discard(req_context.req_id)
                if request := self._requests.get(req_context.req_id):
                    request.keys.discard(key)
                    request.verified_until = None  # it has not to wait; if it is preempted it asks anew
                if not held.loads and not held.requests:
                    self._release(key)

    # ---------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        old = req_context.req_id in self._resets
        usable = [key for key in keys if not old and self._names.usable(key)]
        states = self._states.of(usable) if usable else b""
        new = [key for key, state in zip(usable, states, strict=True) if state == MISSING]
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
        there = self._states.there(names)  # a worker's store that failed is no failure to vLLM
        if stored := [key for key, is_there in zip(keys, there, strict=True) if is_there]:
            self._events.append(OffloadingEvent(stored, Medium.CPU, False))
        for name, key, is_there in zip(names, keys, there, strict=True):
            if is_there:
                self._told.add(name, key)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Also of blocks that were told as stored and have gone since, as the engine's steps find them."""
        if self._events is None:
            return ()
        gone = self._told.gone(self._states.there)
        events, self._events = self._events, []
        return [*events, OffloadingEvent(gone, Medium.CPU, True)] if gone else events

    # ---------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        with self._lock:
            self._requests.setdefault(req_context.req_id, RequestState())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._end()
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
        self._end()
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
        for pool in (self._fetches, self._pool):  # what has not begun is of no use to anybody
            pool.shutdown(wait=True, cancel_futures=True)
        self._claims.close()
        with self._lock:
            for key in list(self._held):
                self._release(key)
            for held in self._leaving:
                held.pins.release_one()
        self._client.close()
