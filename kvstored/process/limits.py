"""This process: its own memory and CPU time, as the kernel says, and its end."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable

from kvstored import log
from kvstored.config.config import Config
from kvstored.config.peers import MAX_PEERS
from kvstored.errors import StartupError

SPARE_DESCRIPTORS = 16  # for a few clients and transfers
SESSION_DESCRIPTORS = 3  # of a session: its socket, its process, its page
# Of a peer and a namespace, each way: the streams that there always are, and at most, and one that tells.
PEER_DESCRIPTORS, MOST_PEER_DESCRIPTORS = 2 * (4 + 1), 2 * (16 + 1)
STRANGERS = 2 * 32 + 2  # on the port for peers, those that are shut among them, and the port itself


def own_memory_bytes() -> int:
    """Resident memory beside the shared segments: neither pool, nor index, nor session pages."""
    total_kib = 0
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                total_kib += int(line.split()[1])
    return total_kib << 10


def cpu_seconds() -> float:
    return time.process_time()


def need_descriptors(config: Config) -> None:
    """Raises the soft limit as far as all sessions and connections need it and the hard limit allows.

    Raises StartupError where that leaves the daemon none for a client: gRPC ends a process that lacks one by
    a signal."""
    needed = len(os.listdir("/proc/self/fd")) - 1 + _own_descriptors(config) + SPARE_DESCRIPTORS
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more_streams = _shares(config) * (MOST_PEER_DESCRIPTORS - PEER_DESCRIPTORS)
    if config.cluster:
        more_streams += MAX_PEERS * len(config.shared) * MOST_PEER_DESCRIPTORS
    wanted = needed + 2 * SESSION_DESCRIPTORS * config.max_sessions + more_streams
    if 0 <= limit < wanted:
        limit = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if 0 <= limit < needed:
        raise StartupError(
            f"the limit on open files is {limit}, this configuration needs {needed}, and "
            f"{SESSION_DESCRIPTORS} more for each session: ulimit -n, LimitNOFILE"
        )


def connections_within(config: Config, descriptors_each: int) -> int:
    """As many as max_sessions, but never more than half of the descriptors that the daemon itself leaves: the
    sessions have one half, the connections of other users the other. One at least."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = max(limit - _own_descriptors(config), SPARE_DESCRIPTORS)
    most = max(1, left // (2 * descriptors_each))
    return min(config.max_sessions, most) if limit >= 0 else config.max_sessions


def members_within(config: Config) -> int:
    """How many of a cluster's hosts may be peers beside the configured ones: their connections have a quarter
    of the descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = limit // 4 // (PEER_DESCRIPTORS * max(1, len(config.shared))) if limit >= 0 else MAX_PEERS
    return min(room, MAX_PEERS - len(config.peer) - bool(config.cluster_memory))


def _own_descriptors(config: Config) -> int:
    disks = len(config.disks)
    of_namespace = 8 + (2 + 3 * disks if disks else 0)
    of_peers = _shares(config) * PEER_DESCRIPTORS + (STRANGERS if config.listen else 0)
    return 19 + len(config.namespaces) * of_namespace + of_peers  # with those for guests and metrics


def _shares(config: Config) -> int:
    """Peers, once for each namespace that is shared with them."""
    return len(config.peer) * sum(namespace.share != "none" for namespace in config.namespaces)


def end_within(limit_s: float, last: Callable[[], None]) -> None:
    """Calls `last` and ends the process then, unless it has ended: Python, too, would wait for a thread that
    a disk holds. Where there is no thread for that, the end is not bounded, and comes all the same."""

    def end() -> None:
        log.error("stop_abandoned", after_s=limit_s, why="a disk does not answer, or is slow")
        try:
            last()
        finally:
            os._exit(0)

    watch = threading.Timer(limit_s, end)
    watch.daemon = True
    try:
        watch.start()
    except RuntimeError as error:
        log.warning("stop_not_bounded", why=str(error))
