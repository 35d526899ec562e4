"""The daemon's figures as Prometheus text.

Owns the text and its labels; what there is to tell is metrics.py's. Labels are namespaces, methods,
operations, states, statuses and owners of pins, all from fixed sets; never a key, a salt or a token. A
namespace is a name of the configuration, at most 16 of them; whose it is (users, groups) is no label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstored.telemetry.histogram import BOUNDS_S, Histogram
from kvstored.telemetry.metrics import (
    ADOPTED,
    BUILD,
    DEGRADED,
    DISK_METRICS,
    DISK_SECONDS,
    GRPC_CALLS,
    GRPC_SECONDS,
    OWNER_METRICS,
    PEER_METRICS,
    PIN_OWNERS,
    POOL_METRICS,
    PROCESS_METRICS,
    SERVER_METRICS,
    SERVING,
    SESSION_SECONDS,
    STORE_METRICS,
    About,
)

Sample = tuple[Mapping[str, str], object]


@dataclass
class Figures:
    """What one scrape shows."""

    version: str = ""
    stores: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # namespace -> counters
    process: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (method, status)
    call_seconds: Mapping[str, Histogram] = field(default_factory=dict)  # method
    session_seconds: Mapping[tuple[str, str], Histogram] = field(
        default_factory=dict
    )  # (namespace, operation)
    disk_seconds: Mapping[tuple[str, str], Histogram] = field(default_factory=dict)  # (namespace, operation)
    degraded: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (state, namespace)
    peers: Sequence[tuple[str, Mapping[str, object]]] = ()  # (namespace, counters and texts)
    peer_server: Mapping[str, object] = field(default_factory=dict)
    pool: Mapping[str, float] = field(default_factory=dict)  # empty: this host has none across machines
    serving: Mapping[str, bool] = field(default_factory=dict)
    adopted: Mapping[str, bool] = field(default_factory=dict)


def _scale(counter: str) -> float:
    """What makes a counter's unit Prometheus' base unit: seconds."""
    return {"us": 1e-6, "ns": 1e-9}.get(counter.rpartition("_")[2], 1)


def render(figures: Figures) -> str:
    """The exposition text."""
    lines: list[str] = []
    _metric(lines, BUILD, [({"version": figures.version}, 1)])
    for counter, about in (STORE_METRICS | DISK_METRICS).items():
        found = figures.stores.items()
        scale = _scale(counter)
        samples = [({"namespace": n}, stats[counter] * scale) for n, stats in found if counter in stats]
        _metric(lines, about, samples)
    for (before, after), about in OWNER_METRICS.items():
        _metric(
            lines,
            about,
            [
                ({"namespace": n, "owner": owner}, stats[before + owner + after])
                for n, stats in figures.stores.items()
                for owner in PIN_OWNERS
                if before + owner + after in stats
            ],
        )
    _metric(lines, SERVING, [({"namespace": name}, int(yes)) for name, yes in figures.serving.items()])
    _metric(lines, ADOPTED, [({"namespace": name}, int(yes)) for name, yes in figures.adopted.items()])
    states = figures.degraded.items()
    _metric(lines, DEGRADED, [({"state": state, "namespace": n}, holds) for (state, n), holds in states])
    for name, about in PROCESS_METRICS.items():
        if name in figures.process:
            _metric(lines, about, [({}, figures.process[name])])
    for counter, about in PEER_METRICS.items():
        scale = _scale(counter)
        samples = [
            ({"namespace": n, "peer": str(peer["node"])}, peer[counter] * scale) for n, peer in figures.peers
        ]
        _metric(lines, about, samples)
    for counter, about in SERVER_METRICS.items():
        if counter in figures.peer_server:
            _metric(lines, about, [({}, figures.peer_server[counter])])
    for counter, about in POOL_METRICS.items():
        if figures.pool:
            _metric(lines, about, [({}, figures.pool.get(counter, 0))])
    calls = sorted(figures.calls.items())
    _metric(lines, GRPC_CALLS, [({"method": m, "status": status}, count) for (m, status), count in calls])
    by_method = sorted(figures.call_seconds.items())
    _histogram(lines, GRPC_SECONDS, [({"method": method}, took) for method, took in by_method])
    for_each = sorted(figures.session_seconds.items())
    _histogram(
        lines, SESSION_SECONDS, [({"namespace": n, "operation": o}, took) for (n, o), took in for_each]
    )
    for_disk = sorted(figures.disk_seconds.items())
    _histogram(lines, DISK_SECONDS, [({"namespace": n, "operation": o}, took) for (n, o), took in for_disk])
    return "\n".join(lines) + "\n"


def _metric(lines: list[str], about: About, samples: Sequence[Sample]) -> None:
    if samples:
        _head(lines, about)
        lines.extend(f"{about.metric}{_labels(labels)} {value}" for labels, value in samples)


def _histogram(
    lines: list[str], about: About, samples: Sequence[tuple[Mapping[str, str], Histogram]]
) -> None:
    if not samples:
        return
    _head(lines, about)
    for labels, took in samples:
        total = 0
        for bound, count in zip((*map(repr, BOUNDS_S), "+Inf"), took.counts, strict=True):
            total += count
            lines.append(f"{about.metric}_bucket{_labels({**labels, 'le': bound})} {total}")
        lines.append(f"{about.metric}_sum{_labels(labels)} {took.sum_s}")
        lines.append(f"{about.metric}_count{_labels(labels)} {total}")


def _head(lines: list[str], about: About) -> None:
    lines.extend((f"# HELP {about.metric} {about.help}", f"# TYPE {about.metric} {about.kind}"))


def _labels(labels: Mapping[str, str]) -> str:
    """Values are plain words by configuration or construction: nothing to escape."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
