"""Cases of searching: blocks found by their tokens, anywhere in a prompt, and by their parent."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

import kvclient
from kvclient.blocks import meta
from kvclient.errors import InvalidArgument
from kvclient.testing.conformance.case import SMALL, Case, fill, geometry, new_keys, raises


class SearchingCases(Case):
    """find and children. Skipped by doors that lack "search"."""

    def text(self, seed: int, chunks: float = 4) -> list[int]:
        generator = random.Random(seed)
        return [generator.randrange(50_000) for _ in range(int(chunks * SMALL.block_tokens))]

    def put_text(self, identity: bytes, tokens: list[int]):
        made = kvclient.chain(identity, tokens, SMALL.block_tokens)
        self._made.extend(made.keys)
        with self.client.create(made, self.small) as writer:
            writer.seal(zero_rest=True)
        return made

    def found(self, identity: bytes, tokens: list[int]) -> list[tuple[int, bytes]]:
        return self.open().find(identity, tokens, SMALL.block_tokens)

    def test_a_text_is_found_at_any_offset_by_its_identity_only(self):
        self.needs("search")
        mine, other = new_keys(2)
        text = self.text(1)
        made = self.put_text(mine, text)
        for shift in (0, 1, SMALL.block_tokens - 1, SMALL.block_tokens, 3 * SMALL.block_tokens + 5):
            prompt = self.text(2, 10)[:shift] + text + [7]
            places = [(shift + i * SMALL.block_tokens, key) for i, key in enumerate(made.keys)]
            assert self.found(mine, prompt) == places
            assert self.found(other, prompt) == []
        assert self.found(mine, text[: SMALL.block_tokens - 1]) == []
        assert self.found(mine, self.text(3, 50)) == []

    def test_a_text_that_repeats_itself_is_found_in_places_that_do_not_overlap(self):
        """Or else what a search names would grow with the square of such a text."""
        self.needs("search")
        (mine,) = new_keys(1)
        size = SMALL.block_tokens
        made = self.put_text(mine, [7] * (20 * size))
        places = self.found(mine, [7] * (20 * size))
        offsets = [offset for offset, _ in places]
        assert offsets == sorted(offsets) and max(map(offsets.count, offsets)) <= 8
        assert set(offsets) >= {i * size for i in range(20)}
        for key in made.keys:
            starts = [offset for offset, other in places if other == key]
            assert all(later - sooner >= size for sooner, later in pairwise(starts))

    def test_children_are_those_of_that_block(self):
        self.needs("search")
        (mine,) = new_keys(1)
        text = self.text(1)
        made = self.put_text(mine, text)
        text[-1] += 1
        other = self.put_text(mine, text)
        assert self.open().children(made.keys[0]) == [made.keys[1]]
        assert sorted(self.open().children(made.keys[2])) == sorted([made.keys[3], other.keys[3]])
        assert self.open().children(made.keys[3]) == []

    def test_a_block_says_of_which_text_it_is(self):
        self.needs("search")
        (mine,) = new_keys(1)
        text = self.text(1, 2.5)
        extra = [0] * 20 + [9] * 20
        for layout, ids in ((self.small, extra), (self.small, None), (self.without_room(), None)):
            made = kvclient.chain(mine, text, SMALL.block_tokens, extra_ids=ids, partial=True)
            with self.client.create(made, layout) as writer:
                writer.seal(zero_rest=True)
            with self.open().get(made) as blocks:
                for index, block in enumerate(blocks):
                    said = meta.unpack(block.meta, block.tokens)
                    start = made.start_tokens[index]
                    ids = np.asarray(text[start : start + block.tokens], np.int32)
                    assert block.holds(ids) == block.holds(ids.tobytes()) == (said is not None)
                    assert not block.holds(ids[1:]) and not block.holds(ids + 1)
                    wanted = meta.of_chunk(made, index) if layout == self.small else None
                    assert said in (wanted, wanted and wanted._replace(identity=b""))
            assert self.client.delete(made) == len(made)

    def test_a_damaged_meta_area_holds_no_tokens(self):
        self.needs("search")
        ids = np.arange(SMALL.block_tokens, dtype=np.int32)
        whole = meta.pack(meta.Meta(meta.NO_PARENT, bytes(32), ids.tobytes(), b"", bytes(32)))
        # Magic, tokens, words of extra ids (three is none of the numbers, four have no room), identity.
        words = ((0, 1), (4, 15), (4, 17), (8, 1), (8, 3), (8, 4), (12, 2), (12, 0), (0, None))
        for at, value in words:
            damaged = bytearray(whole)
            if value is not None:
                damaged[at : at + 4] = value.to_bytes(4, "little")
            with self.client.create(keys := self.keys(1), self.small) as writer:
                fill(writer[0])
                writer[0].meta[: len(damaged)] = damaged
            with self.open().get(keys) as blocks:
                known = meta.unpack(blocks[0].meta, blocks[0].tokens)
                right = known is not None and known.token_ids == ids.tobytes()
                assert blocks[0].holds(ids) == right, f"{value} at {at}"

    def without_room(self) -> int:
        return self.client.register_layout(geometry(meta=(0, 4)).to_blob())

    def test_only_what_is_sealed_is_found(self):
        self.needs("search")
        (mine,) = new_keys(1)
        text = self.text(1)
        made = kvclient.chain(mine, text, SMALL.block_tokens)
        writer = self.client.create(made, self.small)
        assert self.found(mine, text) == [] and self.open().children(made.keys[0]) == []
        writer.seal(zero_rest=True)
        assert len(self.found(mine, text)) == len(made)
        self.client.delete(made[1:2])
        assert [key for _, key in self.found(mine, text)] == [made.keys[0], *made.keys[2:]]
        self.client.delete(made)
        assert self.found(mine, text) == []

    def test_wrong_arguments_are_named(self):
        self.needs("search")
        for identity, tokens, size in ((b"short", [1], 4), (bytes(32), [1], 0), (bytes(32), ["x"], 4)):
            try:
                self.client.find(identity, tokens, size)
            except InvalidArgument:
                continue
            raise AssertionError(f"accepted: {identity!r} {tokens} {size}")
        with raises(InvalidArgument):
            self.client.children(b"short")
