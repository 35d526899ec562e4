"""Goal: vLLM engines whose memory on the host has our tier beneath it share KV through one daemon, and answer
as vLLM does without it, whatever becomes of the daemon.

Method: as test_vllm.py, with vLLM's own TieringOffloadingSpec, manager and memory on the host; the copies
between that and the engine are a test's (vllm_tier_on_cpu.py), because vLLM's want a GPU.
"""

import pytest

from tests.engines.conftest import on_disk, start_anew
from tests.engines.pool_bytes import first_block_bytes, flip_in_pool, names_in
from tests.engines.vllm.test_vllm import FULL_BLOCKS, OTHER, PROMPT, same
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
BLOCKS = FULL_BLOCKS // 32


def stored(engine, kvstored, blocks):
    """Steps of the engine, in which what it computed goes down to the store, until so many are there."""
    for _ in range(100):
        if len(names_in(kvstored)) >= blocks:
            return
        engine.generate(OTHER[:8])
    raise AssertionError(f"{blocks} blocks are not stored:\n{engine.log()[-4000:]}")


def test_other_engines_hit_and_answer_the_same(daemon, vllm, tiny_model, plain):
    """In chunks of two blocks. The control: zeroed KV changes the answer. Other weights miss, and a salt."""
    kvstored = daemon()
    shared = {"tier": {"dir": str(kvstored.dir)}, "offload": {"block_size": 64}}
    first, second, foreign = vllm(*({"model": tiny_model(seed), **shared} for seed in (0, 0, 1)))
    (zeroed,) = vllm({"model": tiny_model(0), **shared}, env={"KVSTORED_TEST_FAULT": "zero"})
    (truth,) = plain.generate(PROMPT)
    (cold,) = first.generate(PROMPT)
    stored(first, kvstored, BLOCKS // 2)
    (warm,) = second.generate(PROMPT)
    assert (cold["cached"], warm["cached"]) == (0, FULL_BLOCKS)
    same(cold, truth)
    same(warm, truth)
    (answer,) = zeroed.generate(PROMPT)
    assert answer["cached"] == FULL_BLOCKS
    assert answer["logprobs"] != pytest.approx(truth["logprobs"], abs=1e-2)
    assert foreign.generate(PROMPT)[0]["cached"] == 0
    (salted,) = second.generate(PROMPT, salt="another tenant")
    assert salted["cached"] == 0
    same(salted, truth)
    longer = PROMPT + truth["tokens"] + OTHER[:64]
    (went_on,) = second.generate(longer)
    assert went_on["cached"] >= FULL_BLOCKS
    same(went_on, plain.generate(longer)[0])


def test_from_disk_and_a_corrupt_block_and_no_daemon(daemon, vllm, tiny_model, plain, tmp_path, wait_until):
    kvstored = daemon(args=on_disk(tmp_path))
    options = {"model": tiny_model(0), "tier": {"dir": str(kvstored.dir), "timeout_s": 0.5}}
    first, second = vllm(options, options)
    truths = [plain.generate(prompt)[0] for prompt in (PROMPT, OTHER)]
    first.generate(PROMPT)
    stored(first, kvstored, BLOCKS)
    with kvstored.connect() as client:
        wait_until(lambda: client.stats()["disk_files"] >= BLOCKS, "all is on disk")
    start_anew(kvstored)
    (from_disk,) = second.generate(PROMPT)
    assert from_disk["cached"] == FULL_BLOCKS
    same(from_disk, truths[0])

    known = names_in(kvstored)
    first.generate(OTHER)
    stored(first, kvstored, len(known) + BLOCKS)
    flip_in_pool(kvstored.dir, first_block_bytes(kvstored, known))
    (computed,) = second.generate(OTHER)
    assert computed["cached"] < FULL_BLOCKS
    same(computed, truths[1])

    kvstored.kill()
    kvstored._note_segments()
    for engine in (first, second):
        same(engine.generate([9, *OTHER])[0], plain.generate([9, *OTHER])[0])
    kvstored.start()
    for attempt in range(200):  # the breaker's backoff is at most 5 s
        prompt = [attempt, *OTHER]
        same(second.generate(prompt)[0], plain.generate(prompt)[0])
        if "is back after" in second.log():
            break
    else:
        raise AssertionError(f"it did not take the new daemon up:\n{second.log()[-4000:]}")


def test_a_hit_from_another_host(daemon, vllm, tiny_model, plain, tmp_path, wait_until):
    hosts, model = Hosts(daemon, tmp_path).start().wait_up(wait_until), tiny_model(0)
    first, second = vllm(
        {"model": model, "tier": {"dir": str(hosts[0].dir)}},
        {"model": model, "tier": {"dir": str(hosts[1].dir), "fetch_wait_s": 60}},
    )
    first.generate(PROMPT)
    stored(first, hosts[0], BLOCKS)
    (warm,) = second.generate(PROMPT)
    assert warm["cached"] == FULL_BLOCKS
    same(warm, plain.generate(PROMPT)[0])
    assert hosts.peers(1)["n0"]["fetched"] == BLOCKS
