"""Create and seal of 64 blocks by the store alone, its pool full with half a million: no socket, no client.

    python -m bench.profile.store_batch
"""

import os
import statistics
import tempfile
import time

from kvclient import Layout
from kvstored import _core

CAPACITY = 2 << 30
MAX_BLOCKS = 550_000
BATCH = 64
ROUNDS = 3000


def memory(size: int) -> int:
    fd = os.memfd_create("store_batch")
    if size:
        os.posix_fallocate(fd, 0, size)
    return fd


def main() -> None:
    table, progress = _core.Store.table_bytes(MAX_BLOCKS, CAPACITY), _core.Store.progress_bytes(MAX_BLOCKS)
    with tempfile.TemporaryDirectory() as sessions:
        store = _core.Store("default", memory(table), memory(progress), memory(0), CAPACITY, MAX_BLOCKS,
                            os.urandom(16), sessions, "p", False)  # fmt: skip
        layout = store.register_layout(bytes(Layout(1, 1, 96, "uint8", 16, meta_fixed=0, meta_per_token=0)))
        owner = store.open_owner()
        while store.stats()["evictions"] == 0:
            for _ in range(100):
                granted = store.create(owner, os.urandom(32 * BATCH), layout, None)
                store.seal(owner, [block.handle for block in granted])
        creates, seals = [], []
        for _ in range(ROUNDS):
            keys = os.urandom(32 * BATCH)
            begin = time.perf_counter_ns()
            granted = store.create(owner, keys, layout, None)
            middle = time.perf_counter_ns()
            handles = [block.handle for block in granted]
            sealing = time.perf_counter_ns()
            store.seal(owner, handles)
            seals.append(time.perf_counter_ns() - sealing)
            creates.append(middle - begin)
        store.close()
    for name, times in (("create", creates), ("seal", seals)):
        typical, least = statistics.median(times) / 1e3, min(times) / 1e3
        print(f"{name} {BATCH} blocks: p50 {typical:.1f} µs, least {least:.1f} µs")


if __name__ == "__main__":
    main()
