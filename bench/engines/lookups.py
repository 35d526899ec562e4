"""What a look-up costs the process that asks, in processor time, run with vLLM's Python: `python -m
bench.engines.lookups`. Told one line, {"directory": …, "calls": n}; answers microseconds, the least and the
middle.

Owns the requests it makes up; nothing of an engine runs.
"""

import hashlib
import json
import sys
import time
from types import SimpleNamespace

import kvclient
from bench.engines.engine import ANSWER

BLOCKS, BLOCK_TOKENS, OBJECTS = 500, 32, 64


def figures(times_ns: list[int]) -> dict:
    times_ns.sort()
    return {"least_us": times_ns[0] / 1e3, "middle_us": times_ns[len(times_ns) // 2] / 1e3}


def thread_ns(call) -> int:
    start = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start


def scheduler(directory: str, calls: int) -> dict[str, dict]:
    """vLLM's scheduler asks for a request's prefix of 500 stored blocks; then the same request again."""
    from kvclient.integrations.vllm.scheduling import Scheduling

    client = kvclient.connect(directory, on_error="miss")
    layout = kvclient.Layout(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="uint8", kv_per_layer=1, block_tokens=BLOCK_TOKENS,
        meta_fixed=0, meta_per_token=0, layer_bytes_per_token=(64,), name="bench",
    )  # fmt: skip
    half = Scheduling(client, bytes(32), BLOCK_TOKENS, BLOCK_TOKENS, 1, 0.0, 0.0, loads=True, saves=True)

    def request(number: int) -> SimpleNamespace:
        hashes = [hashlib.sha256(b"%d" % block).digest() for block in range(BLOCKS + 1)]
        return SimpleNamespace(
            request_id=str(number), block_hashes=hashes, num_tokens=len(hashes) * BLOCK_TOKENS,
            lora_request=None, skip_reading_prefix_cache=False,
        )  # fmt: skip

    half.matched(request(0), 0)
    writer = client.create(half._running["0"].keys.between(0, BLOCKS), client.register_layout(layout))
    for index in writer.granted:
        writer[index].copy_layer(0, bytes(64 * BLOCK_TOKENS))
    writer.seal()
    first, again = [], []
    for number in range(1, calls + 1):
        asked = request(number)
        assert half.matched(asked, 0) == BLOCKS * BLOCK_TOKENS
        half.finished(asked)
        first.append(thread_ns(lambda asked=asked: half.matched(asked, 0)))
        again.append(thread_ns(lambda asked=asked: half.matched(asked, 0)))
        half.finished(asked)
    half.close()
    client.close()
    return {"scheduler, 500 blocks, first": figures(first), "scheduler, 500 blocks, again": figures(again)}


def spec(directory: str, calls: int) -> dict[str, dict]:
    """vLLM's OffloadingConnector asks the spec's manager for one block a call: 500 stored ones of a new
    request, and again once they are held for it."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key

    from kvclient._core import DerivedKeys
    from kvclient.integrations.vllm.offload.scheduling import KvstoredManager

    client = kvclient.connect(directory, on_error="miss")
    derived = DerivedKeys(b"spec".ljust(32, b"\0"))
    names = SimpleNamespace(
        ranks=1, groups=1, divided={}, identity=b"", usable=lambda key: True,
        whole=lambda keys: derived.listed(list(keys)),
    )
    manager = KvstoredManager(client, names, 1.0, 5.0, 30.0, 16_384, events=False)
    keys = [make_offload_key(hashlib.sha256(b"%d" % block).digest(), 0) for block in range(BLOCKS)]
    layout = kvclient.Layout(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="uint8", kv_per_layer=1, block_tokens=BLOCK_TOKENS,
        meta_fixed=0, meta_per_token=0, layer_bytes_per_token=(64,), name="bench",
    )  # fmt: skip
    writer = client.create(names.whole(keys), client.register_layout(layout))
    for index in writer.granted:
        writer[index].copy_layer(0, bytes(64 * BLOCK_TOKENS))
    writer.seal()
    first, end, again = [], [], []
    for number in range(calls):
        context = ReqContext(req_id=str(number))
        for place, key in enumerate(keys, 1):  # as vLLM has named them by then
            context.set_offload_key_position(key, BLOCK_TOKENS * place)
        first.append(thread_ns(lambda context=context: [manager.lookup(key, context) for key in keys]))
        end.append(thread_ns(lambda: manager.on_schedule_end(ScheduleEndContext((), ()))))
        manager._pool.submit(int).result()
        again.append(thread_ns(lambda context=context: [manager.lookup(key, context) for key in keys]))
        assert manager.lookup(keys[-1], context) is LookupResult.HIT
        manager.on_request_finished(context)
    manager.shutdown()
    return {
        "spec, 500 calls, a new request": figures(first), "spec, the end of its step": figures(end),
        "spec, 500 calls, again": figures(again),
    }  # fmt: skip


def lmcache(directory: str, calls: int) -> dict[str, dict]:
    """LMCache's look-up-and-lock of 64 objects with its result, and the unlock."""
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    from kvclient.integrations.lmcache import KvstoredL2Adapter

    adapter = KvstoredL2Adapter({"dir": directory, "model_identity": "bench"})
    keys = [ObjectKey(number.to_bytes(32, "big"), "model", 0, 0, "") for number in range(OBJECTS)]
    data = torch.zeros(1024)
    meta = MemoryObjMetadata(
        shape=data.shape, dtype=data.dtype, address=data.data_ptr(), phy_size=data.nbytes,
        fmt=MemoryFormat.KV_2LTD, ref_count=1,
    )  # fmt: skip
    piece = TensorMemoryObj(data, meta, parent_allocator=None)
    adapter.submit_store_task(keys, [piece] * OBJECTS)
    deadline = time.monotonic() + 60
    while not adapter.pop_completed_store_tasks():
        assert time.monotonic() < deadline, "the objects were not stored"
    look, unlock = [], []
    for _ in range(calls):
        look.append(
            thread_ns(
                lambda: adapter.query_lookup_and_lock_result(adapter.submit_lookup_and_lock_task(keys, None))
            )
        )
        unlock.append(thread_ns(lambda: adapter.submit_unlock(keys)))
    adapter.close()
    return {"LMCache, 64 keys, look up and lock": figures(look), "LMCache, 64 keys, unlock": figures(unlock)}


def main() -> None:
    told = json.loads(sys.stdin.readline())  # {"directory": …, "calls": n}
    print(ANSWER + json.dumps(scheduler(**told) | spec(**told) | lmcache(**told)), flush=True)


if __name__ == "__main__":
    main()
