"""Scenes with KvstoredL2Adapter, made by LMCache's own factory: run with the engines' Python, not imported.

    python -m tests.engines.lmcache.lmcache_scene SCENE DIRECTORY

Each scene asserts for itself. What only the test can do is asked for by a line NEED … and answered by one.
"""

import argparse
import asyncio
import json
import logging
import select
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.platform import consume_fd

import kvclient
from kvclient.integrations.lmcache import KvstoredRemoteConnector
from kvclient.integrations.objects import Objects
from tests.engines.pool_bytes import take_all

DIRECTORY = sys.argv[2]


def adapter(**params):
    spec = {
        "type": "plugin",
        "module_path": "kvclient.integrations.lmcache",
        "class_name": "KvstoredL2Adapter",
        "adapter_params": {"dir": DIRECTORY, "model_identity": "m1", **params},
    }
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    return create_l2_adapter(config.adapters[0], l1_memory_desc=L1MemoryDesc(ptr=0, size=0, align_bytes=4))


def key(number, model="org/model", rank=0, group=0, salt=""):
    return ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt)


def piece(value, elements=1024, dtype=torch.float32, fmt=MemoryFormat.KV_2LTD):
    data = torch.full((elements,), value, dtype=dtype)
    meta = MemoryObjMetadata(
        shape=data.shape, dtype=dtype, address=data.data_ptr(), phy_size=data.nbytes, fmt=fmt, ref_count=1
    )
    return TensorMemoryObj(data, meta, parent_allocator=None)


def awaited(event):
    poll = select.poll()
    poll.register(event, select.POLLIN)
    assert poll.poll(60_000), "the descriptor was not signalled"
    consume_fd(event)


def store(l2, keys, objects):
    task = l2.submit_store_task(keys, objects)
    awaited(l2.get_store_event_fd())
    return l2.pop_completed_store_tasks()[task]


def look_up(l2, keys):
    task = l2.submit_lookup_and_lock_task(keys, {})
    awaited(l2.get_lookup_and_lock_event_fd())
    bitmap = l2.query_lookup_and_lock_result(task)
    assert l2.query_lookup_and_lock_result(task) is None, "an answer is given once"
    return [bitmap.test(i) for i in range(len(keys))]


def load(l2, keys, objects):
    task = l2.submit_load_task(keys, objects)
    awaited(l2.get_load_event_fd())
    bitmap = l2.query_load_result(task)
    assert l2.query_load_result(task) is None, "an answer is given once"
    return [bitmap.test(i) for i in range(len(keys))]


def need(what):
    print("NEED " + what, flush=True)
    sys.stdin.readline()


def shared():
    """Two adapters, objects of every odd length, misses among them."""
    l2, other = adapter(), adapter()
    events = {f() for a in (l2, other) for f in (
        a.get_store_event_fd, a.get_lookup_and_lock_event_fd, a.get_load_event_fd)}  # fmt: skip
    assert len(events) == 6
    lengths = [1, 3, 1024, 1025, 100_000, 1_048_576]
    keys = [key(i) for i in range(8)]
    objects = [piece(i + 1.0, length) for i, length in enumerate(lengths)]
    result = store(l2, keys[:6], objects)
    assert result.is_successful() and result.bytes_transferred() == 4 * sum(lengths)
    assert look_up(other, keys) == [True] * 6 + [False] * 2
    targets = [piece(0.0, length) for length in lengths]
    assert load(other, keys[:6], targets) == [True] * 6
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(targets, objects, strict=True))
    other.submit_unlock(keys)  # also what was never locked
    assert load(other, keys[6:], [piece(0.0), piece(0.0)]) == [False, False]
    # what means something else is a miss, and its memory is left alone
    for wrong in (
        piece(0.0, 1024, torch.int32),
        piece(0.0, 512),
        piece(0.0, 1024, fmt=MemoryFormat.KV_MLA_FMT),
    ):
        assert load(other, keys[2:3], [wrong]) == [False]
        assert not wrong.tensor.any()
    l2.delete(keys[:1])
    assert look_up(other, keys[:2]) == [False, True]
    assert l2.report_status()["is_healthy"] is True
    for a in (l2, other):
        a.close()


def identity():
    """What differs in one thing misses."""
    writer = adapter()
    assert store(writer, [key(1)], [piece(1.0)]).is_successful()
    assert look_up(adapter(), [key(1)]) == [True]
    for what in ({"model": "org/other"}, {"rank": 1}, {"group": 1}, {"salt": "tenant"}):
        assert look_up(adapter(), [key(1, **what)]) == [False], what
    assert look_up(adapter(model_identity="m2"), [key(1)]) == [False]
    named = adapter(model_identity={"org/model": "m1"})
    assert look_up(named, [key(1), key(1, model="org/unknown")]) == [True, False]
    assert store(named, [key(2, model="org/unknown")], [piece(1.0)]).is_successful()
    assert look_up(named, [key(2, model="org/unknown")]) == [False]  # nobody said which weights those are
    for wrong in ({"model_identity": ""}, {"model_id": "m1"}):
        try:
            adapter(**wrong)
        except ValueError as error:
            assert "model_" in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")


def locks():
    """What a look-up locked stays while ten times the pool goes through, until it is unlocked."""
    l2, client = adapter(), kvclient.connect(DIRECTORY)
    elements = (1 << 20) // 4
    held = [key(i) for i in range(8)]
    assert store(l2, held, [piece(i + 1.0, elements) for i in range(8)]).is_successful()
    assert look_up(l2, held) == [True] * 8
    assert look_up(l2, held) == [True] * 8
    pins = client.stats()["pins"]
    assert pins >= 8, pins
    l2.submit_unlock(held)  # of the first look-up
    for batch in range(40):
        store(l2, [key(100 + 16 * batch + i) for i in range(16)], [piece(0.5, elements) for _ in range(16)])
    assert client.stats()["evictions"] > 0
    targets = [piece(0.0, elements) for _ in range(8)]
    assert load(l2, held, targets) == [True] * 8
    assert all(target.tensor[0] == i + 1.0 for i, target in enumerate(targets))
    l2.submit_unlock(held)
    l2.submit_unlock(held)
    assert client.stats()["pins"] == 0


def behind_others():
    """A look-up's time runs while the threads that ask other hosts are busy with others."""
    l2, go_on, waited = adapter(fetch_wait_s=0.1), threading.Event(), []
    for _ in range(4):
        l2._fetches.submit(go_on.wait)
    threading.Timer(0.2, go_on.set).start()
    with patch.object(l2._objects, "pin", lambda names, wait_s=0.0: waited.append(wait_s)):
        assert look_up(l2, [key(0)]) == [False]
    assert set(waited) == {0.0}, waited


def harm():
    """A corrupt object is a miss; a daemon that is away answers every task, and is taken up again."""
    l2 = adapter(timeout_s=0.5, wait_s=0.2)
    keys = [key(i) for i in range(3)]
    assert store(l2, keys, [piece(i + 1.0) for i in range(3)]).is_successful()
    assert look_up(l2, keys) == [True] * 3
    need("flip " + piece(2.0).tensor.numpy().tobytes()[:64].hex())
    targets = [piece(0.0) for _ in range(3)]
    assert load(l2, keys, targets) == [True, False, True]
    assert not targets[1].tensor.any()
    l2.submit_unlock(keys)
    assert look_up(l2, keys) == [True, False, True]
    need("kill")
    more = [key(10 + i) for i in range(3)]
    assert not store(l2, more, [piece(1.0) for _ in range(3)]).is_successful()
    assert load(l2, more, [piece(0.0) for _ in range(3)]) == [False] * 3
    assert look_up(l2, more) == [False] * 3
    l2.submit_unlock(keys)
    assert l2.report_status()["is_healthy"] is False
    need("start")
    deadline = time.monotonic() + 60
    while not store(l2, more, [piece(1.0) for _ in range(3)]).is_successful():
        assert time.monotonic() < deadline, "it did not take the new daemon up"
    assert look_up(l2, more) == [True] * 3
    assert l2.report_status()["is_healthy"] is True
    l2.close()


def given_up():
    """LMCache gives up a get that takes long: what it loads then is nobody's, and LMCache's memory again."""
    connector = object.__new__(KvstoredRemoteConnector)
    connector._pool = ThreadPoolExecutor(1)
    began, go_on, back = threading.Event(), threading.Event(), threading.Event()

    def slow(_key):
        began.set()
        assert go_on.wait(60)
        return SimpleNamespace(ref_count_down=back.set)

    connector._get = slow

    async def ask():
        asked = [asyncio.create_task(connector.get(number)) for number in range(2)]  # one thread for two
        await asyncio.to_thread(began.wait, 60)
        for task in asked:
            task.cancel()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)

    asyncio.run(ask())
    go_on.set()
    assert back.wait(60)
    connector._pool.shutdown()
    assert asyncio.run(connected_get()) == "memory"


def memory(shape):
    flat = piece(0.0, shape.numel())
    flat.meta.shape = shape
    return flat


def connected(heads=8, tokens=16, dir=DIRECTORY, fetch_wait_s=0.0, **change):
    """The older way."""
    prefix = "remote_storage_plugin.kvstored."
    metadata = LMCacheMetadata(
        model_name="org/model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.float32, kv_shape=(3, 2, tokens, 1, heads), chunk_size=tokens,
    )  # fmt: skip
    options = {"dir": dir, "model_identity": "m1", "timeout_s": 30, "fetch_wait_s": fetch_wait_s}
    extra = {prefix + name: value for name, value in options.items()}
    backend = SimpleNamespace(metadata=metadata, allocate=lambda shapes, dtypes, fmt: memory(shapes[0]))
    config = SimpleNamespace(**{"use_layerwise": False, "extra_config": extra, **change})
    return KvstoredRemoteConnector(None, backend, config)


def chunks():
    """Of the older way: whole ones, and the last, which is shorter; a layer's own are refused, because
    LMCache tells a remote backend the shape of all layers."""
    heads, tokens = 8, 16
    try:
        connected(use_layerwise=True)
    except kvclient.InvalidArgument as error:
        assert "use_layerwise" in str(error), error
    else:
        raise AssertionError("a layer's chunks were taken")
    first, second = connected(), connected()
    for count in (tokens, 1, tokens - 1):
        name = CacheEngineKey("org/model", 1, 0, count, torch.float32)
        shape = torch.Size([2, 3, count, heads])
        chunk = memory(shape)
        chunk.raw_data.copy_(torch.rand(shape.numel()))
        assert asyncio.run(second.get(name)) is None
        asyncio.run(first.put(name, chunk))
        found = asyncio.run(second.get(name))
        assert found.meta.shape == shape and bytes(found.byte_array) == bytes(chunk.byte_array), count
    for connector in (first, second):
        asyncio.run(connector.close())


def until_told(names):
    """What was just put elsewhere is a miss here until word of it has come."""
    client, deadline = kvclient.connect(DIRECTORY), time.monotonic() + 60
    while not all(client.lookup(names, peers=True).states):
        assert time.monotonic() < deadline, "no word came"


def elsewhere():
    """Of another host: found where `fetch_wait_s` says so, beside what is here and what is nowhere."""
    there, here, alone = adapter(dir=sys.argv[3]), adapter(fetch_wait_s=60.0), adapter()
    keys = [key(i) for i in range(7)]
    objects = [piece(i + 1.0, 1000 + i) for i in range(7)]
    assert store(there, keys[:5], objects[:5]).is_successful()
    assert store(here, keys[5:6], objects[5:6]).is_successful()
    until_told(there._names(keys[:5]))
    assert look_up(alone, keys) == [False] * 5 + [True, False]
    alone.submit_unlock(keys[5:6])
    assert look_up(here, keys) == [True] * 6 + [False]
    targets = [piece(0.0, 1000 + i) for i in range(7)]
    assert load(here, keys, targets) == [True] * 6 + [False]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(targets[:6], objects, strict=False))
    here.submit_unlock(keys[:6])
    assert kvclient.connect(DIRECTORY).stats()["pins"] == 0, "what was brought is held no more"

    first, second, only = connected(dir=sys.argv[3]), connected(fetch_wait_s=60.0), connected()
    names = [CacheEngineKey("org/model", 1, 0, i, torch.float32) for i in range(3)]
    chunk = memory(torch.Size([2, 3, 16, 8]))
    chunk.raw_data.copy_(torch.rand(chunk.raw_data.shape))
    for name in names[:2]:
        asyncio.run(first.put(name, chunk))
    until_told([first._name(name) for name in names[:2]])
    assert (only.batched_contains(names), second.batched_contains(names)) == (0, 2)
    for name in names[:2]:
        found = asyncio.run(second.get(name))  # its memory lives as long as this
        assert bytes(found.byte_array) == bytes(chunk.byte_array)

    more = [key(20)]
    assert store(there, more, objects[:1]).is_successful()
    until_told(there._names(more))
    need("kill")
    assert look_up(here, more) == [False], "nobody waits for a host that is gone"
    for made in (there, here, alone):
        made.close()


def stats():
    with kvclient.connect(DIRECTORY) as client:
        return client.stats()


def again():
    """Behind a restart of the daemon, and behind one that has nothing but its disk."""
    l2, remote = adapter(timeout_s=5.0, wait_s=30.0), connected()
    keys, name = [key(i) for i in range(5)], CacheEngineKey("org/model", 1, 0, 7, torch.float32)
    objects, chunk = [piece(i + 1.0, 1000 + i) for i in range(4)], memory(torch.Size([2, 3, 16, 8]))
    chunk.raw_data.copy_(torch.rand(chunk.raw_data.shape))
    assert store(l2, keys[:4], objects).is_successful()
    asyncio.run(remote.put(name, chunk))
    deadline = time.monotonic() + 60
    while stats()["disk_files"] < 5:
        assert time.monotonic() < deadline, "all is on disk"
    for how in ("restart", "anew"):
        need(how)
        while look_up(l2, keys) != [True] * 4 + [False] or not remote.batched_contains([name]):
            assert time.monotonic() < deadline, f"it is taken up: {how}"
        assert stats()["pins"] >= 4, "what was found is locked, of what lay on disk, too"
        targets = [piece(0.0, 1000 + i) for i in range(4)]
        assert load(l2, keys[:4], targets) == [True] * 4
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(targets, objects, strict=True))
        found = asyncio.run(remote.get(name))
        assert bytes(found.byte_array) == bytes(chunk.byte_array)
        assert (stats()["disk_loaded"] > 0) is (how == "anew")
        other = adapter(timeout_s=5.0, wait_s=30.0)
        assert look_up(other, keys) == [True] * 4 + [False]
        other.close()
    l2.close()
    asyncio.run(remote.close())


def start():
    """A store that takes nothing just now ends no start, and is tried with the first object that it takes."""
    client, lines = kvclient.connect(DIRECTORY), []
    held = take_all(client)
    log = logging.getLogger("lmcache.kvstored")
    with patch.object(log, "warning", lambda text, *values: lines.append(text % values)):
        full = adapter()
        for writer in held:
            writer.abort()
        need("drain on")
        draining, wrong, remote = adapter(), adapter(), connected()
        need("drain off")
    assert ["drains" in line for line in lines] == [False, True, True, True], lines
    assert all("took no block at the start" in line for line in lines)
    for number, l2 in enumerate((full, draining)):
        assert l2._objects._untried and store(l2, [key(number)], [piece(1.0)]).is_successful()
        assert not l2._objects._untried
    with patch.object(Objects, "_copy_out", lambda *_: set()):
        store(wrong, [key(7)], [piece(1.0)])
        asyncio.run(remote.put(CacheEngineKey("org/model", 1, 0, 5, torch.float32), piece(1.0)))
    assert look_up(wrong, [key(0)]) == [False] and look_up(full, [key(0)]) == [True]
    assert load(wrong, [key(0)], [piece(0.0)]) == [False]
    assert not store(wrong, [key(8)], [piece(1.0)]).is_successful()
    assert remote.batched_contains([CacheEngineKey("org/model", 1, 0, 5, torch.float32)]) == 0
    with patch.object(Objects, "_copy_out", lambda *_: set()):
        try:
            adapter()
        except ValueError as error:
            assert "came back changed" in str(error), error
        else:
            raise AssertionError("an object that comes back changed was taken")


async def connected_get():
    connector = object.__new__(KvstoredRemoteConnector)
    connector._pool, connector._get = ThreadPoolExecutor(1), lambda _key: "memory"
    return await connector.get(0)


globals()[sys.argv[1]]()
print("PASSED", flush=True)
