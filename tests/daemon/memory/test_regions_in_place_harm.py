"""Goal: what goes wrong while blocks are sealed in place costs nobody a byte, and what was sealed is told.

Method: a daemon that is stopped in between, a copy that fails, a key that is sealed twice, a process that is
forked while a thread has the region's lock; Python and C.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

import kvclient
from kvclient.errors import InvalidArgument
from tests.conformance.c_region import CRegionClient
from tests.conftest import ROOT
from tests.daemon.memory import test_regions_pieces as pieces
from tests.daemon.memory.test_regions import LAYERS, held, key, noise, told
from tests.daemon.memory.test_regions_in_place import BLOB, SLOT, TOKENS


@pytest.fixture
def client(daemon):
    with daemon(memory="64MiB").connect() as opened:
        yield opened


@pytest.mark.parametrize("door", ["python", "c"])
def test_a_daemon_that_does_not_answer_costs_no_other_client_a_byte(daemon, wait_until, door):
    """It seals the block once it goes on; the owner has heard nothing of it, nor of the part behind it."""
    kvstored = daemon(memory="8MiB")
    other = kvstored.connect()
    layout = other.register_layout(BLOB)
    with contextlib.ExitStack() as end:
        python = door == "python"
        owner = kvstored.connect(timeout_s=0.5) if python else CRegionClient(str(kvstored.dir), timeout_s=0.5)
        end.enter_context(owner)
        assert owner.register_layout(BLOB) == layout
        region = end.enter_context(owner.register_region(7 << 20))
        region.array[:] = 5
        end.callback(os.kill, kvstored.pid, signal.SIGCONT)
        os.kill(kvstored.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, kvstored.pid, os.WSTOPPED)  # all its threads have stopped
        if python:
            place = region.buffers_at(layout, [2 * SLOT])
            (answer,) = region.register([key(1)], layout, place, in_place=True)
            assert (answer.word, answer.in_place) == ("lost", True)
            assert region.is_sealed(2 * SLOT, 1)
        else:
            assert region.seal([key(1)], layout, [2 * SLOT]) == ["lost"]
        os.kill(kvstored.pid, signal.SIGCONT)
        wait_until(lambda: list(other.lookup([key(1)]).states) == [2], "the daemon goes on and seals it")
        owner.stats()  # attaches anew
        names = [key(100 + i) for i in range(400)]
        with other.create(names, layout) as writer:
            mine = [names[i] for i in writer.granted]
            for i in writer.granted:
                for layer in range(LAYERS):
                    writer[i].layer(layer)[...] = 1
            writer.seal()
        assert mine
        region.array[: 2 * SLOT] = region.array[3 * SLOT :] = 0xAB  # its allocator goes on
        for name in mine:
            with other.get([name]) as blocks:  # as far as it was not evicted
                assert blocks[0] is None or all((blocks[0].layer(i) == 1).all() for i in range(LAYERS))
        assert region.give_back([key(1)]) == ["gone"]


def test_what_was_sealed_in_place_is_told_though_the_copy_fails(client, monkeypatch):
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        region.array[:] = noise(10, region.length)
        place = region.buffers_at(layout, [0, SLOT])
        place[1, ..., 0] += 64  # the second cannot be sealed where it lies

        def away(*_args, **_more):
            raise kvclient.Unavailable("no daemon")

        with monkeypatch.context() as patched:
            patched.setattr(type(client), "create", away)
            answers = region.register([key(1), key(2)], layout, place, in_place=True)
            assert [(a.word, a.in_place) for a in answers] == [("sealed", True), ("unavailable", False)]
            with pytest.raises(kvclient.Unavailable):
                region.register([key(2)], layout, place[1:], in_place=True)
        assert region.give_back([key(1)]) == ["taken"]


def test_a_key_has_one_place_until_it_was_given_back(client):
    """A block is deleted, and its owner computes it again elsewhere: the first memory is not lost."""
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        region.array[:] = noise(11, region.length)
        place = region.buffers_at(layout, [0, SLOT])
        expected = told(region, place[1])
        assert region.register([key(1)], layout, place[:1], in_place=True)[0].in_place
        assert client.delete([key(1)]) == 1
        (answer,) = region.register([key(1)], layout, place[1:], in_place=True)
        assert (answer.word, answer.in_place) == ("sealed", False)
        assert "its key" in answer.reason
        assert held(client, key(1)) == expected
        assert region.give_back([key(1)]) == ["taken"]
        assert not region.is_sealed(0, region.length)
        assert held(client, key(1)) == expected  # the copy is another block
        assert client.stats()["pins"] == 0


def test_a_child_ends_though_a_thread_of_its_parent_was_sealing(daemon, wait_until):
    """The lock of the region is held at the fork by a thread that the child does not have."""
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect(timeout_s=60)
    layout = client.register_layout(BLOB)
    region = client.register_region(4 * SLOT)
    place = region.buffers_at(layout, [0])
    region.array[:] = 7
    os.kill(kvstored.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, kvstored.pid, os.WSTOPPED)
    thread = threading.Thread(target=region._native.seal, args=(layout, [key(1)], [0], [TOKENS], [[]], 35, 0))
    thread.start()
    try:
        wait_until(lambda: region.array[SLOT - 1] == 0, "the thread has the lock and wrote behind the layers")
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            region._native.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        os.kill(kvstored.pid, signal.SIGCONT)
        thread.join()
    assert held(client, key(1)) == told(region, place[0])
    region.close()


WITHOUT_ROOM = """
import resource, sys, kvclient
from pathlib import Path
client = kvclient.connect(sys.argv[1])
block = client.get([bytes.fromhex(sys.argv[2])])[0]
used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (int(used.split()[1]) << 10, -1))
try:
    memoryview(block)
except MemoryError:
    print("MemoryError")
"""


def test_where_there_is_no_room_to_map_it_says_so(daemon):
    started = daemon("128MiB", ("--max-blocks", "32768"))
    client = started.connect()
    layout = client.register_layout(pieces.LARGE)
    with client.register_region(600 * pieces.LARGE_PIECE) as region:
        place = pieces.apart([5, 3, 20, 11, 40, 41]) // pieces.PAGE * pieces.LARGE_PIECE
        assert pieces.seal("python", region, [key(1)], layout, place) == [True]
        program = [sys.executable, "-c", WITHOUT_ROOM, str(started.dir), key(1).hex()]
        said = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        assert (said.stdout, said.returncode) == ("MemoryError\n", 0), said.stderr


def test_a_refused_call_costs_no_memory(daemon):
    client = daemon("64MiB").connect()
    layout = client.register_layout(pieces.BLOB)
    with client.register_region(64 * pieces.PAGE) as region:
        flat = [int(word) for word in pieces.apart([5, 3, 20, 11, 40, 41]).reshape(-1)]
        used = []
        for _ in range(20):
            with pytest.raises(InvalidArgument, match="priority"):
                region._native.seal(layout, [key(1)], [0], [pieces.TOKENS], [flat], 200, 0)
            used.append(client.stats()["used_bytes"])
        assert len(set(used)) == 1
