"""Goal: vLLM processes share KV through one daemon, and what they answer is what vLLM answers without it.

Method: the real vLLM for CPUs, in processes of its own, with a model whose answers depend on every byte of
its KV (zeroed KV is the control). Tokens are compared exactly, log-probabilities within 1e-5, in fp32.
"""

import shutil

import pytest

from tests.engines.pool_bytes import first_block_bytes, flip_in_pool
from tests.engines.vllm import small_kv
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

PROMPT = [(7 * i + 3) % 500 for i in range(200)]
OTHER = [(11 * i + 5) % 500 for i in range(200)]
FULL_BLOCKS = 192  # tokens of it in whole blocks of 32


def same(found: dict, other: dict) -> None:
    assert found["tokens"] == other["tokens"]
    assert found["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def test_another_engine_hits_and_answers_the_same(daemon, vllm, tiny_model, plain):
    store = {"dir": str(daemon().dir)}
    first, second, foreign = vllm(*({"model": tiny_model(seed), "store": store} for seed in (0, 0, 1)))
    (truth,) = plain.generate(PROMPT)
    (cold,) = first.generate(PROMPT)
    (warm,) = second.generate(PROMPT)
    assert (cold["cached"], warm["cached"]) == (0, FULL_BLOCKS)
    same(cold, truth)
    same(warm, truth)

    longer = PROMPT + truth["tokens"] + OTHER[:64]  # a conversation that goes on in the other engine
    (went_on,) = second.generate(longer)
    assert went_on["cached"] >= FULL_BLOCKS
    same(went_on, plain.generate(longer)[0])

    # One dimension of the identity at a time: it must miss, and it must be right.
    (salted,) = second.generate(PROMPT, salt="another tenant")
    assert salted["cached"] == 0
    same(salted, truth)
    assert foreign.generate(PROMPT)[0]["cached"] == 0, "other weights under the same name"
    assert foreign.generate(PROMPT)[0]["tokens"] != truth["tokens"]


@pytest.mark.parametrize("way", ["store", "spec"])
def test_what_is_loaded_is_what_it_answers_from(daemon, vllm, tiny_model, way):
    """The control: zeroed KV changes the answer, so equal answers elsewhere mean equal KV."""
    options, model = {"dir": str(daemon().dir)}, tiny_model(0)
    (first,) = vllm({"model": model, way: options})
    (zeroed,) = vllm({"model": model, way: options}, env={"KVSTORED_TEST_FAULT": "zero"})
    (truth,) = first.generate(PROMPT)
    first.generate(OTHER[:8])  # a step in which a spec's stores end
    (answer,) = zeroed.generate(PROMPT)
    assert answer["cached"] == FULL_BLOCKS
    assert answer["logprobs"] != pytest.approx(truth["logprobs"], abs=1e-2)


def test_blocks_that_go_between_look_up_and_load_are_recomputed(daemon, vllm, tiny_model):
    store, model = {"dir": str(daemon().dir)}, tiny_model(0)
    (first,) = vllm({"model": model, "store": store})
    (robbed,) = vllm({"model": model, "store": store}, env={"KVSTORED_TEST_FAULT": "drop"})
    (truth,) = first.generate(PROMPT)
    same(robbed.generate(PROMPT)[0], truth)
    same(first.generate(PROMPT)[0], truth)  # what it saved meanwhile is right: nothing of the failed step
    first.send({"do": "reset"})
    assert first.answer() is True
    (again,) = first.generate(PROMPT)
    assert again["cached"] > 0
    same(again, truth)


def test_a_killed_daemon_leaves_the_engine_alive(daemon, vllm, tiny_model, plain):
    kvstored = daemon()
    (engine,) = vllm({"model": tiny_model(0), "store": {"dir": str(kvstored.dir)}})
    (truth,), (other_truth,) = plain.generate(PROMPT), plain.generate(OTHER)
    same(engine.generate(PROMPT)[0], truth)
    kvstored.kill()
    same(engine.generate(OTHER)[0], other_truth)
    assert "goes on without the store" in engine.log()
    kvstored.start()
    third = [(13 * i + 1) % 500 for i in range(200)]
    (third_truth,) = plain.generate(third)
    client = kvstored.connect()
    for attempt in range(200):  # the breaker's backoff is at most 5 s; each of these is a step of the engine
        same(engine.generate([*third, attempt])[0], plain.generate([*third, attempt])[0])
        if client.stats()["blocks"] > 0 and "is back after" in engine.log():
            break
    else:
        raise AssertionError(f"it did not take the new daemon up:\n{engine.log()[-4000:]}")
    same(engine.generate(third)[0], third_truth)


@pytest.mark.parametrize("kind", ["draft model", "eagle", "mtp", "fp8"])
def test_guessed_tokens_and_small_kv_hit(daemon, vllm, tiny_model, eagle_pair, mtp_model, kind):
    """A draft's layers lie in the same blocks: were their KV wrong, its guesses would be, and would be seen
    in the steps that the answer takes. So it is where the KV of its last layer comes back as zeros."""
    if kind == "fp8" and not small_kv.there():
        pytest.skip(small_kv.WHY)
    model = tiny_model(0)
    draft = shutil.copytree(model, f"{model}-draft", dirs_exist_ok=True)
    if kind == "eagle":
        model, draft = eagle_pair
    guesses = {"method": kind.replace(" ", "_"), "model": draft, "num_speculative_tokens": 3}
    if kind == "mtp":
        model, guesses = mtp_model, {"method": "mtp", "num_speculative_tokens": 1}
    llm = {"kv_cache_dtype": "fp8_e5m2"} if kind == "fp8" else {"speculative_config": guesses}
    options = {"model": model, "store": {"dir": str(daemon().dir)}, "llm": llm}
    first, second = vllm(options, options)
    (cold,) = first.generate(PROMPT, tokens=24)
    (warm,) = second.generate(PROMPT, tokens=24)
    assert (cold["cached"], warm["cached"]) == (0, FULL_BLOCKS)
    assert warm["tokens"] == cold["tokens"]
    assert cold["guessed"] == warm["guessed"]
    if kind == "draft model":
        assert cold["guessed"] == [18, 18]
    if kind == "fp8":
        assert not cold["guessed"]
        return
    assert cold["guessed"][1] > 0
    (zeroed,) = vllm(options, env={"KVSTORED_TEST_FAULT": "zero-last"})
    (control,) = zeroed.generate(PROMPT, tokens=24)
    assert (control["cached"], control["tokens"]) == (FULL_BLOCKS, cold["tokens"])
    assert control["guessed"] != cold["guessed"], "the layer that guesses had no KV"


@pytest.mark.parametrize("way", ["store", "spec"])
def test_a_tiny_kv_cache_preempts_and_ends(daemon, vllm, tiny_model, plain, way):
    store = {"dir": str(daemon().dir)}
    small = {
        "kv_bytes": 2 << 20,
        "max_tokens": 512,
        "llm": {"max_num_seqs": 10},
    }  # 32 blocks: fewer than the prompts' answers need
    (pressed,) = vllm({"model": tiny_model(0), way: store, **small})
    prompts = [[(k * i + 1) % 500 for i in range(100)] for k in range(3, 13)]
    for answer, truth in zip(
        pressed.generate(*prompts, tokens=60), plain.generate(*prompts, tokens=60), strict=True
    ):
        same(answer, truth)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"llm": {"prefix_caching_hash_algo": "xxhash"}}, "PYTHONHASHSEED"),
        ({"llm": {"load_format": "dummy"}}, "weights_digest"),
        ({"store": {"dri": "typo"}}, "dri"),
    ],
)
def test_what_cannot_be_right_is_refused_at_the_start(vllm, tiny_model, change, word):
    (refused,) = vllm({"model": tiny_model(0), "store": {"dir": "nowhere"}, **change}, ready=False)
    answer = refused.answer()
    assert "error" in answer, answer
    refused.process.wait(60)  # its last words are in the log
    assert word in refused.log()


def test_a_corrupt_block_is_recomputed(daemon, vllm, tiny_model):
    kvstored, model = daemon(), tiny_model(0)
    store = {"dir": str(kvstored.dir)}
    first, second = vllm({"model": model, "store": store}, {"model": model, "store": store})
    (truth,) = first.generate(PROMPT)
    flip_in_pool(kvstored.dir, first_block_bytes(kvstored))
    same(second.generate(PROMPT)[0], truth)
    assert "kvstored" in second.log()
    first.send({"do": "reset"})
    assert first.answer() is True
    (again,) = first.generate(PROMPT)  # computed anew by the second, and right
    assert again["cached"] == FULL_BLOCKS
    same(again, truth)


def test_prefill_and_decode_in_two_engines(daemon, vllm, tiny_model, plain):
    """A producer that only saves, a consumer that only loads; the producer is killed in between."""
    store, model = {"dir": str(daemon().dir)}, tiny_model(0)
    producer, consumer = vllm(
        {"model": model, "store": store, "role": "kv_producer"},
        {"model": model, "store": store, "role": "kv_consumer"},
    )
    (prefilled,) = producer.generate(PROMPT, tokens=1)
    assert prefilled["cached"] == 0
    producer.process.kill()
    producer.process.wait()
    (decoded,) = consumer.generate(PROMPT, tokens=12)
    assert decoded["cached"] == FULL_BLOCKS
    same(decoded, plain.generate(PROMPT, tokens=12)[0])
    blocks = daemon_blocks(store)
    consumer.generate(OTHER)  # a consumer saves nothing
    assert daemon_blocks(store) == blocks


def test_prefill_on_one_host_and_decode_on_another(daemon, vllm, tiny_model, plain, tmp_path, wait_until):
    """Two daemons, joined over TCP; then the prefiller's host is gone: what it did not give is computed."""
    hosts, model = Hosts(daemon, tmp_path).start().wait_up(wait_until), tiny_model(0)
    producer, consumer = vllm(
        {"model": model, "store": {"dir": str(hosts[0].dir)}, "role": "kv_producer"},
        {"model": model, "store": {"dir": str(hosts[1].dir), "fetch_wait_s": 5}, "role": "kv_consumer"},
    )
    producer.generate(PROMPT, OTHER, tokens=1)
    (decoded,) = consumer.generate(PROMPT, tokens=12)
    assert decoded["cached"] == FULL_BLOCKS
    same(decoded, plain.generate(PROMPT, tokens=12)[0])
    assert hosts.peers(1)["n0"]["fetched"] == FULL_BLOCKS // 32
    hosts[0].kill()
    (alone,) = consumer.generate(OTHER, tokens=12)
    assert alone["cached"] == 0
    same(alone, plain.generate(OTHER, tokens=12)[0])


def daemon_blocks(store):
    import kvclient

    with kvclient.connect(store["dir"]) as client:
        return client.stats()["blocks"]


TWO_RANKS = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def test_two_ranks(daemon, vllm, tiny_model, tmp_path, wait_until):
    """Each rank stores its own part, and a block is there only if all have it; a request that loads, computes
    and ends in one step is stored once every rank has loaded, and what stands on a failed load is not."""
    drop, model = tmp_path / "drop", tiny_model(0)
    store, env = {"dir": str(daemon().dir)}, TWO_RANKS
    faulty = {**env, "KVSTORED_TEST_FAULT": "drop-rank", "KVSTORED_TEST_WHEN": str(drop)}
    two = {"model": model, "store": store, "llm": {"tensor_parallel_size": 2}}
    (first,) = vllm(two, env=env)
    (cold,) = first.generate(PROMPT)
    blocks = daemon_blocks(store)
    assert blocks == 2 * (FULL_BLOCKS // 32)
    first.end()
    (second,) = vllm(two, env=faulty)
    (warm,) = second.generate(PROMPT)
    assert (cold["cached"], warm["cached"]) == (0, FULL_BLOCKS)
    same(warm, cold)
    second.ask(do="reset")
    drop.touch()
    (spoilt,) = second.generate(PROMPT + OTHER[:72], tokens=1)
    drop.unlink()
    second.ask(do="reset")
    longer = PROMPT + OTHER[100:172]
    (prefilled,) = second.generate(longer, tokens=1)
    more = 2 * ((len(PROMPT) + 72) // 32 - FULL_BLOCKS // 32)
    wait_until(lambda: daemon_blocks(store) == blocks + 2 * more, "what both computed is stored")
    second.ask(do="reset")
    again = [second.generate(prompt)[0] for prompt in (PROMPT + OTHER[:72], longer)]
    assert [answer["cached"] for answer in (prefilled, *again)] == [FULL_BLOCKS, 256, 256]
    second.end()
    (engine,) = vllm({"model": model, "store": store})
    (other_shards,) = engine.generate(PROMPT)  # another number of ranks misses
    assert other_shards["cached"] == 0
    same(other_shards, cold)
    truths = [engine.generate(prompt)[0] for prompt in (PROMPT + OTHER[:72], longer)]
    for answer, truth in zip(again, truths, strict=True):
        same(answer, truth)
    assert [spoilt["tokens"], prefilled["tokens"]] == [truth["tokens"][:1] for truth in truths]
