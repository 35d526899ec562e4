"""A scene with the scheduler's half of the offloading spec, with vLLM's own types and without an engine: run
with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_spec_scene DIRECTORY

Asserts for itself. What only the test can do is asked for by a line NEED … and answered by one.
"""

import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)

import kvclient
from kvclient.integrations.marks import Word, all_gave_their_word, word_name
from kvclient.integrations.pages import MISSING
from kvclient.integrations.tensor_pages import TensorPages
from kvclient.integrations.vllm.offload import lookups
from kvclient.integrations.vllm.offload.naming import OffloadNames
from kvclient.integrations.vllm.offload.scheduling import StoredBlocks, log
from kvclient.integrations.vllm.offload.spec import KvstoredOffloadingSpec
from kvclient.integrations.vllm.offload.worker import KvstoredWorker
from tests.engines.pool_bytes import take_all
from tests.engines.vllm.offloading.vllm_spec_parts import (
    CONFIG,
    CONTEXT,
    DIRECTORY,
    KEYS,
    ROW,
    answers,
    client,
    content,
    layout,
    manager,
    names,
    put,
    step,
)  # fmt: skip


def what_differs_in_one_thing_misses():
    naming = names()
    put(naming)
    finds = manager(naming)
    assert answers(finds, KEYS) == [True] * len(KEYS)
    finds.shutdown()  # else its pins stay until it is collected
    parallel = CONFIG.parallel
    changes = {
        "weights": names(weights_digest="w2"),
        "version": names(model_version="2"),
        "dtype": names(replace(CONFIG, model=OffloadingModelConfig("model", "bfloat16"))),
        "block bytes": names(replace(CONFIG, worker_kv_bytes_per_block=2 * ROW)),
        "tokens": names(replace(CONFIG, groups=(OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),))),
        "layers": names(replace(CONFIG, groups=(OffloadingGroupConfig(16, ("layer.0",), 0),))),
        "hash": names(replace(CONFIG, cache=OffloadingCacheConfig(8, 1))),
        "chunk": names(replace(CONFIG, cache=OffloadingCacheConfig(16, 2))),
        "layout": names(replace(CONFIG, kv_cache_layout="LBHNC")),
        "canonical": names(replace(CONFIG, canonical_layout=True)),
        "replicated": names(replace(CONFIG, replicated_layout=True)),
        "tensor": names(replace(CONFIG, parallel=replace(parallel, tp_size=2))),
        "pipeline": names(replace(CONFIG, parallel=replace(parallel, pp_size=2))),
        "prefill context": names(replace(CONFIG, parallel=replace(parallel, pcp_size=2))),
        "decode context": names(replace(CONFIG, parallel=replace(parallel, dcp_size=2))),
        "seed": names(seed="7"),
    }
    assert len({other.identity for other in changes.values()} | {naming.identity}) == len(changes) + 1
    for name, other in changes.items():
        assert answers(manager(other), KEYS) == [False] * len(KEYS), name

    # Rows that vLLM says are the same however the model is split are shared, and only those.
    split = [replace(CONFIG, parallel=replace(parallel, tp_size=size, world_size=size)) for size in (2, 4)]
    same = [names(replace(part, replicated_layout=True), whole_rows=True).identity for part in split]
    assert same[0] == same[1]
    assert names(split[0], whole_rows=True).identity != names(split[1], whole_rows=True).identity


class Configuration:
    """Of a model's architecture."""

    def to_dict(self):
        return {}


def engine(revision, load_format="auto", hashes="sha256", cache=None):
    """What of a VllmConfig counts, of a repository's model."""
    return SimpleNamespace(
        lora_config=None, load_config=SimpleNamespace(load_format=load_format, download_dir=cache),
        model_config=SimpleNamespace(
            model="some/model", revision=revision, hf_config=Configuration(), dtype="float32",
            quantization=None, quantization_config=None, model_class_overrides={}, multimodal_config=None,
            pooler_config=None,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo=hashes, kv_cache_dtype_skip_layers=[]
        ),
        attention_config=None, speculative_config=None, device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip


def an_engines_weights_are_those_of_its_revision():
    with tempfile.TemporaryDirectory() as cache:
        of = Path(cache, "models--some--model")
        (of / "refs").mkdir(parents=True)
        for branch, digit in (("main", "1"), ("other", "2")):
            (of / "refs" / branch).write_text(40 * digit)
            (of / "snapshots" / (40 * digit)).mkdir(parents=True)
            (of / "snapshots" / (40 * digit) / "model.safetensors").write_bytes(digit.encode())
        config = replace(CONFIG, model=OffloadingModelConfig("some/model", "float32"))
        options = {"weights_digest": "", "model_version": ""}
        main, also, other = (
            OffloadNames(config, engine(revision, cache=cache), options, "rows").identity
            for revision in (None, "main", "other")
        )
    assert main == also != other
    dummy, told = engine(None, "dummy"), {**options, "weights_digest": "w"}
    refused(config, dummy, options, "weights_digest", "dummy")
    assert OffloadNames(config, dummy, told, "rows").identity

    # Hashes that differ in every process are no names, unless all processes have one seed.
    unseeded = engine(None, hashes="xxhash")
    refused(config, unseeded, told, "xxhash", "sha256", "PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "7"
    assert OffloadNames(config, unseeded, told, "rows").identity
    del os.environ["PYTHONHASHSEED"]


def refused(config, engine, options, *words):
    try:
        OffloadNames(config, engine, options, "rows")
    except kvclient.InvalidArgument as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def need(what):
    print("NEED " + what, flush=True)
    sys.stdin.readline()


def what_has_gone_is_told_and_missed():
    content[:] += 1  # bytes that are in the pool once
    naming = names(model_version="events")
    whole, offloading = put(naming), manager(naming)
    offloading.complete_store(KEYS, CONTEXT)
    (stored,) = offloading.take_events()
    assert list(stored.keys) == KEYS and not stored.removed
    nothing = [make_offload_key(bytes([255]) * 32, 0)]  # its store failed, which is no failure to vLLM
    offloading.complete_store(nothing, CONTEXT)
    assert not list(offloading.take_events())
    client.delete(whole[4:])  # as an eviction
    (removed,) = offloading.take_events()
    assert list(removed.keys) == KEYS[4:] and removed.removed
    assert not list(offloading.take_events()), "what is gone is told once"

    # A block that is wrong is not found, and leaves the index before anybody is told so.
    need("flip " + content[1].tobytes()[:64].hex())
    assert answers(offloading, KEYS) == [True, False, True, True, False, False]
    assert client.lookup([whole[1]]).states[0] == MISSING
    assert answers(offloading, KEYS[:2], "another request") == [True, False]
    (removed,) = offloading.take_events()
    assert list(removed.keys) == [KEYS[1]] and removed.removed

    # It is computed and stored again, and is found.
    assert list(offloading.prepare_store(KEYS, CONTEXT).keys_to_store) == [KEYS[1], *KEYS[4:]]
    put(naming)
    assert answers(offloading, KEYS, "a third request") == [True] * len(KEYS)
    for request in ("r", "another request", "a third request"):
        offloading.on_request_finished(ReqContext(req_id=request))
    assert client.stats()["pins"] == 0
    offloading.shutdown()


def what_was_computed_before_a_reset_is_not_stored_behind_it():
    offloading = manager(names(model_version="old KV"))
    running, preempted, waiting = (ReqContext(req_id=name) for name in ("running", "preempted", "waiting"))
    for request in (running, preempted, waiting):
        offloading.on_new_request(request)
    step(offloading, new=["running", "preempted"])
    offloading.reset_cache()
    step(offloading, preempted=["preempted"])
    for request, stored in ((running, []), (preempted, KEYS), (waiting, KEYS)):
        assert list(offloading.prepare_store(KEYS, request).keys_to_store) == stored, request.req_id
    offloading.on_request_finished(running)
    offloading.on_new_request(running)  # another of the same name
    assert list(offloading.prepare_store(KEYS, running).keys_to_store) == KEYS
    offloading.shutdown()


def what_was_being_loaded_at_a_reset_is_found_and_held_no_more():
    content[:] += 1
    naming = names(model_version="loaded")
    put(naming)
    offloading = manager(naming, max_held=len(KEYS), lease_s=0.0)
    loading = ReqContext(req_id="loading")
    offloading.on_new_request(loading)
    for key in KEYS:
        offloading.lookup(key, loading)
    step(offloading)
    offloading._pool.submit(int).result()
    offloading.prepare_load(KEYS, loading)
    offloading.reset_cache()  # vLLM tells nothing of that load any more
    assert answers(offloading, KEYS, "another") == [False] * len(KEYS)
    assert list(offloading.prepare_store(KEYS, loading).keys_to_store) == [], "it has loaded old KV"
    step(offloading)
    assert client.stats()["pins"] == 0
    put(naming)
    offloading._lease_s = 30.0
    assert answers(offloading, KEYS, "a third") == [True] * len(KEYS), "they still count as held"
    offloading.shutdown()
    assert client.stats()["pins"] == 0


def what_another_engine_computes_is_waited_for_and_computed_once():
    naming = names(model_version="pending")
    patient, impatient = manager(naming, wait_pending_s=3600.0), manager(naming)
    writer = client.create(naming.whole(KEYS[:1]), layout)
    assert patient.lookup(KEYS[0], CONTEXT) is LookupResult.HIT_PENDING
    assert impatient.lookup(KEYS[0], CONTEXT) is LookupResult.MISS
    assert list(patient.prepare_store(KEYS[:1], CONTEXT).keys_to_store) == [], "it would be stored twice"
    writer[0].copy_layer(0, content[0])
    writer.seal()
    assert answers(patient, KEYS[:1]) == [True]
    for offloading in (patient, impatient):
        offloading.on_request_finished(CONTEXT)
        offloading.shutdown()
    assert client.stats()["pins"] == 0


def a_request_does_not_wait_for_ever_behind_others_blocks():
    """They are brought and compared one batch after another: behind a slow disk it is computed instead, and
    so is one that waits for the same blocks."""
    naming = names(model_version="queue")
    put(naming)
    go_on, second = threading.Event(), ReqContext(req_id="a second")
    with patch.object(lookups, "QUEUE_S", 0.2):
        offloading = manager(naming, wait_s=0.0)
        offloading._pool.submit(go_on.wait)
        found, deadline = [LookupResult.RETRY], time.monotonic() + 60
        while LookupResult.RETRY in found and time.monotonic() < deadline:
            found = [offloading.lookup(key, context) for context in (CONTEXT, second) for key in KEYS]
            step(offloading)
    go_on.set()
    assert found == [LookupResult.MISS] * 2 * len(KEYS), "it still waits"
    assert answers(offloading, KEYS, "another") == [True] * len(KEYS)
    for request in (CONTEXT, second, ReqContext(req_id="another")):
        offloading.on_request_finished(request)
    assert client.stats()["pins"] == 0
    offloading.shutdown()


def what_waits_to_be_brought_does_not_hold_up_the_end():
    naming = names(model_version="the end")
    put(naming)
    offloading, go_on = manager(naming, wait_s=60.0), threading.Event()
    offloading._pool.submit(go_on.wait)
    assert offloading.lookup(KEYS[0], CONTEXT) is LookupResult.RETRY
    step(offloading)
    end = threading.Thread(target=offloading.shutdown)
    with patch.object(offloading._client, "get", side_effect=AssertionError) as brought:
        end.start()
        deadline = time.monotonic() + 60
        while not offloading._pool._shutdown and time.monotonic() < deadline:
            end.join(0.01)
        go_on.set()
        end.join()
    assert not brought.called


def worker(tensor):
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, ROW)], [[CanonicalKVCacheRef(0, ROW)]])
    asked = kvclient.connect(DIRECTORY, on_error="miss", timeout_s=1.0)
    return KvstoredWorker(asked, caches, 0, 1, 1, 0.5, word_name("the workers", id(tensor)))


def moved(half, job, name, block, load):
    ours, theirs = StoredBlocks([name]), GPULoadStoreSpec([block], [1], [0])
    half.submit_load(job, ours, theirs) if load else half.submit_store(job, theirs, ours)
    half.wait({job})
    (result,) = half.get_finished()
    return result.success and result.transfer_size == ROW


def a_store_that_takes_nothing_ends_no_start_of_a_worker():
    """What could not be tried at the start is tried with the first block that is stored."""
    blocks, said = torch.randint(-128, 128, (4, ROW), dtype=torch.int8), []
    was = blocks.clone()
    with patch.object(log, "warning", lambda text, *values: said.append(text % values)):
        need("flush")
        held = take_all(client)
        full = worker(blocks)
        for writer in held:
            writer.abort()
        need("drain on")
        draining, wrong = worker(blocks), worker(blocks)
        need("drain off")
        assert torch.equal(blocks, was), "it leaves vLLM's blocks as they were"
        assert ["drains" in line for line in said] == [False, True, True], said
        assert all("took no block at the start" in line for line in said)
        word = [word_name("the workers", id(blocks))]
        for half in (full, draining):
            half._word = Word(client, os.urandom(32))
            assert half._pages._untried and not all_gave_their_word(client, [half._word._name])
            assert moved(half, 1, os.urandom(32), 0, load=False)
            assert not half._pages._untried and all_gave_their_word(client, [half._word._name])
        assert torch.equal(blocks, was), "they were compared in place, and are as they were"
        first, second = os.urandom(32), os.urandom(32)
        with patch.object(TensorPages, "_copy_all", lambda *_: [True]):
            moved(wrong, 1, first, 1, load=False)
        assert torch.equal(blocks, was) and not all_gave_their_word(client, word)
    assert any("did not come back as it was" in line for line in said), said
    assert not moved(wrong, 2, second, 2, load=False) and not moved(wrong, 3, first, 3, load=True)
    assert not moved(full, 2, first, 3, load=True), "nor does another engine find it"
    for half in (full, draining, wrong):
        half.shutdown()
    for answer, words in (([True], "came back changed"), ([False], "was not found again")):
        with patch.object(TensorPages, "_copy_all", lambda *_, answer=answer: answer):
            try:
                worker(blocks)
            except kvclient.InvalidArgument as error:
                assert words in str(error), error
            else:
                raise AssertionError("a block that does not come back was taken")


def its_figures_are_vllms():
    """Told when they change, and at each step without a store; the names are those it defined."""
    asked, heard = manager(names()), []
    for fails in (False, True, False, False):
        if fails:
            asked._health.failed("a look-up", "for once")
        else:
            step(asked)
        heard.append(asked.get_stats())
    first, failed, going_on, back = [stats and stats.reduce() for stats in heard]
    assert set(first) == set(KvstoredOffloadingSpec.build_metric_definitions({}))
    figures = [tuple(said[name] for name in sorted(said)) for said in (first, failed, going_on, back)]
    assert figures == [(0, 0), (1, 1), (1, 0), (0, 0)], figures
    assert asked.get_stats() is None, "a healthy store costs no message"
    asked.shutdown()


what_differs_in_one_thing_misses()
a_store_that_takes_nothing_ends_no_start_of_a_worker()
what_another_engine_computes_is_waited_for_and_computed_once()
a_request_does_not_wait_for_ever_behind_others_blocks()
what_waits_to_be_brought_does_not_hold_up_the_end()
what_was_computed_before_a_reset_is_not_stored_behind_it()
what_was_being_loaded_at_a_reset_is_found_and_held_no_more()
an_engines_weights_are_those_of_its_revision()
its_figures_are_vllms()
what_has_gone_is_told_and_missed()
print("PASSED", flush=True)
