"""A scene with KvstoredTier, made by vLLM's own factory over plain memory: run with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_tier_scene DIRECTORY

What only the test can do is asked for by a line NEED … and answered by one. With a second word, "fill", it
stores job after job until it is killed.
"""

import contextlib
import logging
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvclient
from kvclient.integrations.pages import Pages
from tests.engines.pool_bytes import take_all
from tests.engines.vllm.offloading import vllm_tier_rows as rows
from tests.engines.vllm.offloading.vllm_tier_rows import ROW, ROWS, content, found, job, keys, need

DIRECTORY = sys.argv[1]
FILLED = 1000  # the first block of the process that is killed
tier = partial(rows.tier, DIRECTORY)


def fill():
    storage, memory = tier()
    for first in range(FILLED, 1 << 30, ROWS):
        memory[:] = content(range(first, first + ROWS))
        job(storage, keys(first, ROWS), list(range(ROWS)), False)


def stored_until_it_works(storage, names, rows):
    deadline = time.monotonic() + 60
    while not job(storage, names, rows, False).success:
        assert time.monotonic() < deadline, "nothing can be stored"


def a_prefiller_that_is_killed_leaves_what_it_stored():
    words = [sys.executable, "-m", "tests.engines.vllm.offloading.vllm_tier_scene", DIRECTORY, "fill"]
    with subprocess.Popen(words) as prefiller:
        try:
            heir, target = tier()
            deadline = time.monotonic() + 400  # it imports for itself, on a machine that may be busy
            while not all(found(heir, keys(FILLED, 2 * ROWS))):
                assert prefiller.poll() is None and time.monotonic() < deadline, "it stores nothing"
        finally:
            prefiller.kill()
    first = FILLED
    while all(found(heir, keys(first, ROWS))):
        assert job(heir, keys(first, ROWS), list(range(ROWS)), True).successful_keys is None
        assert (target == content(range(first, first + ROWS))).all()
        first += ROWS
    assert first >= FILLED + 2 * ROWS
    target[:] = content(range(first, first + ROWS))  # where it died: nobody waits for the dead
    stored_until_it_works(heir, keys(first, ROWS), list(range(ROWS)))
    assert all(found(heir, keys(first, ROWS)))
    heir.shutdown()


def behind_a_reset_it_begins_anew():
    """Through vLLM's own reset_cache, which weight updates end with."""
    storage, memory = tier()
    manager = TieringOffloadingManager(primary(memory), [storage])
    running, asked = ReqContext(req_id="running"), keys(2000, 3)
    memory[:3] = content(range(3))
    job(storage, asked[:2], [0, 1], False)
    storage.on_schedule_end(ScheduleEndContext(["running"], ()))
    manager.reset_cache()
    assert found(storage, asked) == [False] * 3 and found(tier()[0], asked) == [True, True, False]
    assert not job(storage, asked, [0, 1, 2], False, running).success, "KV of before the reset"
    assert found(storage, asked) == [False] * 3
    storage.on_schedule_end(ScheduleEndContext((), ["running"]))
    assert job(storage, asked, [0, 1, 2], False, running).success, "it was preempted: it computed all anew"
    assert found(storage, asked) == [True] * 3 and found(tier()[0], asked) == [True, True, False]
    storage.shutdown()


def what_is_wrong_at_the_start_is_told():
    with patch.object(Pages, "_copy_out", lambda *_: set()):
        try:
            tier()
        except ValueError as error:
            assert "self-test" in str(error), error
        else:
            raise AssertionError("a row that does not come back was taken")
    try:
        tier(locality="NEAR")
    except ValueError as error:
        assert "locality='NEAR'" in str(error) and "LOCAL or REMOTE" in str(error), error
    else:
        raise AssertionError("a locality that vLLM does not know was taken")
    with lines() as said:
        tier(dir="/nowhere/at/all")[0].shutdown()
    assert any("at the start" in line and "/nowhere/at/all" in line for line in said), said


@contextlib.contextmanager
def lines():
    said = []
    log = logging.getLogger("vllm.kvstored")
    with patch.object(log, "warning", lambda text, *values: said.append(text % values)):
        yield said


def a_store_that_takes_nothing_ends_no_start():
    """What could not be tried at the start is tried with the first row that is stored."""
    client = kvclient.connect(DIRECTORY)
    with lines() as said:
        held = take_all(client)
        full, memory = tier()
        for writer in held:
            writer.abort()
        need("drain on")
        draining, wrong = tier()[0], tier()[0]
        need("drain off")
    assert ["drains" in line for line in said] == [False, True, True], said
    assert all("took no block at the start" in line for line in said)
    memory[:] = content(range(ROWS))
    for first, storage in ((3000, full), (3002, draining)):
        assert storage._pages._untried
        assert job(storage, keys(first, 2), [0, 1], False).success
        assert not storage._pages._untried
    with patch.object(Pages, "_copy_out", lambda *_: set()), lines() as said:
        job(wrong, keys(3004, 1), [1], False)
        assert not job(wrong, keys(3005, 1), [1], False).success
    assert any("did not come back as it was" in line for line in said), said
    assert found(wrong, keys(3000, 1)) == [False] and found(full, keys(3000, 1)) == [True]
    client.delete(b"".join(full._names.whole(keys(3000, 6))))
    for storage in (full, draining, wrong):
        storage.shutdown()


def degraded(storage):
    said = storage.get_stats().reduce()
    assert set(said) == set(storage.build_metric_definitions({}))
    return said["vllm:kvstored_degraded"]


def the_gauge_is_of_all_tiers():
    """vLLM takes the figures of one after the other, and the last is what its gauge says."""
    first, second = tier()[0], tier()[0]
    assert degraded(first) == degraded(second) == 0
    for storage in (first, second):
        storage._health.failed("a load", "for once")
        storage._health.look()
    second._health.look()
    assert [degraded(storage) for storage in (first, second)] == [1, 1], "the first is still away"
    first.shutdown()
    assert degraded(second) == 0 and second.get_stats() is None
    second.shutdown()


def primary(memory):
    """Of vLLM's first tier what its manager asks for when nothing is in it."""
    return SimpleNamespace(
        get_kv_memoryview=lambda: memoryview(memory), _num_chunks=ROWS, reset_cache=lambda: None
    )


if sys.argv[2:] == ["fill"]:
    fill()

what_is_wrong_at_the_start_is_told()
a_store_that_takes_nothing_ends_no_start()
the_gauge_is_of_all_tiers()
storage, memory = tier(enable_kv_events=True)
assert not memory.any(), "it leaves the memory as it was"
other, target = tier()
memory[:] = np.random.default_rng(1).integers(-128, 128, memory.shape)
names = keys(0, 6)
assert found(other, names) == [False] * 6
stored = job(storage, names[:4], [7, 5, 3, 1], False)
assert stored.success and stored.transfer_bytes == 4 * ROW
(event,) = storage.take_events()
assert list(event.keys) == names[:4] and not event.removed and not list(storage.take_events())
assert found(other, names) == [True] * 4 + [False] * 2

# Some are there and some are not: those that are come, and the others are a miss for a while.
loaded = job(other, names, [0, 1, 2, 3, 4, 5], True)
assert not loaded.success and list(loaded.successful_keys) == names[:4]
assert (target[:4] == memory[[7, 5, 3, 1]]).all() and not target[4:].any()
assert job(other, names[:2], [6, 7], True).successful_keys is None
assert (target[6:] == memory[[7, 5]]).all()
job(storage, names[4:], [2, 4], False)
assert found(other, names) == [True] * 4 + [False] * 2, (
    "a key whose load failed is not asked for at once again"
)
assert found(tier()[0], names) == [True] * 6

for change in ({"weights_digest": "w2"}, {"model_version": "2"}, {"dtype": "fp8"},
               {"parallel": {"tp_size": 2, "world_size": 2}}):  # fmt: skip
    assert found(tier(**change)[0], names) == [False] * 6, change
assert found(storage, [make_offload_key(b"short", 0)]) == [False]  # a hash that differs in every process

need("flip " + memory[5].tobytes()[:64].hex())
fresh, target = tier()
loaded = job(fresh, names[:3], [0, 1, 2], True)
assert list(loaded.successful_keys) == names[:1] and not target[1].any()
assert found(fresh, names[:3]) == [True, False, False]
other_group = [make_offload_key(key[:-4], 1) for key in names[:3]]
assert job(other, other_group, [0, 2, 4], False).success
loaded = job(fresh, [names[1], other_group[0], names[2], other_group[1]], [0, 1, 2, 3], True)
assert list(loaded.successful_keys) == other_group[:2], "each group for itself"
assert job(fresh, [names[1], names[2]], [0, 1], True).successful_keys is None
told, gone = storage.take_events()
assert list(told.keys) == names[4:] and (gone.keys, gone.removed) == ([names[1]], True), (told, gone)
assert not list(storage.take_events()), "what is gone is told once"
figures = set(fresh.build_metric_definitions({}))
assert figures < set(TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [rows.NAMED]}))
assert degraded(fresh) == 0 and fresh.get_stats() is None
need("kill")
gone = job(fresh, keys(50, 2), [0, 1], False)
assert not gone.success and gone.successful_keys is None
assert degraded(fresh) == 1
need("start")
stored_until_it_works(fresh, keys(50, 2), [0, 1])  # it takes the new daemon up
assert degraded(fresh) == 0
a_prefiller_that_is_killed_leaves_what_it_stored()
behind_a_reset_it_begins_anew()
for made in (storage, other, fresh):
    made.shutdown()
try:
    tier(dri="typo")
except ValueError as error:
    assert "dri" in str(error)
else:
    raise AssertionError("a misspelt option was taken")
print("PASSED", flush=True)
