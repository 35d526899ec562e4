"""A scene with KvstoredTier and another host's daemon: run with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_elsewhere_scene DIRECTORY ITS_DIRECTORY

vLLM's own manager of tiers asks and promotes, over plain memory for its first tier.
"""

import sys
import time
from types import SimpleNamespace

from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

import kvclient
from tests.engines.vllm.offloading.vllm_tier_rows import CONTEXT, content, found, job, keys, need, tier

DIRECTORY, ELSEWHERE = sys.argv[1:3]


def answers(storage, names, context=CONTEXT):
    """What vLLM gets at the end, and whether it was told to ask again."""
    deadline, waited = time.monotonic() + 60, False
    while True:
        told = [storage.lookup(name, context) for name in names]
        if LookupResult.RETRY not in told:
            return [answer is LookupResult.HIT for answer in told], waited
        waited = True
        assert time.monotonic() < deadline, "the look-up does not end"
        storage.on_schedule_end(ScheduleEndContext((), ()))


def until_told(names):
    client, deadline = kvclient.connect(DIRECTORY), time.monotonic() + 60
    while not all(client.lookup(names, peers=True).states):
        assert time.monotonic() < deadline, "no word came"


def request(name):
    return SimpleNamespace(req_id=name)


there, memory = tier(ELSEWHERE)
here, target = tier(DIRECTORY, fetch_wait_s=60.0)
alone, _ = tier(DIRECTORY)
names = keys(0, 5)
memory[:4] = content(range(4))
job(there, names[:4], [0, 1, 2, 3], False)
until_told(there._names.whole(names[:4]))
assert found(alone, names) == [False] * 5
assert answers(here, names) == ([True] * 4 + [False], True)
assert job(here, names[:4], [3, 2, 1, 0], True).successful_keys is None
assert (target[[3, 2, 1, 0]] == memory[:4]).all()
client = kvclient.connect(DIRECTORY)
assert client.stats()["pins"] == 0, "what was brought is held until its load"
assert answers(here, names, request("another")) == ([True] * 4 + [False], True)
assert answers(here, names, request("another")) == ([True] * 4 + [False], False), "once a request"

more = keys(10, 1)
job(there, more, [0], False)
until_told(there._names.whole(more))
need("kill")
assert answers(here, more, request("a third"))[0] == [False], "nobody waits for a host that is gone"
for name in ("r", "another", "a third"):
    here.on_request_finished(request(name))
assert not here._sought
for made in (there, here, alone):
    made.shutdown()
print("PASSED", flush=True)
