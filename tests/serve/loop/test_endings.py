"""Proves that an answer is in the store when its end is told, so that the next turn finds it at any server;
and that keeping it delays no token, of its own or of others.

Method: real loops on tiny models beside a real daemon; what a second server would find is asked for by the
one who hears the end, in the loop's own thread.
"""

import contextlib
import queue
from collections import Counter

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvclient
import kvclient.hf
from kvclient.hf.engine.window import Window
from kvclient.serve.engine.endings import Endings
from kvclient.serve.engine.job import Done, Job, Token
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.engine.windowed import WindowedCache, Windowing
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import NEW, Letters, ask, ended

BLOCK = 32


@pytest.mark.parametrize("tokens", [20, 70, 3 * BLOCK])
def test_who_hears_the_end_finds_the_answer_at_another_server(daemon, tokens):
    kvstored, found = daemon(memory="64MiB"), queue.Queue()
    models = [build("llama", layers=2) for _ in range(2)]
    with kvstored.connect() as first, kvstored.connect() as second:
        kvs = [kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
               for model, client in zip(models, (first, second), strict=True)]  # fmt: skip
        loops = [Loop(model, kv, Limits()) for model, kv in zip(models, kvs, strict=True)]
        events = queue.Queue()

        class Hears:
            def put(self, told):
                if isinstance(told[1], Done):
                    found.put(_held(kvs[1], job.said[:-1]))
                events.put(told)

        job = ask(loops[0], prompt(tokens, seed=tokens), Hears(), 0)
        ended(events, 1)
        computed = tokens + NEW - 1
        assert found.get(timeout=60) == computed, "all of it but the newest token, which has no KV"
        again = ask(loops[1], torch.tensor([[*job.said, 5, 6, 7]]), events, 1)
        ended(events, 1)
        assert again.first.cached_tokens == computed
        for loop in loops:
            loop.close()
        for kv in kvs:
            kv.detach()


def test_of_an_answer_that_goes_on_each_full_block_is_there(daemon):
    """So another server has it though this one dies in its middle; with each next token it is looked for."""
    kvstored, seen, events = daemon(memory="64MiB"), [], queue.Queue()
    models = [build("llama", layers=2) for _ in range(2)]
    with kvstored.connect() as first, kvstored.connect() as second:
        kvs = [kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
               for model, client in zip(models, (first, second), strict=True)]  # fmt: skip
        loop, ids = Loop(models[0], kvs[0], Limits()), prompt(20, seed=3)[0].tolist()

        def tell(event):
            if isinstance(event, Token):
                seen.append((len(job.tokens), _held(kvs[1], job.said[:-1])))
            events.put((0, event))

        job = Job(ids, 100, Sampler(Sampling(temperature=0), ids), Text(Letters()), tell)
        loop.submit(job)
        ended(events, 1)
        loop.close()
        for kv in kvs:
            kv.detach()
    assert len(seen) == 100
    for said, held in seen:  # of the step before, whose newest token has no KV
        assert held >= (20 + said - 2) // BLOCK * BLOCK
    assert max(held for _, held in seen) == 96 and loop.stats()["blocks_of_answers_total"] == 3 + 1


@pytest.mark.parametrize("blocks", [64, 20])
def test_what_is_evicted_of_an_answer_is_written_again_at_its_end_only(blocks):
    """With each full block all those before it came again into a pool that does not hold the answer, and
    others' blocks went: 25 blocks were written 142 times."""
    model, events = build("llama", layers=2), queue.Queue()
    size = 16 * model_bytes(model)
    with (
        kvclient.InMemoryClient(blocks * size) as client,
        kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv,
    ):
        loop, ids = Loop(model, kv, Limits()), prompt(20, seed=3)[0].tolist()
        job = Job(ids, 400, Sampler(Sampling(temperature=0), ids), Text(Letters()),
                  lambda event: events.put((0, event)))  # fmt: skip
        loop.submit(job)
        ended(events, 1)
        loop.close()
        assert not loop.stats().get("publish_failed_total")
        written = loop.stats()["blocks_of_answers_total"]
    whole = 419 // 16 - 1  # of the answer; and the tail
    assert written == whole + 1 if blocks > 26 else whole < written <= 2 * (whole + 1)


def model_bytes(model):
    """Of a token's K and V."""
    config = model.config
    heads = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return 2 * config.num_hidden_layers * heads * model.dtype.itemsize


def _held(kv, text):
    """Whole blocks and the tail behind them, as a look-up of another session sees them."""
    chain = kv.chunker.chain(kv.identity, text, partial=True)
    counts = list(chain.token_counts)
    return sum(counts[: kv.client.lookup(chain).resident])


def test_all_tokens_of_a_step_are_told_before_an_answer_is_kept(monkeypatch):
    model, told = build("llama", layers=2), []
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        plain = kv.publish
        monkeypatch.setattr(kv, "publish", lambda *args: told.append("kept") or plain(*args))

        class Hears:
            def put(self, pair):
                told.append("token" if isinstance(pair[1], Token) else type(pair[1]).__name__)
                events.put(pair)

        hears = Hears()  # all in one step: the loop hears of none before it hears of all
        loop._news.put(lambda: [ask(loop, prompt(20, seed=index), hears, index) for index in range(4)])
        ended(events, 4)
        loop.close()
    assert told.count("kept") == 4 and told.count("token") == 4 * NEW
    for place, what in enumerate(told):
        if what == "kept":  # and then its end is told, before the next is kept
            assert told[place + 1] == "Done"
    last = max(place for place, what in enumerate(told) if what == "token")
    same_step = [place for place, what in enumerate(told) if what == "kept" and place > last]
    assert len(same_step) >= 2, "those that end in one step are kept behind the tokens of all"


def test_a_window_that_cannot_be_saved_costs_no_answer(monkeypatch):
    def broken(*_args):
        raise RuntimeError("no room")

    monkeypatch.setattr(WindowedCache, "save", broken)
    model = build("llama", layers=2)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        windowing = Windowing(Window(32, 64), 0, 0)
        ask(loop, prompt(20), events, 0, windowing=windowing)
        assert isinstance(ended(events, 1)[0], Done)
        assert loop.stats()["publish_failed_total"] == 1
        loop.close()


def test_an_answer_whose_call_went_without_the_store_is_no_failure():
    counts = Counter()
    endings = Endings(None, lambda _job: contextlib.nullcontext(), lambda *_: None, counts)
    job = Job([1], 2, sampler=None, text=None, tell=None, tokens=[2, 3], cache=DynamicCache())
    endings.publish(job)
    assert not counts
