"""Goal: a client that dies at any step of writing or reading leaves nothing behind and disturbs nobody
(peers' cases 1 and 12, invariants 1, 3, 5). Method: children announce each step through a pipe and are
killed there by SIGKILL while another client watches; then many of them at random moments under load.
"""

import os
import random
import signal

import pytest

from kvclient.errors import BlockLost, DeadlineExceeded
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys, pattern
from tests.fault.children import Steps, eventually

LAYERS = SMALL.num_layers
PUT_STEPS = [
    "attached",
    "created",
    "half",
    *(f"layer {i}" for i in range(LAYERS)),
    "filled",
    "sealed one",
    "sealed",
]
GET_STEPS = ["looked up", "pinned", "viewed", "released", "pinned again"]


def put_in_steps(daemon, keys):
    """A child's work: three blocks, one step after another."""

    def work(steps: Steps) -> None:
        client = daemon.connect()
        layout = client.register_layout(SMALL.to_blob())
        steps.reached("attached")
        writer = client.create(keys, layout)
        assert writer.results == ["granted"] * len(keys), writer.results
        steps.reached("created")
        writer[0].layer(0)[:1] = pattern(keys[0], 0, (2, 2, 16, 8))[:1]
        steps.reached("half")
        for layer in range(LAYERS):
            for index in range(len(keys)):
                target = writer[index].layer(layer)
                target[...] = pattern(keys[index], layer, target.shape)
                writer[index].mark_layer(layer)
            steps.reached(f"layer {layer}")
        for index in range(len(keys)):
            fill(writer[index])
        steps.reached("filled")
        writer.seal(0)
        steps.reached("sealed one")
        writer.seal()
        steps.reached("sealed")

    return work


@pytest.mark.parametrize("step", PUT_STEPS)
def test_a_writer_dies(daemon, fork, nothing_leaks, step):
    started = daemon(memory="8MiB")
    watcher = started.connect()
    keys = new_keys(3)
    child = fork(put_in_steps(started, keys))
    child.run_to(step)
    marked = max(
        (i + 1 for i in range(LAYERS) if PUT_STEPS.index(step) >= PUT_STEPS.index(f"layer {i}")), default=0
    )
    followed = watcher.get(keys, follow=True)
    expected_hits = 3 if PUT_STEPS.index(step) >= PUT_STEPS.index("created") else 0
    assert followed.hits == expected_hits
    child.kill()

    sealed = {"sealed one": 1, "sealed": 3}.get(step, 0)
    eventually(
        lambda: list(watcher.lookup(keys).states) == [2] * sealed + [0] * (3 - sealed),
        "only what was sealed is found",
    )
    block = None
    for index in range(expected_hits):
        block = followed[index]
        if index < sealed:
            block.wait_layer(LAYERS - 1, timeout_s=20.0)
            check(block)
            continue
        if marked < LAYERS:
            with pytest.raises(BlockLost):
                block.wait_layer(LAYERS - 1, timeout_s=20.0)
    followed.release()
    with watcher.get(keys) as blocks:
        assert blocks.hits == sealed
        for index in range(sealed):
            check(blocks[index])
    del block, blocks, followed
    layout = watcher.register_layout(SMALL.to_blob())
    with watcher.create(keys, layout) as writer:
        assert writer.results == ["exists"] * sealed + ["granted"] * (3 - sealed)
        for index in writer.granted:
            fill(writer[index])
    with watcher.get(keys) as blocks:
        for index in range(3):
            check(blocks[index])
    del blocks
    nothing_leaks(started, watcher, keys)


@pytest.mark.parametrize("step", GET_STEPS)
def test_a_reader_dies(daemon, fork, nothing_leaks, layouts, step):
    started = daemon(memory="8MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(3)
    with client.create(keys, small) as writer:
        for index in range(3):
            fill(writer[index])

    def read(steps: Steps) -> None:
        reader = started.connect()
        assert reader.lookup(keys).resident == 3
        steps.reached("looked up")
        blocks = reader.get(keys)
        steps.reached("pinned")
        views = [block.view for block in blocks]
        steps.reached("viewed")
        del views
        blocks.release()
        steps.reached("released")
        held = reader.get(keys)
        steps.reached("pinned again")
        held.release()

    child = fork(read)
    child.run_to(step)
    held = 0 if step in ("looked up", "released") else 3
    assert client.stats()["pins"] == held
    assert client.delete(keys) == 3
    if held:
        assert client.stats()["used_bytes"] > 0, "pinned memory is not free"
    child.kill()
    nothing_leaks(started, client, keys)


def test_a_waiting_writer_is_granted_what_a_dead_one_left(daemon, fork, layouts):
    started = daemon(memory="8MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(3)
    child = fork(put_in_steps(started, keys))
    child.run_to("sealed one")
    with client.create(keys, small) as writer:
        assert writer.results == ["exists", "pending", "pending"]
        child.kill()
        writer.wait_pending(timeout_s=10.0)
        assert writer.results == ["exists", "granted", "granted"]
        for index in writer.granted:
            fill(writer[index])
    with client.get(keys) as blocks:
        for index in range(3):
            check(blocks[index])


def test_a_frozen_client_holds_nobody_up(daemon, fork, nothing_leaks, layouts):
    """Invariant 9: stopped between two layers, and while it holds pins."""
    started = daemon(memory="8MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys, more = new_keys(3), new_keys(20)
    child = fork(put_in_steps(started, keys))
    child.run_to("layer 1")
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # all its threads have stopped
    with client.create([*keys, *more], small) as writer:
        assert writer.results == ["pending"] * 3 + ["granted"] * 20
        for index in writer.granted:
            fill(writer[index])
        assert not writer.wait_pending(timeout_s=0.05)
        with client.get(keys, follow=True) as blocks:
            blocks.wait_layer(1, timeout_s=20.0)
            with pytest.raises(DeadlineExceeded):
                blocks.wait_layer(2, timeout_s=0.05)
        del blocks
    assert client.lookup(more).resident == 20
    os.kill(child.pid, signal.SIGCONT)
    child.go_on()
    child.run_to("sealed")
    with client.get([*keys, *more]) as blocks:
        for block in blocks:
            check(block)
    del block, blocks, writer
    child.go_on()
    child.finish()
    nothing_leaks(started, client, [*keys, *more])


# A few keys that everybody fights for, and more cold ones than the pool of 8 MiB holds.
HOT, COLD = 40, 1500


def under_load(daemon, keys, seed):
    """A child's work: random calls on shared keys, checking every byte, until it is killed."""

    def work(steps: Steps) -> None:
        choose = random.Random(seed)
        client = daemon.connect()
        layout = client.register_layout(SMALL.to_blob())
        steps.tell("attached")
        while True:
            chosen = choose.sample(keys[:HOT], 3) + choose.sample(keys[HOT:], 3)
            what = choose.randrange(4)
            if what == 0:
                with client.create(chosen, layout) as writer:
                    for index in writer.granted:
                        fill(writer[index])
            elif what == 1:
                with client.get(chosen) as blocks:
                    for block in blocks:
                        if block is not None:
                            check(block)
            elif what == 2:
                follow(client, chosen)
            else:
                client.delete(chosen[:2])
            steps.note("again")

    return work


def follow(client, keys) -> None:
    with client.get(keys, follow=True) as blocks:
        for block in blocks:
            if block is None:
                continue
            try:
                block.wait_layer(LAYERS - 1, timeout_s=10.0)
            except BlockLost:
                continue
            check(block)


def kill_under_load(started, fork, nothing_leaks, rounds: int, seed: int) -> None:
    choose = random.Random(seed)
    keys = new_keys(HOT + COLD)
    watcher = started.connect()
    children = [fork(under_load(started, keys, choose.random())) for _ in range(3)]
    for round_ in range(rounds):
        victim = choose.randrange(len(children))
        for _ in range(choose.randrange(1, 12)):
            assert children[victim].next_step(), f"round {round_}, seed {seed}: a child failed by itself"
        children[victim].kill()
        children[victim] = fork(under_load(started, keys, choose.random()))
        with watcher.get(keys[: HOT + 50]) as blocks:
            for block in blocks:
                if block is not None:
                    check(block)
        del block, blocks
        if round_ % 10 == 9:
            watcher.stats()
    assert watcher.stats()["evictions"] > 0 or rounds < 100, "there was no pressure"
    for child in children:
        assert child.next_step(), f"seed {seed}: a child failed by itself"
        child.kill()
    nothing_leaks(started, watcher, keys)


def test_clients_die_under_load(daemon, fork, nothing_leaks):
    kill_under_load(daemon(memory="8MiB"), fork, nothing_leaks, rounds=40, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_clients_die_under_load_for_long(daemon, fork, nothing_leaks, seed):
    kill_under_load(daemon(memory="8MiB"), fork, nothing_leaks, rounds=1000, seed=seed)
