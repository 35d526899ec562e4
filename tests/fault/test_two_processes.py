"""Goal: what one process seals another finds at once, always (peers' case 11: 10,000 of 10,000), two
writers of one key do the work once, and waiting crosses processes. Method: a forked child and this process
on one real daemon, handing keys over a pipe.
"""

import os
import socket
import threading

import numpy as np

from kvclient.testing.conformance.case import SMALL, check, fill, new_keys, pattern
from tests.fault.children import Steps

ROUNDS = 10_000
LAYERS = SMALL.num_layers


def test_ten_thousand_reads_of_another_process_writes(daemon, fork, layouts):
    started = daemon(memory="16MiB")
    client = started.connect()
    small, _ = layouts(client)
    ours, theirs = socket.socketpair()

    def work(_steps: Steps) -> None:
        ours.close()
        reader = started.connect()
        while key := theirs.recv(32):
            with reader.get([key]) as blocks:
                found = (
                    reader.lookup([key]).resident == 1
                    and blocks[0] is not None
                    and blocks[0].layer(0)[0, 0, 0, 0]
                )
                theirs.sendall(b"%d" % (found == (key[0] & 0x7F)))

    child = fork(work)
    theirs.close()
    missed = 0
    for _ in range(ROUNDS):
        key = os.urandom(32)
        with client.create([key], small, token_counts=[1]) as writer:
            writer[0].layer(0)[...] = key[0] & 0x7F
            writer.seal(zero_rest=True)
        ours.sendall(key)
        missed += ours.recv(1) != b"1"
        client.delete([key])
    ours.close()
    child.finish()
    assert missed == 0, f"{missed} of {ROUNDS} look-ups right after a seal missed"


def test_two_writers_of_one_key_do_the_work_once(daemon, fork, layouts):
    started = daemon(memory="16MiB")
    client = started.connect()
    layouts(client)
    batches = [new_keys(4) for _ in range(30)]

    def work(steps: Steps) -> None:
        client = started.connect()
        layout = client.register_layout(SMALL.to_blob())
        granted = 0
        for number, keys in enumerate(batches):
            steps.reached(f"batch {number}")
            with client.create(keys, layout) as writer:
                granted += len(writer.granted)
                for index in writer.granted:
                    fill(writer[index])
                writer.seal()
                writer.wait_pending(timeout_s=10.0)
                assert set(writer.results) <= {"granted", "exists"}
            with client.get(keys) as blocks:
                for block in blocks:
                    check(block)
        steps.reached(f"granted {granted}")

    children = [fork(work), fork(work)]
    for number in range(len(batches)):
        for child in children:
            assert child.next_step() == f"batch {number}"
        for child in children:
            child.go_on()
    granted = [int(child.next_step().split()[1]) for child in children]
    for child in children:
        child.go_on()
        child.finish()
    assert sum(granted) == sum(map(len, batches)), f"granted {granted}"


def test_a_follower_in_another_process_reads_layer_by_layer(daemon, fork, layouts):
    started = daemon(memory="16MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(3)
    writer = client.create(keys, small)

    def work(steps: Steps) -> None:
        with started.connect().get(keys, follow=True) as blocks:
            assert blocks.hits == 3
            steps.reached("following")
            for layer in range(LAYERS):
                blocks.wait_layer(layer, timeout_s=10.0)
                for block in blocks:
                    assert np.array_equal(block.layer(layer), pattern(block.key, layer, (2, 2, 16, 8)))
                steps.tell(f"read {layer}")

    child = fork(work)
    child.run_to("following")
    child.go_on()
    for layer in range(LAYERS):
        for index in range(3):
            target = writer[index].layer(layer)
            target[...] = pattern(keys[index], layer, target.shape)
            writer[index].mark_layer(layer)
        assert child.next_step() == f"read {layer}"
    writer.abort()
    child.finish()


def test_wait_pending_crosses_processes(daemon, fork, layouts):
    started = daemon(memory="16MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(2)

    def work(steps: Steps) -> None:
        client = started.connect()
        writer = client.create(keys, small)
        for index in range(2):
            fill(writer[index])
        steps.reached("written")
        writer.seal(0)
        writer.abort(1)
        steps.reached("ended")

    child = fork(work)
    child.run_to("written")
    with client.create(keys, small) as writer:
        assert writer.results == ["pending", "pending"]
        waiting = threading.Thread(target=lambda: writer.wait_pending(timeout_s=10.0), daemon=True)
        waiting.start()
        child.go_on()
        waiting.join(15)
        assert not waiting.is_alive()
        assert writer.results == ["exists", "granted"]
        fill(writer[1])
    child.run_to("ended")
    child.go_on()
    child.finish()
    with client.get(keys) as blocks:
        for block in blocks:
            check(block)
