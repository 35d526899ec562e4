"""This process: its own memory and CPU time, as the kernel says, and its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from kvstored import log


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


def end_within(limit_s: float, last: Callable[[], None]) -> None:
    """Calls `last` and ends the process then, unless it has ended: Python, too, would wait for a thread that
    a disk holds."""

    def end() -> None:
        log.error("stop_abandoned", after_s=limit_s, why="a disk does not answer, or is slow")
        try:
            last()
        finally:
            os._exit(0)

    watch = threading.Timer(limit_s, end)
    watch.daemon = True
    watch.start()
