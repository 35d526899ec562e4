"""Cases of following: layers read while their block is still being written."""

from __future__ import annotations

import time

import numpy as np

from kvclient.errors import BlockLost, DeadlineExceeded, InvalidArgument, KVClientError
from kvclient.testing.conformance.case import (
    SMALL,
    WAIT_S,
    Case,
    check,
    fill,
    pattern,
    raises,
    wait_until,
)

LAYERS = SMALL.num_layers


class FollowingCases(Case):
    """Invariant 3: all layers in order or an error, never a hole."""

    def publish(self, block, layer: int) -> None:
        target = block.layer(layer)
        target[...] = pattern(block.key, layer, target.shape)
        block.mark_layer(layer)

    def test_layers_arrive_in_order_while_they_are_written(self):
        self.needs("follow")
        keys = self.keys(3)
        writer = self.client.create(keys, self.small)
        reader = self.open()
        with reader.get(keys, follow=True) as blocks:
            assert blocks.hits == 3 and not blocks[0].sealed
            for layer in range(LAYERS):
                with raises(DeadlineExceeded):
                    blocks.wait_layer(layer, timeout_s=0.01)
                for index in range(3):
                    self.publish(writer[index], layer)
                blocks.wait_layer(layer, timeout_s=10.0)
                for block in blocks:
                    assert block.layers_ready >= layer + 1
                    assert np.array_equal(block.layer(layer), pattern(block.key, layer, (2, 2, 16, 8)))
            for index in range(3):
                fill(writer[index])
            writer.seal()
            if "at_once" in self.lacks:
                wait_until(lambda: all(block.sealed for block in blocks), "word of the seal comes")
            assert all(block.sealed for block in blocks)
            for block in blocks:
                check(block)

    def test_a_layer_that_is_not_there_cannot_be_read(self):
        self.needs("follow")
        keys = self.keys(1)
        writer = self.client.create(keys, self.small)
        self.publish(writer[0], 0)
        with self.open().get(keys, follow=True) as blocks:
            blocks[0].wait_layer(0, timeout_s=10.0)
            with raises(KVClientError):
                blocks[0].layer(1)
            with raises(KVClientError):
                _ = blocks[0].view
        writer.abort()

    def test_a_waiting_follower_wakes(self):
        self.needs("follow")
        keys = self.keys(1)
        writer = self.client.create(keys, self.small)
        with self.open().get(keys, follow=True) as blocks:
            for layer in range(LAYERS):
                joined = self.in_thread(lambda layer=layer: blocks.wait_layer(layer, timeout_s=10.0))
                self.publish(writer[0], layer)
                joined()
            writer.seal()

    def test_an_abort_reaches_the_follower(self):
        self.needs("follow")
        for marked in range(LAYERS):
            keys = self.keys(1)
            writer = self.client.create(keys, self.small)
            with self.open().get(keys, follow=True) as blocks:
                for layer in range(marked):
                    self.publish(writer[0], layer)
                joined = self.in_thread(lambda layer=marked: blocks[0].wait_layer(layer, timeout_s=10.0))
                writer.abort()
                with raises(BlockLost):
                    joined()
                with raises(BlockLost):
                    blocks.wait_layer(LAYERS - 1, timeout_s=10.0)
                if "pins" not in self.lacks:  # else the bytes may be a copy
                    with raises(BlockLost):
                        blocks[0].layer(0)

    def test_the_end_of_the_writers_session_reaches_the_follower(self):
        self.needs("follow")
        keys = self.keys(1)
        other = self.open()
        writer = other.create(keys, self.small)
        self.publish(writer[0], 0)
        with self.client.get(keys, follow=True) as blocks:
            joined = self.in_thread(lambda: blocks[0].wait_layer(1, timeout_s=10.0))
            other.close()
            with raises(BlockLost):
                joined()
        assert self.states(keys) == [0]

    def test_a_seal_completes_a_followed_block(self):
        self.needs("follow")
        keys = self.keys(1)
        writer = self.client.create(keys, self.small)
        with self.open().get(keys, follow=True) as blocks:
            joined = self.in_thread(lambda: blocks[0].wait_layer(LAYERS - 1, timeout_s=10.0))
            fill(writer[0])
            writer.seal()
            joined()
            check(blocks[0])
            assert self.client.delete(keys) == 1
            check(blocks[0])  # the pin taken while it was written holds after seal and delete

    def test_following_a_sealed_block(self):
        self.needs("follow")
        keys = [*self.put(1), *self.keys(1)]
        with self.client.get(keys, follow=True) as blocks:
            assert blocks[1] is None and blocks[0].sealed
            blocks.wait_layer(LAYERS - 1, timeout_s=10.0)
            assert blocks[0].layers_ready == LAYERS
            check(blocks[0])

    def test_layers_are_published_in_order(self):
        self.needs("follow", "ordered_marks")
        keys = self.keys(1)
        writer = self.client.create(keys, self.small)
        with raises(InvalidArgument):
            writer[0].mark_layer(1)
        for wrong in (-1, LAYERS):
            with raises(InvalidArgument):
                writer[0].mark_layer(wrong)
        self.publish(writer[0], 0)
        with raises(InvalidArgument):
            writer[0].mark_layer(0)
        with self.open().get(keys, follow=True) as blocks:
            assert blocks[0].layers_ready == 1
        writer.abort()

    def test_get_waits_for_what_is_being_written(self):
        self.needs("follow")
        keys = self.keys(2)
        writer = self.client.create(keys, self.small)
        reader = self.open()
        joined = self.in_thread(lambda: reader.get(keys, wait_s=WAIT_S))
        fill(writer[0])
        writer.seal(0)
        writer.abort(1)
        with joined() as blocks:
            check(blocks[0])
            assert blocks[1] is None, "its writer gave it up"
        late = self.keys(1)
        writer = self.client.create(late, self.small)
        begun = time.monotonic()
        with reader.get(late, wait_s=0.05) as blocks:
            assert blocks[0] is None and time.monotonic() - begun >= 0.05
        writer.abort()

    def test_a_wait_ends_at_its_deadline(self):
        self.needs("follow")
        keys = self.keys(1)
        writer = self.client.create(keys, self.small)
        with self.client.get(keys, follow=True) as blocks:
            begun = time.monotonic()
            with raises(DeadlineExceeded):
                blocks[0].wait_layer(0, timeout_s=0.05)
            assert time.monotonic() - begun >= 0.05
            with raises(InvalidArgument):
                blocks[0].wait_layer(LAYERS, timeout_s=0.05)
        writer.abort()
