"""The daemon's figures as Prometheus text: every metric's name, type and meaning, in tables.

Owns the names: kvstored_<noun>_<unit>[_total]. Labels are namespaces, methods, operations, states, statuses
and owners of pins, all from fixed sets; never a key, a salt or a token. A namespace is a name of the
configuration, at most 16 of them; whose it is (users, groups) is no label. docs/operations.md has the same
list, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstored.telemetry.histogram import BOUNDS_S

About = tuple[str, str, str]  # metric, type, help
Sample = tuple[Mapping[str, str], object]

# The store's counter -> (metric, type, help).
STORE_METRICS: dict[str, About] = {
    "capacity_bytes": ("kvstored_pool_capacity_bytes", "gauge", "Size the pool may grow to."),
    "frontier_bytes": ("kvstored_pool_frontier_bytes", "gauge", "Size the pool has grown to."),
    "faulted_bytes": ("kvstored_pool_faulted_bytes", "gauge", "Part of the pool that is faulted in."),
    "huge_bytes": ("kvstored_pool_huge_bytes", "gauge", "Part of the pool that was made of huge pages."),
    "used_bytes": ("kvstored_pool_used_bytes", "gauge", "Memory that blocks occupy, whatever their state."),
    "blocks": ("kvstored_blocks", "gauge", "Sealed blocks in memory."),
    "max_blocks": ("kvstored_blocks_limit", "gauge", "Most blocks at a time."),
    "unsealed": ("kvstored_blocks_unsealed", "gauge", "Blocks being written."),
    "zombies": ("kvstored_blocks_zombie", "gauge", "Deleted blocks whose memory a reader still holds."),
    "quarantined": (
        "kvstored_blocks_quarantined",
        "gauge",
        "Blocks whose writer ended but may still touch the memory.",
    ),
    "pins": ("kvstored_pins", "gauge", "Blocks held by readers, or by the disk tier for a write."),
    "asked_back": (
        "kvstored_pins_asked_back_total",
        "counter",
        "Times that pins of a session were asked back.",
    ),
    "sessions": ("kvstored_sessions", "gauge", "Processes attached through shared memory."),
    "hits": ("kvstored_hits_total", "counter", "Gets that found their block."),
    "misses": ("kvstored_misses_total", "counter", "Gets that did not."),
    "creates": ("kvstored_creates_total", "counter", "Blocks granted to writers."),
    "seals": ("kvstored_seals_total", "counter", "Blocks sealed."),
    "aborts": ("kvstored_aborts_total", "counter", "Blocks given up by their writers, or lost with them."),
    "deletes": ("kvstored_deletes_total", "counter", "Blocks deleted on request."),
    "evictions": ("kvstored_evictions_total", "counter", "Blocks evicted to make room."),
    "expired": ("kvstored_expirations_total", "counter", "Blocks whose time to live ended."),
    "no_space": ("kvstored_no_space_total", "counter", "Creates refused for want of memory."),
    "longest_hold_ns": (
        "kvstored_store_longest_hold_seconds",
        "gauge",
        "Longest that the store was held without a pause since the daemon began.",
    ),
    "long_holds": ("kvstored_store_long_holds_total", "counter", "Such holds over half a millisecond."),
    "fenced": ("kvstored_namespace_fenced", "gauge", "1 if a client harmed the memory and it is refused."),
    "corrupt": ("kvstored_corrupt_total", "counter", "Blocks dropped because a checksum did not match."),
}
# Of each owner of pins (native/core/format/store_types.h): what stands around its name -> about.
PIN_OWNERS = ("client", "engine", "disk", "peer")
OWNER_METRICS: dict[tuple[str, str], About] = {
    ("pins_", ""): ("kvstored_pins_held", "gauge", "Blocks held, by whom they are held for."),
    ("pinned_", "_bytes"): (
        "kvstored_pins_held_bytes",
        "gauge",
        "Their memory; one held twice counts twice.",
    ),
}
# The disk tier's counters come with those of its namespace: a row here, and one in docs/operations.md.
DISK_METRICS: dict[str, About] = {
    "on_disk": ("kvstored_blocks_on_disk_only", "gauge", "Blocks that lie only on disk and have a record."),
    "pending_writes": ("kvstored_disk_writes_pending", "gauge", "Blocks that wait to be written."),
    "writes_dropped": (
        "kvstored_disk_writes_dropped_total",
        "counter",
        "Blocks that were not written because too many waited.",
    ),
    "evictions_unwritten": (
        "kvstored_disk_evicted_unwritten_total",
        "counter",
        "Blocks evicted while they waited to be written.",
    ),
    "disk_files": ("kvstored_disk_files", "gauge", "Block files on disk."),
    "disk_bytes": ("kvstored_disk_used_bytes", "gauge", "Their bytes, those being written included."),
    "disk_quota_bytes": ("kvstored_disk_quota_bytes", "gauge", "The most they may be."),
    "disk_indexing": ("kvstored_disk_indexing", "gauge", "1 while the directories are listed after a start."),
    "disk_listed": ("kvstored_disk_listed_files", "gauge", "Files found by that listing so far."),
    "disk_strays": ("kvstored_disk_stray_files", "gauge", "Files found there that are no blocks."),
    "disk_aside_files": ("kvstored_disk_aside_files", "gauge", "Corrupt files kept aside (keep_corrupt)."),
    "disk_aside_bytes": ("kvstored_disk_aside_bytes", "gauge", "Their bytes; the quota does not count them."),
    "disk_loads_waiting": ("kvstored_disk_loads_waiting", "gauge", "Loads that have not begun."),
    "disk_loads_in_flight": ("kvstored_disk_loads_in_flight", "gauge", "Loads in progress."),
    "disk_writes_in_flight": ("kvstored_disk_writes_in_flight", "gauge", "Writes in progress."),
    "disk_load_bytes_per_s": (
        "kvstored_disk_load_bytes_per_second",
        "gauge",
        "Speed of loading, while something is loaded; what clients' estimates rest on.",
    ),
    "disk_loaded": ("kvstored_disk_loads_total", "counter", "Blocks loaded into memory."),
    "disk_load_bytes": ("kvstored_disk_load_bytes_total", "counter", "Bytes of them."),
    "disk_load_errors": ("kvstored_disk_load_errors_total", "counter", "Loads that failed for an error."),
    "disk_load_misses": ("kvstored_disk_load_misses_total", "counter", "Loads whose file was not there."),
    "disk_load_no_space": (
        "kvstored_disk_load_no_space_total",
        "counter",
        "Loads for which no memory was free of pins.",
    ),
    "disk_corrupt": ("kvstored_disk_corrupt_total", "counter", "Files that did not match their checksums."),
    "disk_expired": ("kvstored_disk_expired_total", "counter", "Files whose time to live had ended."),
    "disk_written": ("kvstored_disk_writes_total", "counter", "Blocks written."),
    "disk_write_bytes": ("kvstored_disk_write_bytes_total", "counter", "Bytes of them."),
    "disk_written_today_bytes": (
        "kvstored_disk_written_today_bytes",
        "gauge",
        "Of the daily budget (disk_daily_writes), by UTC days.",
    ),
    "disk_write_errors": ("kvstored_disk_write_errors_total", "counter", "Writes that failed."),
    "disk_writes_cancelled": (
        "kvstored_disk_writes_cancelled_total",
        "counter",
        "Writes whose block was deleted meanwhile.",
    ),
    "disk_writes_too_large": (
        "kvstored_disk_writes_refused_total",
        "counter",
        "Blocks that no file can hold within the quota.",
    ),
    "disk_removed": ("kvstored_disk_removed_total", "counter", "Files removed, for whatever reason."),
    "disk_evicted": ("kvstored_disk_evictions_total", "counter", "Files given up to keep the quota."),
    "disk_reused": ("kvstored_disk_reuses_total", "counter", "Of those, files that became another block's."),
    "disk_cpu_seconds": ("kvstored_disk_cpu_seconds_total", "counter", "CPU time of the disk tier's thread."),
    "shared_nodes": ("kvstored_shared_nodes", "gauge", "Other daemons that keep blocks in disk_shared."),
    "shared_loaded": ("kvstored_shared_loads_total", "counter", "Blocks read from files of other daemons."),
    "shared_load_bytes": ("kvstored_shared_load_bytes_total", "counter", "Bytes of them."),
    "shared_missing": ("kvstored_shared_misses_total", "counter", "Blocks that nobody kept there."),
    "shared_gone": ("kvstored_shared_gone_total", "counter", "Files that went while they were read."),
    "shared_corrupt": ("kvstored_shared_corrupt_total", "counter", "Files there that did not match."),
}
# A peer's counters, of each shared namespace. `peer` is a name of the configuration, at most 64.
PEER_METRICS: dict[str, About] = {
    "up": ("kvstored_peer_up", "gauge", "1 while a connection to the peer stands."),
    "rtt_us": ("kvstored_peer_round_trip_seconds", "gauge", "Round trip of the last look at it."),
    "bytes_per_s": ("kvstored_peer_bytes_per_second", "gauge", "Speed of the last fetches from it."),
    "queued": ("kvstored_peer_fetches_waiting", "gauge", "Blocks that wait to be asked of it."),
    "in_flight": ("kvstored_peer_fetches_in_flight", "gauge", "Blocks asked of it."),
    "fetched": ("kvstored_peer_fetches_total", "counter", "Blocks fetched from it."),
    "fetch_bytes": ("kvstored_peer_fetch_bytes_total", "counter", "Bytes of them."),
    "missing": ("kvstored_peer_misses_total", "counter", "Blocks that it did not have."),
    "pushed": ("kvstored_peer_pushed_total", "counter", "Blocks that it had this host come for."),
    "busy": ("kvstored_peer_busy_total", "counter", "Blocks it was sending to as many as may have it."),
    "held": ("kvstored_peer_blocks_known", "gauge", "Blocks it is known to have."),
    "corrupt": ("kvstored_peer_corrupt_total", "counter", "Connections ended by bytes that did not match."),
    "malformed": ("kvstored_peer_malformed_total", "counter", "Connections ended by what was no answer."),
    "cancelled": ("kvstored_peer_cancelled_total", "counter", "Fetches given up: nobody waited any more."),
    "stalled": ("kvstored_peer_stalls_total", "counter", "Connections ended for want of progress."),
    "gone": ("kvstored_peer_disconnects_total", "counter", "Connections that ended, or could not be made."),
    "refused": ("kvstored_peer_refusals_total", "counter", "Connections it refused, or that were another's."),
}
SERVER_METRICS: dict[str, About] = {
    "connections": ("kvstored_peer_connections", "gauge", "Connections of peers that read here."),
    "refused": ("kvstored_peer_strangers_total", "counter", "Connections of others, refused."),
    "served_blocks": ("kvstored_peer_served_blocks_total", "counter", "Blocks read by peers."),
    "served_bytes": ("kvstored_peer_served_bytes_total", "counter", "Bytes of them."),
    "turned_away": ("kvstored_peer_turned_away_total", "counter", "Fetches sent on to another that has it."),
}
# The pool across machines, as this host's fabric tells of it; counters begin anew with each fabric.
POOL_METRICS: dict[str, About] = {
    "up": ("kvstored_cluster_up", "gauge", "1 while this host's fabric tells of the pool."),
    "etcd_up": ("kvstored_cluster_etcd_up", "gauge", "1 while etcd answers it."),
    "members": ("kvstored_cluster_members", "gauge", "Hosts in the last view of the cluster."),
    "restarts": ("kvstored_cluster_restarts_total", "counter", "Fabrics that ended and were replaced."),
    "lent": ("kvstored_cluster_loans", "gauge", "Extents of this host that a fabric may write to."),
    "puts": ("kvstored_cluster_puts_total", "counter", "Blocks put into the pool."),
    "put_bytes": ("kvstored_cluster_put_bytes_total", "counter", "Bytes of them."),
    "put_failed": ("kvstored_cluster_put_failures_total", "counter", "Blocks that no host took."),
    "replicas": ("kvstored_cluster_replicas_total", "counter", "Replicas of the blocks that were put."),
    "placed_elsewhere": (
        "kvstored_cluster_placed_elsewhere_total",
        "counter",
        "Replicas that the next host took.",
    ),
    "mended": ("kvstored_cluster_mended_total", "counter", "Blocks that got a replica beside others again."),
    "short": ("kvstored_cluster_short_blocks", "gauge", "Blocks on fewer hosts than asked, to be put again."),
    "hits": ("kvstored_cluster_hits_total", "counter", "Blocks got from the pool."),
    "hit_bytes": ("kvstored_cluster_hit_bytes_total", "counter", "Bytes of them."),
    "straight": (
        "kvstored_cluster_straight_total",
        "counter",
        "Of those, blocks brought straight to their place.",
    ),
    "misses": ("kvstored_cluster_misses_total", "counter", "Blocks that it did not have, or not in time."),
    "failed_over": (
        "kvstored_cluster_failovers_total",
        "counter",
        "Blocks of which a later replica was sooner.",
    ),
    "late": ("kvstored_cluster_late_total", "counter", "Calls of Mooncake that did not return in time."),
    "corrupt": ("kvstored_cluster_corrupt_total", "counter", "Replicas that did not match."),
}
PROCESS_METRICS: dict[str, About] = {
    "leases": ("kvstored_leases", "gauge", "gRPC writers that hold unsealed blocks."),
    "leases_expired": ("kvstored_leases_expired_total", "counter", "Leases that reached their deadline."),
    "draining": ("kvstored_draining", "gauge", "1 while creates are refused on request."),
    "subscribers": ("kvstored_event_subscribers", "gauge", "Listeners of Events."),
    "resident_bytes": (
        "kvstored_process_resident_bytes",
        "gauge",
        "The daemon's own memory, beside pool and index.",
    ),
    "cpu_seconds": ("kvstored_process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    "session_cpu_seconds": (
        "kvstored_session_cpu_seconds_total",
        "counter",
        "CPU time of the session server.",
    ),
    "start_time_seconds": ("kvstored_start_time_seconds", "gauge", "When the daemon began, in Unix time."),
    "reloads": (
        "kvstored_config_reloads_total",
        "counter",
        "Configurations that were read again and applied.",
    ),
    "reloads_refused": (
        "kvstored_config_reloads_refused_total",
        "counter",
        "Configurations refused as wrong.",
    ),
    "sessions_refused": ("kvstored_sessions_refused_total", "counter", "Clients refused at attach."),
}


GRPC_CALLS: About = ("kvstored_grpc_calls_total", "counter", "gRPC calls that have ended.")
GRPC_SECONDS: About = (
    "kvstored_grpc_call_seconds",
    "histogram",
    "How long gRPC calls took; a stream lasts as long as its caller reads.",
)
SESSION_SECONDS: About = (
    "kvstored_session_request_seconds",
    "histogram",
    "From a request's arrival at the session socket to its reply.",
)
DISK_SECONDS: About = (
    "kvstored_disk_seconds",
    "histogram",
    "From a load's or a write's beginning to its end, waiting not included.",
)
DEGRADED: About = (
    "kvstored_degraded",
    "gauge",
    "1 while the state holds; docs/operations.md says what to do.",
)
SERVING: About = ("kvstored_namespace_serving", "gauge", "1 if the namespace answers its clients.")
ADOPTED: About = (
    "kvstored_namespace_adopted",
    "gauge",
    "1 if the blocks of an earlier daemon were taken over.",
)
BUILD: About = ("kvstored_build_info", "gauge", "Always 1; the version is a label.")


@dataclass
class Figures:
    """What one scrape shows."""

    version: str = ""
    stores: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # namespace -> counters
    process: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (method, status)
    call_seconds: Mapping[str, tuple[Sequence[int], float]] = field(default_factory=dict)  # method
    session_seconds: Mapping[tuple[str, str], tuple[Sequence[int], float]] = field(
        default_factory=dict
    )  # (namespace, operation) -> counts per bucket, sum
    disk_seconds: Mapping[tuple[str, str], tuple[Sequence[int], float]] = field(
        default_factory=dict
    )  # (namespace, operation)
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
    _histogram(lines, GRPC_SECONDS, [({"method": method}, *took) for method, took in by_method])
    for_each = sorted(figures.session_seconds.items())
    _histogram(
        lines, SESSION_SECONDS, [({"namespace": n, "operation": o}, *took) for (n, o), took in for_each]
    )
    for_disk = sorted(figures.disk_seconds.items())
    _histogram(lines, DISK_SECONDS, [({"namespace": n, "operation": o}, *took) for (n, o), took in for_disk])
    return "\n".join(lines) + "\n"


def _metric(lines: list[str], about: About, samples: Sequence[Sample]) -> None:
    if samples:
        _head(lines, about)
        lines.extend(f"{about[0]}{_labels(labels)} {value}" for labels, value in samples)


def _histogram(
    lines: list[str], about: About, samples: Sequence[tuple[Mapping[str, str], Sequence[int], float]]
) -> None:
    if not samples:
        return
    _head(lines, about)
    for labels, counts, sum_s in samples:
        total = 0
        for bound, count in zip((*map(repr, BOUNDS_S), "+Inf"), counts, strict=True):
            total += count
            lines.append(f"{about[0]}_bucket{_labels({**labels, 'le': bound})} {total}")
        lines.append(f"{about[0]}_sum{_labels(labels)} {sum_s}")
        lines.append(f"{about[0]}_count{_labels(labels)} {total}")


def _head(lines: list[str], about: About) -> None:
    lines.extend((f"# HELP {about[0]} {about[2]}", f"# TYPE {about[0]} {about[1]}"))


def _labels(labels: Mapping[str, str]) -> str:
    """Values are plain words by configuration or construction: nothing to escape."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
