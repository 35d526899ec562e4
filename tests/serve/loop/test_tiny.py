"""Proves what many small requests in one step share: the look whether the model was changed; that a tail
which is there is not asked for again; and that a loop without work keeps no memory for requests to come.

Method: real loops on a tiny model beside the in-memory store; calls are counted, and the model is changed
between two steps.
"""

import queue

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.model.watch import Watch
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.conftest import wait_for
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import ask, ended

BLOCK = 64


@pytest.fixture
def served():
    model = build("llama", layers=2)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        loop = Loop(model, kv, Limits())
        yield model, client, loop
        loop.close()


def asked(loop, prompts):
    """All in one step: the loop hears of none before it hears of all."""
    events, jobs = queue.Queue(), []
    loop._news.put(lambda: jobs.extend(ask(loop, ids, events, i) for i, ids in enumerate(prompts)))
    ended(events, len(prompts))
    return jobs


def test_those_that_join_a_step_look_at_the_model_once(served, monkeypatch):
    _, _, loop = served
    prompts = [prompt(20, seed=seed) for seed in range(8)]
    asked(loop, prompts)
    looks, plain = [], Watch.changed
    monkeypatch.setattr(Watch, "changed", lambda watch: looks.append(1) or plain(watch))
    asked(loop, prompts)
    answers_kept = 8  # each looks again before it is sealed
    assert len(looks) <= 1 + answers_kept, "each prompt looked for itself"


def test_a_model_that_was_changed_between_two_steps_is_seen(served):
    model, _, loop = served
    text = prompt(50)
    before = asked(loop, [text])[0]
    assert asked(loop, [text])[0].first.cached_tokens > 0
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3)
    after = asked(loop, [text, prompt(30, seed=3)])[0]
    assert after.first.cached_tokens == 0 and after.tokens != before.tokens


def test_a_tail_that_is_there_is_not_asked_for(served, monkeypatch):
    _, client, loop = served
    text = prompt(BLOCK + 20)
    asked(loop, [text])
    made, plain = [], client.create
    monkeypatch.setattr(client, "create", lambda *args, **more: made.append(args) or plain(*args, **more))
    again = asked(loop, [text])[0]
    assert again.first.cached_tokens == BLOCK + 19, "the answer before left all but the prompt's last"
    assert len(made) <= 1, "but for the answer's own there is nothing new"


def test_a_loop_without_work_keeps_no_memory_for_requests_to_come(served, monkeypatch):
    """150 MiB of a server of SmolLM2 were such, behind eight prompts of a thousand tokens."""
    _, _, loop = served
    memory, taken = loop._kv._memory, []
    take = memory.take
    monkeypatch.setattr(memory, "take", lambda size: taken.append(size) or take(size))
    asked(loop, [prompt(300)])
    wait_for(lambda: not memory._spare, "what was kept is given back")
    assert taken
