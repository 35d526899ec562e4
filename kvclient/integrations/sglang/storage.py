"""KvstoredHiCache: SGLang's HiCacheStorage, whose third level is a kvstored daemon.

Owns the configuration and the pools that SGLang registers; never makes a key or copies a byte itself.
Invariants: what batch_exists() counted is in memory, and stays there until it was loaded or its lease ends;
what a pool's pages hold is loaded whole or the page is False; a store that is away is an empty one, with one
log line; what an engine computes with weights that were changed under it is not shared.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransferResult,
)

from kvclient.errors import InvalidArgument
from kvclient.integrations.health import Health
from kvclient.integrations.leases import Leases
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.pages import ON_DISK, RESIDENT, Pages
from kvclient.integrations.self_test import Tried
from kvclient.integrations.sglang.buffers import Flat, as_bytes, buffers_of
from kvclient.integrations.sglang.naming import PageNames, kv_dtype_of
from kvclient.integrations.sglang.served import engine_of, updates, weights_of

log = logging.getLogger("sglang.kvstored")
SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 5.0,  # of one question or batch, for the disk, and of one batch for another writer
    "fetch_wait_s": 0.0,  # of one question, for pages of other hosts; 0: only this host's
    "lease_s": 30.0,  # how long what was said to be there is kept for the load
    "model_path": "",  # the weights' directory: its digest tells models apart
    "model_identity": "",  # instead of reading the weights
    "kv_dtype": "",  # where the pool's own type does not say it
}
MAX_LEASED = 32_768  # pages, of the client's 65,536 pins
KV = "kv"
HERE = (RESIDENT, ON_DISK)


class _Pool:
    """One registered host pool: where its pages lie, and how they are named."""

    def __init__(self, store: KvstoredHiCache, pool: Any, name: str) -> None:
        self.buffers, self._pool, self._name = buffers_of(pool, store.in_place), pool, name
        self._kv_dtype = kv_dtype_of(pool, store.options)
        self.name_pages(store)
        self.layout_id = store.pages.format(self.buffers.sizes)

    def name_pages(self, store: KvstoredHiCache) -> None:
        """Under what the engine serves now."""
        self.names = PageNames(
            store.config, store.served, self._pool, self._kv_dtype, self._name, self.buffers.form,
            self.buffers.sizes,
        )  # fmt: skip


class KvstoredHiCache(HiCacheStorage):
    """See docs/engines.md. Raises InvalidArgument at the start for what it cannot keep apart or keep right.

    SGLang calls it from three threads: one asks, one loads, one stores.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self.options = with_defaults(extra, OPTIONS, "the storage backend's extra config", SGLANGS)
        self.config, self.in_place = storage_config, bool(extra.get("interface_v1", 0))
        self.served = {"weights": weights_of(self.options), "engine": engine_of(self.options)}
        self._updates, self._outdated = updates(), False
        self._client = connected(self.options)
        self._health = Health(self._client, log, "sglang" if storage_config.enable_storage_metrics else "")
        self._wait_s = float(self.options["wait_s"])
        self.pages = Pages(self._client, self._health, self._wait_s)
        self._fetch_wait_s = float(self.options["fetch_wait_s"])
        self._leases = Leases(float(self.options["lease_s"]), MAX_LEASED)
        self._pools: dict[str, _Pool] = {}

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)
        self._try_one_page(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        self._pools[name] = made = _Pool(self, pool, name)
        log.info("kvstored: pool %s, pages of %d bytes, %s, identity %s…", name, sum(made.buffers.sizes),
                 made.buffers.form, made.names.identity.hex()[:12])  # fmt: skip

    def _pool(self, name: Any) -> _Pool:
        try:
            return self._pools[str(name)]
        except KeyError:
            raise InvalidArgument(
                f"pool {name} is not registered; known are {', '.join(self._pools)}"
            ) from None

    def _try_one_page(self, pool: Any) -> None:
        """Stores, finds, loads and compares a page of the pool that nobody uses yet. Raises InvalidArgument,
        NotPermitted."""
        anchor = self._pools[KV]
        if not hasattr(pool, "alloc") or (slots := pool.alloc(anchor.buffers.page_tokens)) is None:
            log.warning("kvstored: no free page for the self-test: the first page that is stored is compared")
            self.pages.try_later()
            return
        block = anchor.layout_id, sum(anchor.buffers.sizes)
        try:
            self.pages.try_one(lambda: self._tried(anchor, pool, slots), block)
        finally:
            self._clear_page(anchor, pool, slots)
            pool.free(slots)

    def _tried(self, anchor: _Pool, pool: Any, slots: torch.Tensor) -> Tried:
        key = f"kvstored's self-test {os.urandom(16).hex()}"  # ranks that share pages try theirs side by side
        if isinstance(anchor.buffers, Flat):
            page = pool.get_dummy_flat_data_page()
            page.copy_(_noise(page))
            pool.set_from_flat_data_page(int(slots[0]), page)
            wanted = [as_bytes(page).copy()]
        else:
            wanted = []
            for buffer in anchor.buffers.of(slots, 1)[0]:
                buffer[:] = torch.randint(0, 0x3C, (buffer.nbytes,), dtype=torch.uint8).numpy()
                wanted.append(buffer.copy())
        stored = self._set(anchor, [key], slots)[0]
        self._clear_page(anchor, pool, slots)
        loaded = self._get(anchor, [key], slots)[0]
        self.pages.delete(anchor.names.keys([key]))
        now = anchor.buffers.of(slots, 1)[0]
        same = all(bytes(was) == bytes(its) for was, its in zip(wanted, now, strict=True))
        return Tried(stored=stored, loaded=loaded, same=same)

    @staticmethod
    def _clear_page(anchor: _Pool, pool: Any, slots: torch.Tensor) -> None:
        if isinstance(anchor.buffers, Flat):
            pool.set_from_flat_data_page(int(slots[0]), pool.get_dummy_flat_data_page())
        else:
            for buffer in anchor.buffers.of(slots, 1)[0]:
                buffer[:] = 0

    # ---------------------------------------------------------------- is it there?

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        names = self._pool(KV).names.keys(keys)
        with contextlib.ExitStack() as brought:
            count = self._prefix(names, brought)
            self._keep(names[:count])
        return count

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        with contextlib.ExitStack() as brought:
            return self._exists(keys, pool_transfers, brought)

    def _exists(
        self, keys: list[str], pool_transfers: Any, brought: contextlib.ExitStack
    ) -> PoolTransferResult:
        kv_names = self._pool(KV).names.keys(keys)
        kv_pages = self._prefix(kv_names, brought)
        hits: dict[Any, int] = {KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        wanted = [kv_names]
        for transfer in pool_transfers or ():
            if not restorable:
                break
            names = self._pool(transfer.name).names.keys(keys[:kv_pages])
            can = _can_end_at(transfer, self._there(names, brought))
            if can:
                hits[transfer.name] = max(can)
            restorable = [length for length in restorable if length in can]
            wanted.append(names)
        final = restorable[-1] if restorable else 0
        for names in wanted if final else ():
            self._keep(names[:final])
        return PoolTransferResult(final, hits, restorable)

    def _is_current(self) -> bool:
        """Whether pages may be shared under the names of the start. Pages of both weights may be under way
        when those change, so nothing is shared from then on until clear() says that none is."""
        if not self._outdated and updates() != self._updates:
            self._outdated = True
            log.warning(
                "kvstored: the weights were changed: nothing is shared until the storage backend is cleared"
            )
        return not self._outdated

    def _there(self, names: list[bytes], brought: contextlib.ExitStack, prefix: bool = False) -> list[bool]:
        """In memory, and pinned until `brought` ends. What is not on this host is asked of others first, what
        lies on its disk is brought: SGLang asks on a thread of its own, which may wait. prefix: no further
        than to the first that is nowhere."""
        states = self.pages.states(names)
        sought = [name for name, state in zip(names, states, strict=True) if state not in HERE]
        if self._fetch_wait_s and sought:
            self._pin(sought, self._fetch_wait_s, brought)
            states = self.pages.states(names)
        if prefix:
            names = names[: _leading([state in HERE for state in states])]
        below = [name for name, state in zip(names, states, strict=False) if state == ON_DISK]
        self._pin(below, self._wait_s, brought)
        return self._pin(names, 0.0, brought)

    def _prefix(self, names: list[bytes], brought: contextlib.ExitStack) -> int:
        """How many leading pages are there."""
        return _leading(self._there(names, brought, prefix=True)) if self._is_current() else 0

    def _pin(self, names: list[bytes], wait_s: float, brought: contextlib.ExitStack) -> list[bool]:
        if not names or (blocks := self.pages.pin(names, wait_s)) is None:
            return [False] * len(names)
        brought.callback(blocks.release)
        return self.pages.pinned(blocks)

    def _keep(self, names: list[bytes]) -> None:
        """What is pinned is, until it was loaded or its lease ends."""
        if names and (blocks := self.pages.pin(names)) is not None:
            self._leases.hold(names, blocks)

    # ---------------------------------------------------------------- pages of a pool

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(self._pool(KV), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._set(self._pool(KV), keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._get(self._pool(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._set(self._pool(t.name), t.keys or [], t.host_indices) for t in transfers}

    def _get(self, pool: _Pool, keys: Sequence[str], host_indices: Any) -> list[bool]:
        if not _fits(pool, keys, host_indices) or not self._is_current():
            return [False] * len(keys)
        names = pool.names.keys(keys)
        if isinstance(pool.buffers, Flat):
            pages = pool.buffers.empty(len(keys))
            targets = [[as_bytes(page)] for page in pages]
        else:
            pages, targets = [], pool.buffers.of(host_indices, len(keys))
        found = self.pages.get(names, targets)
        pool.buffers.loaded(host_indices, pages, found)
        self._leases.used(names)
        return found

    def _set(self, pool: _Pool, keys: Sequence[str], host_indices: Any) -> list[bool]:
        if not _fits(pool, keys, host_indices) or not self._is_current():
            return [False] * len(keys)
        return self.pages.put(pool.names.keys(keys), pool.layout_id, pool.buffers.of(host_indices, len(keys)))

    # ---------------------------------------------------------------- pages as tensors, the oldest interface

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        if not (keys and self._is_current()) or any(target is None for target in target_locations or [None]):
            return [None] * len(keys)
        names = self._pool(KV).names.keys(keys)
        buffers = [as_bytes(target) for target in target_locations]
        found = self.pages.get(names, [[buffer] for buffer in buffers])
        self._leases.used(names)
        for target, buffer, there in zip(target_locations, buffers, found, strict=True):
            if there and buffer.ctypes.data != target.data_ptr():
                target.copy_(torch.from_numpy(buffer).view(target.dtype).view(target.shape))
        return [target if there else None for target, there in zip(target_locations, found, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        if not keys:
            return True
        if values is None or any(value is None for value in values) or not self._is_current():
            return False
        sources = [[as_bytes(value)] for value in values]
        layout_id = self.pages.format([sources[0][0].nbytes])
        return all(self.pages.put(self._pool(KV).names.keys(keys), layout_id, sources))

    # ---------------------------------------------------------------- the rest

    def clear(self) -> None:
        """Nothing is deleted, for other engines use the same pages; `kvstored flush` empties a namespace. But
        this one begins anew: it finds nothing of before, and shares with no other, because nobody knows which
        weights it has from now on.
        """
        self.served = {**self.served, "since": os.urandom(16).hex()}
        for pool in self._pools.values():
            pool.name_pages(self)
        self._updates, self._outdated = updates(), False
        log.warning("kvstored: nothing was deleted (`kvstored flush` does); this engine shares with none now")

    def close(self) -> None:
        self._leases.close()
        self._health.close()
        self._client.close()


def _leading(there: Sequence[bool]) -> int:
    return next((i for i, found in enumerate(there) if not found), len(there))


def _can_end_at(transfer: Any, there: Sequence[bool]) -> set[int]:
    """Lengths of a prefix, in pages, at which this pool has all that it needs there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(there) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(there) + 1) if all(there[max(0, end - trailing) : end])}
    raise InvalidArgument(f"pool {transfer.name}: hit policy {transfer.hit_policy} is not supported")


def _fits(pool: _Pool, keys: Sequence[str], host_indices: Any) -> bool:
    wanted = len(keys) * pool.buffers.page_tokens
    if not keys or (host_indices is not None and host_indices.numel() == wanted):
        return bool(keys)
    got = 0 if host_indices is None else host_indices.numel()
    log.error("kvstored: %d host indices for %d pages of %d tokens", got, len(keys), pool.buffers.page_tokens)
    return False


def _noise(page: torch.Tensor) -> torch.Tensor:
    count = page.numel() * page.element_size()
    # bytes below 0x3C: finite numbers in every floating type, so that no copy may quiet a NaN
    return torch.randint(0, 0x3C, (count,), dtype=torch.uint8).view(page.dtype).view(page.shape)
