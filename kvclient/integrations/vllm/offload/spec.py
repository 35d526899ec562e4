"""KvstoredOffloadingSpec: vLLM's OffloadingConnector with a kvstored daemon as what it offloads to.

Owns the configuration, a part of its own in kv_connector_extra_config; never touches a block. Invariant: an
option that is misspelt, weights that cannot be told apart and block hashes that differ in every process are
refused at the start.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvclient.integrations.marks import word_name
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.vllm.figures import offload_definitions
from kvclient.integrations.vllm.offload.naming import OffloadNames, engine_config
from kvclient.integrations.vllm.offload.scheduling import KvstoredManager
from kvclient.integrations.vllm.offload.worker import KvstoredWorker

OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 5.0,  # for blocks that come from disk
    "wait_pending_s": 5.0,  # for blocks that another engine computes at this moment
    "fetch_wait_s": 0.0,  # for blocks of other hosts; 0: only this host's
    "lease_s": 30.0,  # how long what was found is kept for a request that waits for room
    "max_held": 16_384,  # blocks, of all requests together
    "model_version": "",  # weights that were changed in place
    "weights_digest": "",  # instead of reading the checkpoint
}


class KvstoredOffloadingSpec(OffloadingSpec):
    """See docs/engines.md. Raises InvalidArgument at the start for what it cannot serve."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        extra = dict(config.extra_config.get("kvstored", {}))
        self._options = with_defaults(extra, OPTIONS, 'kv_connector_extra_config["kvstored"]')
        self._engine = engine_config()
        self._manager: OffloadingManager | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return offload_definitions()

    def _connect(self) -> Any:
        return connected(self._options)

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            options = self._options
            parallel = self.config.parallel
            words = [word_name(self._unique, rank) for rank in range(parallel.world_size)]
            names = OffloadNames(self.config, self._engine, options, "rows of a block")
            self._manager = KvstoredManager(
                self._connect(), names, float(options["wait_s"]), float(options["wait_pending_s"]),
                float(options["lease_s"]), int(options["max_held"]),
                self.kv_events_config.enable_kv_cache_events, float(options["fetch_wait_s"]), words,
            )  # fmt: skip
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        parallel = self.config.parallel
        return KvstoredWorker(
            self._connect(), kv_caches, parallel.rank, parallel.world_size, self.blocks_per_chunk,
            float(self._options["wait_s"]), word_name(self._unique, parallel.rank),
        )  # fmt: skip

    @property
    def _unique(self) -> str:
        """Of this engine: the same in its scheduler and in its workers."""
        return f"{self.config.engine_id}\0{self.config.parallel.data_parallel_index}"
