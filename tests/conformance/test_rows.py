"""Goal: one layer of many blocks goes between the store and rows of the caller's memory in one call.

Method: the same steps through the client of a real daemon and through the fake; then what is out of bounds.
"""

import logging

import numpy as np
import pytest

import kvclient
from kvclient.client.breaker import NoBlocks, NoWriter
from kvclient.errors import BlockLost, InvalidArgument
from kvclient.integrations.health import Health
from kvclient.integrations.pages import Pages, page_layout
from tests.engines.pool_bytes import flip_in_pool

LAYOUT = kvclient.Layout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="uint8", block_tokens=4)
ROW = 64  # bytes: keys and values of 4 tokens


@pytest.fixture(params=["daemon", "fake"])
def client(request, daemon):
    with daemon().connect() if request.param == "daemon" else kvclient.InMemoryClient() as opened:
        yield opened


def test_rows_go_in_and_come_out(client):
    keys = [bytes([i]) * 32 for i in range(1, 5)]
    source = np.random.default_rng(1).integers(0, 256, (2, 8, ROW), dtype=np.uint8)
    rows = [7, 0, 3]  # of the blocks 0, 2 and 3
    writer = client.create(keys, client.register_layout(LAYOUT))
    for layer in range(2):
        writer.copy_layer(layer, source[layer], [0, 2, 3], [row * ROW for row in rows])
        writer[1].copy_layer(layer, source[layer, 5])
    writer.seal()
    with client.get(keys, verify=True) as blocks:
        assert blocks.hits == 4
        target = np.zeros((4, ROW), np.uint8)
        blocks.copy_layer(1, target, np.array([3, 1, 0], np.uint64), [0, 2 * ROW, ROW])
        assert (target == [source[1, 3], source[1, 7], source[1, 5], np.zeros(ROW)]).all()
        assert blocks.copy_layer(1, target, [], [], verify=True) == []
        target[:] = 0
        assert blocks.copy_layer(1, target, [3, 1, 0], [0, 2 * ROW, ROW], verify=True) == []
        assert (target == [source[1, 3], source[1, 7], source[1, 5], np.zeros(ROW)]).all()


@pytest.mark.parametrize("length", [64, 40_000])  # in one piece, and in pieces of the first cache
def test_rows_that_are_not_what_was_written_are_named(daemon, length):
    running, layout = daemon(), page_layout((length, length))
    keys = [bytes([i]) * 32 for i in range(1, 4)]
    source = np.random.default_rng(2).integers(0, 256, (2, 3, length), dtype=np.uint8)
    target = np.zeros((3, length), np.uint8)
    rows = [0, length, 2 * length]
    with running.connect() as client:
        writer = client.create(keys, client.register_layout(layout))
        for layer in range(2):
            writer.copy_layer(layer, source[layer], [0, 1, 2], rows)
        writer.seal()
        flip_in_pool(running.dir, source[1, 1].tobytes())
        with client.get(keys) as blocks:
            assert blocks.copy_layer(0, target, [0, 1, 2], rows, verify=True) == []
            assert (target == source[0]).all()
            assert blocks.copy_layer(1, target, [2, 1, 0], rows, verify=True) == [1]
            assert (target[[0, 2]] == source[1, [2, 0]]).all() and target[1, 5] == source[1, 1, 5] ^ 1
            assert blocks.copy_layer(1, target, [2, 1, 0], rows) == [], "only who asks compares"


@pytest.mark.parametrize("count", [3, 20])  # with the interpreter's lock, and without
def test_each_block_has_memory_of_its_own(client, count):
    length = 64 << 10
    random = np.random.default_rng(3)
    sources = [random.integers(0, 256, length, dtype=np.uint8) for _ in range(count)]
    keys = [i.to_bytes(32, "little") for i in range(1, count + 2)]
    writer = client.create(keys[:-1], client.register_layout(page_layout((length,))))
    writer.copy_in(0, [sources[0], memoryview(sources[1])], [0, 1])
    writer.copy_in(0, tuple(sources[2:-1]), np.arange(2, count - 1, dtype=np.uint64))
    writer.copy_in(0, [sources[-1][:1000]], [count - 1], whole=False)
    writer.seal()
    sources[-1][1000:] = 0
    targets = [np.zeros(length, np.uint8) for _ in range(count)]
    with client.get(keys, verify=True) as blocks:
        assert blocks.hits == count
        assert blocks.copy_out(0, targets[::-1], list(range(count))) == []
        assert all((a == b).all() for a, b in zip(targets[::-1], sources, strict=True))
        target = np.ones(1000, np.uint8)
        assert blocks.copy_out(0, [target[:999]], [1], whole=False) == []
        assert (target[:999] == sources[1][:999]).all() and target[999] == 1
        assert blocks.copy_out(0, [], []) == []


@pytest.mark.parametrize("length", [64, 1 << 18])  # with the interpreter's lock, and without
def test_memory_that_is_not_what_was_written_is_named(daemon, length):
    running, keys = daemon(), [i.to_bytes(32, "little") for i in range(1, 21)]
    sources = np.random.default_rng(4).integers(0, 256, (20, length), dtype=np.uint8)
    targets = np.zeros((20, length), np.uint8)
    with running.connect() as client:
        writer = client.create(keys, client.register_layout(page_layout((length,))))
        writer.copy_in(0, list(sources), range(20))
        writer.seal()
        flip_in_pool(running.dir, sources[7].tobytes())
        with client.get(keys) as blocks:
            assert blocks.copy_out(0, list(targets), range(20)) == [7]
            assert (np.delete(targets, 7, 0) == np.delete(sources, 7, 0)).all()
            assert not targets[7].any(), "what is wrong is nobody's to see"
            # what is behind the first bytes counts too
            assert blocks.copy_out(0, [targets[0, :1], targets[1, :1]], [7, 1], whole=False) == [0]


def test_memory_of_another_size_is_refused_and_nothing_is_copied(client):
    keys = [bytes([i]) * 32 for i in range(1, 4)]
    writer = client.create(keys[:2], client.register_layout(LAYOUT))
    fitting, target = np.ones(ROW, np.uint8), np.zeros(ROW + 1, np.uint8)
    for wrong in (fitting[1:], np.ones(ROW + 1, np.uint8)):
        with pytest.raises(InvalidArgument):
            writer.copy_in(0, [fitting, wrong], [0, 1])
    for sources, indices, whole in (
        ([target], [0], False), ([fitting], [0, 1], True), ([fitting] * 2, [0], True),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            writer.copy_in(0, sources, indices, whole)
    with pytest.raises(InvalidArgument):
        writer.seal()  # nobody wrote anything
    for layer in range(2):
        writer.copy_in(layer, [fitting, fitting], [0, 1])
    writer.seal()
    with client.get(keys) as blocks:
        assert blocks.hits == 2
        for memory, index, whole in (
            (target, 0, True), (target, 0, False), (target[: ROW - 1], 0, True), (target[:ROW], 2, True),
            (target[:ROW], 9, True), (bytes(ROW), 0, True),
        ):  # fmt: skip
            with pytest.raises((InvalidArgument, TypeError)):
                blocks.copy_out(0, [memory], [index], whole)
        with pytest.raises(InvalidArgument):
            blocks.copy_out(0, [target[:ROW]], [0, 1])
        assert not target.any()


def test_what_is_out_of_bounds_is_refused_and_copies_nothing(client):
    keys = [bytes([i]) * 32 for i in range(1, 3)]
    writer = client.create(keys[:1], client.register_layout(LAYOUT))
    source, target = np.ones((2, ROW), np.uint8), np.zeros((2, ROW), np.uint8)
    for wrong in (ROW + 1, 2 * ROW, 2**63):
        with pytest.raises(InvalidArgument):
            writer.copy_layer(0, source, [0], [wrong])
    with pytest.raises(InvalidArgument):
        writer.copy_layer(2, source, [0], [0])
    with pytest.raises(IndexError):
        writer.copy_layer(0, source, [5], [0])
    for layer in range(2):
        writer.copy_layer(layer, source, [0], [ROW])
    writer.seal()
    with client.get(keys) as blocks:
        for index, offset in ((0, ROW + 1), (0, 2**63), (1, 0), (7, 0)):
            with pytest.raises(InvalidArgument):
                blocks.copy_layer(0, target, [index], [offset])
        assert not target.any()


def test_without_a_store_there_is_nothing_to_copy():
    memory = bytearray(8)
    NoBlocks(2).copy_layer(0, memory, [], [])
    NoWriter(2).copy_layer(0, memory, [], [])
    for nothing in (NoBlocks(2), NoWriter(2)):
        with pytest.raises(InvalidArgument):
            nothing.copy_layer(0, memory, [0], [0])
    NoBlocks(2).copy_out(0, [], [])
    NoWriter(2).copy_in(0, [], [])
    with pytest.raises(InvalidArgument):
        NoBlocks(2).copy_out(0, [memory], [0])
    with pytest.raises(InvalidArgument):
        NoWriter(2).copy_in(0, [memory], [0])


def test_a_page_that_cannot_be_copied_is_the_only_one_that_misses(monkeypatch):
    """What a copy of several pages fails with names none of them."""

    class Blocks:
        def copy_out(self, layer, targets, indices):
            if 1 in indices:
                raise BlockLost("it has gone")
            for target in targets:
                target[:] = 7
            return []

    pages = Pages(kvclient.InMemoryClient(), Health(kvclient.InMemoryClient(), logging.getLogger()), 0)
    monkeypatch.setattr(Pages, "_fits", lambda self, blocks, i, target: True)
    targets = [[np.zeros(8, np.uint8)] for _ in range(3)]
    assert pages._copy_all(Blocks(), targets) == [True, False, True]
    assert [target[0][0] for target in targets] == [7, 0, 7]
