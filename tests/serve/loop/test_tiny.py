"""Proves what many small requests in one step share: the look whether the model was changed; that a tail
which is there is not asked for again; that an answer takes memory as it is said; that a loop without work
keeps no memory for requests to come; and that a long prompt whose pieces nobody keeps is computed in one.

Method: real loops on a tiny model beside the in-memory store; calls are counted, and the model is changed
between two steps.
"""

import queue

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.model.watch import Watch
from kvclient.serve.engine.job import ROOM_TOKENS, Job, Token
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.scheduler import Limits
from tests.conftest import wait_for
from tests.hf.zoo import build, generate, prompt
from tests.serve.loop.test_loop import Letters, ask, ended

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


@pytest.mark.parametrize("head_dim", [8, 32])  # dense; in place
@pytest.mark.parametrize("tokens", [20, 200])  # one that joins a step in place, one that generate() computes
def test_an_answer_takes_memory_as_it_is_said(tokens, head_dim):
    """Room for all that it might say was taken at once, in huge pages: 48 MiB for each chat of SmolLM2 that
    asked for 1,024 tokens. A long prompt's was taken without any: its first token moved all of it.
    """
    model, events, seen = build("llama", layers=2, head_dim=head_dim), queue.Queue(), []
    text, new = prompt(tokens), 280
    ids = text[0].tolist()

    def tell(event):
        if isinstance(event, Token) and job.cache is not None:
            storage = job.cache.layers[0].storage
            seen.append((storage.shape[3], storage.data_ptr(), job.cache.get_seq_length()))
        events.put((0, event))

    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        loop = Loop(model, kv, Limits(piece_tokens=64))
        job = Job(ids, new, Sampler(Sampling(temperature=0), ids), Text(Letters()), tell)
        loop.submit(job)
        ended(events, 1)
        loop.close()
        with kv.bypass():
            assert job.tokens == generate(model, text, new)[0][0, tokens:].tolist()
    first = seen[:ROOM_TOKENS]
    assert len({place for _, place, _ in first}) == 1, "it moved before what there was room for was said"
    assert max(room - length for room, _, length in seen) <= ROOM_TOKENS


def computed(loop, ids, **more):
    """How many tokens of the prompt were."""
    events, before = queue.Queue(), loop.stats().get("prompt_tokens_computed_total", 0)
    ask(loop, ids, events, 0, **more)
    ended(events, 1)
    return loop.stats()["prompt_tokens_computed_total"] - before


def test_what_is_kept_nowhere_is_computed_in_one_piece(served, tmp_path):
    model, _, loop = served
    loop._scheduler.limits = Limits(piece_tokens=64)
    assert computed(loop, prompt(400), write=False) == 400
    loop.close()
    loop._kv.detach()
    with (
        kvclient.connect(dir=tmp_path, on_error="miss") as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        alone = Loop(model, kv, Limits(piece_tokens=64))
        assert computed(alone, prompt(400)) == 400
        alone.close()
