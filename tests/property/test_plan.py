"""plan(): stored text is found wherever it stands, and nothing else is.

Method: Hypothesis stores random texts and assembles prompts from pieces of them and of new text, in any order
and at any shift, over a small alphabet too, so that pieces repeat. Every segment is compared with the token
ids its blocks were written with; a piece that holds a whole block must be found to its last token. Collisions
are planted.
"""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvclient
from kvclient.blocks import match, meta, plan
from kvclient.blocks.chunker import Chunker
from kvclient.errors import InvalidArgument

LAYOUT = kvclient.Layout(1, 1, 1, "uint8", 64)
IDENTITY, OTHER = bytes(32), bytes([1]) * 32


def put(client, tokens, size, identity=IDENTITY, partial=False, contents=None, chain=None):
    chain = kvclient.chain(identity, tokens, size, partial=partial) if chain is None else chain
    if not len(chain):
        return chain
    ids = np.asarray(tokens, np.int32)
    with client.create(chain, client.register_layout(LAYOUT)) as writer:
        for index in writer.granted:
            start = chain.start_tokens[index]
            part = ids[start : start + chain.token_counts[index]]
            area = meta.pack(
                meta.Meta(chain.parent_keys[index], chain.content_keys[index], part.tobytes(), b"")
            )
            if contents is not None:
                area = contents(area)
            writer[index].meta[: len(area)] = area
        writer.seal(zero_rest=True)
    return chain


def check(segments, tokens):
    """Tiles, equal tokens, positions that follow each other, exact only in front."""
    at = 0
    for number, segment in enumerate(segments):
        assert segment.start == at and segment.stop > at
        assert (segment.kind == "live") == (not segment.pieces)
        assert segment.kind != "exact" or (number == 0 and segment.shift == 0)
        position = segment.position
        for view, offset, count, _ in segment.pieces:
            ids = np.frombuffer(meta.unpack(view.meta, view.tokens).token_ids, np.int32)
            assert ids[offset : offset + count].tolist() == tokens[at : at + count]
            assert view.base_position + offset == position
            at, position = at + count, position + count
        at = segment.stop if segment.kind == "live" else at
        assert at == segment.stop
    assert at == len(tokens)


@pytest.fixture
def client():
    with kvclient.InMemoryClient(16 << 20) as client:
        yield client


def fresh(seed, count, low=10_000, high=20_000):
    return np.random.default_rng(seed).integers(low, high, count).tolist()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_assembly_of_stored_pieces_is_covered(data):
    size = data.draw(st.sampled_from([1, 2, 5, 16]), "block_tokens")
    alphabet = data.draw(st.sampled_from([2, 10, 10_000]), "alphabet")
    random = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    texts = [
        random.integers(0, alphabet, n).tolist() for n in data.draw(st.lists(st.integers(1, 100), max_size=4))
    ]
    prompt, pieces = [], []
    for _ in range(data.draw(st.integers(0, 5), "parts")):
        if texts and data.draw(st.booleans()):
            text = texts[data.draw(st.integers(0, len(texts) - 1))]
            start = data.draw(st.integers(0, len(text) - 1))
            piece = text[start : data.draw(st.integers(start, len(text)))]
            whole = [
                b
                for b in range(0, len(text) - size + 1, size)
                if start <= b and b + size <= start + len(piece)
            ]
            stored = len(text) // size * size  # what is behind the last whole block was not stored
            pieces.append((len(prompt), max(0, min(stored - start, len(piece))) if whole else 0))
            prompt += piece
        else:
            prompt += random.integers(20_000, 30_000, data.draw(st.integers(1, 40))).tolist()
    with kvclient.InMemoryClient(16 << 20) as client:
        for text in texts:
            put(client, text, size)
        with plan(client, IDENTITY, prompt, size) as segments:
            check(segments, prompt)
            found = np.zeros(len(prompt), bool)
            for segment in segments:
                found[segment.start : segment.stop] = segment.kind != "live"
            exact = segments.tokens("exact")
            for start, count in pieces:
                if start < exact < start + count < exact + 2 * size:
                    continue  # a prefix goes first, and what it leaves may hold no whole block
                assert found[start : start + count].all(), (
                    start,
                    count,
                    [(s.start, s.stop, s.kind) for s in segments],
                )
        with plan(client, OTHER, prompt, size) as segments:
            assert segments.tokens("live") == len(prompt)


class Words:
    """Every fifth token ends a sentence, every seventh a paragraph."""

    def decode(self, tokens):
        return "\n\n" if tokens[0] % 7 == 0 else "." if tokens[0] % 5 == 0 else " w"


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(["sentence", "paragraph", "document"]), size=st.sampled_from([4, 16]),
    alphabet=st.sampled_from([10, 10_000]), seed=st.integers(0, 1000),
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=5),
)  # fmt: skip
def test_texts_cut_by_content_are_found_whole_in_any_order(rule, size, alphabet, seed, parts):
    """Each behind some new tokens: its first block holds a window, the others follow it."""
    random, chunker = np.random.default_rng(seed), Chunker(rule, size, Words())
    texts = [random.integers(0, alphabet, n).tolist() for n in (2 * size, 3 * size, 50, 90)]
    with kvclient.InMemoryClient(16 << 20) as client:
        for text in texts:
            chain = chunker.chain(IDENTITY, text, partial=True)
            put(client, text, chunker.most, chain=chain)
        prompt, places = [], []
        for number, gap in parts:
            prompt += random.integers(20_000, 30_000, gap).tolist()
            places.append((len(prompt), len(texts[number])))
            prompt += texts[number]
        with plan(client, IDENTITY, prompt, chunker=chunker) as segments:
            check(segments, prompt)
            live = [at for s in segments if s.kind == "live" for at in range(s.start, s.stop)]
            for start, count in places:
                assert not set(live) & set(range(start, start + count)), (start, count, live)


@pytest.mark.parametrize("shift", [0, 1, 7, 15, 16, 17, 100])
def test_a_document_is_found_at_any_shift_whatever_stands_around(client, shift):
    document = fresh(1, 200)
    put(client, fresh(2, 37) + document + fresh(3, 40), 16)
    prompt = fresh(4, shift, 1, 100) + document + fresh(5, 9, 1, 100)
    with plan(client, IDENTITY, prompt, 16) as segments:
        check(segments, prompt)
        assert [(s.start, s.stop, s.kind) for s in segments if s.kind != "live"] == [
            (shift, shift + 200, "approximate")
        ]
        assert segments[0 if shift == 0 else 1].shift == shift - 37


def test_two_documents_swapped_are_one_run_each(client):
    text, second = fresh(1, 150), fresh(2, 130)
    put(client, fresh(3, 20) + text + second + fresh(4, 30), 16)
    prompt = fresh(5, 33) + second + text + fresh(6, 5)
    with plan(client, IDENTITY, prompt, 16) as segments:
        check(segments, prompt)
        assert [(s.stop - s.start, s.kind) for s in segments] == [
            (33, "live"), (130, "approximate"), (150, "approximate"), (5, "live")
        ]  # fmt: skip


def test_the_exact_part_goes_into_the_block_behind_it(client):
    text = fresh(1, 64)
    put(client, text, 16)
    prompt = text[:41] + fresh(2, 30)
    with plan(client, IDENTITY, prompt, 16) as segments:
        check(segments, prompt)
        assert (segments[0].stop, segments[0].kind) == (41, "exact")
        assert len(segments) == 2


def test_known_exact_tokens_are_not_searched(client):
    text = fresh(1, 64)
    put(client, text, 16)
    prompt = fresh(2, 5) + text
    with plan(client, IDENTITY, text + prompt, 16, exact_tokens=64) as segments:
        assert [(s.start, s.stop, s.kind) for s in segments] == [
            (0, 64, "exact"), (64, 69, "live"), (69, 133, "approximate")
        ]  # fmt: skip
    with plan(client, IDENTITY, prompt, 16, min_tokens=65) as segments:
        assert segments.tokens("live") == 69


def test_the_tail_that_fills_no_block_is_found_if_it_was_stored(client):
    text = fresh(1, 50)
    put(client, text, 16, partial=True)
    prompt = fresh(2, 5) + text + fresh(3, 5)
    with plan(client, IDENTITY, prompt, 16) as segments:
        check(segments, prompt)
        assert segments.tokens("approximate") == 50


def test_short_and_empty_prompts(client):
    put(client, fresh(1, 64), 16)
    for prompt in ([], fresh(1, 64)[:3], fresh(1, 64)[:15], [5]):
        with plan(client, IDENTITY, prompt, 16) as segments:
            check(segments, prompt)
            assert segments.tokens("live") == len(prompt)


def test_one_token_chunks(client):
    text = fresh(1, 30)
    put(client, text, 1)
    prompt = [1, *text[3:9], 2, *text]
    with plan(client, IDENTITY, prompt, 1) as segments:
        check(segments, prompt)
        assert [len(s) for s in segments] == [1, 6, 1, 30]


def test_a_planted_fingerprint_is_no_match(client):
    """Blocks that are found by the prompt's fingerprints but hold other tokens, or another's, or rubbish."""
    text, lie = fresh(1, 64), fresh(2, 64)
    real = put(client, lie, 16)
    foreign = put(client, text, 16, identity=OTHER)
    broken = put(client, fresh(3, 64), 16, contents=lambda area: os.urandom(len(area)))
    honest = client.find
    planted = [(i * 16, key) for chain in (real, foreign, broken) for i, key in enumerate(chain.keys)]
    client.find = lambda identity, ids, size, on_disk: sorted([*honest(identity, ids, size), *planted])
    with plan(client, IDENTITY, text, 16) as segments:
        assert segments.tokens("live") == 64
    put(client, fresh(4, 5) + text + fresh(4, 16), 16)
    with plan(client, IDENTITY, text, 16) as segments:
        check(segments, text)
        assert segments.tokens("approximate") == 64


def test_a_block_of_the_same_tokens_with_other_extra_ids_is_no_match(client):
    text = fresh(1, 16)
    chain = kvclient.chain(IDENTITY, text, 16, extra_ids=[0] * 15 + [9])
    ids, extra = np.asarray(text, np.int32), np.asarray([0] * 15 + [9], np.uint64)
    with client.create(chain, client.register_layout(LAYOUT)) as writer:
        area = meta.pack(meta.Meta(meta.NO_PARENT, chain.content_keys[0], ids.tobytes(), extra.tobytes()))
        writer[0].meta[: len(area)] = area
        writer.seal(zero_rest=True)
    assert client.find(IDENTITY, text, 16)
    with plan(client, IDENTITY, text, 16) as segments:
        assert segments.tokens("live") == 16


@pytest.mark.parametrize("period", [3, 5])
def test_text_that_repeats_itself_is_searched_in_linear_work(client, monkeypatch, period):
    """Each of its blocks is sighted all over the prompt, and agrees from there to the ends of both."""
    text, compared = [at % period for at in range(2048)], []
    counted = match.common_length
    monkeypatch.setattr(match, "common_length", lambda *both: compared.append(both) or counted(*both))
    put(client, text, 16)
    prompt = [9999, *text]
    sightings = client.find(IDENTITY, prompt, 16)
    with plan(client, IDENTITY, prompt, 16) as segments:
        check(segments, prompt)
        assert [(s.start, s.stop, s.kind) for s in segments] == [(0, 1, "live"), (1, 2049, "approximate")]
    assert len(compared) <= match.FREE_BLOCKS + 3 * len(sightings)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_long_search_does_not_follow_lies_in_what_it_has(monkeypatch, seed):
    """Texts that share documents, each behind others: the same tokens are covered by as many stretches."""
    random = np.random.default_rng(seed)
    documents = [fresh(100 * seed + number, int(random.integers(20, 90))) for number in range(4)]
    texts = [[t for i in random.permutation(4)[:3] for t in documents[i]] for _ in range(4)]
    prompt = fresh(1, 7)
    for text in (texts[i] for i in random.integers(0, 4, 3)):
        prompt += text[int(random.integers(0, 30)) : int(random.integers(60, 150))]
    with kvclient.InMemoryClient(16 << 20) as client:
        for text in texts:
            put(client, text, 16, partial=True)
        covers = []
        for free in (match.FREE_BLOCKS, 0):
            monkeypatch.setattr(match, "FREE_BLOCKS", free)
            with plan(client, IDENTITY, prompt, 16) as segments:
                check(segments, prompt)
                covers.append([(s.start, s.stop, s.kind) for s in segments])
    assert covers[0] == covers[1]


def test_release_gives_the_pins_back(client):
    put(client, fresh(1, 64), 16)
    with plan(client, IDENTITY, fresh(2, 3) + fresh(1, 64), 16) as segments:
        assert client.stats()["pins"] == 4
        del segments
    assert client.stats()["pins"] == 0


def test_it_works_with_few_pins():
    with kvclient.InMemoryClient(16 << 20, max_pins=2) as client:
        put(client, fresh(1, 64), 16)
        prompt = fresh(2, 3) + fresh(1, 64)
        with plan(client, IDENTITY, prompt, 16) as segments:
            check(segments, prompt)
            assert segments.tokens("approximate") == 32


def test_wrong_arguments_are_named(client):
    with pytest.raises(InvalidArgument, match="min_tokens"):
        plan(client, IDENTITY, [1], min_tokens=0)
    with pytest.raises(InvalidArgument, match="identity"):
        plan(client, b"short", [1] * 200)
