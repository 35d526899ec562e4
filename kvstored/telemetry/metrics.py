"""Every metric of the daemon: its name, its type and what it means.

Owns the names: kvstored_<noun>_<unit>[_total]; docs/operations.md has the same list, which a test compares.
Never a figure: those are prometheus.py's. Invariant: a counter of the store, the disk tier or a peer is
exported if it has a row here, under no other name.
"""

from __future__ import annotations

from typing import NamedTuple


class About(NamedTuple):
    metric: str
    kind: str  # "gauge", "counter" or "histogram"
    help: str


# By the store's counter.
STORE_METRICS: dict[str, About] = {
    "capacity_bytes": About("kvstored_pool_capacity_bytes", "gauge", "Size the pool may grow to."),
    "frontier_bytes": About("kvstored_pool_frontier_bytes", "gauge", "Size the pool has grown to."),
    "faulted_bytes": About("kvstored_pool_faulted_bytes", "gauge", "Part of the pool that is faulted in."),
    "huge_bytes": About("kvstored_pool_huge_bytes", "gauge", "Part of the pool that was made of huge pages."),
    "used_bytes": About(
        "kvstored_pool_used_bytes", "gauge", "Memory that blocks occupy, whatever their state."
    ),
    "blocks": About("kvstored_blocks", "gauge", "Sealed blocks in memory."),
    "max_blocks": About("kvstored_blocks_limit", "gauge", "Most blocks at a time."),
    "unsealed": About("kvstored_blocks_unsealed", "gauge", "Blocks being written."),
    "zombies": About("kvstored_blocks_zombie", "gauge", "Deleted blocks whose memory a reader still holds."),
    "quarantined": About(
        "kvstored_blocks_quarantined",
        "gauge",
        "Blocks whose writer ended but may still touch the memory.",
    ),
    "pins": About("kvstored_pins", "gauge", "Blocks held by readers, or by the disk tier for a write."),
    "asked_back": About(
        "kvstored_pins_asked_back_total",
        "counter",
        "Times that pins of a session were asked back.",
    ),
    "sessions": About("kvstored_sessions", "gauge", "Processes attached through shared memory."),
    "hits": About("kvstored_hits_total", "counter", "Gets that found their block."),
    "misses": About("kvstored_misses_total", "counter", "Gets that did not."),
    "creates": About("kvstored_creates_total", "counter", "Blocks granted to writers."),
    "seals": About("kvstored_seals_total", "counter", "Blocks sealed."),
    "aborts": About(
        "kvstored_aborts_total", "counter", "Blocks given up by their writers, or lost with them."
    ),
    "deletes": About("kvstored_deletes_total", "counter", "Blocks deleted on request."),
    "evictions": About("kvstored_evictions_total", "counter", "Blocks evicted to make room."),
    "expired": About("kvstored_expirations_total", "counter", "Blocks whose time to live ended."),
    "no_space": About("kvstored_no_space_total", "counter", "Creates refused for want of memory."),
    "longest_hold_ns": About(
        "kvstored_store_longest_hold_seconds",
        "gauge",
        "Longest that the store was held without a pause since the daemon began.",
    ),
    "long_holds": About("kvstored_store_long_holds_total", "counter", "Such holds over half a millisecond."),
    "fenced": About(
        "kvstored_namespace_fenced", "gauge", "1 if a client harmed the memory and it is refused."
    ),
    "corrupt": About("kvstored_corrupt_total", "counter", "Blocks dropped because a checksum did not match."),
}
# Of each owner of pins (native/core/format/store_types.h): what stands around its name of its counter.
PIN_OWNERS = ("client", "engine", "disk", "peer")
OWNER_METRICS: dict[tuple[str, str], About] = {
    ("pins_", ""): About("kvstored_pins_held", "gauge", "Blocks held, by whom they are held for."),
    ("pinned_", "_bytes"): About(
        "kvstored_pins_held_bytes",
        "gauge",
        "Their memory; one that two clients hold counts twice.",
    ),
}
# The disk tier's counters come with those of its namespace: a row here, and one in docs/operations.md.
DISK_METRICS: dict[str, About] = {
    "on_disk": About(
        "kvstored_blocks_on_disk_only", "gauge", "Blocks that lie only on disk and have a record."
    ),
    "pending_writes": About("kvstored_disk_writes_pending", "gauge", "Blocks that wait to be written."),
    "writes_dropped": About(
        "kvstored_disk_writes_dropped_total",
        "counter",
        "Blocks that were not written because too many waited.",
    ),
    "evictions_unwritten": About(
        "kvstored_disk_evicted_unwritten_total",
        "counter",
        "Blocks evicted while they waited to be written.",
    ),
    "disk_files": About("kvstored_disk_files", "gauge", "Block files on disk."),
    "disk_bytes": About("kvstored_disk_used_bytes", "gauge", "Their bytes, those being written included."),
    "disk_quota_bytes": About("kvstored_disk_quota_bytes", "gauge", "The most they may be."),
    "disk_indexing": About(
        "kvstored_disk_indexing", "gauge", "1 while the directories are listed after a start."
    ),
    "disk_listed": About("kvstored_disk_listed_files", "gauge", "Files found by that listing so far."),
    "disk_strays": About("kvstored_disk_stray_files", "gauge", "Files found there that are no blocks."),
    "disk_aside_files": About(
        "kvstored_disk_aside_files", "gauge", "Corrupt files kept aside (keep_corrupt)."
    ),
    "disk_aside_bytes": About(
        "kvstored_disk_aside_bytes", "gauge", "Their bytes; the quota does not count them."
    ),
    "disk_loads_waiting": About("kvstored_disk_loads_waiting", "gauge", "Loads that have not begun."),
    "disk_loads_in_flight": About("kvstored_disk_loads_in_flight", "gauge", "Loads in progress."),
    "disk_writes_in_flight": About("kvstored_disk_writes_in_flight", "gauge", "Writes in progress."),
    "disk_load_bytes_per_s": About(
        "kvstored_disk_load_bytes_per_second",
        "gauge",
        "Speed of loading, while something is loaded; what clients' estimates rest on.",
    ),
    "disk_loaded": About("kvstored_disk_loads_total", "counter", "Blocks loaded into memory."),
    "disk_load_bytes": About("kvstored_disk_load_bytes_total", "counter", "Bytes of them."),
    "disk_load_errors": About(
        "kvstored_disk_load_errors_total", "counter", "Loads that failed for an error."
    ),
    "disk_load_misses": About(
        "kvstored_disk_load_misses_total", "counter", "Loads whose file was not there."
    ),
    "disk_load_no_space": About(
        "kvstored_disk_load_no_space_total",
        "counter",
        "Loads for which no memory was free of pins.",
    ),
    "disk_corrupt": About(
        "kvstored_disk_corrupt_total", "counter", "Files that did not match their checksums."
    ),
    "disk_expired": About("kvstored_disk_expired_total", "counter", "Files whose time to live had ended."),
    "disk_written": About("kvstored_disk_writes_total", "counter", "Blocks written."),
    "disk_write_bytes": About("kvstored_disk_write_bytes_total", "counter", "Bytes of them."),
    "disk_written_today_bytes": About(
        "kvstored_disk_written_today_bytes",
        "gauge",
        "Of the daily budget (disk_daily_writes), by UTC days.",
    ),
    "disk_write_errors": About("kvstored_disk_write_errors_total", "counter", "Writes that failed."),
    "disk_writes_cancelled": About(
        "kvstored_disk_writes_cancelled_total",
        "counter",
        "Writes whose block was deleted meanwhile.",
    ),
    "disk_writes_too_large": About(
        "kvstored_disk_writes_refused_total",
        "counter",
        "Blocks that no file can hold within the quota.",
    ),
    "disk_removed": About("kvstored_disk_removed_total", "counter", "Files removed, for whatever reason."),
    "disk_evicted": About("kvstored_disk_evictions_total", "counter", "Files given up to keep the quota."),
    "disk_reused": About(
        "kvstored_disk_reuses_total", "counter", "Of those, files that became another block's."
    ),
    "disk_cpu_seconds": About(
        "kvstored_disk_cpu_seconds_total", "counter", "CPU time of the disk tier's thread."
    ),
    "shared_nodes": About("kvstored_shared_nodes", "gauge", "Other daemons that keep blocks in disk_shared."),
    "shared_loaded": About(
        "kvstored_shared_loads_total", "counter", "Blocks read from files of other daemons."
    ),
    "shared_load_bytes": About("kvstored_shared_load_bytes_total", "counter", "Bytes of them."),
    "shared_missing": About("kvstored_shared_misses_total", "counter", "Blocks that nobody kept there."),
    "shared_gone": About("kvstored_shared_gone_total", "counter", "Files that went while they were read."),
    "shared_corrupt": About("kvstored_shared_corrupt_total", "counter", "Files there that did not match."),
}
# A peer's counters, of each shared namespace. `peer` is a name of the configuration, at most 64.
PEER_METRICS: dict[str, About] = {
    "up": About("kvstored_peer_up", "gauge", "1 while a connection to the peer stands."),
    "rtt_us": About("kvstored_peer_round_trip_seconds", "gauge", "Round trip of the last look at it."),
    "bytes_per_s": About("kvstored_peer_bytes_per_second", "gauge", "Speed of the last fetches from it."),
    "queued": About("kvstored_peer_fetches_waiting", "gauge", "Blocks that wait to be asked of it."),
    "in_flight": About("kvstored_peer_fetches_in_flight", "gauge", "Blocks asked of it."),
    "bytes_in_flight": About(
        "kvstored_peer_in_flight_bytes", "gauge", "Memory of blocks that are coming from it."
    ),
    "deferred": About(
        "kvstored_peer_deferred_total", "counter", "Blocks asked for again: too much was on its way."
    ),
    "fetched": About("kvstored_peer_fetches_total", "counter", "Blocks fetched from it."),
    "fetch_bytes": About("kvstored_peer_fetch_bytes_total", "counter", "Bytes of them."),
    "missing": About("kvstored_peer_misses_total", "counter", "Blocks that it did not have."),
    "pushed": About("kvstored_peer_pushed_total", "counter", "Blocks that it had this host come for."),
    "busy": About("kvstored_peer_busy_total", "counter", "Blocks it was sending to as many as may have it."),
    "held": About("kvstored_peer_blocks_known", "gauge", "Blocks it is known to have."),
    "corrupt": About(
        "kvstored_peer_corrupt_total", "counter", "Connections ended by bytes that did not match."
    ),
    "malformed": About(
        "kvstored_peer_malformed_total", "counter", "Connections ended by what was no answer."
    ),
    "halved": About(
        "kvstored_peer_halved_total", "counter", "Blocks that two connections brought, half each."
    ),
    "taken_over": About(
        "kvstored_peer_taken_over_total", "counter", "Second halves that were too slow, and asked for again."
    ),
    "cancelled": About(
        "kvstored_peer_cancelled_total", "counter", "Fetches given up: nobody waited any more."
    ),
    "stalled": About("kvstored_peer_stalls_total", "counter", "Connections ended for want of progress."),
    "gone": About(
        "kvstored_peer_disconnects_total", "counter", "Connections that ended, or could not be made."
    ),
    "refused": About(
        "kvstored_peer_refusals_total", "counter", "Connections it refused, or that were another's."
    ),
}
SERVER_METRICS: dict[str, About] = {
    "tls": About("kvstored_peer_tls", "gauge", "1 if bytes of and for peers go over TLS, 0 over plain TCP."),
    "connections": About("kvstored_peer_connections", "gauge", "Connections of peers that read here."),
    "refused": About("kvstored_peer_strangers_total", "counter", "Connections of others, refused."),
    "served_blocks": About("kvstored_peer_served_blocks_total", "counter", "Blocks read by peers."),
    "served_bytes": About("kvstored_peer_served_bytes_total", "counter", "Bytes of them."),
    "turned_away": About(
        "kvstored_peer_turned_away_total", "counter", "Fetches sent on to another that has it."
    ),
}
# The pool across machines, as this host's fabric tells of it; counters begin anew with each fabric.
POOL_METRICS: dict[str, About] = {
    "up": About("kvstored_cluster_up", "gauge", "1 while this host's fabric tells of the pool."),
    "etcd_up": About("kvstored_cluster_etcd_up", "gauge", "1 while etcd answers it."),
    "members": About("kvstored_cluster_members", "gauge", "Hosts in the last view of the cluster."),
    "rdma": About("kvstored_cluster_rdma", "gauge", "1 while the pool's bytes go over RDMA, 0 over TCP."),
    "restarts": About("kvstored_cluster_restarts_total", "counter", "Fabrics that ended and were replaced."),
    "lent": About("kvstored_cluster_loans", "gauge", "Extents of this host that a fabric may write to."),
    "puts": About("kvstored_cluster_puts_total", "counter", "Blocks put into the pool."),
    "put_bytes": About("kvstored_cluster_put_bytes_total", "counter", "Bytes of them."),
    "put_failed": About("kvstored_cluster_put_failures_total", "counter", "Blocks that no host took."),
    "replicas": About("kvstored_cluster_replicas_total", "counter", "Replicas of the blocks that were put."),
    "placed_elsewhere": About(
        "kvstored_cluster_placed_elsewhere_total",
        "counter",
        "Replicas that the next host took.",
    ),
    "mended": About(
        "kvstored_cluster_mended_total", "counter", "Blocks that got a replica beside others again."
    ),
    "short": About(
        "kvstored_cluster_short_blocks", "gauge", "Blocks on fewer hosts than asked, to be put again."
    ),
    "hits": About("kvstored_cluster_hits_total", "counter", "Blocks got from the pool."),
    "hit_bytes": About("kvstored_cluster_hit_bytes_total", "counter", "Bytes of them."),
    "straight": About(
        "kvstored_cluster_straight_total",
        "counter",
        "Of those, blocks brought straight to their place.",
    ),
    "misses": About(
        "kvstored_cluster_misses_total", "counter", "Blocks that it did not have, or not in time."
    ),
    "failed_over": About(
        "kvstored_cluster_failovers_total",
        "counter",
        "Blocks of which a later replica was sooner.",
    ),
    "late": About("kvstored_cluster_late_total", "counter", "Calls of Mooncake that did not return in time."),
    "corrupt": About("kvstored_cluster_corrupt_total", "counter", "Replicas that did not match."),
}
PROCESS_METRICS: dict[str, About] = {
    "leases": About("kvstored_leases", "gauge", "gRPC writers that hold unsealed blocks."),
    "leases_expired": About(
        "kvstored_leases_expired_total", "counter", "Leases that reached their deadline."
    ),
    "draining": About("kvstored_draining", "gauge", "1 while creates are refused on request."),
    "subscribers": About("kvstored_event_subscribers", "gauge", "Listeners of Events."),
    "resident_bytes": About(
        "kvstored_process_resident_bytes",
        "gauge",
        "The daemon's own memory, beside pool and index.",
    ),
    "cpu_seconds": About("kvstored_process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    "session_cpu_seconds": About(
        "kvstored_session_cpu_seconds_total",
        "counter",
        "CPU time of the session server.",
    ),
    "start_time_seconds": About(
        "kvstored_start_time_seconds", "gauge", "When the daemon began, in Unix time."
    ),
    "reloads": About(
        "kvstored_config_reloads_total",
        "counter",
        "Configurations that were read again and applied.",
    ),
    "reloads_refused": About(
        "kvstored_config_reloads_refused_total",
        "counter",
        "Configurations refused as wrong.",
    ),
    "sessions_refused": About("kvstored_sessions_refused_total", "counter", "Clients refused at attach."),
}


GRPC_CALLS: About = About("kvstored_grpc_calls_total", "counter", "gRPC calls that have ended.")
GRPC_SECONDS: About = About(
    "kvstored_grpc_call_seconds",
    "histogram",
    "How long gRPC calls took; a stream lasts as long as its caller reads.",
)
SESSION_SECONDS: About = About(
    "kvstored_session_request_seconds",
    "histogram",
    "From a request's arrival at the session socket to its reply.",
)
DISK_SECONDS: About = About(
    "kvstored_disk_seconds",
    "histogram",
    "From a load's or a write's beginning to its end, waiting not included.",
)
DEGRADED: About = About(
    "kvstored_degraded",
    "gauge",
    "1 while the state holds; docs/operations.md says what to do.",
)
SERVING: About = About("kvstored_namespace_serving", "gauge", "1 if the namespace answers its clients.")
ADOPTED: About = About(
    "kvstored_namespace_adopted",
    "gauge",
    "1 if the blocks of an earlier daemon were taken over.",
)
BUILD: About = About("kvstored_build_info", "gauge", "Always 1; the version is a label.")
