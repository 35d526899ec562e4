"""Goal: blocks published out of a client's own memory are what its buffers held, whatever their order;
nothing outside the region is read, a refused item changes no other, and sealed blocks outlive region and
owner.

Method: Hypothesis against a model of bytes; hostile offsets; processes that are killed, forked, restarted;
each door to the store asked for the same blocks.
"""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvclient
from kvclient.client.region import AXES
from tests.conformance.c_region import CRegionClient
from tests.conftest import ROOT

LAYERS, PARTS, TOKENS = 3, 2, 8
LAYOUT = kvclient.Layout(LAYERS, 2, 16, dtype="float16", block_tokens=TOKENS)
LAYER = LAYOUT.geometry.layer_length(0, TOKENS)
BLOB = LAYOUT.geometry.to_blob()
PIECE = LAYER // 2 // PARTS  # of K or V


def key(number):
    return number.to_bytes(32, "little")


def noise(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def places(first=0, count=1):
    """[count, LAYERS, 2, PARTS, 2]: one buffer after the other from `first` on."""
    at = first + PIECE * np.arange(count * LAYERS * 2 * PARTS).reshape(count, LAYERS, 2, PARTS)
    return np.stack([at, np.full_like(at, PIECE)], axis=-1)


def told(region, place):
    """What the block must hold: layer after layer, K before V, part after part."""
    return [b"".join(region.array[o : o + n].tobytes() for o, n in layer.reshape(-1, 2)) for layer in place]


def held(client, name):
    with client.get([name], verify=True) as blocks:
        assert blocks[0] is not None
        return [bytes(blocks[0].layer(layer).tobytes()) for layer in range(LAYERS)]


@pytest.fixture(params=["python", "c"])
def client(daemon, request):
    started = daemon(memory="64MiB")
    with started.connect() if request.param == "python" else CRegionClient(str(started.dir)) as opened:
        yield opened


@pytest.fixture
def python_client(daemon):
    with daemon(memory="64MiB").connect() as opened:
        yield opened


def test_a_block_is_what_its_buffers_held_and_stays_so(client):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        region.array[:] = noise(1, region.length)
        place = places(64, 2)
        expected = [told(region, block) for block in place]
        assert [r.word for r in region.register([key(1), key(2)], layout, place)] == ["sealed", "sealed"]
        region.array[:] = 0  # the allocator goes on with its memory
        assert [held(client, key(k)) for k in (1, 2)] == expected
        assert [r.word for r in region.register([key(1)], layout, places())] == ["exists"]
        assert held(client, key(1)) == expected[0]
        assert client.delete([key(1)]) == 1  # given back one by one
        assert list(client.lookup([key(1), key(2)]).states) == [0, 2]
    assert held(client, key(2)) == expected[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_axes_and_layers(client, data):
    """Buffers of any sizes at any places, in any order of axes, a few layers at a time, of fewer tokens."""
    layout = client.register_layout(BLOB)
    seed = data.draw(st.integers(0, 2**32))
    tokens = data.draw(st.integers(1, TOKENS))
    size = LAYOUT.geometry.layer_length(0, tokens)
    axes = data.draw(st.permutations(AXES))
    parts = data.draw(st.integers(1, 3))
    with client.register_region(256 << 10) as region:
        region.array[:] = noise(seed, region.length)
        slots = data.draw(st.permutations(range(64)))
        place = np.zeros((LAYERS, 2, parts, 2), np.int64)
        for layer in range(LAYERS):
            cuts = sorted(data.draw(st.lists(st.integers(1, size - 1), min_size=2 * parts - 1,
                                             max_size=2 * parts - 1, unique=True)))  # fmt: skip
            sizes = np.diff([0, *cuts, size])
            for i, length in enumerate(sizes):
                place[layer, i // parts, i % parts] = (slots[layer * 2 * parts + i] * 4096, length)
        expected = told(region, place)
        name, groups = os.urandom(32), data.draw(st.permutations([(0, 1), (1, 2), (2, 3)]))
        for turn, (first, stop) in enumerate(groups):
            order = (0, *(1 + AXES.index(axis) for axis in axes), 4)
            given_buffers = place[None, first:stop].transpose(order)
            assert list(client.lookup([name]).states) == [1 if turn else 0]
            (change,) = region.register([name], layout, given_buffers, axes, first, [tokens])
            assert change.word == ("sealed" if turn == LAYERS - 1 else "open"), change
        assert held(client, name) == expected
        client.delete([name])


HOSTILE = [
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), n - 1), "inside"),
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), -64), "inside"),
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), 2**62), "inside"),
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), np.iinfo(np.int64).max - 63), "inside"),
    (lambda p, n: p[..., 1].__setitem__((0, 0, 0, 0), 0), "bytes"),
    (lambda p, n: p[..., 1].__setitem__((0, 0, 0, 0), -1), "bytes"),
    (lambda p, n: p[..., 1].__setitem__((0, 0, 0, 0), 2**62), "bytes"),
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), 1), "multiple"),
    (lambda p, n: p[..., 0].__setitem__((0, 0, 0, 0), p[0, 0, 0, 1, 0]), "overlap"),
    (lambda p, n: p[..., 1].__setitem__((0, 1, 0, 0), PIECE - 1), "layer 1"),
]


@pytest.mark.parametrize(("damage", "word"), HOSTILE)
def test_what_must_not_be_read_is_refused_alone(client, damage, word):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        region.array[:] = noise(3, region.length)
        bad, good = places(0), places(1 << 19)
        damage(bad, region.length)
        answers = region.register([key(1), key(2), key(2)], layout, np.concatenate([bad, good, good]))
        assert [a.word for a in answers] == ["refused", "sealed", "refused"]
        assert word in answers[0].reason
        assert "twice" in answers[2].reason
        assert list(client.lookup([key(1), key(2)]).states) == [0, 2]


def test_unsigned_offsets_that_wrap_are_refused(client):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        bad = places().astype(np.uint64)
        bad[0, 0, 0, 0, 0] = 2**64 - 64
        assert region.register([key(1)], layout, bad)[0].word == "refused"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"axes": ("layer", "kv")}, "axes"),
        ({"axes": ("layer", "kv", "kv")}, "axes"),
        ({"buffers": [[1, 2]]}, "shape"),
        ({"buffers": [[1], [1, 2]]}, "shape"),
        ({"buffers": places().astype(np.float64)}, "integers"),
        ({"layer_index": -1}, "layer_index"),
        ({"layer_index": 1}, "end"),
        ({"layout_id": 47}, "layout"),
        ({"token_counts": [0]}, "token_counts"),
        ({"token_counts": [TOKENS + 1]}, "token_counts"),
        ({"token_counts": [1, 1]}, "token counts"),
    ],
)
def test_arguments_of_no_sense_raise(python_client, change, word):
    client, layout = python_client, python_client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        with pytest.raises(kvclient.InvalidArgument, match=word):
            region.register(**{"keys": [key(1)], "layout_id": layout, "buffers": places(), **change})
        assert list(client.lookup([key(1)]).states) == [0]


def test_layers_that_come_later(client):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        region.array[:] = noise(5, region.length)
        place = places()
        assert region.register([key(1)], layout, place[:, :1])[0].word == "open"
        with client.get([key(1)], follow=True) as blocks:  # a follower has the layers that are there
            blocks[0].wait_layer(0, timeout_s=10)
            assert bytes(blocks[0].layer(0).tobytes()) == told(region, place[0])[0]
        assert "before" in region.register([key(1)], layout, place)[0].reason
        assert (
            "token count"
            in region.register([key(1)], layout, place[:, 1:2], layer_index=1, token_counts=[4])[0].reason
        )
        assert region.register([key(1)], layout, place[:, 1:], layer_index=1)[0].word == "sealed"
        assert held(client, key(1)) == told(region, place[0])
        assert region.register([key(2)], layout, place[:, :1])[0].word == "open"
        region.forget([key(2), key(3)])
        assert list(client.lookup([key(2)]).states) == [0]


def test_the_layers_of_a_set_of_blocks(python_client):
    client, layout = python_client, python_client.register_layout(BLOB)
    region = client.register_region(1 << 20)
    region.array[:] = noise(6, region.length)
    place = places(0, 2)
    region.register([key(1), key(2)], layout, place)
    with client.get([key(1), key(9), key(2)]) as blocks:
        first, miss, second = blocks.layers(1, timeout_s=10)
        assert (first.tobytes(), second.tobytes()) == (told(region, place[0])[1], told(region, place[1])[1])
        assert miss is None
    assert region.register([key(3)], layout, place[:1, :1])[0].word == "open"
    with client.get([key(3)], follow=True) as blocks, pytest.raises(kvclient.DeadlineExceeded):
        blocks.layers(1, timeout_s=0.05)
    region.close()
    region.close()
    with pytest.raises(kvclient.Closed):
        _ = region.array
    with client.get([key(3)]) as blocks:
        assert blocks[0] is None


def test_two_regions_and_no_room(client):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as small, client.register_region(3 << 20) as large:
        small.array[:], large.array[:] = 1, 2
        assert small.register([key(1)], layout, places())[0].word == "sealed"
        assert large.register([key(2)], layout, places(1 << 20))[0].word == "sealed"
        assert small.register([key(2)], layout, places())[0].word == "exists"
        assert (held(client, key(1))[0][0], held(client, key(2))[0][0]) == (1, 2)
        assert small.array.all() and (small.array == 1).all()
        with pytest.raises(kvclient.NoSpace):
            client.register_region(62 << 20)
    for wrong in (0, -1, 65 << 20, 2**40):
        with pytest.raises(kvclient.InvalidArgument):
            client.register_region(wrong)
    with client.register_region(40 << 20):  # what was given back can be had again
        pass


OWNER = """
import sys, numpy as np, kvclient
from tests.daemon.memory.test_regions import BLOB, key, noise, places
client = kvclient.connect(sys.argv[1])
layout, region = client.register_layout(BLOB), client.register_region(8 << 20)
region.array[:] = noise(7, region.length)
print([a.word for a in region.register([key(1)], layout, places())], flush=True)
print([a.word for a in region.register([key(2)], layout, places()[:, :1])], flush=True)
for line in sys.stdin:
    region.array[:] = 9
"""


def owner(kvstored):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(kvstored.dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_owner_that_is_killed_leaves_its_sealed_blocks(daemon, wait_until):
    kvstored = daemon(memory="64MiB")
    client, process = kvstored.connect(), owner(kvstored)
    assert process.stdout.readline() == "['sealed']\n"
    assert process.stdout.readline() == "['open']\n"
    blocks = client.get([key(1)])
    view = blocks[0].layer(0)
    before = view.tobytes()
    used = client.stats()["used_bytes"]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: client.stats()["used_bytes"] <= used - (8 << 20), "the region's memory comes back")
    assert list(client.lookup([key(1), key(2)]).states) == [2, 0]  # the unsealed one is nobody's
    assert view.tobytes() == before  # a view outlives the owner
    blocks.release()
    assert held(client, key(1))[0] == before


@pytest.mark.parametrize("kill", [False, True])
def test_a_daemon_that_restarts(daemon, kill):
    """The pool is adopted with the region in it: what was sealed is there, and the owner goes on."""
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(4 << 20) as region:
        region.array[:] = noise(8, region.length)
        assert region.register([key(1)], layout, places())[0].word == "sealed"
        before = told(region, places()[0])
        kvstored.restart(kill=kill)
        assert held(client, key(1)) == before
        assert told(region, places()[0]) == before  # nobody took the region's memory
        assert region.register([key(2)], layout, places())[0].word == "sealed"
        assert held(client, key(2)) == before


def assert_refused_in_a_child(call):
    """A region is of the process that made it: the call raises InvalidArgument that says so."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except kvclient.InvalidArgument as error:
            os._exit(0 if "process" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_refused(client):
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        assert_refused_in_a_child(lambda: region.register([key(1)], layout, places()))
        assert region.register([key(1)], layout, places())[0].word == "sealed"


def test_every_door_finds_them(daemon):
    from tests.conformance.c_door import CClient
    from tests.conformance.grpc_door import GrpcClient

    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        region.array[:] = noise(9, region.length)
        assert region.register([key(1)], layout, places())[0].word == "sealed"
        before = told(region, places()[0])
    assert held(kvstored.connect(door="socket"), key(1)) == before
    for door in (CClient(str(kvstored.dir)), GrpcClient(str(kvstored.dir / "grpc.sock"))):
        assert list(door.lookup([key(1)]).states) == [2]


def test_without_a_daemon(tmp_path):
    with kvclient.connect(tmp_path, on_error="miss") as client, pytest.raises(kvclient.Unavailable):
        client.register_region(1 << 20)
