"""What the kernel says about this process: its own memory and CPU time. Reads /proc, changes nothing."""

from __future__ import annotations

import time


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
