"""KvstoredRemoteConnector: the store as the remote backend of LMCache inside of an engine, its older way.

Owns the configuration and the threads that copy; never makes a key. Invariants: what get() returns is whole
and its checksum was compared, or None; a store that is away is an empty one; no chunk of LMCache's is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvclient.errors import InvalidArgument
from kvclient.integrations.health import Health
from kvclient.integrations.lmcache.naming import Identities, shared_keys
from kvclient.integrations.objects import TAG_BYTES, Object, Objects
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.pages import ON_DISK, ON_PEERS, RESIDENT

log = logging.getLogger("lmcache.kvstored")
PREFIX = "remote_storage_plugin.kvstored."
LMCACHES = ("module_path", "class_name", "url")
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 5.0,  # of one chunk, for the disk or for another writer
    "fetch_wait_s": 0.0,  # of one chunk, for those of other hosts; 0: only this host's are found
    "model_path": "",  # the weights' directory, or one for each model name
    "model_identity": "",  # instead of reading the weights
}
THREADS = 4


class KvstoredRemoteConnector(RemoteConnector):
    """See docs/engines.md. Raises InvalidArgument at the start for what it cannot keep apart."""

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(config, local_cpu_backend.metadata)
        if config.use_layerwise:
            raise InvalidArgument(
                "use_layerwise: LMCache tells a remote backend the shape of a whole chunk only, in which a "
                "layer's would come back; leave it off"
            )
        chosen = {
            name.removeprefix(PREFIX): value
            for name, value in (config.extra_config or {}).items()
            if name.startswith(PREFIX)
        }
        options = with_defaults(chosen, OPTIONS, f"extra_config[{PREFIX}…]", LMCACHES)
        self._identities = Identities(options["model_identity"], options["model_path"])
        self._loop, self._memory = loop, local_cpu_backend
        self._client = connected(options)
        self._health = Health(self._client, log, "lmcache")
        fetch_wait_s = float(options["fetch_wait_s"])
        self._peers = fetch_wait_s > 0
        self._there = (RESIDENT, ON_DISK, ON_PEERS) if self._peers else (RESIDENT, ON_DISK)
        self._objects = Objects(self._client, self._health, max(float(options["wait_s"]), fetch_wait_s))
        self._pool = ThreadPoolExecutor(THREADS, "kvstored-remote")
        kinds = repr([[str(dtype) for dtype in self.meta_dtypes], self.meta_fmt.name, self.single_token_size])
        self._tag = hashlib.sha256(kinds.encode()).digest()[:TAG_BYTES]
        self._objects.try_an_object("LMCache")

    def _name(self, key: Any) -> bytes | None:
        """None of a model whose weights nobody told apart."""
        if (identity := self._identities.of(key.model_name)) is None:
            return None
        shared = shared_keys(identity, key.model_name, key.worker_id, key.world_size, "")
        # to_string() has the model, the ranks, the chunk, the type, tags, and the layer of a layer's key
        return shared.listed([key.to_string().encode()])[0]

    # ---------------------------------------------------------------- is it there?

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    async def exists(self, key: Any) -> bool:
        return self.exists_sync(key)

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        names = [self._name(key) for key in keys]
        known = names[: names.index(None)] if None in names else names
        found = [name for name in known if name is not None]
        states = self._objects.states(found, self._peers)  # LMCache's thread asks one message of the daemon
        if ON_PEERS in states:
            self._objects.prefetch(found)
        return next((i for i, state in enumerate(states) if state not in self._there), len(states))

    # ---------------------------------------------------------------- chunks

    async def get(self, key: Any) -> Any | None:
        work = self._pool.submit(self._get, key)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:  # LMCache waits no longer than its blocking_timeout_secs
            work.add_done_callback(_give_back)
            raise

    def _get(self, key: Any) -> Any | None:
        if (name := self._name(key)) is None or (length := self._objects.length_of(name)) is None:
            return None
        if (memory := self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)) is None:
            return None
        try:
            fitting = self.reshape_partial_chunk(memory, length)
            target = Object(memoryview(fitting.byte_array), self._tag)
            if self._objects.get([name], [target]) == [True]:
                return fitting
        except ValueError as error:  # a length that no chunk of this engine has
            log.warning("kvstored: %s", error)
        memory.ref_count_down()
        return None

    async def put(self, key: Any, memory_obj: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._put, key, memory_obj)

    def _put(self, key: Any, memory_obj: Any) -> None:
        if (name := self._name(key)) is not None:
            source = Object(memoryview(memory_obj.byte_array), self._tag)
            self._objects.put_objects([name], [source])

    def remove_sync(self, key: Any) -> bool:
        name = self._name(key)
        return name is not None and self._objects.delete([name]) == 1

    # ---------------------------------------------------------------- the rest

    async def list(self) -> list[str]:
        """Nothing: the store's keys are digests, which say no chunk's name."""
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return int(self._client.degraded)

    async def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._health.close()
        self._client.close()


def _give_back(work: Future[Any]) -> None:
    """What was loaded for somebody who has gone: LMCache's memory is LMCache's again."""
    if not work.cancelled() and work.exception() is None and (memory := work.result()) is not None:
        memory.ref_count_down()
