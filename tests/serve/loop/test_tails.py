"""Proves that what is left behind a text's last whole block is found again, read right, and shared with
nobody else: a prompt that was computed costs one token, the next turn its own words.

Method: the real loop on tiny models in fp32 with blocks of 32 tokens, greedy tokens against plain generate();
turns that go on from a tail, texts that part inside of one, and the blocks that are made behind one.
"""

import queue

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import alone, ask, ended

BLOCK = 32


@pytest.fixture(params=["llama"])
def served(request):
    model = build(request.param, layers=2)
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
    assert job.tokens == alone(model, kv, [ids])[0]
    return job.tokens, loop.stats().get("cached_tokens_total", 0) - before


def joined(*parts):
    return torch.tensor([[token for part in parts for token in part]])


def test_the_same_prompt_costs_one_token_and_is_read_in_place(served):
    ids = prompt(2 * BLOCK + 23)
    assert said(served, ids)[1] == 0
    assert said(served, ids)[1] == ids.shape[1] - 1
    assert "part" not in served[1].stats.get("dense", {})
    assert served[1].last.dense is None


def test_a_conversation_computes_its_new_words_only(served):
    text, kept = prompt(BLOCK + 9, seed=3), 0
    for turn in range(5):
        answer, found = said(served, text)
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


def test_a_tail_is_its_salts_own_and_a_short_one_is_not_kept(served):
    ids = prompt(BLOCK + 16, seed=8)
    assert said(served, ids, salt=b"one")[1] == 0
    assert said(served, ids, salt=b"two")[1] == 0
    assert said(served, ids, salt=b"one")[1] == BLOCK + 15
    short = prompt(BLOCK + 3, seed=9)
    loop = served[2]
    said(served, short, write=False)
    assert said(served, short, salt=b"three")[1] == 0 and loop.stats()["requests_running"] == 0
