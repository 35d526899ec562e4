"""Proves what a loop owes the daemon that it stands beside, and what one request's trouble with the store is
to the others: nothing.

Method: a real loop on a tiny model, a real daemon; Python's collector switched off where it would hide that
something is held.
"""

import gc
import queue

import torch

import kvclient.hf
from kvclient.hf.attachment import running
from kvclient.serve.engine.job import Done, Failed
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, generate, prompt
from tests.serve.loop.test_loop import ask, ended

SHARED, OWN, BLOCK = 13 * 32, 40, 32


def test_an_answer_that_has_ended_holds_no_block(daemon, wait_until):
    """Not until Python happens to collect cycles: until then nobody could use that memory."""
    kvstored = daemon(memory="64MiB")
    with kvstored.connect() as client:
        model = build("llama", layers=2)
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        text = prompt(SHARED, seed=100)
        gc.collect()
        gc.disable()
        try:
            for turn in range(3):
                ask(loop, torch.cat([text, prompt(OWN, seed=turn)], 1), events, 0)
                ended(events, 1)
            wait_until(lambda: client.stats()["pins"] == 0, "they are let go")
            assert loop.stats()["cached_tokens_total"] >= 2 * SHARED
            reused = generate(model, torch.cat([text, prompt(OWN, seed=9)], 1))[0]
            assert reused.shape[1] > SHARED + OWN and kv.last.reused_tokens >= SHARED
            assert client.stats()["pins"] == 0, "nor of a generate()"
        finally:
            gc.enable()
            loop.close()
            kv.detach()


def test_where_nothing_inside_is_reused_prompts_join_the_step(daemon, monkeypatch):
    """repair="auto" on a model that nobody calibrated cuts no prompt's pass."""
    joined, opened = [], running.opened

    def counted(*args):
        made = opened(*args)
        joined.append(made is not None)
        return made

    monkeypatch.setattr(running, "opened", counted)
    kvstored = daemon(memory="64MiB")
    with kvstored.connect() as client:
        model = build("llama", layers=2)
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False, repair="auto")
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        ask(loop, prompt(OWN), events, 0)
        ended(events, 1)
        loop.close()
        kv.detach()
    assert joined == [True]


def test_what_cannot_be_coded_is_that_requests_own_error(daemon):
    """Blocks of 16 tokens cut int8's groups of 32: seen before a step is chosen."""
    kvstored = daemon(memory="64MiB")
    with kvstored.connect() as client:
        model = build("llama", layers=2)
        kv = kvclient.hf.attach(model, client, block_tokens=16, self_test=False)
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        ask(loop, prompt(OWN), events, 0, codec="int8")
        end = ended(events, 1)[0]
        assert isinstance(end, Failed) and end.status == 400 and "16" in end.message
        ask(loop, prompt(OWN), events, 0)
        assert isinstance(ended(events, 1)[0], Done)
        loop.close()
        kv.detach()


def test_a_prompt_that_cannot_be_opened_is_computed_apart(daemon, monkeypatch):
    def broken(*_args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(running, "opened", broken)
    kvstored = daemon(memory="64MiB")
    with kvstored.connect() as client:
        model = build("llama", layers=2)
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
        loop, events = Loop(model, kv, Limits()), queue.Queue()
        ask(loop, prompt(OWN), events, 0)
        assert isinstance(ended(events, 1)[0], Done)
        loop.close()
        kv.detach()
