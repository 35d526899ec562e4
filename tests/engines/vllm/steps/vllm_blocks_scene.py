"""Which blocks a step loads and saves, of one rank: hits behind vLLM's own, preemptions, tokens that are
known late or guessed, and what is wrong with what was loaded. Run with the engines' Python.

    python -m tests.engines.vllm.steps.vllm_blocks_scene DIRECTORY

Asserts for itself. What only the test can do is asked for by a line NEED … and answered by one.
"""

import os
import sys
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch

import kvclient
from kvclient.integrations.vllm import scheduling, transfer
from kvclient.integrations.vllm.identity import KEY_BYTES
from kvclient.integrations.vllm.scheduling import Scheduling, Step, Transfer
from kvclient.integrations.vllm.transfer import Worker
from tests.engines.pool_bytes import take_all
from tests.engines.vllm.steps.vllm_halves import (
    PROMPT,
    TOKENS,
    Engine,
    Rank,
    client,
    put,
    request,
    saved,
    states,
    until,
)


def need(what):
    print("NEED " + what, flush=True)
    sys.stdin.readline()


def a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved(early=False):
    """early: vLLM asks before the step's end, as it does with a draft model."""
    tensors = {f"layer.{i}": torch.randn(8, 1, TOKENS, 4) for i in range(3)}
    worker = Worker(client, 0, 1, list(tensors), TOKENS, 8, 1.0)
    worker.register(tensors)
    keys, behind = os.urandom(3 * KEY_BYTES), os.urandom(KEY_BYTES)
    truth = [tensor[:3].clone() for tensor in tensors.values()]
    worker.begin(Step(saves=[Transfer(keys, [0, 1, 2])]))
    worker.finish()
    assert client.lookup(keys).states == b"\2\2\2" and not worker.take_failed()
    last_of_second = tensors["layer.2"][1].numpy().tobytes()
    need("flip " + last_of_second[:64].hex())
    for tensor in tensors.values():
        tensor[:6].zero_()
    worker.begin(Step(loads=[Transfer(keys, [3, 4, 5])], saves=[Transfer(behind, [6])]))
    for name in tensors:
        worker.load_layer(name)
        worker.save_layer(name)
    failed = worker.take_failed() if early else set()
    worker.finish()
    assert failed | worker.take_failed() == {4}
    for tensor, was in zip(tensors.values(), truth, strict=True):
        assert torch.equal(tensor[3], was[0]) and torch.equal(tensor[5], was[2])
    assert client.lookup(keys).states == b"\2\0\2", "what is wrong has left the index"
    assert client.lookup(behind).states == b"\0", "it was computed from what was wrong"
    worker.begin(Step(saves=[Transfer(keys[KEY_BYTES : 2 * KEY_BYTES] + behind, [4, 6])]))
    worker.finish()
    assert client.lookup(keys + behind).states == b"\2\2\2\2"


def _worker():
    tensors = {f"layer.{i}": torch.randn(8, 1, TOKENS, 4) for i in range(3)}
    worker, said = Worker(client, 0, 1, list(tensors), TOKENS, 8, 1.0), []
    was = [tensor.clone() for tensor in tensors.values()]
    with patch.object(transfer.log, "warning", lambda text, *values: said.append(text % values)):
        worker.register(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors.values(), was, strict=True))
    return worker, said


def _step(worker, keys, numbers, load=False):
    moves = [Transfer(keys, numbers)]
    worker.begin(Step(loads=moves) if load else Step(saves=moves))
    worker.finish()
    return client.lookup(keys).states, worker.take_failed()


def a_store_that_takes_nothing_ends_no_start():
    """What could not be tried at the start is tried with the first block that is stored."""
    need("flush")
    held = take_all(client)
    full, (line,) = _worker()
    assert "took no block at the start" in line and "in use" in line, line
    for writer in held:
        writer.abort()
    need("drain on")
    draining, (line,) = _worker()
    assert "took no block at the start" in line and "drains" in line, line
    (wrong, _), (astray, _) = _worker(), _worker()
    need("drain off")
    keys, behind = os.urandom(2 * KEY_BYTES), os.urandom(KEY_BYTES)
    for worker, part in ((full, keys[:KEY_BYTES]), (draining, keys[KEY_BYTES:])):
        assert worker._untried and _step(worker, part, [1]) == (b"\2", set())
        assert not worker._untried
    wrong._rows[1].stride = 0  # as if its blocks lay elsewhere
    assert _step(wrong, behind, [2])[0] == b"\0", "what was stored wrong is taken out again"
    assert _step(wrong, keys, [3, 4], load=True)[1] == {3, 4}, "nothing is shared from then on"
    assert _step(wrong, os.urandom(KEY_BYTES), [5])[0] == b"\0"
    assert wrong.health.away
    assert _step(full, keys, [3, 4], load=True)[1] == set()
    another, was = os.urandom(KEY_BYTES), [tensor.clone() for tensor in astray._tensors]
    # What is loaded does not come into vLLM's memory.
    with patch.object(Worker, "_copy_out", lambda *_: None):
        assert _step(astray, another, [2])[0] == b"\0" and astray.health.away
    assert all(torch.equal(*pair) for pair in zip(astray._tensors, was, strict=True)), "left as computed"


def a_block_that_comes_back_changed_ends_the_start():
    of_layer = Worker.load_layer
    for method, change, words in (
        ("load_layer", lambda self, name: of_layer(self, "layer.0"), "layer.1, layer.2"),
        ("_pin", lambda self, load: self._fail(*load.block_ids), "not found again"),
    ):
        with patch.object(Worker, method, change):
            try:
                _worker()
            except kvclient.InvalidArgument as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {words}")


def tensors_whose_rows_are_no_blocks_are_refused():
    """A kernel that takes smaller blocks than vLLM's has each in pieces: row 3 is no block 3 then."""
    tensors = {f"layer.{i}": torch.zeros(2 * 8, 1, TOKENS // 2, 4) for i in range(2)}
    worker = Worker(client, 0, 1, list(tensors), TOKENS, 8, 1.0)
    try:
        worker.register(tensors)
    except kvclient.InvalidArgument as error:
        assert f"--block-size {TOKENS // 2}" in str(error), error
    else:
        raise AssertionError("not refused")


def hashes_that_vllm_takes_back_name_nothing():
    """As its scheduler does when a request gets more input: the token sampled last goes, and its hash."""
    engine, asked = Engine(os.urandom(32)), request(PROMPT[: 3 * TOKENS])
    engine.new(asked, 3 * TOKENS)
    before = engine.keys(asked)
    del asked._all_token_ids[3 * TOKENS - 1 :]
    del asked.block_hashes[2:]
    assert engine.keys(asked) == before[: 2 * KEY_BYTES]
    asked.append_output_token_ids(499)
    assert engine.keys(asked)[: 2 * KEY_BYTES] == before[: 2 * KEY_BYTES]
    fresh = request([*PROMPT[: 3 * TOKENS - 1], 499])
    engine.new(fresh, 3 * TOKENS)
    assert engine.keys(asked) == engine.keys(fresh) != before


def a_request_that_wants_its_prompts_logprobs_loads_nothing():
    """It is computed whole, and stored for the others."""
    identity = os.urandom(32)
    engine, asked = Engine(identity), request(PROMPT[: TOKENS + 8], prompt_logprobs=1)
    put(engine.half._of(request(PROMPT)).keys.between(0, 1))
    found, step = engine.new(asked, TOKENS + 8)
    assert (found, step.loads, saved(step)) == (0, [], [0])
    assert engine.half.matched(request(PROMPT), 0) == TOKENS


def what_the_daemon_asks_back_during_a_load_is_computed():
    """`kvstored revoke`, say: an exception out of a layer would end the engine."""
    identity, rank = os.urandom(32), Rank(0, 1)
    _, step = Engine(identity).new(request(PROMPT[: 2 * TOKENS + 8]), 2 * TOKENS + 8)
    rank.run(step, [0, 1])
    asked = request(PROMPT)
    engine = Engine(identity)
    _, step = engine.new(asked, TOKENS)
    gone = kvclient.BlockLost("the daemon asked these blocks back")
    pin = rank.worker._pin

    def pinned_and_asked_back(load):
        pin(load)
        (moved,) = rank.worker._loading
        copies = Mock(side_effect=[[], gone, gone])
        moved.blocks = SimpleNamespace(release=moved.blocks.release, copy_layer=copies)

    with patch.object(rank.worker, "_pin", pinned_and_asked_back):
        failed, _ = rank.run(step, [2], garbage=True)
    assert failed == {0, 1}
    assert states(engine.keys(asked))[2:3] == b"\0"


def what_was_brought_is_not_kept_for_ever():
    """A request that vLLM has no room for keeps what it was brought for the time of a lease."""
    identity = os.urandom(32)
    _, step = Engine(identity).new(request(PROMPT[: 2 * TOKENS + 8]), 2 * TOKENS + 8)
    Rank(0, 1).run(step, [0, 1])
    with patch.object(scheduling, "LEASE_S", 0.5):
        half = Scheduling(client, identity, TOKENS, TOKENS, 1, 0.0, 5.0, loads=True, saves=True)
    half._present = lambda keys: (0, False)  # as long as they lie on another host
    asked = [request(PROMPT[: 2 * TOKENS + 8]) for _ in range(2)]
    pins = client.stats()["pins"]
    bring, go_on = half._bring, threading.Event()
    half._bring = lambda *told: bring(*told) if go_on.wait(60) else []
    assert [half.matched(waiting, 0) for waiting in asked] == [None, None]
    go_on.set()
    until(lambda: half._brought.count == 4)
    assert client.stats()["pins"] > pins
    until(lambda: client.stats()["pins"] == pins)
    assert all(half.matched(waiting, 0) is not None for waiting in asked), "and is not asked for again"
    half._brought._lease_s = 60.0
    third = request(PROMPT[: 2 * TOKENS + 8])
    half.matched(third, 0)
    until(lambda: half._brought.count == 2)
    for ended in asked:
        half.finished(ended)
    assert half._brought.count == 2, "requests whose own time is over do not end another's"
    half.finished(third)
    assert half._brought.count == 0 and client.stats()["pins"] == pins
    half.close()


def tokens_that_are_known_late_are_saved_late():
    """vLLM computes a token in a step that it made before it knew which."""
    engine, asked = Engine(os.urandom(32)), request(PROMPT[: TOKENS - 2])
    _, step = engine.new(asked, TOKENS - 2)
    assert saved(step) == saved(engine.next(asked, TOKENS - 2, 1)) == []
    asked.append_output_token_ids(5)
    assert saved(engine.next(asked, TOKENS - 1, 1)) == [], "the block's last token is not known yet"
    asked.append_output_token_ids(6)
    assert saved(engine.next(asked, TOKENS, 1)) == [0]
    assert saved(engine.next(asked, TOKENS + 1, 1)) == []


def guessed_tokens_are_saved_once_they_are_right():
    """A step computes three guesses behind the last token; vLLM takes one of them, and its own next."""
    engine, asked = Engine(os.urandom(32)), request(PROMPT[: 2 * TOKENS - 2])
    _, step = engine.new(asked, 2 * TOKENS - 2)
    assert saved(step) == [0]
    asked.append_output_token_ids(5)  # the block's last token but one
    assert saved(engine.next(asked, 2 * TOKENS - 2, 4)) == [], "the guesses fill the block, and may be wrong"
    asked.append_output_token_ids([6, 7])  # the first was right: the block is full, its KV all right
    assert saved(engine.next(asked, 2 * TOKENS, 4)) == [1]
    assert engine.keys(asked) == engine.keys_of([*PROMPT[: 2 * TOKENS - 2], 5, 6])


def a_hit_behind_vllms_own_and_in_two_parts():
    """Two blocks are vLLM's own, two are in the store; the rest is computed in two steps, the second behind a
    preemption, into other blocks."""
    identity, rank = os.urandom(32), Rank(0, 1)
    _, step = Engine(identity).new(request(PROMPT[: 4 * TOKENS + 8]), 4 * TOKENS + 8)
    rank.run(step, [0, 1, 2, 3])
    engine, asked = Engine(identity), request(PROMPT)
    found, step = engine.new(asked, TOKENS + 8, local=2 * TOKENS)
    assert found == 2 * TOKENS
    assert [load.block_ids for load in step.loads] == [[2, 3]] and saved(step) == [0, 1, 4]
    for tensor in rank.tensors.values():
        tensor[2:] = 0
    engine.hear(rank.run(step, [4]))
    assert rank.is_right(range(5))
    keys = engine.keys(asked)
    assert states(keys) == b"\2" * 5 + b"\0"
    client.delete([keys[4 * KEY_BYTES : 5 * KEY_BYTES]])
    assert engine.half.matched(asked, 0) == 4 * TOKENS
    engine.half.allocated(asked, 4 * TOKENS)
    step = engine.next(asked, 4 * TOKENS, 2 * TOKENS + 8, resumed_in=[9, 8, 7, 6, 11, 10, 12])
    assert [load.block_ids for load in step.loads] == [[9, 8, 7, 6]] and saved(step) == [10, 11]
    rank.run(step, [11, 10])
    assert states(keys) == b"\2" * 6
    for tensor in rank.tensors.values():
        assert [int(tensor[at].mean()) for at in (9, 8, 7, 6)] == [int(tensor[at].mean()) for at in range(4)]


for scene in (
    a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved,
    partial(a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved, early=True),
    a_store_that_takes_nothing_ends_no_start,
    a_block_that_comes_back_changed_ends_the_start,
    tensors_whose_rows_are_no_blocks_are_refused,
    hashes_that_vllm_takes_back_name_nothing,
    a_request_that_wants_its_prompts_logprobs_loads_nothing,
    what_the_daemon_asks_back_during_a_load_is_computed,
    what_was_brought_is_not_kept_for_ever,
    tokens_that_are_known_late_are_saved_late,
    guessed_tokens_are_saved_once_they_are_right,
    a_hit_behind_vllms_own_and_in_two_parts,
):
    scene()
print("PASSED", flush=True)
