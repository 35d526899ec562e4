"""A scene with KvstoredTier behind a restart of its daemon, and behind one that has nothing but its disk: run
with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_again_scene DIRECTORY
"""

import sys
import time

import kvclient
from tests.engines.vllm.offloading.vllm_tier_rows import content, found, job, keys, need, tier

DIRECTORY, COUNT = sys.argv[1], 5


def stats():
    with kvclient.connect(DIRECTORY) as client:
        return client.stats()


def until(true, what):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, what


storage, memory = tier(DIRECTORY, wait_s=30.0, timeout_s=5.0)
names = keys(0, COUNT + 1)
memory[:COUNT] = content(range(COUNT))
assert job(storage, names[:COUNT], list(range(COUNT)), False).success
until(lambda: stats()["disk_files"] >= COUNT, "all is on disk")
for how in ("restart", "anew"):
    need(how)
    assert stats()["disk_loaded"] == 0
    until(lambda: found(storage, names) == [True] * COUNT + [False], f"it hits: {how}")
    fresh, target = tier(DIRECTORY, wait_s=30.0, timeout_s=5.0)
    for reader, rows in ((storage, memory), (fresh, target)):
        rows[:] = 0
        assert found(reader, names) == [True] * COUNT + [False]
        assert job(reader, names[:COUNT], list(range(COUNT)), True).successful_keys is None
        assert (rows[:COUNT] == content(range(COUNT))).all() and not rows[COUNT:].any()
    fresh.shutdown()
    assert (stats()["disk_loaded"] > 0) is (how == "anew")
storage.shutdown()
print("PASSED", flush=True)
