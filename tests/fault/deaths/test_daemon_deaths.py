"""Goal: a killed daemon costs nothing but time: sealed blocks, pins and views survive it, no byte changes
under a reader, a writer that goes on writing over the restart corrupts nothing, and every client carries on
(peers' cases 14 and 21, invariants 1, 5, 11). Method: SIGKILL to a real daemon at each step of put and get,
then another one on the same directory, with clients in this process and in children; then rounds of it
under load.
"""

import gc
import random

import pytest

from kvclient.errors import BlockLost, KVClientError, Unavailable
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from tests.fault.children import Steps

LOST = (BlockLost, Unavailable)


def put(client, keys, layout_id, geometry=SMALL):
    with client.create(keys, layout_id) as writer:
        assert writer.results == ["granted"] * len(keys), writer.results
        for index in writer.granted:
            fill(writer[index], geometry.num_layers)


def test_sealed_blocks_survive_and_clients_carry_on(daemon, nothing_leaks, layouts):
    started = daemon(memory="16MiB")
    client, other = started.connect(), started.connect()
    small, _ = layouts(client)
    keys = new_keys(50)
    put(client, keys, small)
    before = client.stats()
    for kill in (True, False, True):
        started.restart(kill=kill)
        assert client.lookup(keys).resident == 50
        with other.get(keys) as blocks:
            for block in blocks:
                check(block)
        del block, blocks
        more = new_keys(2)
        put(other, more, small)
        assert client.delete(more) == 2
        after = client.stats()
        assert (after["blocks"], after["used_bytes"]) == (before["blocks"], before["used_bytes"])
    nothing_leaks(started, client, keys)


def test_while_the_daemon_is_down_reading_goes_on(daemon, layouts):
    started = daemon(memory="16MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(5)
    put(client, keys, small)
    held = client.get(keys)
    views = [block.view for block in held]
    started.kill()
    assert client.lookup([*keys, *new_keys(1)]).resident == 5
    with client.get(keys) as blocks:
        for block in blocks:
            check(block)
    for block in held:
        check(block)
    for call in (
        lambda: client.create(new_keys(1), small),
        lambda: client.delete(keys),
        client.stats,
        lambda: started.connect(),
    ):
        with pytest.raises(Unavailable):
            call()
    started.start()
    assert client.delete(keys) == 5
    assert [len(view) for view in views] == [len(views[0])] * 5
    for block in held:
        check(block)


def test_pins_of_the_living_hold_over_a_restart(daemon, nothing_leaks, layouts):
    started = daemon(memory="8MiB")
    client = started.connect()
    small, big = layouts(client)
    keys = new_keys(3)
    put(client, keys, big, BIG)
    held = client.get(keys)
    started.restart(kill=True)
    other = started.connect()
    assert other.stats()["pins"] == 3
    assert other.delete(keys) == 3
    for _ in range(3):  # everything that can be had is written over and over
        churn = new_keys(8)
        with other.create(churn, big) as writer:
            for index in writer.granted:
                writer[index].view[:] = b"\xee" * len(writer[index].view)
        other.delete(churn)
    for block in held:
        check(block, BIG.num_layers)
    del block
    held.release()
    del held
    nothing_leaks(started, other, keys)
    put(client, keys, small)
    nothing_leaks(started, client, keys)


WRITE_STEPS = ["created", "half", "marked", "filled", "sealed one"]


@pytest.mark.parametrize("kill_at", WRITE_STEPS)
def test_a_writer_goes_on_over_the_restart(daemon, fork, nothing_leaks, layouts, kill_at):
    """It fills its memory before and after; what it had sealed is there, the rest hurts nobody."""
    started = daemon(memory="8MiB")
    keys = new_keys(3)

    def work(steps: Steps) -> None:
        client = started.connect()
        layout = client.register_layout(BIG.to_blob())
        writer = client.create(keys, layout)
        grants = [writer[index] for index in range(3)]
        views = [grant.view for grant in grants]
        steps.reached("created")
        views[0][:1000] = b"x" * 1000
        steps.reached("half")
        fill(grants[0], BIG.num_layers)
        carry_on(grants[0].mark_layer, 0)
        steps.reached("marked")
        for index in range(3):
            carry_on(fill, grants[index], BIG.num_layers)
        steps.reached("filled")
        carry_on(writer.seal, 0)
        steps.reached("sealed one")
        for view in views[1:]:
            view[:] = b"\xdd" * len(view)
        steps.reached("wrote on")
        carry_on(writer.seal)
        fresh = new_keys(1)
        put(client, fresh, layout, BIG)
        with client.get(fresh) as blocks:
            check(blocks[0], BIG.num_layers)
        assert client.delete(fresh) == 1
        steps.reached("carried on")

    child = fork(work)
    child.run_to(kill_at)
    started.restart(kill=True)
    other = started.connect()
    sealed = 1 if kill_at == "sealed one" else 0
    assert list(other.lookup(keys).states) == [2] * sealed + [0] * (3 - sealed)
    _, big = layouts(other)
    survivor = other.get(keys[:sealed])  # pinned, or the next line might evict it
    mine = new_keys(8)
    granted = other.create(mine, big)
    for index in granted.granted:
        fill(granted[index], BIG.num_layers)
    assert granted.granted, "the memory of the lost writer is not all there is"
    granted.seal()
    mine = [mine[index] for index in granted.granted]
    child.go_on()
    child.run_to("wrote on")
    with other.get(mine) as blocks:
        for block in blocks:
            check(block, BIG.num_layers)
    del block, blocks, granted
    for block in survivor:
        check(block, BIG.num_layers)
        del block
    survivor.release()
    other.delete(mine)
    child.go_on()
    child.run_to("carried on")
    child.kill()
    nothing_leaks(started, other, [*keys, *mine])


def carry_on(call, *args) -> None:
    """A call whose block may have been lost with the daemon."""
    try:
        call(*args)
    except (BlockLost, Unavailable, KVClientError):
        pass


def test_a_follower_learns_of_the_restart(daemon, layouts):
    started = daemon(memory="8MiB")
    writer_client, follower = started.connect(), started.connect()
    small, _ = layouts(writer_client)
    keys = new_keys(1)
    writer = writer_client.create(keys, small)
    writer[0].layer(0)[...] = 1
    writer[0].mark_layer(0)
    blocks = follower.get(keys, follow=True)
    blocks[0].wait_layer(0, timeout_s=20.0)
    started.restart(kill=True)
    with pytest.raises(LOST):
        blocks[0].wait_layer(1, timeout_s=10.0)
    blocks.release()
    with pytest.raises(LOST):
        writer.seal(zero_rest=True)


def load(started, keys, seed):
    """A child's work: puts and gets for ever; only the store being away or a block being lost is borne."""

    def work(steps: Steps) -> None:
        choose = random.Random(seed)
        client = started.connect()
        layout = client.register_layout(SMALL.to_blob())
        steps.tell("attached")
        while True:
            chosen = choose.sample(keys[:60], 4) + choose.sample(keys[60:], 4)
            try:
                if choose.randrange(2):
                    with client.create(chosen, layout) as writer:
                        for index in writer.granted:
                            fill(writer[index])
                else:
                    with client.get(chosen) as blocks:
                        for block in blocks:
                            if block is not None:
                                check(block)
                steps.note("worked")
            except LOST:
                steps.note("refused")

    return work


def kill_under_load(started, fork, nothing_leaks, rounds, seed) -> None:
    choose = random.Random(seed)
    keys = new_keys(1560)  # more than the pool holds
    kept = new_keys(5)
    watcher = started.connect()
    put(watcher, kept, watcher.register_layout(SMALL.to_blob()))
    held = watcher.get(kept)
    children = [fork(load(started, keys, choose.random())) for _ in range(2)]
    for child in children:
        assert child.next_step() == "attached"
    for round_ in range(rounds):
        for _ in range(choose.randrange(1, 20)):
            assert children[0].next_step(), f"round {round_}, seed {seed}: a child failed by itself"
        started.restart(kill=True)
        for block in held:
            check(block)
        for child in children:  # each carries on: it works again
            while (said := child.next_step()) != "worked":
                assert said, f"round {round_}, seed {seed}: a child failed by itself"
        if choose.randrange(3) == 0:
            children[1].kill()
            children[1] = fork(load(started, keys, choose.random()))
            assert children[1].next_step() == "attached"
    for child in children:
        child.kill()
    del block
    held.release()
    del held
    gc.collect()
    nothing_leaks(started, watcher, [*keys, *kept])


def test_daemons_die_under_load(daemon, fork, nothing_leaks):
    kill_under_load(daemon(memory="8MiB"), fork, nothing_leaks, rounds=8, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_daemons_die_under_load_for_long(daemon, fork, nothing_leaks, seed):
    kill_under_load(daemon(memory="8MiB"), fork, nothing_leaks, rounds=400, seed=seed)
