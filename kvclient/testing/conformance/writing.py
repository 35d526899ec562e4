"""Cases of writing: create, fill, seal, abort, and what several writers see of each other."""

from __future__ import annotations

import time

import numpy as np

from kvclient.errors import BlockLost, Closed, InvalidArgument, KVClientError
from kvclient.testing.conformance.case import SMALL, Case, check, fill, geometry, pattern, raises

MISSING, PENDING, RESIDENT = 0, 1, 2


class WritingCases(Case):
    """Create to seal."""

    def test_put_and_get_round_trip(self):
        keys = self.put(5)
        with self.open().get(keys) as blocks:
            assert len(blocks) == 5 and blocks.hits == 5
            for key, block in zip(keys, blocks, strict=True):
                assert (block.key, block.tokens, block.layout_id) == (key, SMALL.block_tokens, self.small)
                assert block.sealed
                check(block)
                del block

    def test_a_block_of_fewer_tokens(self):
        keys = self.keys(3)
        with self.client.create(keys, self.small, token_counts=[1, 7, 16]) as writer:
            for index in writer.granted:
                fill(writer[index])
        with self.client.get(keys) as blocks:
            assert [block.tokens for block in blocks] == [1, 7, 16]
            assert blocks[1].layer(0).shape == (2, 2, 7, 8)
            for index in range(3):
                check(blocks[index])

    def test_pads_and_meta_show_nothing_of_the_block_before(self):
        self.needs("zeroed")
        for _ in range(3):
            before = self.keys(50)
            with self.client.create(before, self.small) as writer:
                for index in writer.granted:
                    writer[index].view[:] = b"\xee" * len(writer[index].view)
                    writer[index].meta[:] = b"\xee" * len(writer[index].meta)
            self.client.delete(before)
        keys = self.keys(10)
        with self.client.create(keys, self.small, token_counts=[7] * 10) as writer:
            for index in writer.granted:
                for layer in range(SMALL.num_layers):
                    writer[index].layer(layer)[...] = 1
        with self.client.get(keys) as blocks:
            for block in blocks:
                assert bytes(block.meta) == bytes(SMALL.meta_length(7))
                for layer in range(SMALL.num_layers):
                    end = SMALL.layer_offset(layer, 7) + SMALL.layer_length(layer, 7)
                    assert not any(block.view[end : SMALL.layer_offset(layer + 1, 7)])

    def test_a_second_put_changes_nothing(self):
        keys = self.put(2)
        with self.open().create([*keys, *self.keys(1)], self.small) as writer:
            assert writer.results == ["exists", "exists", "granted"] and writer.granted == [2]
            fill(writer[2])
        with self.client.get(keys) as blocks:
            for index in range(2):
                check(blocks[index])

    def test_unsealed_is_found_by_nobody(self):
        keys = self.keys(2)
        other = self.open()
        with self.client.create(keys, self.small) as writer:
            for client in (self.client, other):
                assert self.states(keys, client) == [PENDING, PENDING]
                assert client.lookup(keys).resident == 0
                with client.get(keys) as blocks:
                    assert list(blocks) == [None, None] and blocks.hits == 0
            for index in writer.granted:
                fill(writer[index])
        assert self.states(keys, other) == [RESIDENT, RESIDENT]

    def test_found_as_soon_as_seal_returned(self):
        other = self.open()
        for _ in range(100):
            key = self.put(1)
            assert other.lookup(key).resident == 1
            with other.get(key) as blocks:
                assert blocks[0] is not None

    def test_abort_leaves_nothing(self):
        keys = self.keys(3)
        writer = self.client.create(keys, self.small)
        for index in writer.granted:
            fill(writer[index])
        writer.abort()
        assert self.states(keys) == [MISSING] * 3
        assert self.used() == self.used_before
        writer.abort()  # a second time is no error

    def test_an_exception_aborts_the_whole_batch(self):
        keys = self.keys(4)
        with raises(ZeroDivisionError), self.client.create(keys, self.small) as writer:
            fill(writer[0])
            raise ZeroDivisionError
        assert self.states(keys, self.open()) == [MISSING] * 4
        assert self.used() == self.used_before

    def test_early_seal_and_abort_of_single_blocks(self):
        keys = self.keys(4)
        with raises(ZeroDivisionError), self.client.create(keys, self.small) as writer:
            for index in range(4):
                fill(writer[index])
            writer.seal(1)
            writer.abort(2)
            assert self.states(keys) == [PENDING, RESIDENT, MISSING, PENDING]
            raise ZeroDivisionError
        assert self.states(keys) == [MISSING, RESIDENT, MISSING, MISSING]

    def test_the_end_of_the_context_seals_what_is_left(self):
        keys = self.keys(3)
        with self.client.create(keys, self.small) as writer:
            for index in range(3):
                fill(writer[index])
            writer.seal(0)
            writer.abort(1)
        assert self.states(keys) == [RESIDENT, MISSING, RESIDENT]

    def test_a_key_twice_in_one_batch_is_granted_once(self):
        key = self.keys(1)[0]
        with self.client.create([key, key], self.small) as writer:
            assert writer.results == ["granted", "pending"]
            fill(writer[0])
        assert self.states([key]) == [RESIDENT]

    def test_one_batch_gets_an_answer_per_key(self):
        there, written, new = self.put(1), self.keys(1), self.keys(2)
        first = self.client.create(written, self.small)
        with self.open().create([new[0], *there, *written, new[1]], self.small) as writer:
            assert writer.results == ["granted", "exists", "pending", "granted"]
            assert writer.granted == [0, 3] and writer[-1].key == new[1]
            for index in writer.granted:
                fill(writer[index])
        assert self.states([*new, *there, *written]) == [RESIDENT, RESIDENT, RESIDENT, PENDING]
        first.abort()

    def test_a_create_may_seal_what_came_before(self):
        self.needs("sealing")
        first, second = self.keys(2), self.keys(2)
        writer = self.client.create(first, self.small)
        for index in writer.granted:
            fill(writer[index])
        with self.client.create(second, self.small, sealing=writer) as follower:
            assert self.states([*first, *second]) == [RESIDENT, RESIDENT, PENDING, PENDING]
            for index in follower.granted:
                fill(follower[index])
        writer.seal()  # again is no error
        with self.open().get([*first, *second]) as blocks:
            for index in range(4):
                check(blocks[index])

    def test_what_was_given_up_cannot_be_sealed(self):
        self.needs("sealing")
        writer = self.client.create(keys := self.keys(3), self.small)
        writer.abort(1)
        for index in (1, None):
            with raises(BlockLost):  # after the others
                writer.seal(index, zero_rest=True)
        assert self.states(keys) == [RESIDENT, MISSING, RESIDENT]
        self.client.delete(keys)
        for index in (0, 2):
            writer.seal(index)  # was sealed; what others did since then is theirs
        self.client.create(self.keys(1), self.small, sealing=writer).abort()  # nothing of it is open

    def test_a_refused_create_does_nothing(self):
        self.needs("sealing")
        earlier = self.client.create(before := self.keys(1), self.small)
        keys = self.keys(2)
        for wrong in ({"token_counts": [16, 17]}, {"priority": 101}, {"ttl_s": 0}, {"sealing": "a writer"}):
            with raises(InvalidArgument):
                self.client.create(keys, self.small, **{"sealing": earlier, **wrong})
        assert self.states([*before, *keys]) == [PENDING, MISSING, MISSING]
        earlier.abort()

    def test_copies_into_a_block(self):
        self.needs("copies")
        keys = self.keys(2)
        with self.client.create(keys, self.small) as writer:
            layers = [pattern(keys[0], layer, (2, 2, 16, 8)) for layer in range(SMALL.num_layers)]
            for layer, source in enumerate(layers):
                writer[0].copy_layer(layer, source)
            writer[0].meta[:32] = keys[0]
            whole = b"".join(
                pattern(keys[1], layer, (2, 2, 16, 8)).tobytes() for layer in range(SMALL.num_layers)
            )
            writer[1].copy_from(whole)
            writer[1].meta[:32] = keys[1]
            apart = np.repeat(layers[0], 2, axis=-1)[..., ::2]  # the same elements, with others in between
            for wrong in (
                lambda: writer[0].copy_from(whole[1:]),
                lambda: writer[0].copy_layer(0, whole),
                lambda: writer[0].copy_layer(0, apart),
            ):
                with raises(InvalidArgument):
                    wrong()
        with self.open().get(keys) as blocks:
            for index in range(2):
                check(blocks[index])
                assert blocks[index].verify()

    def test_what_was_copied_may_be_changed_until_it_is_sealed(self):
        self.needs("copies")
        keys = self.keys(2)
        layers = [pattern(keys[0], layer, (2, 2, 16, 8)) for layer in range(SMALL.num_layers)]
        with self.client.create(keys, self.small) as writer:
            for index in range(2):
                writer[index].copy_from(b"".join(layer.tobytes() for layer in layers))
            writer[0].view[:4] = b"view"
            writer[1].layer(1)[...] = layers[0]
        with self.open().get(keys) as blocks:
            assert bytes(blocks[0].view[:4]) == b"view" and blocks[0].verify()
            assert bytes(blocks[1].layer(1).tobytes()) == layers[0].tobytes() and blocks[1].verify()

    def test_what_was_not_granted_cannot_be_written(self):
        with self.client.create([*self.put(1), *self.keys(1)], self.small) as writer:
            with raises(KVClientError):
                writer[0]
            with raises(IndexError, KVClientError):
                writer[2]
            fill(writer[1])

    def test_wait_pending_sees_the_other_seal(self):
        self.needs("wait_pending")
        keys = self.keys(2)
        first = self.client.create(keys, self.small)
        second = self.open().create(keys, self.small)
        assert second.results == ["pending", "pending"]
        joined = self.in_thread(lambda: second.wait_pending(timeout_s=10.0))
        for index in range(2):
            fill(first[index])
        first.seal()
        joined()
        assert second.results == ["exists", "exists"] and second.granted == []

    def test_wait_pending_is_granted_what_the_other_aborts(self):
        self.needs("wait_pending")
        keys = self.keys(2)
        first = self.client.create(keys, self.small)
        with self.open().create(keys, self.small) as second:
            joined = self.in_thread(lambda: second.wait_pending(timeout_s=10.0))
            fill(first[0])
            first.seal(0)
            first.abort(1)
            joined()
            assert second.results == ["exists", "granted"] and second.granted == [1]
            fill(second[1])
        with self.client.get(keys) as blocks:
            for index in range(2):
                check(blocks[index])

    def test_wait_pending_ends_at_its_deadline(self):
        self.needs("wait_pending")
        keys = self.keys(1)
        first = self.client.create(keys, self.small)
        second = self.open().create(keys, self.small)
        begun = time.monotonic()
        second.wait_pending(timeout_s=0.05)
        assert second.results == ["pending"] and time.monotonic() - begun >= 0.05
        first.abort()

    def test_closing_aborts_what_is_unsealed(self):
        keys = self.keys(2)
        other = self.open()
        writer = other.create(keys, self.small)
        fill(writer[0])
        writer.seal(0)
        other.close()
        assert self.states(keys) == [RESIDENT, MISSING]
        if "sealing" not in self.lacks:
            with raises(Closed):
                writer.seal()

    def test_arguments_are_checked(self):
        key = self.keys(1)[0]
        for wrong in (
            lambda: self.client.create([key[:31]], self.small),
            lambda: self.client.create([key + b"x"], self.small),
            lambda: self.client.create([key], self.small + 200),
            lambda: self.client.create([key], -1),
            lambda: self.client.create([key], self.small, priority=101),
            lambda: self.client.create([key], self.small, priority=-1),
            lambda: self.client.create([key], self.small, token_counts=[0]),
            lambda: self.client.create([key], self.small, token_counts=[-1]),
            lambda: self.client.create([key], self.small, token_counts=[SMALL.block_tokens + 1]),
            lambda: self.client.create([key], self.small, token_counts=[1, 1]),
            lambda: self.client.create([key], self.small, ttl_s=-1.0),
            lambda: self.client.lookup([key[:8]]),
            lambda: self.client.get([b""]),
            lambda: self.client.delete([key, b"short"]),
            lambda: self.client.lookup(17),
            lambda: self.client.lookup(None),
            lambda: self.client.get(None),
            lambda: self.client.create(None, self.small),
        ):
            with raises(InvalidArgument):
                wrong()
        assert self.states([key]) == [MISSING] and self.used() == self.used_before
        self.put(1)

    def test_errors_name_what_was_given_and_the_limit(self):
        self.needs("sealing")
        key = self.keys(1)[0]
        with self.client.create([key], self.small) as writer, self.client.get([key]) as blocks:
            for wrong, words in (
                (lambda: self.client.lookup(17), "got int"),
                (lambda: self.client.get(None), "got NoneType"),
                (lambda: self.client.delete([key, b"short"]), "32 bytes; key 1 is 5 bytes"),
                (lambda: self.client.create([7], self.small), "32 bytes; key 0 is of type int"),
                (lambda: writer[9], "index 9 of 1 keys"),
                (lambda: blocks[-2], "index -2 of 1 blocks"),
            ):
                try:
                    wrong()
                except (InvalidArgument, IndexError) as error:
                    assert words in str(error), error
                else:
                    raise AssertionError(f"nothing was raised for {words!r}")
            writer.abort()

    def test_layouts_are_registered_once(self):
        assert self.client.register_layout(SMALL.to_blob()) == self.small
        no_bytes = () if "sealing" in self.lacks else (7, None, "KVL1")
        for wrong in (*no_bytes, b"KVL1", SMALL.to_blob() + bytes(257), bytes(1 << 20)):
            with raises(InvalidArgument):
                self.client.register_layout(wrong)
        assert self.open().register_layout(SMALL.to_blob()) == self.small
        assert self.client.register_layout(geometry(layers=3).to_blob()) != self.small
        blob = SMALL.to_blob()
        for wrong in (b"", b"KVL2" + blob[4:], blob[:-1], blob + bytes(5000), blob[:4] + bytes(4) + blob[8:]):
            with raises(InvalidArgument):
                self.client.register_layout(wrong)

    def test_batches_longer_than_a_message(self):
        keys = self.keys(2500)
        with self.client.create(keys, self.small, token_counts=[1] * 2500) as writer:
            assert writer.results == ["granted"] * 2500
            writer[2499].layer(0)[...] = 3
            writer.seal(zero_rest=True)
        found = self.open().lookup(keys)
        assert found.resident == 2500 and len(found.states) == 2500
        with self.client.get(keys) as blocks:
            assert blocks.hits == 2500 and blocks[2499].layer(0)[0, 0, 0, 0] == 3
        assert self.client.touch(keys) == 2500
        assert self.client.delete(keys) == 2500
        assert self.used() == self.used_before

    def test_empty_batches(self):
        found = self.client.lookup([])
        assert (found.resident, found.pending, found.on_disk, bytes(found.states)) == (0, 0, 0, b"")
        with self.client.get([]) as blocks:
            assert len(blocks) == 0
        with self.client.create([], self.small) as writer:
            assert writer.results == [] and writer.granted == []
        assert self.client.delete([]) == 0 and self.client.touch([]) == 0
