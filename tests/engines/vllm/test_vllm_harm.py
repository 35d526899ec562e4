"""Goal: a vLLM engine answers right and goes on when its daemon dies in the middle of a load or a store, or
comes back without its memory; a prompt that two engines want at once is computed once.

Method: as test_vllm.py. The engine's own connector, with a fault that a test arms, kills the daemon at the
third of four layers, or stands still there while the other engine asks.
"""

import pytest

from tests.engines.conftest import on_disk, start_anew
from tests.engines.vllm.test_vllm import FULL_BLOCKS, OTHER, PROMPT, daemon_blocks, same

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]
ARMED = {"KVSTORED_TEST_FAULT": "armed"}
THIRD = [(13 * i + 1) % 500 for i in range(200)]


def until_it_is_back(engine, plain, times):
    """Steps of the engine, each right, until its breaker has closed for the n-th time."""
    for attempt in range(200):  # the backoff is at most 5 s
        prompt = [attempt, times, *THIRD]  # of blocks that nobody has
        same(engine.generate(prompt)[0], plain.generate(prompt)[0])
        if engine.log().count("is back after") >= times:
            return
    raise AssertionError(f"it did not take the new daemon up:\n{engine.log()[-4000:]}")


def test_a_daemon_that_dies_during_a_load_and_a_store(daemon, vllm, tiny_model, plain):
    kvstored = daemon()
    store = {"dir": str(kvstored.dir), "timeout_s": 1.0}
    (engine,) = vllm({"model": tiny_model(0), "store": store}, env=ARMED)
    truths = {tuple(prompt): plain.generate(prompt)[0] for prompt in (PROMPT, OTHER)}
    same(engine.generate(PROMPT)[0], truths[tuple(PROMPT)])
    for times, (fault, prompt) in enumerate((("kill-load", PROMPT), ("kill-store", OTHER)), 1):
        engine.ask(do="reset")
        engine.ask(do="fault", fault=fault, pid=kvstored.process.pid)
        (answer,) = engine.generate(prompt)
        assert kvstored.process.wait(60) == -9, "the fault did not happen"
        assert answer["cached"] == (FULL_BLOCKS if fault == "kill-load" else 0)
        same(answer, truths[tuple(prompt)])
        kvstored._note_segments()
        until_it_noticed(engine, plain, times)
        kvstored.start()
        until_it_is_back(engine, plain, times)
    engine.ask(do="reset")
    same(engine.generate(OTHER)[0], truths[tuple(OTHER)])  # what was half stored is not found


def test_a_request_given_up_while_its_load_fails_leaves_nothing_behind(daemon, vllm, tiny_model, plain):
    """vLLM keeps the blocks of a request that it gives up in its own prefix cache, also those that were not
    loaded, because it looks for failed ones in requests that run."""
    store, model = {"dir": str(daemon().dir)}, tiny_model(0)
    (first,) = vllm({"model": model, "store": store})
    (faulty,) = vllm({"model": model, "store": store}, env=ARMED)
    (truth,) = plain.generate(PROMPT)
    first.generate(PROMPT)
    faulty.generate(OTHER)  # so that its blocks hold something
    faulty.ask(do="fault", fault="drop-abort")
    faulty.ask(do="abandon", prompts=[PROMPT])
    longer = PROMPT + OTHER[:72]
    (answer,) = faulty.generate(longer)
    assert answer["cached"] == 0
    same(answer, plain.generate(longer)[0])
    same(faulty.generate(PROMPT)[0], truth)
    faulty.ask(do="reset")
    faulty.generate(OTHER)
    faulty.ask(do="fault", fault="drop-once")
    faulty.ask(do="abandon", prompts=[PROMPT])  # behind that step: vLLM has set it back by then
    same(faulty.generate(longer)[0], plain.generate(longer)[0])
    # A request that vLLM's own cache gave the same blocks waits for the first to compute them
    for engine in (faulty, first):
        engine.ask(do="reset")
    first.generate(PROMPT)
    faulty.generate(OTHER)
    faulty.ask(do="fault", fault="drop-once")
    faulty.send({"do": "abandon", "prompts": [PROMPT, longer]})
    assert faulty.answer() == [plain.generate(longer)[0]["tokens"]]


def until_it_noticed(engine, plain, times):
    for attempt in range(200):
        prompt = [200 + attempt, times, *THIRD]
        same(engine.generate(prompt)[0], plain.generate(prompt)[0])
        if engine.log().count("goes on without the store") >= times:
            return
    raise AssertionError(engine.log()[-4000:])


@pytest.mark.parametrize("way", ["store", "spec"])
def test_it_hits_after_a_restart_and_from_disk(daemon, vllm, tiny_model, tmp_path, wait_until, way):
    kvstored, blocks = daemon(args=on_disk(tmp_path)), FULL_BLOCKS // 32
    (engine,) = vllm({"model": tiny_model(0), way: {"dir": str(kvstored.dir)}})
    (truth,) = engine.generate(PROMPT)
    assert truth["cached"] == 0
    engine.generate(OTHER[:8])  # a step in which a spec's stores end
    with kvstored.connect() as client:
        wait_until(lambda: client.stats()["disk_files"] >= blocks, "all is on disk")
    for fresh in (False, True):
        start_anew(kvstored) if fresh else kvstored.restart()
        for attempt in range(200):  # until its breaker has closed, which asks at steps only
            for _ in range(2):
                engine.ask(do="reset")
                (other,) = engine.generate([100 + attempt, int(fresh), *THIRD])
                engine.generate(OTHER[:8])
            if other["cached"]:
                break
        engine.ask(do="reset")
        (again,) = engine.generate(PROMPT)  # which it has not computed since
        same(again, truth)
        assert again["cached"] == FULL_BLOCKS
        with kvstored.connect() as client:
            if fresh:  # counted behind the load, which nobody waits for
                wait_until(lambda: client.stats()["disk_loaded"] > 0, "what came from disk is counted")
            else:
                assert client.stats()["disk_loaded"] == 0


@pytest.mark.parametrize("way", ["store", "spec"])
def test_two_engines_that_start_one_prompt_at_once_compute_it_once(
    daemon, vllm, tiny_model, tmp_path, wait_until, way
):
    """The first stands still at its third layer, or, with the spec, before it has stored anything."""
    options, model = {"dir": str(daemon().dir), "wait_pending_s": 300}, tiny_model(0)
    first, second = vllm(*[{"model": model, way: options}] * 2, env=ARMED)
    first.ask(do="fault", fault="pause", dir=str(tmp_path))
    second.ask(do="fault", fault="note", file=str(tmp_path / "waits"))
    first.send({"do": "generate", "prompts": [PROMPT]})
    wait_until(lambda: (tmp_path / "paused").exists(), "the first is in the middle of it", timeout_s=300)
    second.send({"do": "generate", "prompts": [PROMPT]})
    wait_until(lambda: (tmp_path / "waits").exists(), "the second waits for it", timeout_s=300)
    (tmp_path / "go").touch()
    (computed,), (loaded,) = first.answer(), second.answer()
    assert (computed["cached"], loaded["cached"]) == (0, FULL_BLOCKS)
    same(loaded, computed)
    assert daemon_blocks(options) == FULL_BLOCKS // 32


def test_a_pass_that_raises_leaves_nothing_in_the_store(daemon, vllm, tiny_model, plain, wait_until):
    """vLLM tells the connector to save behind it all the same, and goes down only then."""
    options = {"model": tiny_model(0), "store": {"dir": str(daemon().dir)}}
    first, second = vllm(options, options, env=ARMED)
    first.ask(do="fault", fault="raise")
    first.send({"do": "generate", "prompts": [PROMPT]})
    wait_until(lambda: first.process.poll() is not None, "the first is down", timeout_s=300)
    assert "the pass fails" in first.log()
    (computed,) = second.generate(PROMPT)
    assert computed["cached"] == 0, "KV that nobody computed"
    same(computed, plain.generate(PROMPT)[0])


@pytest.mark.parametrize("way", ["store", "spec"])
def test_what_vllm_was_told_to_forget_is_not_found_again(daemon, vllm, tiny_model, way):
    """reset_prefix_cache with reset_connector, which vLLM's own weight updates end with."""
    options = {"model": tiny_model(0), way: {"dir": str(daemon().dir)}}
    first, second = vllm(options, options)
    (truth,) = first.generate(PROMPT)
    first.generate(OTHER[:8])  # a step in which a spec's stores end
    assert second.generate(PROMPT)[0]["cached"] == FULL_BLOCKS
    second.ask(do="reset", connector=True)
    (anew,) = second.generate(PROMPT)
    assert anew["cached"] == 0, "KV of before the reset"
    same(anew, truth)
    second.generate(OTHER[:8])
    second.ask(do="reset")
    (kept,) = second.generate(PROMPT)
    assert kept["cached"] == FULL_BLOCKS, "what it stored since is its own"
    same(kept, truth)
    first.ask(do="reset")
    assert first.generate(PROMPT)[0]["cached"] == FULL_BLOCKS, "the other engine was told of nothing"
