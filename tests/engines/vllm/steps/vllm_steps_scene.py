"""Several ranks and steps that are sent off before the one before has ended: what must not be sealed yet. And
what a request loses to a store that fails, or that asks other hosts. Run with the engines' Python.

    python -m tests.engines.vllm.steps.vllm_steps_scene DIRECTORY

Asserts for itself.
"""

import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

from kvclient.client.tolerant import TolerantWriter
from kvclient.integrations.unsure import MAX_IN_FLIGHT
from kvclient.integrations.vllm import transfer
from kvclient.integrations.vllm.connector import KvstoredConnector
from kvclient.integrations.vllm.identity import KEY_BYTES, of_rank
from kvclient.integrations.vllm.scheduling import FETCHES, Step, Transfer
from tests.engines.vllm.steps.vllm_halves import (
    BLOCKS,
    PROMPT,
    TOKENS,
    Engine,
    Rank,
    client,
    request,
    saved,
    states,
    until,
)


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


def a_store_that_fails_otherwise_than_it_says_costs_its_hits_alone():
    """No memory for its answer, say, or no thread."""
    identity, rank = os.urandom(32), Rank(0, 1)
    _, step = Engine(identity).new(request(PROMPT[: 2 * TOKENS + 8]), 2 * TOKENS + 8)
    rank.run(step, [0, 1])
    for error in (MemoryError(), RuntimeError("no thread"), OSError(24, "no descriptor")):

        def fail(*_, error=error, **__):
            raise error

        broken = SimpleNamespace(lookup=fail, get=fail, create=fail, degraded=False)
        engine, asked = Engine(identity), request(PROMPT)
        with patch.object(engine.half, "_client", broken):
            found, step = engine.new(asked, TOKENS)
        assert found == 0, error
        found, step = Engine(identity).new(request(PROMPT), TOKENS)
        assert found == 2 * TOKENS
        with patch.object(rank.worker, "_client", broken):
            failed, _ = rank.run(step, [2])
            assert failed == {0, 1}
            rank.run(Step(saves=[Transfer(os.urandom(32), [3])]), [3])
        with patch.object(TolerantWriter, "seal", fail):
            rank.run(Step(saves=[Transfer(key := os.urandom(32), [3])]), [3])
        assert states(key) == b"\0", "it is given back"


def a_request_waits_no_longer_for_other_hosts_behind_others():
    """Of more requests at once than there are threads that ask."""
    go_on, waited = threading.Event(), []
    engine = Engine(os.urandom(32), fetch_wait_s=0.2)
    for _ in range(FETCHES):
        engine.half._pool.submit(go_on.wait)

    def get(keys, wait_s):
        waited.append(wait_s)
        return client.get(keys)

    with patch.object(engine.half, "_client", SimpleNamespace(lookup=client.lookup, get=get, degraded=False)):
        asked, until_s = request(PROMPT), time.monotonic() + 0.3
        assert engine.half.matched(asked, 0) is None
        until(lambda: time.monotonic() > until_s)
        go_on.set()
        until(lambda: engine.half.matched(asked, 0) is not None)
    assert waited == [0.0]
    engine.half.finished(asked)
    engine.half.close()


def what_lies_on_disk_comes_while_its_request_waits_for_its_turn():
    """Of the leading blocks, and of each rank."""
    wanted, lookups = [], []

    def lookup(keys):
        lookups.append(keys)
        return SimpleNamespace(states=b"\2\3\3\0\3\0"[: len(keys) // KEY_BYTES])

    def fail(_keys):
        raise OSError(24, "no descriptor")

    engine, asked = Engine(os.urandom(32), ranks=2), request(PROMPT)
    connector = SimpleNamespace(_scheduler=engine.half)
    store = SimpleNamespace(lookup=lookup, prefetch=wanted.append, degraded=False)
    with patch.object(engine.half, "_client", store):
        KvstoredConnector.on_new_request(connector, asked)
        KvstoredConnector.on_new_request(connector, request(PROMPT, skip_reading_prefix_cache=True))
        store.prefetch = fail
        KvstoredConnector.on_new_request(connector, request(PROMPT))
    parts = [of_rank(engine.keys(asked), rank, 2) for rank in (0, 1)]
    assert wanted == [[part[i * KEY_BYTES : (i + 1) * KEY_BYTES] for part in parts for i in (1, 2)]]
    assert len(lookups) == 4


for scene in (
    what_lies_on_disk_comes_while_its_request_waits_for_its_turn,
    a_store_that_fails_otherwise_than_it_says_costs_its_hits_alone,
    a_request_waits_no_longer_for_other_hosts_behind_others,
    a_load_that_fails_on_one_rank_spoils_what_the_others_compute,
    a_step_with_loads_on_two_ranks_is_sealed_by_the_next,
    what_waits_for_a_word_is_not_kept_for_ever,
    what_a_step_saved_in_vain_is_saved_again,
    a_step_sent_off_before_a_load_had_failed_saves_nothing,
):
    scene()
print("PASSED", flush=True)
