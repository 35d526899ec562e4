"""The connector's two halves step by step, as vLLM calls them, with its own requests and hashes and without
an engine: several ranks, steps that are sent off before the one before has ended, tokens that are known late.
Run with the engines' Python.

    python -m tests.engines.vllm.vllm_steps_scene DIRECTORY

Asserts for itself. A rank "computes" a block by filling it with what that rank's block must hold.
"""

import itertools
import os
import sys
import threading
import time
from functools import partial, reduce
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvclient
from kvclient.integrations.unsure import MAX_IN_FLIGHT
from kvclient.integrations.vllm import scheduling, transfer
from kvclient.integrations.vllm.connector import KvstoredConnector
from kvclient.integrations.vllm.identity import KEY_BYTES, of_rank
from kvclient.integrations.vllm.scheduling import Scheduling, Step, Transfer
from kvclient.integrations.vllm.transfer import Worker

TOKENS, BLOCKS = 32, 6
PROMPT = [(7 * i + 3) % 500 for i in range(TOKENS * BLOCKS + 8)]
GARBAGE = -1.0
NUMBERS = itertools.count()
init_none_hash(sha256)
HASHER = get_request_block_hasher(TOKENS, sha256)
client = kvclient.connect(sys.argv[1], on_error="miss", timeout_s=5.0)


def request(prompt):
    return Request(
        request_id=str(next(NUMBERS)), prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=9),
        pooling_params=None, block_hasher=HASHER,
    )  # fmt: skip


class Rank:
    """A worker with the tensors of its rank."""

    def __init__(self, rank, ranks):
        self.rank = rank
        self.tensors = {f"layer.{i}": torch.zeros(2 * BLOCKS + 2, 1, TOKENS, 4) for i in range(2)}
        self.worker = Worker(client, rank, ranks, list(self.tensors), TOKENS, 1.0)
        self.worker.register(self.tensors)

    def run(self, step, computed, garbage=False):
        """A step that computes those blocks. What vLLM hears of it: failed blocks, and the other word."""
        self.worker.begin(step)
        for layer, (name, tensor) in enumerate(self.tensors.items()):
            self.worker.load_layer(name)
            for block in computed:
                tensor[block] = GARBAGE if garbage else 100 * self.rank + 10 * layer + block + 1
            self.worker.save_layer(name)
        self.worker.finish()
        return self.worker.take_failed(), self.worker.take_ended()

    def is_right(self, blocks):
        return all(
            bool((tensor[block] == 100 * self.rank + 10 * layer + block + 1).all())
            for layer, tensor in enumerate(self.tensors.values())
            for block in blocks
        )


class Engine:
    """The scheduler's half; a request has its blocks in order, 0 first."""

    def __init__(self, identity, ranks=1):
        self.half = Scheduling(client, identity, TOKENS, TOKENS, ranks, 0.0, 0.0, loads=True, saves=True)

    def new(self, asked, tokens, beside=None):
        """Its first step: so many tokens behind what is found. `beside`: another's, its blocks behind."""
        found = [self.half.matched(each, 0) for each in (asked, beside) if each is not None]
        new = []
        for each, at in zip((asked, beside), found, strict=False):
            self.half.allocated(each, at)
            first = 0 if each is asked else BLOCKS + 1
            numbers = list(range(first, first + BLOCKS + 1))
            new.append(SimpleNamespace(req_id=each.request_id, block_ids=[numbers], num_computed_tokens=at))
        return found[0], self._step(new, [], tokens)

    def empty(self):
        """A step that computes nothing, as vLLM makes behind a request's end."""
        return self._step([], [], 0)

    def next(self, asked, computed, tokens):
        return self._step([], [(asked.request_id, computed)], tokens)

    def _step(self, new, cached, tokens):
        names = [entry.req_id for entry in new] + [name for name, _ in cached]
        return self.half.step(SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in cached], resumed_req_ids=set(),
                new_block_ids=[None] * len(cached), num_computed_tokens=[at for _, at in cached],
            ),
            num_scheduled_tokens=dict.fromkeys(names, tokens),
        ))  # fmt: skip

    def keys(self, asked):
        return self.half._running[asked.request_id].keys.between(0, BLOCKS)

    def hear(self, *ran):
        """What each rank's run() said, as vLLM tells the connector."""
        ended = reduce(lambda mine, other: mine.aggregate(other), [meta for _, meta in ran])
        output = KVConnectorOutput(
            invalid_block_ids=set().union(*[failed for failed, _ in ran]), kv_connector_worker_meta=ended
        )
        connector = SimpleNamespace(_scheduler=self.half, _evict=Mock())
        KvstoredConnector.update_connector_output(connector, output)


def saved(step):
    return sorted(block for transfer in step.saves for block in transfer.block_ids)


def states(keys, rank=0, ranks=1):
    return client.lookup(of_rank(keys, rank, ranks)).states


def a_load_that_fails_on_one_rank_spoils_what_the_others_compute():
    identity, ranks = os.urandom(32), [Rank(0, 2), Rank(1, 2)]
    first = Engine(identity, ranks=2)
    _, step = first.new(request(PROMPT[: 3 * TOKENS + 8]), 3 * TOKENS + 8)
    assert saved(step) == [0, 1, 2], "a step without loads saves at once"
    assert [rank.run(step, [0, 1, 2]) for rank in ranks] == [(set(), None)] * 2
    second, asked = Engine(identity, ranks=2), request(PROMPT)
    found, step = second.new(asked, 3 * TOKENS + 8)
    assert found == 3 * TOKENS
    keys = second.keys(asked)
    assert client.delete([of_rank(keys, 0, 2)[KEY_BYTES : 2 * KEY_BYTES]]) == 1
    ran = [rank.run(step, [3, 4, 5], garbage=True) for rank in ranks]
    assert [failed for failed, _ in ran] == [{1}, set()]
    assert states(keys, 1, 2)[3:] == b"\1\1\1", "rank 1 computed it from what rank 0 did not have"
    second.hear(*ran)
    step = second.next(asked, TOKENS, 5 * TOKENS + 8)  # vLLM sets it back to the first block that failed
    for rank in ranks:
        rank.run(step, [1, 2, 3, 4, 5])
    assert [states(keys, rank, 2) for rank in (0, 1)] == [b"\2" * BLOCKS] * 2
    third, asked = Engine(identity, ranks=2), request(PROMPT)
    found, step = third.new(asked, 8)
    assert found == BLOCKS * TOKENS
    for rank in ranks:
        for tensor in rank.tensors.values():
            tensor.zero_()
        rank.run(step, [])
        assert rank.is_right(range(BLOCKS))


def a_step_with_loads_on_two_ranks_is_sealed_by_the_next():
    identity, ranks = os.urandom(32), [Rank(0, 2), Rank(1, 2)]
    _, step = Engine(identity, ranks=2).new(request(PROMPT[: TOKENS + 8]), TOKENS + 8)
    for rank in ranks:
        rank.run(step, [0])
    engine, asked = Engine(identity, ranks=2), request(PROMPT)
    found, step = engine.new(asked, 2 * TOKENS)
    assert (found, saved(step)) == (TOKENS, [1, 2])
    keys = engine.keys(asked)
    ran = [rank.run(step, [1, 2]) for rank in ranks]
    assert [states(keys, rank, 2) for rank in (0, 1)] == [b"\2\1\1\0\0\0"] * 2
    engine.half.finished(asked)  # prefill apart: it loads, computes and ends in one step
    engine.hear(*ran)
    assert engine.half.waits, "vLLM makes one more step for it"
    step = engine.empty()
    assert not engine.half.waits
    for rank in ranks:
        rank.run(step, [])
    assert [states(keys, rank, 2) for rank in (0, 1)] == [b"\2\2\2\0\0\0"] * 2


def what_waits_for_a_word_is_not_kept_for_ever():
    """Of an engine that makes no further step."""
    identity = os.urandom(32)
    with patch.object(transfer, "IDLE_S", 0.5):
        ranks = [Rank(0, 2), Rank(1, 2)]
    _, step = Engine(identity, ranks=2).new(request(PROMPT[: TOKENS + 8]), TOKENS + 8)
    for rank in ranks:
        rank.run(step, [0])
    engine, asked = Engine(identity, ranks=2), request(PROMPT)
    _, step = engine.new(asked, 2 * TOKENS)
    ran = [rank.run(step, [1, 2]) for rank in ranks]
    until(lambda: not any(rank.worker._unsealed.count for rank in ranks))
    keys = engine.keys(asked)
    engine.hear(*ran)
    step = engine.next(asked, 3 * TOKENS, 8)
    for rank in ranks:
        rank.run(step, [])  # the word comes late
    assert [states(keys, rank, 2) for rank in (0, 1)] == [b"\2\0\0\0\0\0"] * 2


def what_a_step_saved_in_vain_is_saved_again():
    """A request that had nothing to do with the load that failed loses what it saved beside it no more."""
    identity, rank = os.urandom(32), Rank(0, 1)
    _, step = Engine(identity).new(request(PROMPT[: TOKENS + 8]), TOKENS + 8)
    rank.run(step, [0])
    engine, asked, beside = Engine(identity), request(PROMPT), request([7, *PROMPT])
    found, step = engine.new(asked, 2 * TOKENS, beside)
    keys, others = engine.keys(asked), engine.keys(beside)
    assert (found, saved(step)) == (TOKENS, [1, 2, BLOCKS + 1, BLOCKS + 2])
    client.delete([keys[:KEY_BYTES]])
    ran = rank.run(step, [BLOCKS + 1, BLOCKS + 2])
    assert ran[0] == {0} and states(others) == bytes(BLOCKS)
    engine.hear(ran)
    rank.run(engine.next(beside, 2 * TOKENS, TOKENS), [BLOCKS + 3])
    assert states(others) == b"\2\2\2" + bytes(BLOCKS - 3)


def a_step_sent_off_before_a_load_had_failed_saves_nothing():
    identity, rank = os.urandom(32), Rank(0, 1)
    _, step = Engine(identity).new(request(PROMPT[: 2 * TOKENS + 8]), 2 * TOKENS + 8)
    rank.run(step, [0, 1])
    engine, asked = Engine(identity), request(PROMPT)
    found, step = engine.new(asked, TOKENS)
    assert found == 2 * TOKENS
    keys = engine.keys(asked)
    assert client.delete([keys[:KEY_BYTES]]) == 1
    ahead = engine.next(asked, 3 * TOKENS, TOKENS)
    ran = rank.run(step, [2], garbage=True)
    assert ran[0] == {0}
    assert rank.run(ahead, [3], garbage=True)[0] == set()
    assert states(keys) == b"\0\2\0\1\0\0", "both stand on a block that was not loaded"
    engine.hear(ran)
    rank.run(engine.next(asked, 0, 4 * TOKENS), [0, 1, 2, 3])
    rank.run(engine.next(asked, 4 * TOKENS, 2 * TOKENS + 8), [4, 5])
    assert states(keys) == b"\2" * BLOCKS
    again, asked = Engine(identity), request(PROMPT)
    found, step = again.new(asked, 8)
    for tensor in rank.tensors.values():
        tensor.zero_()
    again.hear(rank.run(step, []))
    assert rank.is_right(range(BLOCKS))
    asked = request(PROMPT[: 2 * TOKENS] + [1] * 2 * TOKENS)
    assert again.new(asked, TOKENS)[0] == 2 * TOKENS
    steps = [again.next(asked, 3 * TOKENS, TOKENS) for _ in range(MAX_IN_FLIGHT)]
    assert steps[0].unsure
    last = steps[-1]  # an end that is never told holds nothing back for ever
    assert (last.unsure, saved(last), len(last.wrong)) == (False, [0, 1, 2, 3], MAX_IN_FLIGHT)


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
    half._bring = lambda names: bring(names) if go_on.wait(60) else []
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


def a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved(early=False):
    """early: vLLM asks before the step's end, as it does with a draft model."""
    tensors = {f"layer.{i}": torch.randn(8, 1, TOKENS, 4) for i in range(3)}
    worker = Worker(client, 0, 1, list(tensors), TOKENS, 1.0)
    worker.register(tensors)
    keys, behind = os.urandom(3 * KEY_BYTES), os.urandom(KEY_BYTES)
    truth = [tensor[:3].clone() for tensor in tensors.values()]
    worker.begin(Step(saves=[Transfer(keys, [0, 1, 2])]))
    worker.finish()
    assert client.lookup(keys).states == b"\2\2\2" and not worker.take_failed()
    last_of_second = tensors["layer.2"][1].numpy().tobytes()
    print("NEED flip " + last_of_second[:64].hex(), flush=True)
    sys.stdin.readline()
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


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


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


for scene in (
    a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved,
    partial(a_wrong_layer_is_reported_and_nothing_of_its_step_is_saved, early=True),
    hashes_that_vllm_takes_back_name_nothing,
    what_the_daemon_asks_back_during_a_load_is_computed,
    what_was_brought_is_not_kept_for_ever,
    a_load_that_fails_on_one_rank_spoils_what_the_others_compute,
    a_step_with_loads_on_two_ranks_is_sealed_by_the_next,
    what_waits_for_a_word_is_not_kept_for_ever,
    what_a_step_saved_in_vain_is_saved_again,
    a_step_sent_off_before_a_load_had_failed_saves_nothing,
    tokens_that_are_known_late_are_saved_late,
):
    scene()
print("PASSED", flush=True)
