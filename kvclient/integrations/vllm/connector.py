"""KvstoredConnector: vLLM's KVConnectorBase_V1 over the two halves, scheduling and transfer.

Owns the configuration and which half a process has; never copies a byte itself. Invariant: a model whose
blocks it cannot keep right (hybrid cache groups, windows, states) is refused at the start, with the reason;
after the start no failure of the store reaches vLLM except as a load to recompute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvclient.errors import InvalidArgument
from kvclient.integrations.options import connected, with_defaults
from kvclient.integrations.vllm.events import checked_endpoints
from kvclient.integrations.vllm.figures import KvstoredPromMetrics, KvstoredStats, Reporter
from kvclient.integrations.vllm.identity import model_identity
from kvclient.integrations.vllm.scheduling import Ended, Scheduling, Step
from kvclient.integrations.vllm.transfer import Worker

logger = init_logger("vllm.kvstored")
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_pending_s": 5.0,  # for blocks that another engine computes at this moment
    "fetch_wait_s": 0.0,  # for blocks of other hosts; 0: only this host's
    "load_wait_s": 2.0,  # for blocks that come from disk
    "model_version": "",  # weights that were changed in place
    "weights_digest": "",  # instead of reading the checkpoint
    "enable_kv_events": False,  # tell vLLM's publisher of events which blocks are in the store
}


class KvstoredConnector(KVConnectorBase_V1, SupportsHMA):
    """See docs/engines.md. Raises InvalidArgument at the start for what it cannot serve."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = with_defaults(transfer.kv_connector_extra_config, OPTIONS, "kv_connector_extra_config")
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidArgument(
                f'kv_load_failure_policy={transfer.kv_load_failure_policy!r}; it must be "recompute": '
                "a block may be evicted between look-up and load"
            )
        if (ranks := vllm_config.parallel_config.decode_context_parallel_size) > 1:
            raise InvalidArgument(
                f"decode_context_parallel_size={ranks}: each block's tokens are spread over {ranks} ranks, "
                "which the connector takes for whole blocks; only 1 is supported"
            )
        if (parts := vllm_config.parallel_config.num_ubatches) > 1:
            raise InvalidArgument(
                f"{parts} microbatches: a layer is left before all of a step is computed, and would be saved "
                "then; start without --enable-dbo and --ubatch-size"
            )
        chosen = vllm_config.scheduler_config.get_scheduler_cls()
        if not issubclass(chosen, Scheduler):
            raise InvalidArgument(
                f"scheduler_cls={chosen.__qualname__}: none of vLLM's own kind, by which the connector has "
                "computed again what a load that failed spoils"
            )
        group = _only_group(kv_cache_config)
        if options["enable_kv_events"]:
            checked_endpoints(vllm_config.kv_events_config)
        self._client = connected(options)
        block_tokens = group.kv_cache_spec.block_size
        ranks = vllm_config.parallel_config.world_size
        self._scheduling: Scheduling | None = None
        self._worker: Worker | None = None
        self._block_pool: Any = None  # vLLM's
        if role == KVConnectorRole.SCHEDULER:
            identity = model_identity(vllm_config, kv_cache_config, options)
            hash_tokens = kv_cache_config.hash_block_size or block_tokens
            if block_tokens % hash_tokens:
                raise InvalidArgument(f"blocks of {block_tokens} tokens, hashes of {hash_tokens}")
            self._scheduling = Scheduling(
                self._client, identity, block_tokens, hash_tokens, ranks, float(options["wait_pending_s"]),
                float(options["fetch_wait_s"]), loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer,
                events=bool(options["enable_kv_events"]),
            )  # fmt: skip
            logger.info("kvstored: identity %s…, blocks of %d tokens", identity.hex()[:12], block_tokens)
        else:
            self._worker = Worker(
                self._client, vllm_config.parallel_config.rank, ranks, list(group.layer_names), block_tokens,
                kv_cache_config.num_blocks, float(options["load_wait_s"]),
            )  # fmt: skip

        self._reporter = None if self._worker is None else Reporter(self._worker.health)

    def get_kv_connector_stats(self) -> KvstoredStats | None:
        return None if self._reporter is None else self._reporter.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstoredStats | None:
        return KvstoredStats(data) if data else None

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvstoredPromMetrics:
        return KvstoredPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---------------------------------------------------------------- the scheduler's process

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduler.step(scheduler_output)

    @property
    def requires_kv_delivery(self) -> bool:
        """What a step that was sent off gives a request that is preempted meanwhile is dropped: it may stand
        on a load of which nobody has heard."""
        return True

    def update_connector_output(self, connector_output: Any) -> None:
        if failed := connector_output.invalid_block_ids:
            self._compute_again(failed, self._scheduler.spoilt(failed))
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, Ended):
            self._scheduler.ended(ended.steps, ended.failed)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    def _compute_again(self, failed: set[int], spoilt: set[int]) -> None:
        """vLLM 0.32 sets back the first request that has a block which failed, and no more: it delivers what
        steps that it has sent off meanwhile gave that request, goes on with others that share the block, and
        has in its prefix cache what the first leaves there when it is given up. So all of them are preempted
        as vLLM does it where its cache is reset under them, and what is spoilt is found no more."""
        if (scheduler := _vllms_scheduler()) is None:
            logger.warning(
                "kvstored: a load failed and vLLM's scheduler was not found: it sets back the first request "
                "that has such a block, and no other"
            )
        for request in () if scheduler is None else reversed(scheduler.running.copy()):
            (numbers,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            if failed.isdisjoint(numbers):
                continue
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        if self._block_pool is not None:
            self._block_pool.evict_blocks(spoilt)

    def has_pending_push_work(self) -> bool:
        """vLLM makes steps until the last request's blocks are sealed."""
        return self._scheduler.waits

    def reset_cache(self) -> bool | None:
        if self._scheduling is None:
            return None
        self._scheduling.begin_anew()
        logger.warning("kvstored: vLLM's cache was reset: from now on this engine shares with no other")
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, [])

    @property
    def _scheduler(self) -> Scheduling:
        assert self._scheduling is not None, "asked of the scheduler's half in a worker"
        return self._scheduling

    # ---------------------------------------------------------------- the workers' processes

    @property
    def _own_worker(self) -> Worker:
        assert self._worker is not None, "asked of the worker's half in the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._own_worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The step begins here: where nothing is loaded vLLM calls start_load_kv() behind what it computes,
        and until then no other engine would hear who computes it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        self._own_worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The step has begun."""

    def has_connector_metadata(self) -> bool:
        """Of vLLM's layers, before their two calls: a step that loads nothing has none for them."""
        return self._worker is not None and self._worker.loads

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._own_worker.load_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._own_worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """vLLM's runner calls it in a `finally`, so also behind a pass that raised, and goes down only then:
        what was to be saved was not computed."""
        self._own_worker.finish(computed=sys.exception() is None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._own_worker.take_failed()

    def build_connector_worker_meta(self) -> Ended | None:
        return self._own_worker.take_ended()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a replayed graph would skip the layers' calls

    def shutdown(self) -> None:
        if self._scheduling is not None:
            self._scheduling.close()
        if self._worker is not None:
            self._worker.close()
        self._client.close()


def _vllms_scheduler() -> Any | None:
    """The one whose call this is, for vLLM hands it to no connector. None: it is called from elsewhere."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Scheduler):
            return found
        frame = frame.f_back
    return None


def _only_group(cache: Any) -> Any:
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        raise InvalidArgument(f"the model has {len(groups)} KV cache groups; hybrid models are not supported")
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs) or not isinstance(
        spec, FullAttentionSpec | MLAAttentionSpec
    ):
        raise InvalidArgument(f"KV of {type(spec).__name__}; only full attention is supported")
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise InvalidArgument("layers with a window or chunks; only full attention is supported")
    return groups[0]
