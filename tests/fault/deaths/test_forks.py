"""Goal: a client is usable after every kind of fork, and no child can harm its parent's pins, session or
blocks (docs/design.md §6): a handle inherited through fork does nothing in the child; the child attaches
anew; memory a child can still write is not handed out. Method: os.fork, multiprocessing with its three
start methods, a program that is started, and forks while other threads are inside the library; the daemon is
real.
"""

import gc
import multiprocessing
import os
import select
import subprocess
import sys
import threading

import pytest

import kvclient
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from tests.fault.children import Steps, eventually


def put(client, keys, layout_id, geometry=SMALL):
    with client.create(keys, layout_id) as writer:
        for index in writer.granted:
            fill(writer[index], geometry.num_layers)


@pytest.fixture
def started(daemon):
    return daemon(memory="8MiB")


@pytest.fixture
def client(started):
    with started.connect(timeout_s=60) as client:  # a busy machine is no lock that nobody opens
        yield client


def test_an_inherited_client_attaches_anew(started, client, layouts, fork, nothing_leaks):
    small, _ = layouts(client)
    keys, more = new_keys(3), new_keys(3)
    put(client, keys, small)
    mine = client.session

    def work(steps: Steps) -> None:
        with client.get(keys) as blocks:
            for block in blocks:
                check(block)
        put(client, more, small)
        assert client.lookup(more).resident == 3
        assert client.session != mine
        steps.reached("working")
        client.close()

    child = fork(work)
    child.run_to("working")
    assert client.stats()["sessions"] == 2
    assert client.session == mine
    assert client.lookup(more).resident == 3
    child.go_on()
    child.finish()
    eventually(lambda: client.stats()["sessions"] == 1, "the child's session ended")
    nothing_leaks(started, client, [*keys, *more])


def test_inherited_pins_are_the_parents(started, client, layouts, fork, nothing_leaks):
    small, _ = layouts(client)
    keys = new_keys(4)
    put(client, keys, small)
    blocks = client.get(keys)
    views = [blocks[2].layer(0), blocks[3].view]

    def work(steps: Steps) -> None:
        blocks.release()
        blocks.release()
        views.clear()  # the last to hold their pins
        gc.collect()
        steps.reached("released")
        client.close()
        gc.collect()

    child = fork(work)
    child.run_to("released")
    assert client.stats()["pins"] == 4, "the child cleared its parent's pins"
    child.go_on()
    child.finish()
    assert client.stats()["pins"] == 4
    assert client.delete(keys) == 4
    put(client, new_keys(40), small)
    for block in blocks:
        check(block)
    del block
    views.clear()
    blocks.release()
    client.close()
    with started.connect() as other:
        eventually(lambda: other.stats()["pins"] == 0, "the parent's own release counts")


def test_inherited_views_stay_readable_while_the_child_lives(started, client, layouts, fork, nothing_leaks):
    """A reader forks and dies: its pins stay as long as its child has the page, and so do the bytes."""
    _, big = layouts(client)
    keys = new_keys(1)
    put(client, keys, big, BIG)

    def parent(steps: Steps) -> None:
        inherited = started.connect()
        blocks = inherited.get(keys)
        pid = os.fork()
        if pid == 0:
            steps.reached("child reads")
            check(blocks[0], BIG.num_layers)
            steps.reached("child read")
            os._exit(0)
        os.waitpid(pid, 0)

    child = fork(parent)
    child.run_to("child reads")
    os.kill(child.pid, 9)  # the parent only; its child has the connection to us as well
    assert client.delete(keys) == 1
    for _ in range(2):
        churn = new_keys(8)
        with client.create(churn, big) as writer:
            for index in writer.granted:
                writer[index].view[:] = b"\xee" * len(writer[index].view)
        client.delete(churn)
    child.go_on()
    assert child.next_step() == "child read", "bytes changed under the child"
    child.go_on()
    child.wait()
    nothing_leaks(started, client, keys)


def test_memory_a_child_can_write_is_not_handed_out(started, client, layouts, fork, nothing_leaks):
    """Invariant 11: a writer forks and dies. Its child has the mapping, so the extents wait for it."""
    _, big = layouts(client)
    lost, mine = new_keys(2), new_keys(8)

    def parent(steps: Steps) -> None:
        inherited = started.connect()
        writer = inherited.create(lost, big)
        views = [writer[index].view for index in range(2)]
        pid = os.fork()
        if pid == 0:
            steps.reached("child is there")
            for view in views:
                view[:] = b"\xdd" * len(view)
            steps.reached("child wrote")
            os._exit(0)
        os.waitpid(pid, 0)

    child = fork(parent)
    child.run_to("child is there")
    os.kill(child.pid, 9)
    eventually(
        lambda: list(client.lookup(lost).states) == [0, 0], "the dead writer's blocks are found by nobody"
    )
    with client.create(mine, big) as writer:
        assert 0 < len(writer.granted) < len(mine), "the extents of the dead writer were handed out"
        for index in writer.granted:
            fill(writer[index], BIG.num_layers)
    child.go_on()
    assert child.next_step() == "child wrote"
    with client.get(mine) as blocks:
        assert blocks.hits == len(writer.granted)
        for index in writer.granted:
            check(blocks[index], BIG.num_layers)
    del blocks, writer
    child.go_on()
    child.wait()
    nothing_leaks(started, client, [*lost, *mine])


def test_a_program_it_started_keeps_nothing(started, client, layouts, fork, nothing_leaks):
    """exec drops mappings and descriptors: what a client has started, and outlives it, holds nothing back."""
    _, big = layouts(client)
    lost, kept = new_keys(2), new_keys(1)
    put(client, kept, big, BIG)
    until, end = os.pipe()

    def parent(steps: Steps) -> None:
        os.close(end)
        inherited = started.connect()
        blocks = inherited.get(kept)
        writer = inherited.create(lost, big)
        program = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=until)
        steps.reached(f"started {program.pid}")
        assert blocks and writer

    child = fork(parent)
    program = int(child.next_step().removeprefix("started "))
    watched = os.pidfd_open(program)
    child.kill()
    assert client.delete(kept) == 1
    nothing_leaks(started, client, [*kept, *lost])
    assert not select.select([watched], [], [], 0)[0], "the program still runs"
    for fd in (end, until, watched):
        os.close(fd)


def test_a_writers_child_cannot_seal_for_it(started, client, layouts, fork):
    small, _ = layouts(client)
    keys = new_keys(1)
    writer = client.create(keys, small)

    def work(_steps: Steps) -> None:
        with pytest.raises(kvclient.KVClientError):
            writer.seal()

    fork(work).finish()
    assert list(client.lookup(keys).states) == [1]
    fill(writer[0])
    writer.seal()
    with client.get(keys) as blocks:
        check(blocks[0])


def test_a_child_that_exits_does_not_end_its_parents_session(started, client, layouts, fork):
    small, _ = layouts(client)
    keys = new_keys(2)
    writer = client.create(keys, small)
    for _ in range(3):
        fork(lambda _steps: client.stats()).finish()
    for index in range(2):
        fill(writer[index])
    writer.seal()
    assert client.lookup(keys).resident == 2


def in_a_pool(directory: str, keys: list[bytes]) -> int:
    with kvclient.connect(dir=directory) as client, client.get(keys) as blocks:
        for block in blocks:
            check(block)
        return blocks.hits


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(started, client, layouts, method, nothing_leaks):
    small, _ = layouts(client)
    keys = new_keys(3)
    put(client, keys, small)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        jobs = [pool.apply_async(in_a_pool, (str(started.dir), keys)) for _ in range(4)]
        assert [job.get(60) for job in jobs] == [3] * 4
        pool.close()
        pool.join()
    nothing_leaks(started, client, keys)


def test_forks_while_threads_are_inside(started, client, layouts, fork, nothing_leaks):
    """A lock that another thread holds at the fork stays locked in the child for ever: nothing of the
    library may wait for one."""
    small, _ = layouts(client)
    keys = new_keys(12)
    put(client, keys, small)
    stop = threading.Event()
    failures = []

    def busy(part: int) -> None:
        part_keys = keys[4 * part : 4 * part + 4]
        try:
            while not stop.is_set():
                with client.get(keys) as blocks:
                    for block in blocks:
                        if block is not None:
                            check(block)
                del block, blocks
                client.delete(part_keys)
                put(client, part_keys, small)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=busy, args=(part,), daemon=True) for part in range(3)]
    for thread in threads:
        thread.start()

    def work(_steps: Steps) -> None:
        more = new_keys(2)
        put(client, more, small)
        with client.get(more) as blocks:
            assert blocks.hits == 2
        assert client.delete(more) == 2

    try:
        for _ in range(25):
            fork(work).finish()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures[0]
    nothing_leaks(started, client, keys)


def test_a_fork_from_a_thread(started, client, layouts, fork):
    small, _ = layouts(client)
    keys = new_keys(2)
    outcome = []

    def from_thread() -> None:
        child = fork(lambda _steps: put(client, keys, small))
        child.finish()
        outcome.append(child.status)

    thread = threading.Thread(target=from_thread)
    thread.start()
    thread.join(30)
    assert outcome == [0]
    assert client.lookup(keys).resident == 2


def test_a_grandchild(started, client, layouts, fork):
    small, _ = layouts(client)
    keys = new_keys(2)

    def work(_steps: Steps) -> None:
        assert client.lookup(keys).resident == 0
        pid = os.fork()
        if pid == 0:
            put(client, keys, small)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.lookup(keys).resident == 2

    fork(work).finish()
    assert client.lookup(keys).resident == 2
