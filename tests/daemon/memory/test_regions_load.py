"""Goal: what is loaded into a client's own memory is what the block holds, wherever its buffers lie there,
K and V apart; nothing else of that memory changes, and what cannot be is refused before a byte is written.

Method: Hypothesis against a model of the region's bytes; hostile offsets, corrupt blocks, blocks that are
still written, memory that is sealed; Python and C.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvclient
from kvclient.client.region import AXES
from tests.conformance.c_region import CRegionClient
from tests.daemon.memory.test_regions import (
    BLOB,
    HOSTILE,
    LAYER,
    LAYERS,
    LAYOUT,
    TOKENS,
    assert_refused_in_a_child,
    key,
    noise,
    places,
)  # fmt: skip

SLOT = 4096


@pytest.fixture(params=["python", "c"])
def client(daemon, request):
    started = daemon(memory="64MiB")
    with started.connect() if request.param == "python" else CRegionClient(str(started.dir)) as opened:
        yield opened


def put(client, names, tokens=None, seed=1):
    """Blocks of noise, the ordinary way; of each its layers' bytes."""
    layout = client.register_layout(BLOB)
    held = []
    with client.create(
        names, layout, token_counts=None if tokens is None else [tokens] * len(names)
    ) as writer:
        for i in range(len(names)):
            size = LAYOUT.geometry.layer_length(0, tokens or TOKENS)
            held.append([noise(seed + 100 * i + layer, size) for layer in range(LAYERS)])
            for layer, content in enumerate(held[-1]):
                writer[i].layer(layer).reshape(-1).view(np.uint8)[:] = content
        writer.seal()
    return held


def laid_out(before, held, place, first=0):
    """The region's bytes when those layers of the blocks went to their places."""
    after = before.copy()
    for layers, block in zip(held, place, strict=True):
        for content, buffers in zip(layers[first:], block, strict=False):
            done = 0
            for offset, size in buffers.reshape(-1, 2).tolist():
                after[offset : offset + size] = content[done : done + size]
                done += size
    return after


@pytest.mark.parametrize("door", ["python", "c"])
def test_where_one_block_has_no_pin_nothing_is_written(daemon, door):
    kvstored = daemon(memory="64MiB")
    python = door == "python"
    with kvstored.connect(max_pins=1) if python else CRegionClient(str(kvstored.dir), max_pins=1) as client:
        put(client, [key(1), key(2)])
        with client.register_region(1 << 16) as region, client.get([key(1), key(2)]) as blocks:
            region.array[:] = 3
            with pytest.raises(kvclient.PinsExhausted):
                region.load(blocks, places(0, 2))
            assert (region.array == 3).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_buffers_anywhere_in_any_order(client, data):
    """Two blocks, buffers of any sizes in any order of axes, some of the layers, of fewer tokens."""
    tokens = data.draw(st.integers(1, TOKENS))
    size = LAYOUT.geometry.layer_length(0, tokens)
    axes, parts = data.draw(st.permutations(AXES)), data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, LAYERS - 1))
    count = data.draw(st.integers(1, LAYERS - first))
    names = [os.urandom(32), os.urandom(32)]
    held = put(client, names, tokens, data.draw(st.integers(0, 2**31)))
    place = np.zeros((2, count, 2, parts, 2), np.int64)
    slots = iter(data.draw(st.permutations(range(2 * count * 2 * parts))))
    for buffers in place.reshape(2 * count, 2 * parts, 2):
        cuts = data.draw(st.lists(st.integers(1, size - 1), min_size=2 * parts - 1, max_size=2 * parts - 1,
                                  unique=True))  # fmt: skip
        buffers[:, 0] = [next(slots) * SLOT + 64 * data.draw(st.integers(0, 3)) for _ in buffers]
        buffers[:, 1] = np.diff([0, *sorted(cuts), size])
    with client.register_region(72 * SLOT) as region:
        region.array[:] = noise(9, region.length)
        expected = laid_out(region.array, held, place, first)
        order = (0, *(1 + AXES.index(axis) for axis in axes), 4)
        with client.get(names) as blocks:
            said = region.load(blocks, place.transpose(order), axes, first)
        assert [tuple(answer) for answer in said] == [("loaded", "")] * 2
        assert (region.array == expected).all()
    client.delete(names)


@pytest.mark.parametrize(("damage", "word"), HOSTILE)
def test_what_must_not_be_written_is_refused_alone(client, damage, word):
    held = put(client, [key(1), key(2)])
    with client.register_region(1 << 20) as region:
        place = np.concatenate([places(0), places(1 << 19)])
        damage(place[:1], region.length)
        expected = laid_out(region.array, [[], held[1]], place)
        with client.get([key(1), key(2)]) as blocks:
            said = region.load(blocks, place)
        assert [answer.word for answer in said] == ["refused", "loaded"]
        assert (word if word != "bytes" else "inside") in said[0].reason
        assert (region.array == expected).all()


def test_two_blocks_to_one_place_and_layers_that_are_not_there(client):
    put(client, [key(1), key(2)])
    with client.register_region(1 << 20) as region, client.get([key(1), key(3), key(2)]) as blocks:
        said = region.load(blocks, np.concatenate([places(), places(1 << 19), places()]))
        assert [answer.word for answer in said] == ["loaded", "missing", "refused"]
        assert "in this call" in said[2].reason
        said = region.load(
            blocks, np.concatenate([places(at) for at in (0, 1 << 18, 1 << 19)]), layer_index=1
        )
        assert [answer.word for answer in said] == ["refused", "missing", "refused"]
        assert f"has {LAYERS}" in said[0].reason


def test_a_followed_block_has_the_layers_that_are_there(client):
    layout = client.register_layout(BLOB)
    writer = client.create([key(1)], layout)
    content = noise(3, LAYER)
    writer[0].layer(0).reshape(-1).view(np.uint8)[:] = content
    writer[0].mark_layer(0)
    with client.register_region(1 << 20) as region, client.get([key(1)], follow=True) as blocks:
        assert region.load(blocks, places()[:, :1])[0].word == "loaded"
        assert (region.array[:LAYER] == content).all()
        later = region.load(blocks, places()[:, :2])[0]
        assert (later.word, later.reason) == ("pending", "of the followed block 1 layers are there")
        writer.abort()
        assert region.load(blocks, places()[:, :2])[0].word == "lost"


def test_a_corrupt_block_says_so_and_leaves_by_verify(client):
    geometry, layout = LAYOUT.geometry, client.register_layout(BLOB)
    with client.register_region(1 << 20) as region:
        region.array[:] = noise(4, region.length)
        if isinstance(client, CRegionClient):
            assert region.seal([key(1)], layout, [0]) == ["sealed"]
        else:
            assert region.register([key(1)], layout, region.buffers_at(layout, [0]), in_place=True)[
                0
            ].in_place
        with client.get([key(1)]) as blocks:
            assert region.load(blocks, places(1 << 19))[0].word == "loaded"
            at = geometry.layer_offset(1, TOKENS)
            assert (region.array[(1 << 19) + LAYER :][:LAYER] == region.array[at : at + LAYER]).all()
            before = region.array.copy()
            onto = region.load(blocks, places(at))[0]  # memory that is sealed, its own too
            assert onto.word == "refused"
            assert "sealed there" in onto.reason
            assert (region.array == before).all()
            region.array[at + 5] ^= 1  # what a correct client does not do
            said = region.load(blocks, places(1 << 19))[0]
            assert (said.word, said.reason) == ("corrupt", "layer 1 has a wrong checksum")
            assert (
                region.load(blocks, places(1 << 19)[:, :1])[0].word == "loaded"
            )  # the layer before is right
        with client.get([key(1)], verify=True) as blocks:
            assert blocks[0] is None
        assert list(client.lookup([key(1)]).states) == [0]


def test_who_must_not_load(client):
    put(client, [key(1)])
    with client.register_region(1 << 20) as region:
        blocks = client.get([key(1)])
        assert_refused_in_a_child(lambda: region.load(blocks, places()))
        assert region.load(blocks, places())[0].word == "loaded"
        blocks.release()


def test_what_python_refuses(daemon):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect(on_error="miss")
    put(client, [key(1)])
    region, blocks = client.register_region(1 << 20), client.get([key(1)])
    for wrong, word in (
        ({"buffers": [[1, 2]]}, "shape"), ({"axes": ("layer", "kv", "kv")}, "axes"),
        ({"layer_index": -1}, "layer_index"), ({"buffers": places().astype(np.float64)}, "integers"),
        ({"buffers": places(0, 2)}, "shape"),
    ):  # fmt: skip
        with pytest.raises(kvclient.InvalidArgument, match=word):
            region.load(**{"blocks": blocks, "buffers": places(), **wrong})
    blocks.release()
    with pytest.raises(kvclient.Closed):
        region.load(blocks, places())
    kvstored.kill()
    again = client.get([key(1)])  # the pool outlives its daemon
    assert region.load(again, places())[0].word == "loaded"
    region.close()
    with pytest.raises(kvclient.Closed):
        region.load(again, places())
