"""Cases of blocks that were not written whole: the memory of the block before is never found in them."""

from __future__ import annotations

from kvclient.testing.conformance.case import SMALL, Case, fill, names

MISSING, PENDING, RESIDENT = 0, 1, 2


class UnwrittenCases(Case):
    """Seal, publish and leave with layers whose memory nobody asked for."""

    def test_a_block_with_layers_nobody_wrote_is_not_sealed(self):
        self.needs("unwritten")
        self.foul_the_pool()
        keys, more = self.keys(3), self.keys(1)
        writer = self.client.create(keys, self.small)
        fill(writer[0])
        writer[1].layer(1)[...] = 1
        with names("block 1 of 3", "layers nobody wrote", "0, 2", "zero_rest"):
            writer.seal(1)
        with names("block 1 of 3"):  # and the good one beside it is not sealed either
            writer.seal()
        if "sealing" not in self.lacks:
            with names("block 1 of 3"):
                self.client.create(more, self.small, sealing=writer)
        assert self.states([*keys, *more]) == [PENDING] * 3 + [MISSING]
        writer.seal(0)
        writer.abort(1)
        with names("block 2 of 3"):
            writer.seal()
        writer.abort()
        assert self.states(keys) == [RESIDENT, MISSING, MISSING]

    def test_leaving_the_context_with_layers_nobody_wrote_aborts(self):
        self.needs("unwritten")
        keys = self.keys(2)
        with names("block 1 of 2"), self.client.create(keys, self.small) as writer:
            fill(writer[0])
            writer[1].layer(0)[...] = 1
        assert self.states(keys) == [MISSING, MISSING] and self.used() == self.used_before

    def test_layers_nobody_wrote_become_zeros_if_asked_for(self):
        self.needs("unwritten")
        self.foul_the_pool()
        keys = self.keys(2)
        with self.client.create(keys, self.small) as writer:
            writer[0].layer(2)[...] = 1
            writer.seal(zero_rest=True)
        with self.client.get(keys) as blocks:
            for index, block in enumerate(blocks):
                for layer in range(SMALL.num_layers):
                    assert (block.layer(layer) == (index == 0 and layer == 2)).all(), (index, layer)
                assert block.verify()

    def test_a_layer_nobody_wrote_is_not_published(self):
        self.needs("unwritten", "ordered_marks")
        writer = self.client.create(self.keys(1), self.small)
        with names("layer 0", "not written"):
            writer[0].mark_layer(0)
        fill(writer[0])
        writer[0].mark_layer(0)
        writer.abort()

    def foul_the_pool(self) -> None:
        """What is free now had another prompt's bytes."""
        before = self.keys(50)
        with self.client.create(before, self.small) as writer:
            for index in writer.granted:
                writer[index].view[:] = b"\xee" * len(writer[index].view)
        self.client.delete(before)
