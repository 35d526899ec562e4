"""Cases of a full pool: eviction, pins against it, priority, time to live, exact accounting."""

from __future__ import annotations

from typing import Any

from kvclient.testing.conformance.case import BIG, Case, check, fill, geometry, wait_until

MISSING, RESIDENT = 0, 2


class PressureCases(Case):
    """The store under test has little memory: these cases fill it several times over."""

    def setup_method(self) -> None:
        super().setup_method()
        self.capacity = self.client.stats()["capacity_bytes"]

    def fill_pool(self, count: int | None = None, **options: Any) -> list[bytes]:
        """Puts big blocks one by one: twice as many as fit, or `count`. All must be granted."""
        big = self.client.register_layout(BIG.to_blob())
        keys = self.keys(count or 2 * self.capacity // BIG.length(BIG.block_tokens))
        for key in keys:
            with self.client.create([key], big, **options) as writer:
                assert writer.results == ["granted"], writer.results
                fill(writer[0], BIG.num_layers)
        return keys

    def test_a_full_pool_evicts(self):
        keys = self.fill_pool()
        stats = self.client.stats()
        assert stats["evictions"] > 0 and stats["used_bytes"] <= self.capacity
        states = self.states(keys)
        there = [key for key, state in zip(keys, states, strict=True) if state == RESIDENT]
        assert states[-1] == RESIDENT, "the block just written is not the victim"
        assert len(there) * BIG.length(BIG.block_tokens) >= self.capacity // 2, "far too much was evicted"
        for key in there[:: max(1, len(there) // 8)]:
            with self.client.get([key]) as blocks:
                check(blocks[0], BIG.num_layers)
        assert self.client.delete(keys) == len(there)
        assert self.used() == self.used_before

    def test_the_newest_blocks_of_a_full_pool_stay(self):
        """A prompt's first blocks must not be thrown out by its next ones: all else equal, the oldest go."""
        keys = self.fill_pool()
        newest = keys[-(len(keys) // 6) :]
        assert self.states(newest) == [RESIDENT] * len(newest)

    def test_another_size_gets_memory_in_a_full_pool(self):
        self.fill_pool()
        keys = self.keys(300)
        for key in keys:
            with self.client.create([key], self.small) as writer:
                assert writer.results == ["granted"], writer.results
                fill(writer[0])
        there = self.states(keys).count(RESIDENT)
        assert there >= 200, f"only {there} of 300 small blocks stayed among idle big ones"

    def test_a_pinned_block_is_not_evicted(self):
        self.needs("pins")
        pinned = self.fill_pool(5, priority=0)  # first in the line, were it not for the pins
        with self.open().get(pinned) as blocks:
            self.fill_pool()
            assert self.states(pinned) == [RESIDENT] * 5
            for block in blocks:
                check(block, BIG.num_layers)

    def test_no_space_when_all_is_pinned(self):
        self.needs("pins")
        keys = self.fill_pool()
        reader = self.open()
        with reader.get(keys) as blocks:
            held = blocks.hits
            assert held > 0
            big = self.client.register_layout(BIG.to_blob())
            wanted = self.keys(held)
            with self.client.create(wanted, big) as writer:
                assert "no_space" in writer.results, "more was granted than there is"
                for index in writer.granted:
                    fill(writer[index], BIG.num_layers)
            for block in blocks:
                if block is not None:
                    check(block, BIG.num_layers)
            del block
        self.fill_pool(2)

    def test_no_space_of_one_item_is_its_own(self):
        huge = geometry(layers=64, heads=64, dim=64, tokens=128)
        assert huge.length(128) > self.capacity
        huge_id = self.client.register_layout(huge.to_blob())
        there = self.put(2)
        keys = self.keys(2)
        with self.client.create(keys, huge_id, token_counts=[128, 1]) as writer:
            assert writer.results == ["no_space", "granted"]
            fill(writer[1], 64)
        assert self.states([*keys, *there]) == [MISSING, RESIDENT, RESIDENT, RESIDENT]

    def test_what_is_being_written_is_not_evicted(self):
        big = self.client.register_layout(BIG.to_blob())
        keys = self.keys(3)
        with self.client.create(keys, big) as writer:
            for index in range(3):
                fill(writer[index], BIG.num_layers)
            self.fill_pool()
        with self.client.get(keys) as blocks:
            for index in range(3):
                check(blocks[index], BIG.num_layers)

    def test_low_priority_goes_first(self):
        fits = self.capacity // BIG.length(BIG.block_tokens)
        low = self.fill_pool(fits // 4, priority=0)
        high = self.fill_pool(fits // 4, priority=100)
        self.fill_pool(fits // 2 + fits // 8)
        lost_low = self.states(low).count(MISSING)
        assert lost_low > 0 and self.states(high).count(MISSING) == 0

    def test_time_to_live(self):
        mortal, immortal = self.put(2, ttl_s=0.05), self.put(1)
        wait_until(lambda: self.states(mortal) == [MISSING, MISSING], "the blocks expire")
        with self.client.get(mortal) as blocks:
            assert list(blocks) == [None, None]
        assert self.states(immortal) == [RESIDENT]
        self.put(keys=mortal)
        long = self.put(1, ttl_s=3600)
        assert self.states([*mortal, *long]) == [RESIDENT] * 3

    def test_memory_returns_to_exactly_zero(self):
        """C7: after a mixture of all ways to end, what is in use is what was before."""
        for round_ in range(10):
            keys = self.keys(9)
            other = self.open()
            writer = other.create(keys, self.small, token_counts=[1 + round_] * 9)
            writer.seal(0, zero_rest=True)
            writer.seal(1, zero_rest=True)
            writer.abort(2)
            view = self.client.get(keys[:1])[0]
            self.client.delete(keys[:1])
            other.close()
            del view, writer  # until then memory of the ended session could still be written
            self.client.delete(keys)
        wait_until(lambda: self.used() == self.used_before, "memory in use is what it was")
