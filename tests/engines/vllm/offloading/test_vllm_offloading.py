"""Goal: vLLM's own OffloadingConnector shares KV through one daemon with our spec, and answers as vLLM does
without it, whatever becomes of the daemon.

Method: as test_vllm.py, with the spec instead of the connector.
"""

import pytest

from tests.engines.pool_bytes import first_block_bytes, flip_in_pool
from tests.engines.vllm.test_vllm import FULL_BLOCKS, OTHER, PROMPT, TWO_RANKS, same
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("chunk", [1, 2])
def test_another_engine_hits_and_answers_the_same(daemon, vllm, tiny_model, chunk):
    spec, model = {"dir": str(daemon().dir)}, tiny_model(0)
    offload = {"block_size": 32 * chunk}
    first, second = vllm(*[{"model": model, "spec": spec, "offload": offload}] * 2)
    (cold,) = first.generate(PROMPT)
    (warm,) = second.generate(PROMPT)
    assert cold["cached"] == 0
    assert warm["cached"] == FULL_BLOCKS
    same(warm, cold)
    (salted,) = second.generate(PROMPT, salt="another tenant")
    assert salted["cached"] == 0
    same(salted, cold)
    longer = PROMPT + cold["tokens"] + OTHER[:64]
    (went_on,) = second.generate(longer)
    (again,) = first.generate(longer)
    assert went_on["cached"] >= FULL_BLOCKS
    same(went_on, again)


def test_two_ranks(daemon, vllm, tiny_model, wait_until):
    """Each rank stores its own part, and a block whose part of one rank is gone is no hit."""
    kvstored = daemon()
    spec = {"dir": str(kvstored.dir)}
    two = {"model": tiny_model(0), "spec": spec, "llm": {"tensor_parallel_size": 2}}
    (first,) = vllm(two, env=TWO_RANKS)
    (cold,) = first.generate(PROMPT)
    first.generate(OTHER[:8])  # a step in which the stores end
    client = kvstored.connect()
    wait_until(lambda: client.stats()["blocks"] == 2 * (FULL_BLOCKS // 32), "both ranks have stored theirs")
    first.end()
    (second,) = vllm(two, env=TWO_RANKS)
    (warm,) = second.generate(PROMPT)
    assert (cold["cached"], warm["cached"]) == (0, FULL_BLOCKS)
    same(warm, cold)
    wait_until(lambda: client.stats()["pins"] == 0, "what was loaded is held no more")


def test_a_killed_daemon_and_a_corrupt_block(daemon, vllm, tiny_model):
    kvstored, model = daemon(), tiny_model(0)
    spec = {"dir": str(kvstored.dir), "timeout_s": 0.5}
    first, second = vllm(*[{"model": model, "spec": spec}] * 2)
    (truth,) = first.generate(PROMPT)
    client = kvstored.connect()
    assert client.stats()["blocks"] >= 6
    content = first_block_bytes(kvstored)
    flip_in_pool(kvstored.dir, content)
    (computed,) = second.generate(PROMPT)  # what is corrupt is computed again
    assert computed["cached"] < FULL_BLOCKS
    same(computed, truth)
    (other_truth,) = first.generate(OTHER)
    kvstored.kill()
    (from_memory,) = second.generate(OTHER)  # the pool outlives its daemon
    same(from_memory, other_truth)
    third = [(13 * i + 1) % 500 for i in range(200)]
    (one_more,) = first.generate(third)
    (one_more_again,) = second.generate(third)
    same(one_more, one_more_again)
    kvstored.start()
    for attempt in range(200):  # the breaker's backoff is at most 5 s; each of these is a step of the engine
        first.generate([*third[:-1], attempt])
        if "is back after" in first.log():
            break
    else:
        raise AssertionError(f"it did not take the new daemon up:\n{first.log()[-4000:]}")


def test_a_prefiller_that_is_killed(daemon, vllm, tiny_model, plain, wait_until):
    """In pieces of 64 tokens: what it had stored of its prompt is found, the rest is computed, all is right.
    What it had not sealed holds up nobody."""
    kvstored, model = daemon(), tiny_model(0)
    spec = {"dir": str(kvstored.dir), "wait_pending_s": 0}
    pieces = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    prefiller, decoder = vllm(
        {"model": model, "spec": spec, "llm": pieces}, {"model": model, "spec": spec}
    )  # fmt: skip
    long = [(17 * i * i + 3 * i) % 500 for i in range(1900)]
    prefiller.send({"do": "generate", "prompts": [long], "tokens": 100})
    with kvstored.connect() as client:
        wait_until(lambda: client.stats()["blocks"] >= 2, "it has stored a part", timeout_s=300)
    prefiller.process.kill()
    prefiller.process.wait()
    (decoded,) = decoder.generate(long, tokens=12)
    assert 0 < decoded["cached"] < 1900
    same(decoded, plain.generate(long, tokens=12)[0])
    with kvstored.connect() as client:
        wait_until(lambda: client.stats()["pins"] == 0, "nothing is pinned for the dead")


def test_a_hit_from_another_host(daemon, vllm, tiny_model, plain, tmp_path, wait_until):
    """Two daemons that are peers, an engine on each: what the second loads came from the first's."""
    hosts, model = Hosts(daemon, tmp_path).start().wait_up(wait_until), tiny_model(0)
    first, second = vllm(
        {"model": model, "spec": {"dir": str(hosts[0].dir)}},
        {"model": model, "spec": {"dir": str(hosts[1].dir), "fetch_wait_s": 60}},
    )
    first.generate(PROMPT)
    first.generate(OTHER)
    first.generate(OTHER[:8])  # a step in which the stores end
    with hosts[0].connect() as client:
        blocks = 2 * (FULL_BLOCKS // 32)
        wait_until(lambda: client.stats()["blocks"] == blocks, "all is stored")
    with hosts[1].connect() as client:
        pins = client.stats()["pins"]
    (warm,) = second.generate(PROMPT)
    assert warm["cached"] == FULL_BLOCKS
    same(warm, plain.generate(PROMPT)[0])
    assert hosts.peers(1)["n0"]["fetched"] == FULL_BLOCKS // 32
    second.generate(OTHER[:8])
    with hosts[1].connect() as client:
        wait_until(lambda: client.stats()["pins"] == pins, "what was loaded is held no more")
    hosts[0].kill()
    (alone,) = second.generate(OTHER)
    assert alone["cached"] == 0
    same(alone, plain.generate(OTHER)[0])
