"""Goal: a text is cut where its structure says, into parts that can be found.

Method: hypothesis over texts of pieces as tokenizers make them, and small examples per rule.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvclient.blocks.chunker import CHUNKERS, SLIDE, Chunker, cuts
from kvclient.errors import InvalidArgument

TOKENS = ("a", " b", ".", " ", "\n", "\n\n", "# ", "---\n", "\f", "?", ". ")
PIECES = st.lists(st.sampled_from(TOKENS), max_size=200)


@given(PIECES, st.sampled_from(CHUNKERS), st.integers(1, 40))
@settings(deadline=None)
def test_the_parts_tile_the_text_and_each_fills_a_block(texts, chunker, block_tokens):
    stops = cuts(texts, chunker, block_tokens)
    assert stops[-1] == len(texts)
    lengths = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    assert len(stops) == 1 or min(lengths) >= block_tokens


def words(text):
    return [word + " " if not word.endswith("\n") else word for word in text.split(" ")]


def test_paragraphs_are_cut_behind_blank_lines():
    texts = words("one two three\n\n four five six seven\n\n eight nine ten")
    assert cuts(texts, "paragraph", 2) == [3, 7, 10]
    assert cuts(texts, "paragraph", 4) == [10]  # two cuts would leave parts of three words
    assert cuts(texts, "fixed", 2) == [10]


def test_documents_are_cut_at_rules_headings_and_form_feeds():
    texts = words("a b\n # C d\n ## e f\n ---\n g h \fi j")
    assert cuts(["a b\n", "# C", " d\n", "## e\n", "---\n", "g", "\f", "h"], "document", 1) == [1, 5, 7, 8]
    assert cuts(texts, "document", 100) == [len(texts)]


@pytest.mark.parametrize("moved", [-SLIDE, -3, 0, 5, SLIDE])
def test_a_cut_slides_to_the_end_of_a_sentence_that_is_near_enough(moved):
    texts = ["w "] * 400
    texts[159 + moved] = "end. "
    assert cuts(texts, "sentence", 40)[0] == 160 + moved


def test_without_a_sentence_near_it_is_cut_by_size():
    texts = ["w "] * 400
    texts[159 + SLIDE + 1] = "end. "
    assert cuts(texts, "sentence", 40) == [160, 320, 400]


def test_another_name_is_refused():
    with pytest.raises(InvalidArgument, match="fixed, sentence, paragraph, document"):
        cuts(["a"], "semantic", 4)


class Tokenizer:
    def decode(self, tokens):
        return TOKENS[tokens[0]]


IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=300)


RUNS = st.lists(st.tuples(st.integers(0, len(TOKENS) - 1), st.integers(1, 40)), max_size=20).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)


@given(IDS | RUNS, IDS | RUNS, st.sampled_from(CHUNKERS), st.sampled_from([1, 8, 16, 128]))
@settings(deadline=None)
@example([0] * 10 + [5] + [3] * 7, [4] + [0] * 20, "paragraph", 8)
def test_texts_that_begin_alike_are_cut_alike(ids, more, chunker, block_tokens):
    rule = Chunker(chunker, block_tokens, Tokenizer())
    counts, longer = rule.counts(ids), rule.counts(ids + more)
    assert all(1 <= count <= rule.most for count in longer)
    assert len(ids) - sum(counts) <= rule.most
    assert longer[: len(counts)] == counts


@given(IDS, st.sampled_from(CHUNKERS))
@settings(deadline=None)
def test_a_part_begins_with_a_whole_window(ids, chunker):
    rule = Chunker(chunker, 16, Tokenizer())
    counts = rule.counts(ids)
    if chunker in ("paragraph", "document"):
        assert all(before == 16 for before, count in zip([16, *counts], counts, strict=False) if count < 16)
    else:
        assert all(abs(count - 16) <= rule.slide for count in counts)


def test_blocks_end_with_sentences_that_are_near():
    def cut(end):
        texts = ["w "] * 300
        texts[end - 1 : end + 1] = ["end.", " "]

        class Known:
            def decode(self, tokens):
                return texts[tokens[0]]

        return Chunker("sentence", 128, Known()).counts(range(300))

    assert cut(140) == [140, 128] and cut(112) == [112, 128] and cut(111) == cut(145) == [128, 128]


def test_the_names_of_rules_and_their_needs_are_checked():
    with pytest.raises(InvalidArgument, match="fixed, sentence"):
        Chunker("best", 128)
    with pytest.raises(InvalidArgument, match="tokenizer"):
        Chunker("sentence", 128)
