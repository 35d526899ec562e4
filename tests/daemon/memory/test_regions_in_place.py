"""Goal: a block that is sealed where it lies in a client's own memory is a block like any other, its memory
is nobody else's until it was given back, and then the allocator's again; the region loses no byte.

Method: Hypothesis against a model of the allocator; readers that hold on, deleters, an owner that is killed,
a daemon that restarts; each door to the store, the disk, Python and C.
"""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvclient
from tests.conformance.c_region import CRegionClient
from tests.conftest import ROOT
from tests.daemon.memory.test_regions import LAYERS, held, key, noise, told

TOKENS = 8
LAYOUT = kvclient.Layout(LAYERS, 2, 64, dtype="float16", block_tokens=TOKENS)  # a block of one to four pages
BLOB = LAYOUT.geometry.to_blob()
SLOT = LAYOUT.geometry.length(TOKENS)
PAGE = 4096


@pytest.fixture
def started(daemon, integrity):
    kvstored = daemon(memory="64MiB")
    yield kvstored
    integrity(kvstored)


@pytest.fixture
def client(started):
    with started.connect() as opened:
        yield opened


def test_a_block_is_sealed_where_it_lies(client):
    layout = client.register_layout(BLOB)
    with client.register_region(8 * SLOT) as region:
        assert region.block_bytes(layout) == SLOT
        region.array[:] = noise(1, region.length)
        place = region.buffers_at(layout, [2 * SLOT, 5 * SLOT], parts=2)
        expected = [told(region, block) for block in place]
        used = client.stats()["used_bytes"]
        answers = region.register([key(1), key(2)], layout, place, in_place=True)
        assert [(a.word, a.in_place) for a in answers] == [("sealed", True)] * 2
        assert client.stats()["used_bytes"] == used  # no byte more
        assert [held(client, key(k)) for k in (1, 2)] == expected
        with client.get([key(1)]) as blocks:  # its view is the region's own memory
            view = blocks[0].layer(1)
            at = int(place[0, 1, 0, 0, 0])
            region.array[at] ^= 255  # what a correct client does not do shows that nothing was copied
            assert view.tobytes()[0] == expected[0][1][0] ^ 255
            region.array[at] ^= 255
        assert (region.is_sealed(0, 2 * SLOT), region.is_sealed(3 * SLOT - 1, 1)) == (False, True)
        again = region.register([key(1), key(3)], layout, place, in_place=True)
        assert [(a.word, a.in_place) for a in again] == [("exists", False), ("sealed", False)]
        assert "sealed already" in again[1].reason  # another name for bytes that lie sealed: copied
        assert held(client, key(3)) == expected[1]


def test_what_lies_otherwise_is_copied_and_says_why(client):
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        region.array[:] = noise(2, region.length)
        other = client.register_region(SLOT)
        good = region.buffers_at(layout, [0])
        cases = [
            (good + np.array([64, 0]), "multiple of 4096"),
            (good + np.array([3584, 0]), "multiple of 4096"),
        ]
        swapped = good.copy()
        swapped[0, 1, 0, 0, 0], swapped[0, 1, 1, 0, 0] = good[0, 1, 1, 0, 0], good[0, 1, 0, 0, 0]
        cases.append((swapped, "in place it would lie at"))
        for number, (place, why) in enumerate(cases):
            expected = told(region, place[0])
            (answer,) = region.register([key(number)], layout, place, in_place=True)
            assert (answer.word, answer.in_place) == ("sealed", False)
            assert why in answer.reason
            assert held(client, key(number)) == expected
        first = region.register([key(9)], layout, good[:, :1], in_place=True)[0]
        assert (first.word, first.reason) == ("open", "only some of its layers were given")
        with pytest.raises(kvclient.InvalidArgument, match="tokens"):
            region.buffers_at(layout, [0], tokens=TOKENS + 1)
        with pytest.raises(kvclient.InvalidArgument, match="divided"):
            region.buffers_at(layout, [0], parts=5)
        other.close()
        with pytest.raises(kvclient.Closed):
            other.give_back([key(1)])


def test_memory_that_is_read_is_not_given_back(daemon):
    kvstored = daemon(memory="64MiB")
    client, reader = kvstored.connect(), kvstored.connect()
    layout = client.register_layout(BLOB)
    region = client.register_region(4 * SLOT)
    region.array[:] = noise(3, region.length)
    place = region.buffers_at(layout, [0])
    before = told(region, place[0])
    assert region.register([key(1)], layout, place, in_place=True)[0].in_place
    blocks = reader.get([key(1)])
    view = blocks[0].layer(0)
    assert region.give_back([key(1), key(2)]) == ["held", "gone"]
    assert list(client.lookup([key(1)]).states) == [0]  # nobody finds it any more
    assert region.is_sealed(0, 1)
    assert view.tobytes() == before[0]
    blocks.release()
    assert region.give_back([key(1)]) == ["held"]  # a view holds on
    del view
    assert region.give_back([key(1), key(1)]) == ["taken", "gone"]
    assert not region.is_sealed(0, region.length)
    region.array[:] = 7
    assert region.register([key(1)], layout, place, in_place=True)[0].in_place
    assert held(reader, key(1))[0][:4] == b"\7\7\7\7"


@pytest.mark.parametrize("door", ["python", "c"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_against_a_model_of_the_allocator(started, client, door, data):
    """Any blocks at any pages, sealed, held by others, deleted, given back: at each step the blocks have
    their bytes, the free memory has the allocator's, and the daemon's sums are the same."""
    layout, pages = client.register_layout(BLOB), 24
    with contextlib.ExitStack() as end:
        owner = client if door == "python" else end.enter_context(CRegionClient(str(started.dir)))
        assert owner.register_layout(BLOB) == layout
        region = end.enter_context(owner.register_region(pages * PAGE))
        region.array[:] = 0
        memory = np.zeros(region.length, np.uint8)  # what the allocator wrote where it may
        sealed, readers, hidden = {}, {}, set()
        for step in range(data.draw(st.integers(5, 25))):
            what = data.draw(st.sampled_from(["seal", "seal", "back", "read", "let go", "delete"]))
            if what == "seal":
                first, tokens = data.draw(st.integers(0, pages)), data.draw(st.integers(1, TOKENS))
                size = LAYOUT.geometry.length(tokens)
                at, name = first * PAGE, os.urandom(32)
                if at + size > region.length:
                    continue
                taken = any(at < e and s < at + size for s, e, _ in sealed.values())
                if not taken:
                    memory[at : at + size] = region.array[at : at + size] = noise(step, size)
                    layers = [
                        memory[at + LAYOUT.geometry.layer_offset(i, tokens) :][
                            : LAYOUT.geometry.layer_length(i, tokens)
                        ].tobytes()
                        for i in range(LAYERS)
                    ]
                if door == "python":
                    place = region.buffers_at(layout, [at], tokens)
                    (answer,) = region.register([name], layout, place, token_counts=[tokens], in_place=True)
                    assert (answer.word, answer.in_place) == ("sealed", not taken)
                else:
                    word = region.seal([name], layout, [at], [tokens])[0]
                    assert word == ("no_space" if taken else "sealed")
                if not taken:
                    sealed[name] = (at, at + size, layers)
            elif sealed:
                name = data.draw(st.sampled_from(list(sealed)))
                if what == "read" and name not in hidden:
                    readers.setdefault(name, []).append(client.get([name]))
                elif what == "let go" and readers.get(name):
                    readers[name].pop().release()
                elif what == "delete":
                    assert client.delete([name]) == (name not in hidden)
                    hidden.add(name)
                elif what == "back":
                    (word,) = region.give_back([name])
                    assert word == ("held" if readers.get(name) else "taken")
                    hidden.add(name)
                    if word == "taken":
                        start, stop, _ = sealed.pop(name)
                        memory[start:stop] = region.array[start:stop] = 0
            for name, (start, stop, layers) in sealed.items():
                assert (list(client.lookup([name]).states) == [0]) == (name in hidden)
                if name not in hidden:
                    assert held(client, name) == layers
                memory[start:stop] = region.array[start:stop]
            assert (region.array == memory).all()
        for blocks in [held for held_on in readers.values() for held in held_on]:
            blocks.release()
        assert set(region.give_back(list(sealed))) <= {"taken"}


OWNER = """
import sys, numpy as np, kvclient
from tests.daemon.memory.test_regions_in_place import BLOB, key, noise
client = kvclient.connect(sys.argv[1])
layout, region = client.register_layout(BLOB), client.register_region(8 << 20)
region.array[:] = noise(7, region.length)
place = region.buffers_at(layout, [1 << 20, 2 << 20, 0])
answers = region.register([key(1), key(2), key(3)], layout, place, in_place=True)
print([a.in_place for a in answers], flush=True)
for line in sys.stdin:
    print(region.give_back([key(int(line))]), flush=True)
"""


def test_an_owner_that_is_killed_leaves_what_is_sealed(daemon, wait_until):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(kvstored.dir)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "[True, True, True]\n"
    client.register_layout(BLOB)
    blocks = client.get([key(1)])
    view = blocks[0].layer(0)
    before = view.tobytes()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: client.stats()["used_bytes"] == 3 * SLOT, "all but the sealed blocks comes back")
    assert list(client.lookup([key(1), key(2), key(3)]).states) == [2, 2, 2]
    assert view.tobytes() == before  # the view outlives the owner
    blocks.release()
    assert client.delete([key(1), key(2)]) == 2  # each by itself
    del view
    wait_until(lambda: client.stats()["used_bytes"] == SLOT, "they are given back one by one")
    with client.register_region(40 << 20):  # and their memory can be had in one piece
        pass


@pytest.mark.parametrize("kill", [False, True])
def test_a_daemon_that_restarts_keeps_them(daemon, kill):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(8 * SLOT) as region:
        region.array[:] = noise(8, region.length)
        place = region.buffers_at(layout, [SLOT, 4 * SLOT])
        expected = [told(region, p) for p in place]
        assert all(a.in_place for a in region.register([key(1), key(2)], layout, place, in_place=True))
        kvstored.restart(kill=kill)
        assert [held(client, key(k)) for k in (1, 2)] == expected
        third = region.buffers_at(layout, [6 * SLOT])
        assert region.register([key(3)], layout, third, in_place=True)[0].in_place  # the region goes on
        assert region.give_back([key(1)]) == ["taken"]
        assert region.register([key(4)], layout, place[:1], in_place=True)[0].in_place
        assert held(client, key(4)) == expected[0]
    assert list(client.lookup([key(2), key(3), key(4)]).states) == [2, 2, 2]


def test_an_empty_pool_after_a_fresh_start(daemon):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    region = client.register_region(4 * SLOT)
    region.array[:] = noise(9, region.length)
    place = region.buffers_at(layout, [0])
    expected = told(region, place[0])
    assert region.register([key(1)], layout, place, in_place=True)[0].in_place
    kvstored.args.append("--fresh")
    kvstored.restart(kill=True)
    assert list(client.lookup([key(1)]).states) == [0]
    (answer,) = region.register([key(2)], layout, region.buffers_at(layout, [SLOT]), in_place=True)
    assert (answer.word, answer.in_place) == ("sealed", False)
    with pytest.raises(kvclient.Unavailable):
        region.give_back([key(1)])
    assert told(region, place[0]) == expected  # its memory is still there
    region.close()


def test_a_forked_child_changes_nothing(client):
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        place = region.buffers_at(layout, [0])
        assert region.register([key(1)], layout, place, in_place=True)[0].in_place
        child = os.fork()
        if child == 0:
            try:
                region.give_back([key(1)])
            except kvclient.InvalidArgument:
                region.close()
                os._exit(0)
            except BaseException:
                os._exit(3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(client.lookup([key(1)]).states) == [2]
        assert region.give_back([key(1)]) == ["taken"]


def test_every_door_and_the_disk_have_them(daemon, tmp_path, wait_until):
    from tests.conformance.c_door import CClient
    from tests.conformance.grpc_door import GrpcClient

    kvstored = daemon("64MiB", ("--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB"))
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        region.array[:] = noise(9, region.length)
        place = region.buffers_at(layout, [SLOT])
        before = told(region, place[0])
        assert region.register([key(1)], layout, place, in_place=True, priority=100)[0].in_place
        assert held(kvstored.connect(door="socket"), key(1)) == before
        for door in (CClient(str(kvstored.dir)), GrpcClient(str(kvstored.dir / "grpc.sock"))):
            assert list(door.lookup([key(1)]).states) == [2]
        wait_until(lambda: client.stats()["disk_files"] == 1, "it is written to disk")
        assert region.give_back([key(1)]) == ["taken"]
        region.array[:] = 0
        assert list(client.lookup([key(1)]).states) == [3]  # its file stays
        with client.get([key(1)], wait_s=10, verify=True) as blocks:
            assert [bytes(blocks[0].layer(i).tobytes()) for i in range(LAYERS)] == before


def test_drained_it_seals_nothing_more(daemon):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(4 * SLOT) as region:
        place = region.buffers_at(layout, [0, SLOT])
        assert region.register([key(1)], layout, place[:1], in_place=True)[0].in_place
        drain = [sys.executable, "-m", "kvstored", "drain", "--wait-s", "0", "--dir", str(kvstored.dir)]
        subprocess.run(drain, cwd=ROOT, check=False, capture_output=True)
        (answer,) = region.register([key(2)], layout, place[1:], in_place=True)
        assert answer.word == "no_space"
        assert held(client, key(1)) == told(region, place[0])
        assert region.give_back([key(1)]) == ["taken"]
