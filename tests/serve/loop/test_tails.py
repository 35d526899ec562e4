"""Proves that what is left behind a text's last whole block is found again, read right, and shared with
nobody else: a prompt that was computed costs one token, the next turn its own words. Behind quantised blocks
it is kept as computed. Where layers have windows it is found as a whole.

Method: the real loop on tiny models in fp32 with blocks of 32 tokens, greedy tokens against plain generate();
turns that go on from a tail, texts that part inside of one, and the blocks that are made behind one. Of
quantised blocks what two calls hold, bit by bit.
"""

import queue
from functools import partial

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.release import cache_of
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.hf.reuse.test_chunkers import Tokenizer
from tests.hf.zoo import build, generate, known, near, prompt
from tests.serve.loop.test_loop import alone, ask, ended

BLOCK = 32


@pytest.fixture
def served(request):
    model = build(getattr(request, "param", "llama"), layers=2)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv,
    ):
        loop = Loop(model, kv, Limits(piece_tokens=64))
        yield model, kv, loop
        loop.close()


def said(served, ids, **more):
    """(tokens, how many of the prompt's were found), having held them against those without a store."""
    model, kv, loop = served
    before, events = loop.stats().get("cached_tokens_total", 0), queue.Queue()
    job = ask(loop, ids, events, 0, **more)
    ended(events, 1)
    assert more.get("codec") or job.tokens == alone(model, kv, [ids])[0]
    return job.tokens, loop.stats().get("cached_tokens_total", 0) - before


def joined(*parts):
    return torch.tensor([[token for part in parts for token in part]])


in_place = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)
everywhere = pytest.mark.parametrize("served", ["llama", "gemma2", "gpt_oss"], indirect=True)


@everywhere
def test_the_same_prompt_costs_one_token_and_is_read_in_place(served):
    ids = prompt(2 * BLOCK + 23)
    assert said(served, ids)[1] == 0
    assert said(served, ids)[1] == ids.shape[1] - 1
    assert "part" not in served[1].stats.get("dense", {})
    assert served[1].last.dense is None


@everywhere
def test_a_prompt_shorter_than_a_block_costs_one_token_the_second_time(served):
    short = prompt(BLOCK - 5, seed=30)
    assert said(served, short)[1] == 0
    assert said(served, short)[1] == short.shape[1] - 1
    longer = joined(short[0].tolist(), prompt(2 * BLOCK, seed=31)[0].tolist())
    assert said(served, longer)[1] == short.shape[1], "it is where a longer one begins"
    assert said(served, short, salt=b"another's")[1] == 0


@everywhere
def test_a_conversation_computes_its_new_words_only(served):
    goes_on(served)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_conversation_in_quantised_blocks_computes_its_new_words_only(served, codec):
    goes_on(served, codec=codec)


def goes_on(served, **more):
    text, kept = prompt(BLOCK - 9, seed=3), 0
    for turn in range(5):
        answer, found = said(served, text, **more)
        assert found == kept, turn
        kept = text.shape[1] + len(answer) - 1  # the newest token's KV was never computed
        kept -= kept % BLOCK if kept % BLOCK < BLOCK // 8 else 0  # too few for a block of their own
        text = joined(text[0].tolist(), answer, prompt(7 + turn, seed=turn + 20)[0].tolist())


def test_texts_that_part_inside_of_a_tail_share_what_they_have_in_common(served):
    first = prompt(2 * BLOCK + 20, seed=5)
    other = joined(first[0, : 2 * BLOCK + 11].tolist(), prompt(60, seed=6)[0].tolist())
    said(served, first)
    assert said(served, other)[1] == 2 * BLOCK + 11
    assert said(served, other)[1] == other.shape[1] - 1, "what was computed behind a part was not kept"
    assert said(served, first)[1] == first.shape[1] - 1


@pytest.mark.parametrize("served", ["gemma2", "gpt_oss"], indirect=True)
def test_where_layers_have_windows_a_hit_ends_with_a_whole_tail(served):
    first = prompt(2 * BLOCK + 20, seed=5)
    said(served, first)
    parts = joined(first[0, : 2 * BLOCK + 11].tolist(), prompt(60, seed=6)[0].tolist())
    assert said(served, parts)[1] == 2 * BLOCK, "no window ends where they part"
    assert said(served, parts)[1] == parts.shape[1] - 1
    longer = joined(first[0].tolist(), prompt(40, seed=7)[0].tolist())
    assert said(served, longer, salt=b"mine")[1] == 0
    assert said(served, longer)[1] == first.shape[1]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_behind_quantised_blocks_the_last_tokens_are_those_that_were_computed(served, codec):
    model, kv, _ = served
    ids = prompt(2 * BLOCK + 23, seed=11)
    wanted = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    with kv.coded(codec), kv.keeping(tails=True):
        first, second = (cache_of(model.generate(ids, **wanted)).layers for _ in range(2))
        told = kv.last
        assert said(served, ids, codec=codec)[1] == ids.shape[1] - 1
        parted = joined(ids[0, : 2 * BLOCK + 11].tolist(), prompt(30, seed=12)[0].tolist())
        assert said(served, parted, codec=codec)[1] == 2 * BLOCK + 11
    assert told.reused_tokens == ids.shape[1] - 1 and told.dense is None
    assert told.full_tokens == 4 + BLOCK + 22, "the first, the last whole block and what is behind it"
    for computed, found in zip(first, second, strict=True):
        keys, held = computed.keys[0], found.keys[0]
        assert torch.equal(keys[:, BLOCK : ids.shape[1] - 1], held[:, BLOCK : ids.shape[1] - 1])
        assert not torch.equal(keys[:, 4:BLOCK], held[:, 4:BLOCK]), "these are the codec's"


@in_place
def test_less_of_a_text_than_its_cache_has_from_the_store_is_not_published():
    """The layers hold the tokens behind the store's blocks only; the first of them are not the text's."""
    model, ids = known("llama"), prompt(6 * BLOCK + 8)
    shorter = torch.cat([ids[:, :20], prompt(20, seed=2)], dim=1)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv,
        kv.keeping(tails=True),
    ):
        generate(model, ids)
        cache = generate(model, ids)[2]
        assert {layer.origin for layer in cache.layers} == {6 * BLOCK}
        assert kv.publish(ids[0, :20].tolist(), cache) == 0
        with kv.bypass():
            plain, logits, _ = generate(model, shorter)
        tokens, found, _ = generate(model, shorter)
        assert torch.equal(tokens, plain) and near(found, logits)


@in_place
@pytest.mark.parametrize(("name", "codec"), [("llama", "int8"), ("gemma2", None)])
def test_a_tail_of_codes_or_windows_is_not_worth_leaving_the_pages(name, codec):
    model, ids = known(name), prompt(2 * BLOCK + 23)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, paged=True, codec=codec) as kv,
        kv.keeping(tails=True),
    ):
        for reused in (0, 2 * BLOCK):
            generate(model, ids, 4)
            assert (kv.last.reused_tokens, kv.last.dense) == (reused, None)


def test_a_tail_is_its_salts_own_and_a_short_one_is_not_kept(served):
    ids = prompt(BLOCK + 16, seed=8)
    assert said(served, ids, salt=b"one")[1] == 0
    assert said(served, ids, salt=b"two")[1] == 0
    assert said(served, ids, salt=b"one")[1] == BLOCK + 15
    short = prompt(BLOCK + 3, seed=9)
    loop = served[2]
    said(served, short, write=False)
    assert said(served, short, salt=b"three")[1] == 0 and loop.stats()["requests_running"] == 0


def test_a_prompt_that_is_cut_by_what_it_says_stays_in_pieces():
    """Behind a piece a few tokens fill no block of their own: that is not a store that keeps nothing."""
    model = build("llama", layers=2)
    options = {"chunker": "paragraph", "tokenizer": Tokenizer(), "block_tokens": 64, "self_test": False}
    with kvclient.InMemoryClient(64 << 20) as client, kvclient.hf.attach(model, client, **options) as kv:
        loop, events, jobs = Loop(model, kv, Limits(piece_tokens=128)), queue.Queue(), []

        def in_one_step(texts):
            jobs.extend(ask(loop, ids, events, i) for i, ids in enumerate(texts))

        for seed in range(8):
            texts = [prompt(20, seed=seed), prompt(1000, seed=100 + seed)]
            loop._news.put(partial(in_one_step, texts))
            ended(events, 2)
        loop.close()
    pieces = [job.pieces for job in jobs[1::2]]
    assert min(pieces) >= 7, f"{pieces} pieces of 1,000 tokens"


def test_what_is_reused_inside_of_a_long_prompt_is_told_and_computed_once():
    """Alone it is one piece. Its pieces beside others lose what lies behind the first."""
    model = build("llama", layers=2)
    document = prompt(640, seed=9)
    moved = torch.cat([prompt(250, seed=5), document[:, 64:], prompt(30, seed=6)], dim=1)
    repair = kvclient.hf.Repair("none", min_tokens=16)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=64, self_test=False, repair=repair) as kv,
    ):
        loop = Loop(model, kv, Limits(piece_tokens=64))
        events = queue.Queue()
        ask(loop, document, events, 0)
        ended(events, 1)
        before = loop.stats()["prompt_tokens_computed_total"]
        job = ask(loop, moved, events, 1)
        ended(events, 1)
        assert (job.pieces, job.first.approximate_tokens, job.exact) == (1, 576, False)
        assert loop.stats()["prompt_tokens_computed_total"] - before <= moved.shape[1]
        loop.close()
