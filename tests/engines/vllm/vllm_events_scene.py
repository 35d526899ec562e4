"""What a router hears of a running engine, on vLLM's own publisher: run with the engines' Python.

    python -m tests.engines.vllm.vllm_events_scene WAY DIRECTORY MODEL SOCKET

WAY is "connector" or "spec". Asserts for itself; the test empties the store, asked for by a line NEED flush.
The router's half is vLLM's own format read from the socket; vLLM's events of its own cache, which come on the
same socket, say which hashes the prompt has.
"""

import sys
import time

import msgspec
import torch
import zmq
from vllm import LLM, SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

WAY, DIRECTORY, MODEL, SOCKET = sys.argv[1:]
BLOCKS = 6  # whole ones of 32 tokens in 200
OURS = "kvclient.integrations.vllm"
store = {"dir": DIRECTORY, **({"enable_kv_events": True} if WAY == "connector" else {})}
transfer = {
    "connector": {"kv_connector": "KvstoredConnector", "kv_connector_module_path": OURS,
                  "kv_load_failure_policy": "recompute", "kv_connector_extra_config": store},
    "spec": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "KvstoredOffloadingSpec", "spec_module_path": OURS, "kvstored": store}},
}[WAY]  # fmt: skip


def ask(llm, first):
    prompt = {"prompt_token_ids": [first, *((7 * i + 3) % 500 for i in range(199))], "cache_salt": "secret"}
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)


def heard(router, decoder, wait_ms=200):
    """(of vLLM's cache, of the store): the events since the last call."""
    events = []
    while router.poll(wait_ms):
        _topic, _number, payload = router.recv_multipart()
        events += decoder.decode(payload).events
    ours = [event for event in events if event.medium == "CPU"]
    return [event for event in events if event.medium == "GPU"], ours


def hashes(events, kind):
    return [name for event in events if isinstance(event, kind) for name in event.block_hashes]


def main():
    torch.set_num_threads(1)
    router = zmq.Context.instance().socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.connect(SOCKET)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    llm = LLM(
        model=MODEL, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
        kv_cache_memory_bytes=32 << 20, max_model_len=512,
        kv_transfer_config={"kv_role": "kv_both", **transfer},
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": SOCKET},
    )  # fmt: skip
    deadline, number = time.monotonic() + 120, 0
    while not heard(router, decoder)[0]:  # until the router has joined
        assert time.monotonic() < deadline, "vLLM publishes nothing"
        number += 1
        ask(llm, number)
    while any(heard(router, decoder)):
        pass

    ask(llm, 400)
    cache, stored = heard(router, decoder)
    while len(hashes(stored, BlockStored)) < BLOCKS:  # what is stored behind a step is told at a later one
        assert time.monotonic() < deadline, stored
        number += 1
        ask(llm, number)
        more = heard(router, decoder)
        cache, stored = cache + more[0], stored + more[1]
    prompt = hashes(cache, BlockStored)[:BLOCKS]
    assert len(prompt) == BLOCKS and set(prompt) <= set(hashes(stored, BlockStored))
    for event in stored:
        assert not event.token_ids and not event.extra_keys and event.lora_name is None, event
        assert b"secret" not in msgspec.msgpack.encode(event)
        assert WAY == "spec" or (event.ownership, event.locality) == ("kvstored", "LOCAL"), event
    if WAY == "connector":
        chain = {event.block_hashes[0]: event.parent_block_hash for event in stored}
        assert [chain[name] for name in prompt] == [None, *prompt[:-1]]

    print("NEED flush", flush=True)  # as an eviction of all
    sys.stdin.readline()
    removed = []
    while not set(prompt) <= set(removed):
        assert time.monotonic() < deadline, removed
        number += 1
        ask(llm, number)
        removed += hashes(heard(router, decoder)[1], BlockRemoved)
    llm.llm_engine.engine_core.shutdown()
    print("PASSED", flush=True)


if __name__ == "__main__":
    main()
