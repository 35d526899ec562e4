"""Goal: a block whose buffers lie apart in a client's own memory is sealed there without a copy, is a block
like any other for every reader, and its memory is the allocator's again once it was given back.

Method: Hypothesis against a model of the pages; an owner that is killed, a daemon that restarts and drains, a
forked child; each door to the store, Python and C; more pieces than a process may map.
"""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvclient
from kvclient.errors import Closed
from tests.conformance.c_door import WRITTEN, CClient
from tests.conformance.c_region import CRegionClient
from tests.conformance.grpc_door import GrpcClient
from tests.conftest import ROOT
from tests.daemon.memory.test_regions import LAYERS, held, key, noise, told

PAGE, TOKENS = 4096, 16
LAYOUT = kvclient.Layout(LAYERS, 2, 64, dtype="float16", block_tokens=TOKENS)  # a page of K, and one of V
BLOB = LAYOUT.geometry.to_blob()
PIECES = 2 * LAYERS
LARGE = kvclient.Layout(LAYERS, 2, 64, dtype="float16", block_tokens=256).geometry.to_blob()
LARGE_PIECE = 64 << 10  # bytes, from which on pieces are mapped and not copied


@pytest.fixture
def started(daemon, integrity):
    kvstored = daemon("128MiB", ("--max-blocks", "32768"))
    yield kvstored
    integrity(kvstored)


@pytest.fixture
def client(started):
    with started.connect() as opened:
        yield opened


def apart(*blocks):
    """[blocks, layers, 2, 1, 2], from the pages of each block, in the order layer, K before V."""
    at = PAGE * np.array(blocks).reshape(len(blocks), LAYERS, 2, 1)
    return np.stack([at, np.full_like(at, PAGE)], -1)


def seal(door, region, names, layout, place):
    """Whether each was sealed without a copy."""
    if door == "c":
        return [word == "sealed" for word in region.seal_pieces(names, layout, place)]
    return [answer.in_place for answer in region.register(names, layout, place, in_place=True)]


def test_it_is_sealed_and_read_without_a_copy(client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = noise(1, region.length)
        place = apart([5, 3, 20, 11, 40, 41], [63, 0, 62, 1, 61, 2])
        expected = [told(region, block) for block in place]
        used = client.stats()["used_bytes"]
        assert seal("python", region, [key(1), key(2)], layout, place) == [True, True]
        assert client.stats()["used_bytes"] == used + 2 * PAGE  # what stands behind the layers
        assert [held(client, key(k)) for k in (1, 2)] == expected
        with client.get([key(1)]) as blocks:
            view = blocks[0].layer(0)
            assert not view.flags.writeable
        assert [region.is_sealed(page * PAGE, PAGE) for page in (3, 4, 5, 6)] == [True, False, True, False]
        assert view.tobytes() == expected[0][0]  # a view holds on
        assert region.give_back([key(1), key(2)]) == ["held", "taken"]
        del view
        assert region.give_back([key(1)]) == ["taken"]
        assert client.stats()["used_bytes"] == used + 2 * PAGE  # kept for the next
        assert seal("python", region, [key(3)], layout, place[:1]) == [True]
        assert client.stats()["used_bytes"] == used + 2 * PAGE
    assert client.stats()["used_bytes"] == (PIECES + 1) * PAGE


def test_large_pieces_are_not_copied_for_who_reads_them(client):
    layout, bytes_each = client.register_layout(LARGE), LARGE_PIECE
    with client.register_region(64 * bytes_each) as region:
        region.array[:] = noise(1, region.length)
        place = apart([5, 3, 20, 11, 40, 41]) // PAGE * bytes_each
        expected = told(region, place[0])
        assert seal("python", region, [key(1)], layout, place) == [True]
        with client.get([key(1)]) as blocks:
            view = blocks[0].layer(0)
            assert view.tobytes() == expected[0]
            region.array[3 * bytes_each] ^= 255  # what a correct client does not do shows it
            assert view.tobytes()[bytes_each] == expected[0][bytes_each] ^ 255
            region.array[3 * bytes_each] ^= 255
            del view
        assert region.give_back([key(1)]) == ["taken"]


def test_a_block_let_go_of_is_closed(client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        assert seal("python", region, [key(1)], layout, apart([5, 3, 20, 11, 40, 41])) == [True]
        blocks = client.get([key(1)])
        block = blocks[0]
        blocks.release()
        assert region.give_back([key(1), key(1)]) == ["taken", "gone"]
        for look in (lambda: block.layer(0), lambda: memoryview(block), lambda: block.meta):
            with pytest.raises(Closed):
                look()


def test_as_many_as_one_message_cannot_hold(client):
    """Buffers that touch are one piece: 1,100 blocks of one piece each."""
    layer = kvclient.Layout(1, 2, 64, dtype="float16", block_tokens=TOKENS).geometry
    layout, count = client.register_layout(layer.to_blob()), 1100
    with client.register_region(3 * count * PAGE) as region:
        at = 3 * PAGE * np.arange(count).reshape(count, 1, 1, 1) + PAGE * np.array([0, 1]).reshape(1, 1, 2, 1)
        names = [os.urandom(32) for _ in range(count)]
        seals = region._native.seal(layout, names, [0] * count, [TOKENS] * count,
                                    [[int(a[0, 0, 0]), 2 * PAGE] for a in at], 35, 0)  # fmt: skip
        assert set(seals) == {"sealed"}
        assert set(region.give_back(names)) == {"taken"}


def test_too_many_pieces_are_copied(client):
    """1,536 pieces, of 1,024 that may be; another block of the call has few."""
    longer = kvclient.Layout(LAYERS, 2, 64, dtype="float16", block_tokens=4096)
    layout, parts = client.register_layout(longer.geometry.to_blob()), 256
    with client.register_region(8000 * PAGE) as region:
        region.array[:] = noise(12, region.length)
        pages = np.arange(2 * PIECES * parts).reshape(2, LAYERS, 2, parts)
        pages[0] = 2 * pages[0, ::-1]
        pages[1] = 4000 + pages[1, ::-1]
        place = np.stack([pages * PAGE, np.full_like(pages, PAGE)], -1)
        answers = region.register([key(1), key(2)], layout, place, in_place=True)
        assert [(a.word, a.in_place) for a in answers] == [("sealed", False), ("sealed", True)]
        assert "1024 pieces" in answers[0].reason
        assert [held(client, key(k)) for k in (1, 2)] == [told(region, where) for where in place]


def test_what_cannot_be_in_pieces_is_copied_and_says_why(client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = noise(2, region.length)
        place = apart([5, 3, 20, 11, 40, 42])
        cases = [(place + np.array([64, 0]), "whole pages")]
        halves = np.repeat(place, 2, axis=3) // np.array([1, 2])
        halves[:, :, :, 1, 0] += PAGE // 2
        assert seal("python", region, [key(1)], layout, halves[:, :, :, :1]) == [False]  # refused
        cases.append((halves[..., ::-1, :].copy(), "whole pages"))
        small = client.register_layout(kvclient.Layout(LAYERS, 2, 16, "float16", TOKENS).geometry.to_blob())
        for number, (where, why) in enumerate(cases):
            expected = told(region, where[0])
            (answer,) = region.register([key(10 + number)], layout, where, in_place=True)
            assert (answer.word, answer.in_place) == ("sealed", False)
            assert why in answer.reason
            assert held(client, key(10 + number)) == expected
        quarter = place // np.array([1, 4])
        (answer,) = region.register([key(20)], small, quarter, in_place=True)
        assert (answer.word, answer.in_place) == ("sealed", False)
        assert seal("python", region, [key(30)], layout, halves) == [True]  # touching, they are whole pages
        assert held(client, key(30)) == told(region, place[0])


@pytest.mark.parametrize("door", ["python", "c"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_against_a_model_of_the_pages(started, client, door, data):
    layout, pages = client.register_layout(BLOB), 40
    with contextlib.ExitStack() as end:
        owner = client if door == "python" else end.enter_context(CRegionClient(str(started.dir)))
        assert owner.register_layout(BLOB) == layout
        region = end.enter_context(owner.register_region(pages * PAGE))
        memory = region.array[:] = noise(0, region.length)  # what the allocator wrote where it may
        sealed, readers, hidden = {}, {}, set()
        for step in range(data.draw(st.integers(5, 25))):
            what = data.draw(st.sampled_from(["seal", "seal", "back", "read", "let go", "delete"]))
            if what == "seal":
                which = data.draw(st.permutations(range(pages)))[:PIECES]
                assume(which != list(range(which[0], which[0] + PIECES)))  # as its layout says
                name, place = os.urandom(32), apart(which)
                taken = any(set(which) & set(others) for others, _ in sealed.values())
                if not taken:
                    for page in which:
                        at = slice(page * PAGE, (page + 1) * PAGE)
                        memory[at] = region.array[at] = noise(100 * step + page, PAGE)
                assert seal(door, region, [name], layout, place) == [not taken]
                if not taken:
                    sealed[name] = which, told(region, place[0])
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
                        del sealed[name]
            for name, (_, layers) in sealed.items():
                assert (list(client.lookup([name]).states) == [0]) == (name in hidden)
                if name not in hidden:
                    assert held(client, name) == layers
            assert (region.array == memory).all()
        for blocks in [held for held_on in readers.values() for held in held_on]:
            blocks.release()
        assert set(region.give_back(list(sealed))) <= {"taken"}


def test_loaded_into_another_region_and_by_every_door(started, client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region, client.register_region(64 * PAGE) as other:
        region.array[:] = noise(3, region.length)
        place = apart([5, 3, 20, 11, 40, 41])
        before = told(region, place[0])
        assert seal("python", region, [key(1)], layout, place) == [True]
        with client.get([key(1)], verify=True) as blocks:
            where = apart([1, 9, 8, 30, 31, 2])
            assert other.load(blocks, where)[0].word == "loaded"
            assert told(other, where[0]) == before
        assert held(started.connect(door="socket"), key(1)) == before
        assert held(started.connect(read_only=True), key(1)) == before
        WRITTEN[key(1)] = layout, LAYOUT.geometry
        for door in (CClient(str(started.dir)), GrpcClient(str(started.dir / "grpc.sock"))):
            assert list(door.lookup([key(1)]).states) == [2]
            with door.get([key(1)]) as blocks:
                assert [bytes(blocks[0].layer(i).tobytes()) for i in range(LAYERS)] == before
        region.array[20 * PAGE + 5] ^= 1
        with client.get([key(1)], verify=True) as blocks:
            assert blocks[0] is None  # and the daemon dropped it
        assert list(client.lookup([key(1)]).states) == [0]


def test_more_pieces_than_are_mapped_are_copied(started, client):
    """Every layer is right, whichever way."""
    wide = kvclient.Layout(64, 2, 64, dtype="float16", block_tokens=256)
    layout, count = client.register_layout(wide.geometry.to_blob()), 4
    with client.register_region(count * 128 * 2 * LARGE_PIECE) as region:
        region.array[: 1 << 20] = noise(4, 1 << 20)
        pages = 2 * np.random.default_rng(5).permutation(count * 128).reshape(count, 64, 2, 1)
        place = np.stack([pages * LARGE_PIECE, np.full_like(pages, LARGE_PIECE)], -1)
        names = [key(100 + i) for i in range(count)]
        assert seal("python", region, names, layout, place) == [True] * count
        with contextlib.ExitStack() as open_views:
            views = []
            for _ in range(40):  # 20,480 pieces
                blocks = open_views.enter_context(client.get(names))
                views.append([block.layer(63) for block in blocks])
            for each in (views[0], views[-1]):
                assert [view.tobytes() for view in each] == [told(region, where)[63] for where in place]
            del views, each
        assert region.give_back(names) == ["taken"] * count


def test_its_file_has_all_of_it(daemon, tmp_path, wait_until):
    kvstored = daemon("64MiB", ("--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB"))
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = noise(6, region.length)
        place = apart([5, 3, 20, 11, 40, 41])
        before = told(region, place[0])
        assert region.register([key(1)], layout, place, in_place=True, priority=100)[0].in_place
        wait_until(lambda: client.stats()["disk_files"] == 1, "it is written to disk")
        assert region.give_back([key(1)]) == ["taken"]
        region.array[:] = 0
        assert list(client.lookup([key(1)]).states) == [3]  # its file stays
        with client.get([key(1)], wait_s=10, verify=True) as blocks:
            assert [bytes(blocks[0].layer(i).tobytes()) for i in range(LAYERS)] == before
        kvstored.restart(kill=True)
        assert held(client, key(1)) == before


OWNER = """
import sys, numpy as np, kvclient
from tests.daemon.memory.test_regions_pieces import BLOB, PAGE, apart, key, noise, seal
client = kvclient.connect(sys.argv[1])
layout, region = client.register_layout(BLOB), client.register_region(2000 * PAGE)
region.array[:] = noise(7, region.length)
place = apart([900, 3, 20, 11, 40, 41], [1999, 0, 1998, 1, 500, 501])
print(seal("python", region, [key(1), key(2)], layout, place), flush=True)
sys.stdin.read()
"""


def test_an_owner_that_is_killed_leaves_what_is_sealed(started, client, wait_until):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(started.dir)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "[True, True]\n"
    client.register_layout(BLOB)
    blocks = client.get([key(1)])
    view, before = blocks[0].layer(0), held(client, key(1))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    block = (PIECES + 1) * PAGE
    wait_until(lambda: client.stats()["used_bytes"] == 2 * block, "all but the sealed blocks comes back")
    assert held(client, key(1)) == before
    assert view.tobytes() == before[0]  # the view outlives the owner
    blocks.release()
    assert client.delete([key(1), key(2)]) == 2
    assert view.tobytes() == before[0]
    del view
    wait_until(lambda: client.stats()["used_bytes"] == 0, "they are given back")
    with client.register_region(120 << 20):  # and their memory can be had in one piece
        pass


@pytest.mark.parametrize("kill", [False, True])
def test_a_daemon_that_restarts_keeps_them(started, client, kill):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = noise(8, region.length)
        place = apart([5, 3, 20, 11, 40, 41], [63, 0, 62, 1, 61, 2], [32, 33, 34, 35, 36, 38])
        expected = [told(region, p) for p in place]
        assert seal("python", region, [key(1), key(2)], layout, place[:2]) == [True, True]
        blocks = client.get([key(2)])
        view = blocks[0].layer(0)
        started.restart(kill=kill)
        assert [held(client, key(k)) for k in (1, 2)] == expected[:2]
        assert view.tobytes() == expected[1][0]
        assert seal("python", region, [key(3)], layout, place[2:]) == [False]  # what is new is copied
        assert region.give_back([key(1), key(2)]) == ["taken", "held"]
        assert seal("python", region, [key(4)], layout, place[:1]) == [True]
        assert held(client, key(4)) == expected[0]
        del view
        blocks.release()
        assert region.give_back([key(2)]) == ["taken"]
    assert list(client.lookup([key(2), key(3), key(4)]).states) == [0, 2, 2]


def test_a_forked_child_changes_nothing(client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = noise(9, region.length)
        place = apart([5, 3, 20, 11, 40, 41])
        before = told(region, place[0])
        assert seal("python", region, [key(1)], layout, place) == [True]
        blocks = client.get([key(1)])
        view = blocks[0].layer(1)
        child = os.fork()
        if child == 0:
            same = view.tobytes() == before[1]
            del view
            with contextlib.suppress(kvclient.KVClientError):
                blocks.release()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert view.tobytes() == before[1]
        assert region.give_back([key(1)]) == ["held"]
        del view
        blocks.release()
        assert region.give_back([key(1)]) == ["taken"]


def test_drained_it_seals_nothing_more(started, client):
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        place = apart([5, 3, 20, 11, 40, 41], [63, 0, 62, 1, 61, 2])
        assert seal("python", region, [key(1)], layout, place[:1]) == [True]
        drain = [sys.executable, "-m", "kvstored", "drain", "--wait-s", "0", "--dir", str(started.dir)]
        subprocess.run(drain, cwd=ROOT, check=False, capture_output=True)
        (answer,) = region.register([key(2)], layout, place[1:], in_place=True)
        assert answer.word == "no_space"
        assert held(client, key(1)) == told(region, place[0])
        assert region.give_back([key(1)]) == ["taken"]
