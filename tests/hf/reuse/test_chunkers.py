"""Goal: what a prompt is cut into is found again, by its prefix or by its content, whatever cuts it; what is
computed behind approximate tokens is found by its content and never as a prefix.

Method: a tiny random model, a tokenizer of made-up words, plain generate() as reference; the in-memory fake,
and a daemon where blocks are read in place.
"""

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import kvclient
import kvclient.hf
from kvclient.blocks import meta, plan
from kvclient.blocks.chunker import Chunker
from kvclient.errors import InvalidArgument
from tests.hf.inside import AUTO
from tests.hf.zoo import build, generate, prompt

BLOCK = 16
RULES = ("sentence", "paragraph", "document")


class Tokenizer:
    """Every eleventh token ends a sentence, every twenty-third a paragraph, every thirty-first a document."""

    def decode(self, tokens):
        return "".join(map(self.word, tokens))

    def word(self, token):
        return "\f" if token % 31 == 0 else "\n\n" if token % 23 == 0 else "end." if token % 11 == 0 else " w"


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=4)


@pytest.fixture
def attach(model, client):
    attached = []

    def attach(repair="none", **options):
        for kv in attached:
            kv.detach()
        merged = {"tokenizer": Tokenizer(), "block_tokens": BLOCK, "self_test": False, **options}
        kv = kvclient.hf.attach(model, client, repair=repair, **merged)
        attached.append(kv)
        return kv

    yield attach
    for kv in attached:
        kv.detach()
    assert client.stats()["pins"] == 0


# ---------------------------------------------------------------- cut by content


@pytest.mark.parametrize("rule", RULES)
def test_a_prefix_cut_by_content_is_exact(attach, model, rule):
    kv = attach(None, chunker=rule)
    ids = prompt(200)
    other = torch.cat([ids[:, :150], prompt(30, seed=9)], 1)
    for asked, least in ((ids, 0), (ids, 200 - BLOCK - 3), (other, 110)):
        with kv.bypass():
            plain, logits, _ = generate(model, asked)
        tokens, warm, _ = generate(model, asked)
        assert torch.equal(tokens, plain) and torch.allclose(warm, logits, atol=1e-5)
        assert kv.last.reused_tokens >= least
    counts = kv.chunker.chain(kv.identity, ids[0].tolist()).token_counts
    assert len(set(counts)) > 1 and max(counts) <= kv.chunker.most


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [1, 16, 37])
def test_a_document_is_found_at_any_shift(attach, model, rule, shift):
    kv = attach(chunker=rule)
    document = prompt(130, seed=5)
    generate(model, torch.cat([prompt(21, seed=2), document, prompt(20, seed=3)], 1))
    generate(model, torch.cat([prompt(shift, seed=7), document, prompt(9, seed=4)], 1))
    assert (kv.last.reused_tokens, kv.last.approximate_tokens) == (0, 130)


@pytest.mark.parametrize("rule", ["fixed", *RULES])
def test_generated_text_is_cut_alike(attach, model, rule):
    kv = attach(None, chunker=rule)
    ids = prompt(50)
    tokens, *_ = generate(model, ids, 100)
    more = torch.cat([tokens, prompt(20, seed=8)], 1)
    with kv.bypass():
        plain, *_ = generate(model, more)
    again, *_ = generate(model, more)
    assert torch.equal(again, plain)
    assert kv.last.reused_tokens >= 150 - 2 * BLOCK


def test_rows_of_a_batch_are_cut_each_for_itself(attach, model):
    kv = attach(None, chunker="sentence")
    rows = torch.cat([prompt(90, seed=1), prompt(90, seed=2)])
    with kv.bypass():
        plain, *_ = generate(model, rows)
    for _ in range(2):
        tokens, *_ = generate(model, rows)
        assert torch.equal(tokens, plain)
    assert kv.last.reused_tokens > 100


def test_blocks_cut_by_content_are_read_in_place(daemon, model):
    ids = prompt(100)
    plain, *_ = generate(model, ids)
    with daemon(memory="64MiB").connect() as client:
        options = {"chunker": "sentence", "tokenizer": Tokenizer(), "block_tokens": BLOCK, "repair": None}
        with kvclient.hf.attach(model, client, in_place=True, self_test=False, **options) as kv:
            for least in (0, 80):
                tokens, *_ = generate(model, ids)
                assert torch.equal(tokens, plain)
                assert kv.last.reused_tokens >= least


def test_a_block_that_agrees_in_part_is_used_in_part(client):
    """Its fingerprint is of its first tokens only; what differs behind those is left out."""
    rule, identity = Chunker("sentence", BLOCK, Tokenizer()), bytes(32)
    tokens = [1] * 17 + [11] + [1] * 30  # the first block ends with the sentence, two tokens late
    chain = rule.chain(identity, tokens)
    assert chain.token_counts[0] == 18
    layout = client.register_layout(kvclient.Layout(1, 1, 1, "uint8", rule.most))
    with client.create(chain[:1], layout) as writer:
        ids = np.asarray(tokens[:18], np.int32).tobytes()
        area = meta.pack(meta.Meta(meta.NO_PARENT, chain.content_keys[0], ids, b""))
        writer[0].meta[: len(area)] = area
        writer.seal(zero_rest=True)
    with plan(client, identity, [5, 6, *tokens[:16], 7, 8], chunker=rule) as segments:
        assert [(s.start, s.stop, s.kind) for s in segments] == [
            (0, 2, "live"), (2, 18, "approximate"), (18, 20, "live"),
        ]  # fmt: skip


def test_what_needs_a_tokenizer_or_whole_groups_says_so(attach, model, client):
    with pytest.raises(InvalidArgument, match="tokenizer"):
        attach(chunker="paragraph", tokenizer=None)
    with pytest.raises(InvalidArgument, match="groups of 32"):
        attach(chunker="paragraph", codec="int8")
    with pytest.raises(InvalidArgument, match="overlap_tokens"):
        attach(overlap_tokens=-1)


# ---------------------------------------------------------------- gaps


def test_what_is_computed_between_and_behind_found_texts_is_found_later(attach, model):
    kv = attach(AUTO)
    text, another, new = prompt(60, seed=5), prompt(60, seed=6), prompt(70, seed=7)
    generate(model, torch.cat([text, prompt(3, seed=1)], 1))
    generate(model, torch.cat([another, prompt(3, seed=2)], 1))
    first = torch.cat([prompt(5, seed=8), text, new, another, prompt(5, seed=9)], 1)
    tokens, *_ = generate(model, first, 60)
    assert kv.last.approximate_tokens == 120
    generate(model, torch.cat([prompt(9, seed=10), new, prompt(9, seed=11)], 1))
    assert kv.last.approximate_tokens == 70, "the gap"
    answer = tokens[:, first.shape[1] :]
    generate(model, torch.cat([prompt(9, seed=12), answer, prompt(9, seed=13)], 1))
    assert kv.last.approximate_tokens >= 2 * BLOCK, "the answer"


def test_a_gap_is_nobodys_prefix(attach, model):
    kv = attach(AUTO)
    text, new = prompt(60, seed=5), prompt(70, seed=7)
    generate(model, text)
    generate(model, torch.cat([prompt(5, seed=8), text, new], 1))
    alone = torch.cat([new, prompt(9, seed=3)], 1)
    generate(model, alone)
    assert (kv.last.reused_tokens, kv.last.approximate_tokens) == (0, 70)
    with kv.limited(inside=False):
        with kv.bypass():
            plain, *_ = generate(model, alone)
        tokens, *_ = generate(model, alone)
    assert kv.last.reused_tokens == 0
    assert torch.equal(tokens, plain)


def test_of_gaps_too_only_the_cacheable_part_is_published(attach, model, client):
    kv = attach(AUTO)
    text = prompt(60, seed=5)
    generate(model, text)
    before = client.stats()["blocks"]
    with kv.limited(publish_tokens=5 + 60 + 40):
        generate(model, torch.cat([prompt(5, seed=8), text, prompt(70, seed=7)], 1), 40)
    assert client.stats()["blocks"] == before + 3  # 40 tokens: two blocks and their rest


# ---------------------------------------------------------------- warm


def test_a_text_that_is_partly_stored_is_warmed_whole(attach, model):
    kv = attach(AUTO)
    known, text = prompt(64, seed=5), prompt(130, seed=6)
    generate(model, torch.cat([prompt(7, seed=1), known], 1))
    whole = torch.cat([text[:, :40], known, text[:, 40:]], 1)
    assert kv.warm(whole[0].tolist()).blocks == 194 // BLOCK + 1
    generate(model, torch.cat([whole, prompt(9, seed=2)], 1))
    assert kv.last.reused_tokens == 194


def test_parts_are_warmed_where_that_is_asked_for(attach, model):
    texts = prompt(200, seed=3)[0]
    texts = torch.where(texts % 23 == 0, texts + 1, texts)
    texts[[59, 119]] = 23  # ends of paragraphs
    kv = attach(AUTO, chunker="paragraph", overlap_tokens=8)
    stored = kv.warm(texts.tolist(), chunker="paragraph")
    assert (stored.parts, stored.last) == (3, 88)
    generate(model, torch.cat([texts[None, 52:120], prompt(9, seed=2)], 1))
    assert kv.last.reused_tokens == 68, "the second part behind the eight tokens before it"
    assert kv.warm(texts.tolist()).parts == 1, "attach(chunker=) says where blocks are cut, no more"
    with pytest.raises(InvalidArgument, match="no token"):
        kv.warm([])


def test_sentences_are_seen_where_tokens_begin_with_their_space():
    """As SentencePiece's do, whose tokens, decoded one by one, have none."""
    text = " ".join(" ".join("word" for _ in range(5 + at * 7 % 6)) + "." for at in range(60))
    vocabulary = {"<unk>": 0, "\u2581word": 1, ".": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and tokenizer.decode([1]) == "word"
    chunker, at, ends = Chunker("sentence", 64, tokenizer), 0, []
    for count in chunker.counts(ids):
        at += count
        ends.append(ids[at - 1])
    assert len(ends) > 5 and set(ends) == {2}
    assert "".join(chunker.texts.of(ids)) == " " + text
