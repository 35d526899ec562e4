"""Cases of reading: look-up, get, pins, views, delete under a reader, and what a client may not do."""

from __future__ import annotations

import gc
import threading

import numpy as np

from kvclient.blocks.layout import Geometry
from kvclient.errors import Closed, InvalidArgument, PinsExhausted
from kvclient.testing.conformance.case import (
    BIG,
    SMALL,
    Case,
    check,
    fill,
    new_keys,
    pattern,
    raises,
)

MISSING, PENDING, RESIDENT = 0, 1, 2


class ReadingCases(Case):
    """Look-up to release."""

    def test_look_up_counts_the_leading_blocks(self):
        a, b, c, d = (self.put(1)[0] for _ in range(4))
        hole = self.keys(1)[0]
        written = self.keys(2)
        writer = self.client.create(written, self.small)
        found = self.client.lookup([a, b, *written, c, hole, d])
        assert (found.resident, found.pending, found.on_disk) == (2, 2, 0)
        assert list(found.states) == [RESIDENT, RESIDENT, PENDING, PENDING, RESIDENT, MISSING, RESIDENT]
        assert self.client.lookup([hole, a]).resident == 0
        assert self.client.lookup([a, b, c, d]).resident == 4
        writer.abort()

    def test_a_miss_is_a_value(self):
        there = self.put(1)
        with self.client.get([*self.keys(1), *there, *self.keys(1)]) as blocks:
            assert blocks[0] is None and blocks[2] is None and blocks.hits == 1
            check(blocks[1])

    def test_delete_twice(self):
        keys = self.put(2)
        other = self.open()
        assert other.delete([*keys, *self.keys(1)]) == 2
        assert self.client.delete(keys) == 0
        assert self.states(keys) == [MISSING, MISSING]
        assert self.used() == self.used_before
        self.put(keys=keys)
        with other.get(keys) as blocks:
            check(blocks[1])

    def test_a_delete_does_not_touch_what_is_being_written(self):
        keys = self.keys(1)
        with self.client.create(keys, self.small) as writer:
            fill(writer[0])
            assert self.open().delete(keys) == 0
        assert self.states(keys) == [RESIDENT]

    def test_views_cannot_be_written(self):
        with self.client.get(self.put(1)) as blocks:
            assert blocks[0].view.readonly and (blocks[0].meta is None or blocks[0].meta.readonly)
            assert not blocks[0].layer(0).flags.writeable
            with raises(ValueError):
                blocks[0].layer(0)[...] = 0
            with raises(TypeError):
                blocks[0].view[0] = 1

    def test_view_and_layers_show_the_same_bytes(self):
        with self.client.get(self.put(1)) as blocks:
            length = SMALL.layer_length(0, 16)
            for layer in range(SMALL.num_layers):
                offset = SMALL.layer_offset(layer, 16)
                assert bytes(blocks[0].view[offset : offset + length]) == blocks[0].layer(layer).tobytes()
            for wrong in (-1, SMALL.num_layers, 1 << 40):
                with raises(InvalidArgument):
                    blocks[0].layer(wrong)
                with raises(InvalidArgument):
                    blocks[0].wait_layer(wrong, timeout_s=0.01)

    def test_layers_of_another_width_are_bytes(self):
        widths = (64, 100, 64)  # bytes per token: only the first and the last are of the layout's shape
        layout = Geometry(3, 2, 2, 8, "float16", 16, 0, 0, 0, widths)
        layout_id = self.client.register_layout(layout.to_blob())
        keys = self.keys(1)
        with self.client.create(keys, layout_id) as writer:
            for layer, shape in enumerate(((2, 2, 16, 8), (1600,), (2, 2, 16, 8))):
                assert writer[0].layer(layer).shape == shape
                writer[0].layer(layer)[...] = layer + 1
        with self.client.get(keys) as blocks:
            assert blocks[0].layer(1).dtype == np.uint8 and blocks[0].layer(1).tolist() == [2] * 1600
            assert blocks[0].layer(2).dtype == np.float16 and (blocks[0].layer(2) == 3).all()

    def test_blocks_behave_as_a_sequence(self):
        keys = self.put(3)
        with self.client.get(keys) as blocks:
            assert [block.key for block in blocks] == keys
            assert blocks[-1].key == keys[2]
            assert [block.key for block in blocks[:0:-1]] == keys[:0:-1]
            with raises(IndexError):
                blocks[3]

    def test_deleted_under_a_reader(self):
        """A deletes what B has mapped, then allocates everything: B's bytes stay (peers' case 2)."""
        self.needs("pins")
        big = self.client.register_layout(BIG.to_blob())
        keys = self.keys(1)
        with self.client.create(keys, big) as writer:
            fill(writer[0], BIG.num_layers)
        reader = self.open()
        with reader.get(keys) as blocks:
            view = blocks[0].view
            before = bytes(view)
            assert self.client.delete(keys) == 1
            for _ in range(4):
                self.churn(big, 40)
            assert bytes(view) == before
            check(blocks[0], BIG.num_layers)
            assert self.client.stats()["pins"] >= 1
            del view
        self.pinned(0)

    def churn(self, layout_id: int, count: int) -> None:
        """Writes other bytes over as much memory as the store gives, and deletes it again."""
        keys = self.keys(count)
        with self.client.create(keys, layout_id) as writer:
            for index in writer.granted:
                writer[index].layer(0)[...] = np.float16(-1)
                writer[index].layer(1)[...] = np.float16(-1)
        self.client.delete(keys)

    def test_pins_are_counted_and_released(self):
        self.needs("pins")
        keys = self.put(3)
        blocks = self.client.get(keys)
        self.pinned(3)
        again = self.open().get(keys[:1])
        self.pinned(4)
        blocks.release()
        blocks.release()
        self.pinned(1)
        again.release()
        self.pinned(0)

    def test_after_the_release_nothing_new_can_be_taken(self):
        self.needs("pins")
        blocks = self.client.get(self.put(2))
        first = blocks[0]
        view = first.view
        blocks.release()
        with raises(Closed):
            blocks[1].layer(0)
        for gone in (lambda: first.layer(0), lambda: first.key, first.verify):
            with raises(Closed):
                gone()
        assert bytes(view[:4]) == pattern(self._made[-2], 0, (2, 2, 16, 8)).tobytes()[:4]

    def test_a_view_outlives_its_context(self):
        self.needs("pins")
        keys = self.put(1)
        with self.client.get(keys) as blocks:
            view, array = blocks[0].view, blocks[0].layer(1)
        self.client.delete(keys)
        assert self.client.stats()["pins"] >= 1
        self.put(20)
        assert bytes(view[:1024]) == pattern(keys[0], 0, (2, 2, 16, 8)).tobytes()
        del view
        assert np.array_equal(array, pattern(keys[0], 1, (2, 2, 16, 8)))
        del array, blocks
        gc.collect()
        self.pinned(0)

    def test_a_slice_of_a_view_keeps_the_block(self):
        self.needs("pins")
        keys = self.put(1)
        with self.client.get(keys) as blocks:
            part = blocks[0].layer(2)[1, 0, 3:5]
        del blocks
        gc.collect()
        self.pinned(1)
        assert np.array_equal(part, pattern(keys[0], 2, (2, 2, 16, 8))[1, 0, 3:5])
        del part
        self.pinned(0)

    def test_views_outlive_close(self):
        keys = self.put(1)
        reader = self.open()
        view = reader.get(keys)[0].view
        before = bytes(view)
        reader.close()
        self.client.delete(keys)
        self.put(50)
        assert bytes(view) == before

    def test_a_client_says_whether_it_is_attached(self):
        self.needs("sealing")
        client = self.connect()
        assert "'default', attached" in repr(client)
        client.close()
        assert "'default', closed" in repr(client)

    def test_close_is_idempotent_and_final(self):
        client = self.connect()
        keys = self.put(1, client=client)
        client.close()
        client.close()
        for call in (
            lambda: client.lookup(keys),
            lambda: client.get(keys),
            lambda: client.create(keys, self.small),
            lambda: client.delete(keys),
            client.stats,
        ):
            with raises(Closed):
                call()

    def test_pins_beyond_the_limit_are_refused_not_missed(self):
        self.needs("max_pins")
        keys = self.put(5)
        reader = self.open(max_pins=4)
        with raises(PinsExhausted):
            blocks = reader.get(keys)
            assert None not in list(blocks), "told as a miss"
        blocks = None
        gc.collect()
        for _ in range(3):
            with reader.get(keys[:4]) as held:
                assert held.hits == 4
                with raises(PinsExhausted):
                    list(reader.get(keys[4:]))
        with reader.get(keys[4:]) as held:
            check(held[0])

    def test_the_same_block_twice_takes_two_pins(self):
        self.needs("pins")
        key = self.put(1)
        with self.client.get(key * 2) as blocks:
            assert blocks.hits == 2
            self.pinned(2)
            check(blocks[0])
            check(blocks[1])

    def test_touch_counts_what_is_there(self):
        keys = self.put(3)
        assert self.client.touch([*keys, *self.keys(2)]) == 3

    def test_read_your_writes(self):
        """Peers' case 11: a look-up right after a store misses there in half of the cases."""
        other = self.open()
        for _ in range(200):
            keys = self.put(2)
            assert other.lookup(keys).resident == 2
            assert other.delete(keys) == 2
            assert self.client.lookup(keys).resident == 0

    def test_stats_has_what_is_promised(self):
        before = self.client.stats()
        keys = self.put(2)
        with self.client.get([*keys, *self.keys(1)]):
            after = self.client.stats()
        for name in (
            "used_bytes",
            "capacity_bytes",
            "faulted_bytes",
            "blocks",
            "pins",
            "sessions",
            "hits",
            "misses",
            "evictions",
        ):
            assert isinstance(after[name], int), name
        assert after["blocks"] - before["blocks"] == 2
        assert after["used_bytes"] - before["used_bytes"] >= 2 * SMALL.length(16)
        assert after["used_bytes"] <= after["capacity_bytes"]

    def test_many_threads_share_one_client(self):
        """Peers' case 13, C16: puts, gets and deletes of the same few keys from eight threads."""
        keys = self.keys(16)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    chosen = [keys[i] for i in random.choice(16, size=4, replace=False)]
                    with self.client.create(chosen, self.small) as writer:
                        for index in writer.granted:
                            fill(writer[index])
                    with self.client.get(chosen) as blocks:
                        for block in blocks:
                            if block is not None:
                                check(block)
                    if random.integers(3) == 0:
                        self.client.delete(chosen[:1])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        if failures:
            raise failures[0]

    def test_chains_are_keys(self):
        self.needs("chains")
        from kvclient import chain

        prompt = list(range(5, 5 + 16 * 4 + 3))
        whole = chain(new_keys(1)[0], prompt, block_tokens=16, partial=True)
        self._made.extend(whole.keys)
        with self.client.create(whole, self.small) as writer:
            assert writer.results == ["granted"] * 5
            for index in writer.granted:
                fill(writer[index])
        found = self.open().lookup(
            chain(whole.identity, [*prompt[:64], 1, 2, 3], block_tokens=16, partial=True)
        )
        assert found.resident == 4
        with self.client.get(whole) as blocks, self.client.get(list(whole.keys)) as same:
            assert [block.tokens for block in blocks] == [16, 16, 16, 16, 3]
            assert [block.base_position for block in blocks] == [0, 16, 32, 48, 64]
            assert [block.key for block in same] == whole.keys
            check(blocks[4])
        assert self.client.lookup(whole[2:4]).resident == 2
        with raises(InvalidArgument):  # the chain says how many tokens a chunk has
            self.client.create(whole[3:], self.small, token_counts=[16, 16])
        assert self.client.delete(whole[:2]) == 2
