"""A scene with the offloading spec's scheduler, which looks ahead for the blocks that vLLM asks for next: run
with the engines' Python.

    python -m tests.engines.vllm.offloading.vllm_ahead_scene DIRECTORY
"""

import random
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kvclient.integrations.pages import MISSING
from tests.engines.vllm.offloading.vllm_spec_parts import ROW, client, layout, manager, names, pages, step

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
    assert HIT not in found
    settled(offloading)
    assert walked(offloading, KEYS, context) == [HIT] * 9 + [MISS]
    assert offloading.lookup(OTHERS[0], context) is MISS, "another group's"
    held = client.stats()["pins"]
    assert held == COUNT - 1, held
    client.delete(whole[:9])  # they are held: what was promised is there
    assert walked(offloading, KEYS, context) == [HIT] * 9 + [MISS]
    offloading.prepare_load(KEYS[:9], context)
    offloading.complete_load(KEYS[:9], context)
    assert walked(offloading, KEYS, context) == [MISS], "they were let go, in this same step"
    offloading.on_request_finished(context)
    assert client.stats()["pins"] == 0 and not offloading._held
    offloading.shutdown()


def it_answers_as_one_question_a_block_would():
    """Prefixes and windows of two requests and two groups, over random states of the store."""
    choose = random.Random(25)
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
        wait_s = choose.choice((0.0, 3600.0))
        pair = [manager(config_names, max_held=choose_room, wait_pending_s=wait_s)
                for choose_room in [choose.choice((5, 100))] * 2]  # fmt: skip
        contexts = [
            [named(name, KEYS, OTHERS) for name in "ab"],
            [ReqContext(req_id=name) for name in "ab"],  # knows no keys: each is asked by itself
        ]
        for _ in range(4):
            for request in choose.choices((0, 1), k=3):
                keys, start = choose.choice((KEYS, OTHERS)), choose.randrange(COUNT)
                keys = keys[: choose.randint(1, COUNT)][::-1] if choose.random() < 0.3 else keys[start:]
                ahead, alone = (
                    walked(made, keys, its[request]) for made, its in zip(pair, contexts, strict=True)
                )
                if ahead != alone:  # it may hold, or have on their way, more than it was asked for
                    assert len(ahead) == len(alone) or pair[0]._max_held == 5, (ahead, alone)
                    for mine, theirs in zip(ahead, alone, strict=False):
                        assert mine is theirs or pair[0]._max_held == 5 or (mine, theirs) == (HIT, RETRY)
                for key, answer in zip(keys, ahead, strict=False):
                    assert answer is not HIT or key in pair[0]._held
            for made in pair:
                settled(made)
        writer.abort()
        for made, its in zip(pair, contexts, strict=True):
            for context in its:
                made.on_request_finished(context)
            assert not made._held and not any(made._wanted.values())
            made.shutdown()
        assert client.stats()["pins"] == 0
        client.delete(b"".join(every))
        assert set(client.lookup(every).states) == {MISSING}


one_question_for_all_and_nothing_is_promised_that_goes_in_between()
it_answers_as_one_question_a_block_would()
print("PASSED", flush=True)
