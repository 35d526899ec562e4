"""KvstoredTier: a secondary tier of vLLM's TieringOffloadingSpec, beneath its own memory on the host.

Owns the jobs under way; copies between vLLM's host memory and the store on threads of its own, never on the
scheduler's. Invariants: each job is reported once, with the keys that were loaded; a key whose load failed is
a miss for a while, so that vLLM does not ask for it for ever; a store that is away is an empty one; behind a
reset of vLLM's cache nothing of before is found, and nothing is stored of a request that has KV of before;
other hosts are asked once for what a request does not find here, by threads of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvclient.integrations.health import Health
from kvclient.integrations.leases import Leases
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.pages import MISSING, ON_DISK, RESIDENT, Pages
from kvclient.integrations.self_test import Tried
from kvclient.integrations.vllm.figures import TierReporter, offload_definitions, offload_stats
from kvclient.integrations.vllm.offload.naming import GROUP_BYTES, OffloadNames, Resets, engine_config
from kvclient.integrations.watched import Watched

log = logging.getLogger("vllm.kvstored")
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 5.0,  # of one job, for the disk or for another writer
    "fetch_wait_s": 0.0,  # for blocks of other hosts; 0: only this host's
    "model_version": "",  # weights that were changed in place
    "weights_digest": "",  # instead of reading the checkpoint
    "enable_kv_events": False,
    "locality": None,  # "LOCAL" or "REMOTE", for vLLM's events and a request's kv_load_tiers
}
THREADS = 4
FETCHES = 4  # requests for which other hosts are asked at a time
QUEUE_S = 5.0  # beyond fetch_wait_s: how long a request waits while others' blocks are brought
LEASE_S = 30.0  # how long what was brought is kept for its load
MAX_BROUGHT = 32_768  # blocks of all requests, of the client's 65,536 pins
FORGET_FAILURE_S = 10.0


class _NoPressure(BackpressureDetector):
    """Of a tier whose user wants no detector: nothing is ever held back."""

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """It counts nothing."""

    def is_under_pressure(self) -> bool:
        return False

    def should_store(self, num_blocks: int) -> bool:
        return True

    def reset(self) -> None:
        """There is nothing to forget."""


class _Sought:
    """What a request did not find on this host: of this step, and what was asked for before."""

    def __init__(self, until: float) -> None:
        self.new: set[OffloadKey] = set()
        self.asked: dict[OffloadKey, Future[None]] = {}
        self.until = until  # then it waits no longer, behind others' blocks say


def _locality(said: str | None) -> Locality | None:
    """A ValueError for another, as vLLM's own tiers raise."""
    if said is not None and said not in Locality.__members__:
        raise ValueError(f"locality={said!r} is no Locality: it must be {' or '.join(Locality.__members__)}")
    return None if said is None else Locality[said]


class KvstoredTier(SecondaryTierManager):
    """See docs/engines.md. vLLM calls it from the scheduler's thread. Raises InvalidArgument at the start for
    what it cannot keep apart, and where a row does not come back."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, self._heard(backpressure_detector))
        options = with_defaults(more, OPTIONS, f"secondary tier {tier_type}")
        self.locality = _locality(options["locality"])
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        config = offloading_spec.config
        form = f"primary tier's rows of {self._rows.shape[1]} bytes"
        self._names = OffloadNames(config, engine_config(), options, form, whole_rows=True)
        self._client = connected(options)
        self._health = Health(self._client, log)
        self._reporter = TierReporter(self._health)
        self._pages = Pages(self._client, self._health, float(options["wait_s"]))
        self._layout_id = self._pages.format([self._rows.shape[1]])
        self._pool = ThreadPoolExecutor(THREADS, "kvstored-tier")
        self._fetch_wait_s = float(options["fetch_wait_s"])
        self._fetches = ThreadPoolExecutor(FETCHES, "kvstored-fetch")
        self._sought: dict[str, _Sought] = {}  # by request
        self._brought = Leases(LEASE_S, MAX_BROUGHT)
        self._lock = threading.Lock()
        self._running: set[Future[None]] = set()
        self._finished: deque[JobResult] = deque()
        self._failed: dict[OffloadKey, float] = {}  # until when a key counts as a miss
        self._events: list[OffloadingEvent] | None = None
        self._told: Watched[OffloadKey] = Watched()
        self._resets = Resets()
        if options["enable_kv_events"] and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._try_one_row()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return offload_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return offload_stats(self._reporter)

    def _try_one_row(self) -> None:
        """Stores, finds, loads and compares the last row, which nobody uses yet."""
        row = self._rows[-1]

        def attempt() -> Tried:
            before, noise, key = row.copy(), np.frombuffer(os.urandom(row.nbytes), np.uint8), [os.urandom(32)]
            row[:] = noise
            stored = self._pages.put(key, self._layout_id, [[row]])[0]
            row[:] = 0
            loaded = self._pages.get(key, [[row]])[0]
            tried = Tried(stored=stored, loaded=loaded, same=np.array_equal(row, noise))
            self._pages.delete(key)
            row[:] = before
            return tried

        self._pages.try_one(attempt, (self._layout_id, row.nbytes))

    # ---------------------------------------------------------------- vLLM's resets

    def _heard(self, detector: Any) -> Any:
        """vLLM 0.32 tells a secondary tier nothing of a reset of its cache, which is how weights change under
        an engine. But it resets each tier's detector of back-pressure then, and at no other time."""
        found: Any = _NoPressure() if detector is None else detector
        its_own = found.reset

        def reset() -> None:
            its_own()
            self._begin_anew()

        found.reset = reset
        return found

    def _begin_anew(self) -> None:
        """Of no tier a job is under way: vLLM has waited for them."""
        self._names.begin_anew()
        self._resets.reset()
        with self._lock:
            self._failed = {}
        self._sought.clear()
        log.warning("kvstored: vLLM's cache was reset: from now on this engine shares with no other")

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._resets.scheduled(context)
        for sought in self._sought.values():
            if new := sought.new:
                sought.new = set()
                coming = self._fetches.submit(self._bring, self._names.whole(new))
                sought.asked.update(dict.fromkeys(new, coming))
        self._health.look()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._resets.finished(req_context.req_id)
        self._sought.pop(req_context.req_id, None)

    # ---------------------------------------------------------------- the scheduler asks

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._names.usable(key):
            return LookupResult.MISS
        if self._failed:
            with self._lock:
                until = self._failed.get(key)
                if until is not None and time.monotonic() < until:
                    return LookupResult.MISS
                self._failed.pop(key, None)
        (state,) = self._pages.states(self._names.whole([key]))
        if state in (RESIDENT, ON_DISK):
            return LookupResult.HIT
        # What another engine writes at this moment is not waited for here: vLLM would ask without an end.
        return self._ask_elsewhere(key, req_context.req_id) if state == MISSING else LookupResult.MISS

    def _ask_elsewhere(self, key: OffloadKey, req_id: str) -> LookupResult:
        """Of other hosts, once a request; the step that ends sends the question off."""
        if not self._fetch_wait_s:
            return LookupResult.MISS
        now = time.monotonic()
        if (sought := self._sought.get(req_id)) is None:
            sought = self._sought[req_id] = _Sought(now + self._fetch_wait_s + QUEUE_S)
        if (coming := sought.asked.get(key)) is None:
            sought.new.add(key)
        elif coming.done() or now >= sought.until:
            return LookupResult.MISS
        return LookupResult.RETRY

    def _bring(self, names: list[bytes]) -> None:
        """On a thread of its own: into this host's memory, and kept there for the load."""
        if (blocks := self._pages.pin(names, self._fetch_wait_s)) is not None:
            came = self._pages.states(names)  # what did not is not loaded, and would hold the others
            self._brought.hold(
                [name for name, state in zip(names, came, strict=True) if state == RESIDENT], blocks
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    # ---------------------------------------------------------------- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        old = job_metadata.req_context.req_id in self._resets
        self._submit(job_metadata, self._store_nothing if old else self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def _submit(self, job: TransferJob, work: Any) -> None:
        future = self._pool.submit(self._run, job, work)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def _run(self, job: TransferJob, work: Any) -> None:
        start = time.monotonic()
        try:
            done = work(job)
        except Exception as error:  # a job without a result would hold vLLM's memory for ever
            self._health.failed("a job", error)
            log.exception("kvstored: a job failed")
            done = []
        bad = set(job.keys).difference(done)
        if job.is_promotion and bad:
            done = self._gives_up(job, bad)
        result = JobResult(
            job.job_id, not bad, (done or None) if job.is_promotion and bad else None,
            time.monotonic() - start, len(done) * self._rows.shape[1],
        )  # fmt: skip
        with self._lock:
            if not job.is_promotion and done and self._events is not None:
                self._events.append(OffloadingEvent(done, self.medium, False, self.locality, self.tier_type))
                for name, key in zip(self._names.whole(done), done, strict=True):
                    self._told.add(name, key)
            self._finished.append(result)

    def _gives_up(self, job: TransferJob, bad: set[OffloadKey]) -> list[OffloadKey]:
        """What is left of a load, as vLLM's file tier has it: of each group what lies before its first bad
        one. A prefix has no use for more, and vLLM's memory is not held for it."""
        ended, done, failed = set[bytes](), [], []
        for key in job.keys:
            if key in bad:
                ended.add(key[-GROUP_BYTES:])
            (failed if key[-GROUP_BYTES:] in ended else done).append(key)
        now = time.monotonic()
        with self._lock:
            self._failed = {key: at for key, at in self._failed.items() if at > now}
            self._failed.update(dict.fromkeys(failed, now + FORGET_FAILURE_S))
        return done

    def _buffers(self, job: TransferJob) -> tuple[list[OffloadKey], list[list[np.ndarray]]]:
        pairs = [
            (key, [self._rows[int(row)]])
            for key, row in zip(job.keys, job.chunk_ids, strict=True)
            if self._names.usable(key)
        ]
        return [key for key, _ in pairs], [rows for _, rows in pairs]

    def _store(self, job: TransferJob) -> list[OffloadKey]:
        keys, rows = self._buffers(job)
        stored = self._pages.put(self._names.whole(keys), self._layout_id, rows)
        return [key for key, done in zip(keys, stored, strict=True) if done]

    def _store_nothing(self, job: TransferJob) -> list[OffloadKey]:
        return []

    def _load(self, job: TransferJob) -> list[OffloadKey]:
        keys, rows = self._buffers(job)
        names = self._names.whole(keys)
        loaded = self._pages.get(names, rows)
        if self._fetch_wait_s:
            self._brought.used(names)
        return [key for key, done in zip(keys, loaded, strict=True) if done]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            finished, self._finished = self._finished, deque()
        return finished

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._running or self._finished)

    def drain_jobs(self) -> None:
        with self._lock:
            running = set(self._running)
        wait(running)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Also of blocks that were told as stored and have gone since, as the engine's steps find them."""
        if self._events is None:
            return ()
        with self._lock:
            gone = self._told.gone(
                lambda names: [state in (RESIDENT, ON_DISK) for state in self._pages.states(names)]
            )
            events, self._events = self._events, []
        if gone:
            events.append(OffloadingEvent(gone, self.medium, True, self.locality, self.tier_type))
        return events

    def shutdown(self) -> None:
        self._fetches.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True)
        self._brought.close()
        del self._rows  # vLLM releases its memory next, which nobody must look at then
        self._reporter.close()
        self._client.close()
