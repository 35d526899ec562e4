"""kvclient.hf.Engine: what it answers is what plain generate() answers, and what it says of itself is true.

A tiny random model with a tokenizer of bytes, saved and loaded as a user's would be, and the in-memory fake.
"""

import math
import re
import threading

import numpy as np
import pytest
import torch

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf import Engine
from kvclient.hf.decoding import stopping as tokens_module
from kvclient.hf.decoding.stopping import Listener
from tests.hf.inside import AUTO

TEXT = (
    "The store keeps what was computed. A document may stand anywhere in a prompt, behind any other words. "
)
DOCUMENT = TEXT * 2
BLOCK = 16


@pytest.fixture
def engine(home, client):
    with Engine.from_pretrained(
        home, client, dtype=torch.float32, block_tokens=BLOCK, repair=AUTO, self_test=False
    ) as engine:
        yield engine


def plain(engine, prompt, count=12, **options):
    ids = torch.tensor([engine.encode(prompt)])
    with engine.kv.bypass():
        rows = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return rows[0, ids.shape[1] :].tolist()


def test_three_lines(engine):
    warmed = engine.warm(DOCUMENT)
    length = len(engine.encode(DOCUMENT))
    assert (warmed.tokens, warmed.tail_tokens, warmed.aligned) == (
        length,
        length % BLOCK,
        length % BLOCK == 0,
    )
    assert warmed.blocks == length // BLOCK + 1 and warmed.note == ""
    result = engine.generate(DOCUMENT + "What now?", max_new_tokens=12)
    assert result.tokens == plain(engine, DOCUMENT + "What now?")
    assert result.text == engine.tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert result.prompt_tokens == length + 9 and result.report.reused_tokens == length
    assert result.reuse_ratio == length / (length + 9)
    assert 0 < result.ttft_s <= result.total_s and result.tokens_per_s > 0
    assert int(result.first_logits.argmax()) == result.tokens[0]
    assert result.finish == "length"


def test_a_text_is_warmed_behind_what_it_will_stand_behind(engine):
    before = "You are a careful engineer. "
    warmed = engine.warm(DOCUMENT, before=before)
    assert warmed.tokens == len(before) + len(DOCUMENT)
    exact = engine.generate(before + DOCUMENT + "?", 2, cacheable_prefix_len=0).report
    assert exact.reused_tokens == warmed.tokens
    moved = engine.generate("You are a hasty one. " + DOCUMENT + "?", 2).report
    assert moved.approximate_tokens >= len(DOCUMENT)


def test_modes_reuse_nothing_prefixes_or_everything(engine):
    engine.warm("Some words in front. " + DOCUMENT + "and behind")
    prompt = "Another beginning: " + DOCUMENT + "so?"
    reused = {}
    for mode in ("baseline", "prefix", "chunk"):
        result = engine.generate(prompt, 4, mode, cacheable_prefix_len=0)
        reused[mode] = (result.report.bypassed, result.report.reused_tokens, result.report.approximate_tokens)
    assert reused["baseline"] == ("bypass", 0, 0)
    assert reused["prefix"] == (None, 0, 0)
    assert reused["chunk"][:2] == (None, 0) and reused["chunk"][2] >= len(DOCUMENT)
    assert engine.generate(prompt, 4, "prefix").tokens == engine.generate(prompt, 4, "baseline").tokens
    with pytest.raises(InvalidArgument, match="mode"):
        engine.generate(prompt, 4, "best")


def test_greedy_at_temperature_zero_and_the_same_seed_says_the_same(engine):
    """peers' case: temperature 0 divides by zero and takes the first positive logit."""
    assert engine.generate("The capital", 8).tokens == plain(engine, "The capital", 8)
    state = torch.random.get_rng_state()
    said, again, other = (
        engine.generate(TEXT, 16, temperature=1.0, top_k=50, seed=seed).tokens for seed in (1, 1, 2)
    )
    assert said == again != other
    assert torch.equal(torch.random.get_rng_state(), state)
    assert engine.generate(TEXT, 16, temperature=1.0, top_k=1).tokens == plain(engine, TEXT, 16)


def test_repetition_penalty_reaches_the_model(engine):
    with_penalty = engine.generate(TEXT, 16, repetition_penalty=3.0).tokens
    assert with_penalty == plain(engine, TEXT, 16, repetition_penalty=3.0) != plain(engine, TEXT, 16)


def test_tokens_are_told_as_they_come(engine):
    told = []
    result = engine.generate(TEXT, 10, on_token=lambda token, text: told.append((token, text)))
    assert [token for token, _ in told] == result.tokens
    assert "".join(text for _, text in told) == result.text


def test_a_stop_string_ends_the_answer_and_is_not_shown(engine):
    whole = engine.generate(TEXT, 30).text
    stop = whole[7:10]
    told = []
    result = engine.generate(TEXT, 30, stop=["never", stop], on_token=lambda _t, text: told.append(text))
    assert result.text == whole[: whole.find(stop)] == "".join(told)
    assert result.finish == "stop"


@pytest.mark.parametrize(
    ("stop", "text", "heard"),
    [(["<bos>"], "ab", 3), (["b<bos>c", "d"], "a", 4), (["<pad>", "<bos>cd"], "ab", 5), (["bcd"], "a", 5)],
)
def test_a_stop_string_may_hold_a_special_token(engine, stop, text, heard):
    """Which the text that is shown does not: "<|im_end|>" in a model whose end token is another."""
    told = []
    listener = Listener([9], engine.tokenizer, frozenset(), stop, lambda _token, text: told.append(text))
    for token in engine.encode("ab<bos>cde"):
        if listener(torch.tensor([[token]]), None)[0]:
            break
    tokens, answer, finish = listener.answer(0)
    assert (answer, len(tokens), finish) == (text, heard, "stop") and "".join(told) == text


class Fallback:
    """A tokenizer of bytes that shows one U+FFFD for each byte of a character that is not whole."""

    def decode(self, ids, **_given):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError as error:
            return bytes(ids[: error.start]).decode() + "\ufffd" * (len(ids) - error.start)


def test_a_character_is_told_when_it_is_whole():
    told = []
    listener = Listener([8], Fallback(), frozenset(), (), lambda _token, text: told.append(text))
    for byte in "\U0001f642!".encode():
        listener(torch.tensor([[byte]]), None)
    assert told == ["", "", "", "\U0001f642", "!"]


class Joined:
    """A tokenizer whose tokens are pieces of one text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, **_given):
        return "".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize(
    ("pieces", "heard"),
    [
        (("A", " b", ".", " c", " d", ".", " e", " f"), 6),  # the first sentence ends too soon
        (("A", " b", " c", " d", " 3", ".", "14", "!"), 8),  # a number goes on
        (("A", " b", " c", ' "d', '?"', "\n", " e", "."), 5),
        (("A", " b", " c", " d", " e", " f", " g", " h"), 8),
    ],
)
def test_a_soft_stop_waits_for_the_end_of_a_sentence(pieces, heard):
    """peers' case: from three quarters of the limit on; the finish says why only if it was not the limit."""
    told = []

    def tell(_token, text):
        told.append(text)

    listener = Listener([8, 8], Joined(*pieces), frozenset(), on_token=tell, soft_stop=0.5)
    for token in range(8):
        done = listener(torch.tensor([[token], [7]]), None)
        if done[0]:
            break
    tokens, text, finish = listener.answer(0)
    assert (len(tokens), text) == (heard, "".join(pieces[:heard])) and text == "".join(told)
    assert finish == ("length" if heard == 8 else "sentence")


def test_an_answer_and_a_batch_end_with_a_sentence(engine, monkeypatch):
    whole = engine.generate(TEXT, 12)
    monkeypatch.setattr(tokens_module, "SENTENCE", re.compile(re.escape(whole.text[-5]) + "$"))
    soft = engine.generate(TEXT, 12, soft_stop=0.2)
    assert soft.finish == "sentence" and 3 <= len(soft.tokens) < 12
    assert soft.tokens == whole.tokens[: len(soft.tokens)]
    assert engine.generate_batch([TEXT], 12, soft_stop=0.2)[0].tokens == soft.tokens
    assert engine.generate(TEXT, 12).tokens == whole.tokens


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_an_end_token_ends_the_answer(engine, kind):
    tokens = plain(engine, TEXT, 10)
    engine.model.generation_config.eos_token_id = kind([2, tokens[4]])
    result = engine.generate(TEXT, 10)
    engine.model.generation_config.eos_token_id = None
    assert result.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert result.finish == "stop"


def test_rows_of_a_batch_equal_their_single_runs(engine):
    """peers' case: prompts of unequal length padded without a mask; one limit for all."""
    prompts = [DOCUMENT + "one", "short", DOCUMENT + "another one"]
    singles = [engine.generate(p, n, "baseline").tokens for p, n in zip(prompts, (5, 9, 2), strict=True)]
    for mode in ("baseline", "chunk", "chunk"):
        results = engine.generate_batch(prompts, [5, 9, 2], mode)
        assert [result.tokens for result in results] == singles
        assert [result.finish for result in results] == ["length"] * 3
    assert results[0].report.reused_tokens > 0
    again = engine.generate_batch([DOCUMENT + "one", DOCUMENT + "two"], np.int64(1))
    assert [len(result.tokens) for result in again] == [1, 1]
    assert all(0.9 < result.reuse_ratio < 1 for result in again)  # of all rows' tokens, as the report is
    assert engine.generate_batch([]) == []
    with pytest.raises(InvalidArgument, match="limits"):
        engine.generate_batch(prompts, [1])
    with pytest.raises(InvalidArgument, match="one text"):
        engine.generate_batch(DOCUMENT)


def test_what_lies_behind_the_cacheable_prefix_is_not_published(engine, client):
    engine.generate(DOCUMENT + "a secret", 20, cacheable_prefix_len=100)
    assert client.stats()["blocks"] == 100 // BLOCK
    engine.generate(DOCUMENT + "a secret", 20, cacheable_prefix_len=0)
    assert client.stats()["blocks"] == 100 // BLOCK


def test_a_pinned_text_outlives_eviction(home):
    with kvclient.InMemoryClient(1 << 20) as client:
        with Engine.from_pretrained(
            home, client, dtype=torch.float32, block_tokens=BLOCK, repair=None, self_test=False
        ) as engine:
            engine.warm(DOCUMENT)
            assert engine.pin(DOCUMENT) == len(DOCUMENT) // BLOCK
            for number in range(60):
                engine.warm(f"{number} " + TEXT[number:] + TEXT)
            assert client.stats()["evictions"] > 0
            assert engine.generate(DOCUMENT + "?", 1).report.reused_tokens == len(DOCUMENT) // BLOCK * BLOCK
            assert engine.stats()["pinned"] == 1
            engine.unpin(DOCUMENT)
            assert client.stats()["pins"] == 0
            assert engine.pin("never seen before " * 10) == engine.stats()["pinned"] == 0
            engine.unpin("not pinned either")
            engine.pin(DOCUMENT)
        assert client.stats()["pins"] == 0  # closed


def test_a_pinned_text_is_pinned_in_all_its_parts(engine, client):
    """In the parts that it was computed in, and with what is left behind their whole blocks."""
    engine.warm(PARAGRAPHS, chunker="paragraph")
    assert engine.pin(PARAGRAPHS) == client.stats()["blocks"] == client.stats()["pins"]


def test_warming_says_what_will_not_be_found(home, client):
    with Engine.from_pretrained(
        home, client, dtype=torch.float32, block_tokens=BLOCK, repair=None, self_test=False
    ) as engine:
        assert "fill no block" in engine.warm("short").note
        assert engine.warm(DOCUMENT[:35]).note.startswith("the last 3 tokens")
        assert engine.warm(DOCUMENT[:32]).note == ""
        with pytest.raises(InvalidArgument):
            engine.warm([])
        parts = engine.warm(PARAGRAPHS, chunker="paragraph")
        lengths = (len(TEXT) + 2, len(TEXT) + 1, len(TEXT))
        assert parts.note.startswith(f"the {sum(n % BLOCK for n in lengths)} tokens at parts' ends")
        with engine.kv.bypass(read=False):
            note = engine.warm("Z" + TEXT).note
            assert note.startswith(f"{len(TEXT) // BLOCK} of its blocks are not in the store")


def test_warming_says_what_is_left_behind_shorter_blocks_and_unequal_ones(engine, home, client):
    assert engine.warm("A" + DOCUMENT[:34]).note == ""  # three tokens: a block of their own
    assert engine.warm("B" + DOCUMENT[:32]).note.startswith("the last 1 tokens")
    assert engine.generate("B" + DOCUMENT[:32] + "?", 1).report.reused_tokens == 32
    engine.close()
    with Engine.from_pretrained(
        home, client, block_tokens=32, chunker="sentence", repair=None, self_test=False
    ) as engine:
        warmed = engine.warm(DOCUMENT)
        reused = engine.generate(DOCUMENT + "?" * 60, 1, cacheable_prefix_len=0).report.reused_tokens
        assert warmed.tail_tokens == len(DOCUMENT) - reused > 0
        assert warmed.note.startswith(f"the last {warmed.tail_tokens} tokens")


def test_a_chat_and_token_ids_are_prompts_too(engine):
    chat = [{"role": "user", "content": "Hello"}]
    assert engine.tokenizer.decode(engine.encode(chat)) == "<user>Hello<assistant>"
    ids = engine.encode(chat)
    for same in (ids, np.array(ids), torch.tensor(ids)):
        assert engine.generate(chat, 4).tokens == engine.generate(same, 4).tokens


def test_chunked_prefill_says_the_same(engine):
    result = engine.generate(DOCUMENT, 8, prefill_chunk_size=30)
    assert result.tokens == plain(engine, DOCUMENT, 8)


def test_threads_get_their_own_reports(engine):
    engine.warm(DOCUMENT)
    results = {}

    def ask(number):
        prompt = DOCUMENT if number % 2 else f"{number} nothing like it"
        results[number] = engine.generate(prompt, 4, cacheable_prefix_len=0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        assert result.report.prompt_tokens == result.prompt_tokens
        assert (result.report.reused_tokens > 0) == bool(number % 2)


def test_verify_takes_texts(engine):
    measured = engine.verify([TEXT * 2, DOCUMENT[7:] + TEXT])
    assert measured["prefix"].passed and measured["none"].found > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"repetition_penalty": 0.0},
        {"max_new_tokens": 0}, {"cacheable_prefix_len": -1}, {"soft_stop": 0.0}, {"soft_stop": 1.5},
        {"prefill_chunk_size": 0}, {"temperature": math.nan}, {"repetition_penalty": math.nan},
        {"max_new_tokens": 2.5}, {"top_k": 1.5},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(engine, wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        engine.generate("text", **wrong)
    with pytest.raises(InvalidArgument, match="without tokens"):
        engine.generate([])


@pytest.mark.parametrize("token", [-1, 10**6, 2.5, "a"])
def test_a_token_that_the_model_does_not_have_is_named(engine, token):
    with pytest.raises(InvalidArgument, match="token"):
        engine.generate([1, token], 1)
    with pytest.raises(InvalidArgument, match="token"):
        engine.warm([token])


PARAGRAPHS = f"{TEXT}\n\n{TEXT[::-1].strip()}\n\n{TEXT.swapcase()}"


def test_a_text_is_warmed_in_parts_and_found_in_any_order(engine):
    warmed = engine.warm(PARAGRAPHS, chunker="paragraph")
    assert warmed.parts == 3 and warmed.tokens == len(PARAGRAPHS)
    paragraph, second, third = PARAGRAPHS.split("\n\n")
    report = engine.generate(f"Swapped: {third}. {paragraph}, {second}?", 2, cacheable_prefix_len=0).report
    assert report.approximate_tokens >= len(paragraph + second + third) - BLOCK
    exact = engine.generate(f"{second}\n\n?", 2, cacheable_prefix_len=0).report
    assert exact.reused_tokens == len(second) + 2
    with pytest.raises(InvalidArgument, match="chunker"):
        engine.warm(PARAGRAPHS, chunker="best")


def test_parts_are_computed_behind_the_true_tokens_before_them(engine):
    with pytest.raises(InvalidArgument, match="overlap_tokens"):
        engine.warm(PARAGRAPHS, chunker="paragraph", overlap_tokens=-1)
    engine.warm(PARAGRAPHS, chunker="paragraph", overlap_tokens=24)
    first = len(TEXT) + 2
    behind = PARAGRAPHS[first - 24 :]
    assert engine.generate(behind + "?", 2, cacheable_prefix_len=0).report.reused_tokens >= 24 + len(TEXT)


def test_a_call_chooses_its_codec(home, client):
    """Each call stores and finds blocks of its own codec, single, in a batch, and ahead."""
    options = {"dtype": torch.float32, "device": "auto", "block_tokens": 32, "self_test": False}
    with Engine.from_pretrained(home, client, **options) as engine:
        assert engine.model.device == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        engine.warm(DOCUMENT, codec="int8")
        prompt = DOCUMENT + "What now?"
        assert engine.generate(prompt, 2, cacheable_prefix_len=0).report.reused_tokens == 0
        result = engine.generate(prompt, 2, "prefix", codec="int8")
        assert result.report.reused_tokens > 100 and result.report.full_tokens > 0
        assert result.mode == "prefix" and engine.generate(prompt, 2, "baseline").mode == "baseline"
        rows = engine.generate_batch([prompt, DOCUMENT + "Why?"], 2, codec="int8", cacheable_prefix_len=0)
        assert all(row.report.reused_tokens > 100 for row in rows)
        with pytest.raises(InvalidArgument, match="int5"):
            engine.generate(prompt, 2, codec="int5")
