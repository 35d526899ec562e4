"""KvstoredL2Adapter: LMCache's second level, whose objects lie in a kvstored daemon.

Owns the tasks under way, their three event descriptors and the locks; never makes a key or copies a byte
itself. Invariants: each task completes once, with an answer, also when the store is away; an object that was
locked is in memory and stays there until it was unlocked, `lock_s` at most; a look-up reads shared memory
where the daemon is attached, and waits on a thread of its own for the disk and for what other hosts have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.leases import Leases
from kvclient.integrations.lmcache.naming import Identities, shared_keys, tag_of
from kvclient.integrations.objects import Object, Objects
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.pages import ON_DISK, RESIDENT

log = logging.getLogger("lmcache.kvstored")
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 5.0,  # of one task, for the disk or for another writer
    "fetch_wait_s": 0.0,  # of one look-up, for objects of other hosts; 0: only this host's
    "lock_s": 60.0,  # what LMCache does not unlock by then is unlocked
    "model_path": "",  # the weights' directory, or one for each model name
    "model_identity": "",  # instead of reading the weights
}
MAX_LOCKED = 32_768  # objects, of the client's 65,536 pins
MAX_KINDS = 10_000
THREADS = 4  # tasks that copy side by side
FETCHES = 4  # look-ups at a time that wait for the disk or for other hosts


class _Tasks:
    """Answers by task, and the descriptor that says there is one."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def complete(self, task: int, answer: Any) -> None:
        with self._lock:
            self._done[task] = answer
        self.event.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done


class KvstoredL2Adapter(L2AdapterInterface):
    """See docs/engines.md. Raises InvalidArgument at the start for what it cannot keep apart."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()  # no capacity: the daemon evicts, for all its clients together
        options = with_defaults(params, OPTIONS, "adapter_params")
        self._identities = Identities(options["model_identity"], options["model_path"])
        self._client = connected(options)
        self._health = Health(self._client, log, "lmcache")
        self._wait_s = float(options["wait_s"])
        self._objects = Objects(self._client, self._health, self._wait_s)
        self._locks = Leases(float(options["lock_s"]), MAX_LOCKED)
        self._pool = ThreadPoolExecutor(THREADS, "kvstored-l2")
        self._fetch_wait_s = float(options["fetch_wait_s"])
        self._fetches = ThreadPoolExecutor(FETCHES, "kvstored-fetch")
        self._stores, self._lookups, self._loads = _Tasks(), _Tasks(), _Tasks()
        self._next, self._next_lock = 0, threading.Lock()
        self._shared: dict[tuple[str, int, int, str], Any] = {}  # None: nothing of it is shared
        self._objects.try_an_object("LMCache")

    # ---------------------------------------------------------------- descriptors

    def get_store_event_fd(self) -> int:
        return self._stores.event.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.event.fileno()

    # ---------------------------------------------------------------- tasks

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._stores, L2StoreResult(False, 0), lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        nothing = Bitmap(len(keys))
        if not self._client.attached:
            return self._submit(self._lookups, nothing, lambda: self._look_up(keys)[0])
        # shared memory answers: in less time than another thread would take
        found, below, missing = self._guarded((nothing, [], []), lambda: self._look_up(keys))
        if below or (missing and self._fetch_wait_s):
            work = partial(self._look_elsewhere, keys, found, below, missing, time.monotonic())
            return self._submit(self._lookups, found, work, self._fetches)
        task = self._number()
        self._lookups.complete(task, found)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._locks.used([name for name in self._names(keys) if name is not None])

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._loads, Bitmap(len(keys)), lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def _submit(
        self, tasks: _Tasks, failure: Any, work: Callable[[], Any], pool: ThreadPoolExecutor | None = None
    ) -> int:
        task = self._number()
        (pool or self._pool).submit(lambda: tasks.complete(task, self._guarded(failure, work)))
        return task

    def _guarded(self, failure: Any, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # a task without an answer would hang LMCache
            self._health.failed("a task", error)
            log.exception("kvstored: a task failed")
            return failure

    def _number(self) -> int:
        with self._next_lock:
            self._next += 1
            return self._next

    # ---------------------------------------------------------------- the work

    def _names(self, keys: Sequence[Any]) -> list[bytes | None]:
        """The store's keys; None of a model whose weights nobody told apart."""
        known, names = self._shared, list[bytes | None]()  # which another thread may replace
        for key in keys:
            kind = key.model_name, key.kv_rank, key.object_group_id, key.cache_salt
            derived = known[kind] if kind in known else self._begin(kind)
            names.append(None if derived is None else derived.packed([key.chunk_hash]))
        return names

    def _begin(self, shared: tuple[str, int, int, str]) -> Any | None:
        model_name, rank, group, salt = shared
        if (identity := self._identities.of(model_name)) is None:
            log.warning("kvstored: no weights are known of model %s: nothing of it is shared", model_name)
        if len(self._shared) >= MAX_KINDS:
            self._shared = {}  # many tenants' salts: they are made anew as they come
        derived = None if identity is None else shared_keys(identity, model_name, rank, group, salt)
        self._shared[shared] = derived
        return derived

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        names = self._names(keys)
        mine = [i for i, name in enumerate(names) if name is not None]
        if not mine:
            return L2StoreResult(True, 0)
        pieces = [_object_of(objects[i]) for i in mine]
        done = self._objects.put_objects([names[i] for i in mine], pieces)
        stored = [i for i, success in zip(mine, done, strict=True) if success]
        sizes = [piece.memory.nbytes for piece, success in zip(pieces, done, strict=True) if success]
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], sizes)
        return L2StoreResult(all(done), sum(sizes))

    def _look_up(self, keys: list[Any]) -> tuple[Bitmap, list[int], list[int]]:
        """What is in memory is locked. And which lie on disk, and which are missing."""
        bitmap, names = Bitmap(len(keys)), self._names(keys)
        if keys and None not in names and (blocks := self._objects.pin(names)) is not None:
            if blocks.hits == len(keys):  # the usual answer, in one call
                self._locks.hold(names, blocks)
                bitmap.batched_set(range(len(keys)))
                return bitmap, [], []
            blocks.release()
        mine = [i for i, name in enumerate(names) if name is not None]
        states = self._objects.states([names[i] for i in mine])
        of = dict(zip(mine, states, strict=True))
        self._lock(names, [i for i in mine if of[i] == RESIDENT], bitmap)
        self._health.look()
        below = [i for i in mine if of[i] == ON_DISK]
        return bitmap, below, [i for i in mine if of[i] not in (RESIDENT, ON_DISK)]

    def _lock(self, names: list[Any], which: list[int], bitmap: Bitmap, wait_s: float = 0.0) -> None:
        """Those of them that are in memory, or come there in time."""
        if not which or (blocks := self._objects.pin([names[i] for i in which], wait_s)) is None:
            return
        held = self._objects.pinned(blocks)
        there = [i for i, pinned in zip(which, held, strict=True) if pinned]
        self._locks.hold([names[i] for i in there], blocks)
        bitmap.batched_set(there)

    def _look_elsewhere(
        self, keys: list[Any], found: Bitmap, below: list[int], missing: list[int], since: float
    ) -> Bitmap:
        """On disk and, where they are asked, on other hosts. Its time runs while other look-ups wait, too."""
        names = self._names(keys)
        for which, wait_s in ((below, self._wait_s), (missing, self._fetch_wait_s)):
            if wait_s:
                self._lock(names, which, found, max(0.0, since + wait_s - time.monotonic()))
        return found

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        bitmap, names = Bitmap(len(keys)), self._names(keys)
        mine = [i for i, name in enumerate(names) if name is not None]
        found = self._objects.get([names[i] for i in mine], [_object_of(objects[i]) for i in mine])
        loaded = [i for i, success in zip(mine, found, strict=True) if success]
        bitmap.batched_set(loaded)
        if loaded:
            self._notify_keys_accessed([keys[i] for i in loaded])
        return bitmap

    # ---------------------------------------------------------------- the rest

    def delete(self, keys: list[Any]) -> None:
        self._objects.delete([name for name in self._names(keys) if name is not None])

    def get_usage(self) -> AdapterUsage:
        """Of the whole namespace, which other engines fill too."""
        try:
            used = self._client.stats()["used_bytes"]
        except FAILURES:
            used = 0
        return AdapterUsage(total_bytes_used=used, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": not self._client.degraded,
            "type": type(self).__name__,
            "attached": self._client.attached,
            "failures_total": self._health.failures_total,
            "locked_objects": self._locks.count,
        }

    def close(self) -> None:
        self._fetches.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._locks.close()
        self._health.close()
        self._client.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.event.close()


def _object_of(memory_object: Any) -> Object:
    return Object(memoryview(memory_object.byte_array), tag_of(memory_object))
