"""What vLLM's own metrics say of the store: whether an engine goes on without it, and what failed.

Owns the two figures and their names; never asks the store. Invariant: a figure is sent when it changes, and
at each step of an engine without its store, so that the gauge of a healthy engine costs nothing.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvclient.integrations.health import Health

DEGRADED, FAILURES = "degraded", "failures"
GAUGE, GAUGE_SAYS = "vllm:kvstored_degraded", "1 while the engine goes on without kvstored."
COUNTER, COUNTER_SAYS = "vllm:kvstored_failures", "Calls of the store that failed and became misses."


class KvstoredStats(KVConnectorStats):
    """`degraded`: 1 in a process whose store is away. `failures`: that became misses, since the last."""

    def reset(self) -> None:
        self.data = {DEGRADED: 0, FAILURES: 0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvstoredStats({
            DEGRADED: max(self.data[DEGRADED], other.data[DEGRADED]),
            FAILURES: self.data[FAILURES] + other.data[FAILURES],
        })  # fmt: skip

    def reduce(self) -> dict[str, int | float]:
        return {f"kvstored {name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class Reporter:
    """Of one half of a connector."""

    def __init__(self, health: Health) -> None:
        self._health, self._told = health, (-1, 0)

    @property
    def away(self) -> bool:
        """Whether its half is without its store."""
        return self._health.away

    def take(self) -> KvstoredStats | None:
        """What is new since the last call; None: nothing is, and the store is there."""
        now = (int(self.away), self._health.failures_total)
        if now == self._told and not now[0]:
            return None
        failures = now[1] - self._told[1]
        self._told = now
        return KvstoredStats({DEGRADED: now[0], FAILURES: failures})


class TierReporter(Reporter):
    """Of one of the tiers beneath one manager, whose gauge has no label to tell them apart: it is 1 as long
    as any of this process is without its store. vLLM asks them all from one thread."""

    _alive: ClassVar[weakref.WeakSet[TierReporter]] = weakref.WeakSet()

    def __init__(self, health: Health) -> None:
        super().__init__(health)
        self._alive.add(self)

    @property
    def away(self) -> bool:
        return any(reporter._health.away for reporter in self._alive)

    def close(self) -> None:
        """Its tier has ended."""
        self._alive.discard(self)


def offload_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Both figures, as vLLM's OffloadingConnector wants to be told of them."""
    return {GAUGE: OffloadingGaugeMetadata(GAUGE_SAYS), COUNTER: OffloadingCounterMetadata(COUNTER_SAYS)}


def offload_stats(reporter: Reporter) -> OffloadingConnectorStats | None:
    """What is new, for that connector."""
    if (new := reporter.take()) is None:
        return None
    stats = OffloadingConnectorStats()
    stats.set_gauge(GAUGE, new.data[DEGRADED])
    stats.increase_counter(COUNTER, new.data[FAILURES])
    return stats


class KvstoredPromMetrics(KVConnectorPromMetrics):
    """vllm:kvstored_degraded and vllm:kvstored_failures_total, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        degraded = self._gauge_cls(name=GAUGE, documentation=GAUGE_SAYS, labelnames=labelnames)
        failures = self._counter_cls(name=COUNTER, documentation=COUNTER_SAYS, labelnames=labelnames)
        self._degraded = {engine: degraded.labels(*values) for engine, values in per_engine.items()}
        self._failures = {engine: failures.labels(*values) for engine, values in per_engine.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._degraded[engine_idx].set(transfer_stats_data[DEGRADED])
        self._failures[engine_idx].inc(transfer_stats_data[FAILURES])
