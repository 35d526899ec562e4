"""What the connector's scheduler half says of requests, with vLLM's own configurations, hashes, events and
metrics, and without an engine: run with the engines' Python.

    python -m tests.engines.vllm.vllm_keys_scene DIRECTORY MODEL SCRATCH

Asserts for itself. What only the test can do is asked for by a line NEED … and answered by one.
"""

import itertools
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm import SamplingParams
from vllm.config import KVEventsConfig, MultiModalConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

import kvclient
from kvclient.integrations.checkpoint import checkpoint_digest
from kvclient.integrations.health import Health
from kvclient.integrations.vllm.events import checked_endpoints
from kvclient.integrations.vllm.figures import KvstoredPromMetrics, KvstoredStats, Reporter
from kvclient.integrations.vllm.identity import weights_digest
from kvclient.integrations.vllm.scheduling import Scheduling
from tests.engines.vllm.vllm_identities import (
    TOKENS,
    copy_of_model,
    identity_of,
    long_positions,
    other_config,
    other_weight,
    variable,
)

DIRECTORY, MODEL, SCRATCH = sys.argv[1], sys.argv[2], Path(sys.argv[3])
BLOCKS = 6
AMX = torch.cpu._is_amx_tile_supported()
PROMPT = [(7 * i + 3) % 500 for i in range(TOKENS * BLOCKS + 8)]
NUMBERS = itertools.count()
init_none_hash(sha256)
HASHER = get_request_block_hasher(TOKENS, sha256)
client = kvclient.connect(DIRECTORY, on_error="miss", timeout_s=1.0)
LAYOUT = client.register_layout(
    kvclient.Layout(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8", kv_per_layer=1, block_tokens=TOKENS,
        meta_fixed=0, meta_per_token=0, layer_bytes_per_token=(8,), name="scene",
    )
)  # fmt: skip


def identity(model=MODEL, **more):
    return identity_of(model, **more)


def copied(name, change):
    return copy_of_model(MODEL, SCRATCH / name, change)


def guessing(name, change):
    return {"method": "draft_model", "model": copied(name, change), "num_speculative_tokens": 2}


def half(engine_id, ranks=1, events=False):
    return Scheduling(
        client, engine_id, TOKENS, TOKENS, ranks, 0.0, 0.0, loads=True, saves=True, events=events
    )


def request(prompt=PROMPT, **more):
    return Request(
        request_id=str(next(NUMBERS)), prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None, block_hasher=HASHER, **more,
    )  # fmt: skip


def save(scheduling, asked):
    """The step that computes all of it, and what the worker does."""
    scheduling.matched(asked, 0)
    new = SimpleNamespace(req_id=asked.request_id, block_ids=[list(range(BLOCKS))], num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    step = scheduling.step(SimpleNamespace(
        scheduled_new_reqs=[new], scheduled_cached_reqs=cached,
        num_scheduled_tokens={asked.request_id: len(PROMPT)},
    ))  # fmt: skip
    (transfer,) = step.saves
    writer = client.create(transfer.keys, LAYOUT)
    for index in writer.granted:
        writer[index].copy_layer(0, bytes(8 * TOKENS))
    return writer


def hits(scheduling, **more):
    return scheduling.matched(request(**more), 0)


def need(what):
    print("NEED " + what, flush=True)
    sys.stdin.readline()


def each_dimension_of_the_identity_misses():
    base = half(identity())
    save(base, request()).seal()
    assert hits(half(identity())) == BLOCKS * TOKENS, "the same engine hits"
    assert hits(half(identity(copied("moved", lambda path: None)))) == BLOCKS * TOKENS, "wherever it lies"
    with variable("PYTHONHASHSEED", "7"):
        seeded = identity()
    with variable("VLLM_MARLIN_USE_ATOMIC_ADD", "1"):
        elsewhere = identity()
    with variable("VLLM_LOGGING_PREFIX", "x"):
        assert hits(half(identity(max_model_len=1024))) == BLOCKS * TOKENS
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: not AMX):
        another_processor = identity()
        beside_a_gpu = identity(device="cuda")
    assert beside_a_gpu == identity(device="cuda"), "of a GPU's host the processor is all one"
    long = copied("long", long_positions)
    media, another = MultiModalConfig(mm_processor_cache_gb=1), MultiModalConfig(video_pruning_rate=0.5)
    assert identity(fields={"multimodal_config": media}) == identity(
        fields={"multimodal_config": MultiModalConfig()}
    )
    others = {
        "environment": elsewhere,
        "processor": another_processor,
        "device": beside_a_gpu,
        "attention": identity(attention_config={"use_prefill_query_quantization": True}),
        "layers without it": identity(kv_cache_dtype_skip_layers=["0"]),
        "guessing": identity(speculative_config=guessing("guess", lambda path: None)),
        "another guess": identity(speculative_config=guessing("another", other_weight)),
        "weights": identity(copied("weights", other_weight)),
        "config": identity(copied("config", other_config)),
        "positions of short requests": identity(long, max_model_len=1024),
        "positions of long requests": identity(long, max_model_len=4096),
        "media": identity(fields={"multimodal_config": media}),
        "pruned media": identity(fields={"multimodal_config": another}),
        "quantized layers": identity(fields={"quantization_config": {"ignore": ["lm_head"]}}),
        "classes": identity(fields={"model_class_overrides": {"LlamaForCausalLM": "other:Llama"}}),
        "override": identity(hf_overrides={"rope_theta": 5000.0}),
        "dtype": identity(dtype="bfloat16"),
        "cache dtype": identity(kv_cache_dtype="fp8"),
        "layers": identity(layers=3),
        "block": identity(block=64),
        "layout": identity(layout="LBNHC"),
        "tensor": identity(tensor_parallel_size=2),
        "pipeline": identity(pipeline_parallel_size=2),
        "contexts": identity(split={"decode_context_parallel_size": 2}),
        "contexts in pieces": identity(
            split={"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": TOKENS}
        ),
        "version": identity(extra={"model_version": "2"}),
        "digest": identity(extra={"weights_digest": "given"}),
        "hash": identity(prefix_caching_hash_algo="sha256_cbor"),
        "seed": seeded,
    }
    assert len(set(others.values())) == len(others)
    for name, other in others.items():
        assert hits(half(other)) == 0, name
    assert hits(half(identity()), cache_salt="tenant") == 0
    assert hits(half(identity()), prompt=[1, *PROMPT[1:]]) == 0
    assert hits(half(identity(), ranks=2)) == 0


def what_was_forgotten_is_neither_found_nor_saved_for_others():
    engine_id = identity()
    first, second, other = half(engine_id), half(engine_id), half(identity())
    save(first, request(cache_salt="reset")).seal()
    waiting, running = request(cache_salt="reset"), request(cache_salt="reset", prompt=PROMPT[:-1])
    assert first.matched(waiting, 0) == first.matched(running, 0) == BLOCKS * TOKENS
    first.allocated(running, BLOCKS * TOKENS)
    for scheduling in (first, second):
        scheduling.begin_anew()
        assert hits(scheduling, cache_salt="reset") == 0
    assert first.matched(waiting, 0) == 0
    cached = SimpleNamespace(
        req_ids=[running.request_id], resumed_req_ids=set(), new_block_ids=[None], num_computed_tokens=[0]
    )
    step = first.step(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached,
                                      num_scheduled_tokens={running.request_id: len(PROMPT)}))  # fmt: skip
    assert not step.loads and not step.saves
    # A session that got more input is new to a step, with the KV that it had.
    session = request(cache_salt="session")
    save(first, session).seal()
    first.begin_anew()
    first.allocated(session, 0)
    blocks = [list(range(BLOCKS))]
    new = SimpleNamespace(req_id=session.request_id, block_ids=blocks, num_computed_tokens=TOKENS)
    nothing = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    step = first.step(SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=nothing,
                                      num_scheduled_tokens={session.request_id: 1}))  # fmt: skip
    assert not step.saves
    first.finished(session)
    save(first, session)  # another of the same name
    save(first, request(cache_salt="reset")).seal()
    assert hits(first, cache_salt="reset") == BLOCKS * TOKENS and hits(second, cache_salt="reset") == 0
    assert hits(other, cache_salt="reset") == BLOCKS * TOKENS, "what was right before is still shared"


def the_weights_are_those_of_the_download_dir():
    for day in ("old", "new"):
        cache = SCRATCH / day / "models--org--model"
        snapshot = cache / "snapshots" / (day * 14)[:40]
        snapshot.mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(snapshot.name)
        (snapshot / "model.safetensors").write_bytes(day.encode())
        model = SimpleNamespace(model="org/model", revision=None)
        load = SimpleNamespace(load_format="auto", download_dir=str(SCRATCH / day))
        served = weights_digest(SimpleNamespace(model_config=model, load_config=load), {})
        assert served == checkpoint_digest(snapshot), day


def adapter(path, content):
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return str(path)


def an_adapters_content_is_part_of_the_key():
    engine_id, path = identity(), SCRATCH / "adapter"
    numbers = itertools.count(1)

    def lora():
        return {"lora_request": LoRARequest("a", next(numbers), str(path))}

    adapter(path, b"one")
    first, lora_args = half(engine_id), lora()
    save(first, request(**lora_args)).seal()
    assert hits(first, **lora_args) == hits(half(engine_id), **lora()) == BLOCKS * TOKENS
    adapter(path, b"two")
    assert hits(half(engine_id), **lora()) == 0, "other content under the same name and path"
    assert hits(first, **lora_args) == 0, "nobody knows which content this engine has in memory"
    save(first, request(**lora_args)).seal()
    assert hits(half(engine_id), **lora()) == 0, "and nothing it computes is found by others"
    adapter(path, b"one")
    assert hits(half(engine_id), **lora()) == BLOCKS * TOKENS
    shutil.rmtree(path)
    assert hits(half(engine_id), **lora()) == 0
    in_place = LoRARequest("a", 1, adapter(path, b"one"), load_inplace=True)
    assert hits(half(engine_id), lora_request=in_place) == 0


def events_tell_hashes_of_what_is_there():
    engine_id = identity(extra={"model_version": "events"})
    secret = request(cache_salt="secret salt")
    scheduling = half(engine_id, events=True)
    writer = save(scheduling, secret)
    assert not list(scheduling.take_events()), "what is not sealed is not told"
    writer.seal()
    events = list(scheduling.take_events())
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    told = msgspec.msgpack.decode(batch, type=KVEventBatch).events
    hashes = [maybe_convert_block_hash(value) for value in secret.block_hashes]
    assert [event.block_hashes for event in told] == [[value] for value in hashes[:BLOCKS]]
    assert [event.parent_block_hash for event in told] == [None, *hashes[: BLOCKS - 1]]
    assert all(isinstance(event, BlockStored) and event.block_size == TOKENS for event in told)
    assert not any(event.token_ids or event.extra_keys or event.lora_name for event in told)
    assert b"secret" not in batch
    assert not list(scheduling.take_events()) and not list(half(engine_id).take_events())
    what_has_gone_is_told(scheduling, secret, hashes[:BLOCKS])
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"):
        for config in (
            KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint),
            KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///tmp/x", replay_endpoint=endpoint),
        ):
            refused(lambda config=config: checked_endpoints(config), "endpoint")
    refused(lambda: checked_endpoints(KVEventsConfig()), "--kv-events-config")
    for endpoint in ("tcp://127.0.0.1:5557", "ipc:///tmp/x", "tcp://[::1]:5557", "tcp://localhost:1"):
        checked_endpoints(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))


def what_has_gone_is_told(scheduling, asked, hashes):
    keys = scheduling._running[asked.request_id].keys
    client.delete(keys.between(1, BLOCKS))  # as an eviction: all but the first
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=list(scheduling.take_events())))
    gone = msgspec.msgpack.decode(batch, type=KVEventBatch).events
    assert [event.block_hashes for event in gone] == [[value] for value in hashes[1:]]
    assert all(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in gone)
    assert not list(scheduling.take_events()), "what is gone is told once"
    save(scheduling, asked).seal()
    again = [event.block_hashes for event in scheduling.take_events()]
    assert again == [[value] for value in hashes]
    assert not list(scheduling.take_events())
    client.delete(keys.between(0, BLOCKS))
    assert [event.block_hashes for event in scheduling.take_events()] == again


def refused(call, word):
    try:
        call()
    except ValueError as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"not refused: {word}")


def a_store_that_refuses_is_an_empty_one():
    """As one that was started anew without this namespace, or for other users."""
    scheduling, asked = half(identity(extra={"model_version": "refused"}), events=True), request()
    save(scheduling, asked).seal()
    refused = kvclient.NotPermitted("namespace 'default' is not there, or not for this user")
    with patch.object(client, "lookup", side_effect=refused):
        assert hits(scheduling) == 0
        assert [type(event) for event in scheduling.take_events()] == []
    assert hits(scheduling) == BLOCKS * TOKENS
    assert len(list(scheduling.take_events())) == BLOCKS


def the_gauge_says_whether_the_store_is_there():
    lines = []
    health = Health(client, SimpleNamespace(warning=lambda text, *args: lines.append(text % args)))
    reporter = Reporter(health)
    config = SimpleNamespace(kv_transfer_config=None)
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = KvstoredPromMetrics(config, types, ["engine"], {0: ["0"]})

    def gauge():
        health.look()
        stats = reporter.take()
        if stats is not None:
            metrics.observe(stats.to_dict())
        return metrics._degraded[0]._value.get()

    assert gauge() == 0 and reporter.take() is None, "a healthy store costs no message"
    need("kill")
    ask(lambda: gauge() == 1)
    need("start")
    ask(lambda: gauge() == 0)
    went, came = lines
    assert "since 20" in went and "cannot be reached" in went
    assert "is back after" in came and "cannot be reached" in came
    assert metrics._failures[0]._value.get() >= 1
    both = KvstoredStats({"degraded": 1, "failures": 2}).aggregate(
        KvstoredStats({"degraded": 0, "failures": 3})
    )
    assert both.to_dict() == {"degraded": 1, "failures": 5}


def ask(done):
    """Steps of an engine, until it has noticed."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        client.create([os.urandom(32)], LAYOUT).abort()


for scene in (
    each_dimension_of_the_identity_misses,
    the_weights_are_those_of_the_download_dir,
    what_was_forgotten_is_neither_found_nor_saved_for_others,
    an_adapters_content_is_part_of_the_key,
    events_tell_hashes_of_what_is_there,
    a_store_that_refuses_is_an_empty_one,
    the_gauge_says_whether_the_store_is_there,
):
    scene()
print("PASSED", flush=True)
