"""A scene with the offloading spec's scheduler, whose answers hold for the blocks that vLLM asks for next as
well: run with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_ahead_scene DIRECTORY
"""

import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import OffloadingCacheConfig

from kvclient.integrations.pages import MISSING
from kvclient.integrations.vllm.offload import lookups, scheduling
from tests.engines.vllm.offloading.vllm_spec_parts import (
    CONFIG,
    ROW,
    client,
    layout,
    manager,
    names,
    pages,
    step,
)  # fmt: skip

HIT, MISS, RETRY, PENDING = (
    LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING,
)  # fmt: skip
COUNT = 24
KEYS = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(COUNT)]
OTHERS = [make_offload_key(number.to_bytes(32, "big"), 1) for number in range(COUNT)]
ROWS = [[row] for row in np.random.default_rng(3).integers(0, 256, (COUNT, ROW), np.uint8)]


def named(request, *groups):
    """A request's context as vLLM has filled it in."""
    made = ReqContext(req_id=request)
    for keys in groups:
        for place, key in enumerate(keys, 1):
            made.set_offload_key_position(key, 16 * place)
    return made


def walked(offloading, keys, context):
    """As vLLM asks: as far as a miss."""
    found = []
    for key in keys:
        found.append(offloading.lookup(key, context))
        if found[-1] is MISS:
            break
    return found


def settled(offloading):
    step(offloading)
    offloading._pool.submit(int).result()


def one_question_for_all_and_nothing_is_promised_that_goes_in_between():
    naming = names(model_version="between")
    whole = naming.whole(KEYS)
    assert all(pages.put(whole, layout, ROWS))
    offloading, context = manager(naming), named("r", KEYS, OTHERS)
    with patch.object(offloading._client, "lookup", wraps=offloading._client.lookup) as asked:
        first = offloading.lookup(KEYS[0], context)
        client.delete(whole[9:10])  # as an eviction
        found = [first, *walked(offloading, KEYS[1:], context)]
        assert asked.call_count == 1, asked.call_count
        assert set(walked(offloading, KEYS, context)) == {RETRY}, "once more, as for several groups"
        assert asked.call_count == 2, asked.call_count
    assert HIT not in found
    settled(offloading)
    assert walked(offloading, KEYS, context) == [HIT] * 9 + [MISS]
    assert offloading.lookup(OTHERS[0], context) is MISS, "another group's"
    assert client.stats()["pins"] == 9, "what lies behind one that is gone is of no use"
    client.delete(whole[:9])  # they are held: what was promised is there
    assert walked(offloading, KEYS, context) == [HIT] * 9 + [MISS]
    offloading.prepare_load(KEYS[:9], context)
    offloading.complete_load(KEYS[:9], context)
    assert walked(offloading, KEYS, context) == [MISS], "they were let go, in this same step"
    offloading.on_request_finished(context)
    assert client.stats()["pins"] == 0 and not offloading._held
    offloading.shutdown()


def what_vllm_does_not_ask_for_is_not_pinned():
    """It asks no further than it may load, and then comes back for more."""
    naming = names(model_version="bound")
    assert all(pages.put(naming.whole(KEYS), layout, ROWS))
    offloading = manager(naming)
    first, second = named("a", KEYS), named("b", KEYS)
    for count in (5, 8):
        walked(offloading, KEYS[:count], first)
        assert offloading.has_pending_work()
        settled(offloading)
        assert set(offloading._held) == set(KEYS[:count]) and client.stats()["pins"] == count
        assert walked(offloading, KEYS[:count], first) == [HIT] * count
    assert walked(offloading, KEYS[:3], second) == [HIT] * 3  # pinned for another
    settled(offloading)
    offloading.on_request_finished(first)
    assert set(offloading._held) == set(KEYS[:3])
    assert walked(offloading, KEYS[:2], second) + walked(offloading, KEYS[:4], second) == [HIT] * 5 + [RETRY]
    offloading.on_request_finished(second)
    settled(offloading)
    assert client.stats()["pins"] == 0 and not offloading.has_pending_work()
    offloading.shutdown()


def what_one_request_wants_is_not_sought_elsewhere_for_another():
    """It went before the step's end; a third, in the next step, has it sought."""
    naming = names(model_version="wanted")
    assert all(pages.put(naming.whole(KEYS[:3]), layout, ROWS[:3]))
    offloading = manager(naming, fetch_wait_s=0.01)
    first, second = named("a", KEYS[:3]), named("b", KEYS[:3])
    with patch.object(offloading, "_verify", wraps=offloading._verify) as verified:
        assert walked(offloading, KEYS[:3], first) == [RETRY] * 3
        client.delete(naming.whole(KEYS[:3]))
        assert walked(offloading, KEYS[:3], second) == [RETRY] * 3
        offloading._settle()
        assert set(offloading._wanted) == set(KEYS[:3]) and not offloading._sought
        assert set(map(frozenset, offloading._wanted.values())) == {frozenset("ab")}
        settled(offloading)
        assert verified.call_count == 1, "the same blocks are brought twice"
        assert walked(offloading, KEYS[:3], first) == [RETRY] * 3
        offloading._settle()
        assert set(offloading._sought) == set(KEYS[:3])
    for context in (first, second):
        offloading.on_request_finished(context)
    offloading.shutdown()


def who_asks_anew_waits_anew():
    """It waited for room until its lease had ended, or was preempted, long after it asked first."""
    naming = names(model_version="anew")
    assert all(pages.put(naming.whole(KEYS[:3]), layout, ROWS[:3]))
    offloading, context, ahead = manager(naming), named("r", KEYS[:3]), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])

    def asked():
        go_on = threading.Event()
        offloading._pool.submit(go_on.wait)  # others' blocks are compared
        found = []
        for _ in range(2):
            found += walked(offloading, KEYS[:3], context)
            step(offloading)
        go_on.set()
        assert found == [RETRY] * 6, found
        settled(offloading)
        assert walked(offloading, KEYS[:3], context) == [HIT] * 3

    with patch.object(lookups, "time", clock), patch.object(scheduling, "time", clock):
        asked()
        ahead[0] = 100.0
        step(offloading)
        assert not offloading._held, "its lease has ended"
        asked()
        offloading.prepare_load(KEYS[:3], context)
        offloading.complete_load(KEYS[:3], context)
        ahead[0] = 120.0  # it runs, and is preempted
        asked()
    offloading.on_request_finished(context)
    offloading.shutdown()


def parts_of_a_chunk_do_not_hide_each_other():
    """Behind the whole chunks vLLM asks for parts of the next one, the longest first, as far as a hit."""
    config = replace(CONFIG, cache=OffloadingCacheConfig(tokens_per_hash=4, blocks_per_chunk=1))
    naming = names(config, model_version="parts")
    parts = [KEYS[20], KEYS[21], KEYS[22]]  # of 12, 8 and 4 tokens behind the chunks
    assert all(pages.put(naming.whole([*KEYS[:2], parts[1]]), layout, ROWS[:3]))
    writer = client.create(naming.whole(parts[:1]), layout)
    for chunks in (KEYS[:2], []):
        offloading, context = manager(naming, wait_pending_s=3600.0), named("r", chunks)

        def asked(offloading=offloading, context=context, chunks=chunks):
            found = walked(offloading, chunks, context)
            for place, key in enumerate(parts):
                context.set_offload_key_position(key, 16 * len(chunks) + 12 - 4 * place)
                found.append(offloading.lookup(key, context))
            return found

        asked()
        settled(offloading)
        assert asked() == [HIT] * len(chunks) + [PENDING, HIT, MISS]
        context.set_offload_key_position(KEYS[2], 48)  # it got longer
        assert walked(offloading, [*chunks, KEYS[2]], context) == [HIT] * len(chunks) + [MISS]
        offloading.on_request_finished(context)
        offloading.shutdown()
    writer.abort()
    assert client.stats()["pins"] == 0


def verdict(found):
    """What vLLM makes of it: so many blocks are loaded, or the request is to wait."""
    return None if RETRY in found or PENDING in found else found.count(HIT)


def ended(offloading, keys, context):
    """vLLM's verdict once nothing is on its way."""
    for _ in range(2 * COUNT):
        if RETRY not in (found := walked(offloading, keys, context)):
            return verdict(found)
        settled(offloading)
    raise AssertionError("the look-up does not end")


def it_answers_as_one_question_a_block_would():
    """Prefixes and windows of two requests and two groups, over random states of the store."""
    choose, compared = random.Random(25), 0
    config_names = names(model_version="ahead")
    config_names.groups = 2
    for turn in range(60):
        config_names.begin_anew()
        every = config_names.whole([*KEYS, *OTHERS])
        shown = [choose.choice(("there", "there", "there", "written", "missing")) for _ in every]
        if turn % 3 == 0:
            shown = ["there"] * choose.randrange(COUNT) + shown
        of = dict(zip(every, shown, strict=False))
        there = [name for name in every if of[name] == "there"]
        assert all(pages.put(there, layout, [ROWS[0]] * len(there)))
        writer = client.create([name for name in every if of[name] == "written"] or [every[-1]], layout)
        wait_s, small = choose.choice((0.0, 3600.0)), choose.random() < 0.3
        pair = [manager(config_names, max_held=5 if small else 100, wait_pending_s=wait_s) for _ in "ab"]
        contexts = [
            [named(name, KEYS, OTHERS) for name in "ab"],
            [ReqContext(req_id=name) for name in "ab"],  # knows no keys: each is asked by itself
        ]
        for _ in range(4):
            for request in choose.choices((0, 1), k=3):
                keys, start = choose.choice((KEYS, OTHERS)), choose.randrange(COUNT)
                backwards = choose.random() < 0.3
                keys = keys[: choose.randint(1, COUNT)][::-1] if backwards else keys[start:]
                ahead, alone = (
                    walked(made, keys, its[request]) for made, its in zip(pair, contexts, strict=True)
                )
                if not small and verdict(ahead) != verdict(alone):  # small: what is looked for takes room
                    pairs = enumerate(zip(ahead, alone, strict=False))
                    place = next(i for i, (mine, theirs) in pairs if mine is not theirs)
                    assert (ahead[place], alone[place]) == (RETRY, HIT), (ahead, alone)
                    assert keys[place] not in pair[0]._held, "needed only now, behind one that was waited for"
                for key, answer in zip(keys, ahead, strict=False):
                    assert answer is not HIT or key in pair[0]._held
            for made in pair:
                settled(made)
            assert small or set(pair[0]._held) <= set(pair[1]._held)
        for keys in () if small else (KEYS, OTHERS):
            ends = [ended(made, keys, its[0]) for made, its in zip(pair, contexts, strict=True)]
            assert ends[0] == ends[1]
            compared += bool(ends[0])
        writer.abort()
        for made, its in zip(pair, contexts, strict=True):
            for context in its:
                made.on_request_finished(context)
            assert not made._held and not any(made._wanted.values())
            made.shutdown()
        assert client.stats()["pins"] == 0
        client.delete(b"".join(every))
        assert set(client.lookup(every).states) == {MISSING}
    assert compared > 20, compared


one_question_for_all_and_nothing_is_promised_that_goes_in_between()
what_vllm_does_not_ask_for_is_not_pinned()
what_one_request_wants_is_not_sought_elsewhere_for_another()
parts_of_a_chunk_do_not_hide_each_other()
who_asks_anew_waits_anew()
it_answers_as_one_question_a_block_would()
print("PASSED", flush=True)
