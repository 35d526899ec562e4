"""Goal: detach() takes the store away between calls, never under one: it waits for those that run, in other
threads, and those that begin meanwhile go without the store.

Method: threads that stand still within generate(), in a logits processor, on a tiny random model.
"""

import threading

import pytest
import torch
import transformers

import kvclient.hf
from kvclient.errors import DeadlineExceeded
from kvclient.hf.attachment import running
from tests.hf.zoo import build, generate, prompt

DEADLINE_S = 60.0
BLOCK = 8


class Held(transformers.LogitsProcessor):
    """Stops a call at its first token until it is let go."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, ids, scores):
        self.reached.set()
        assert self.go.wait(DEADLINE_S)
        return scores


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def kv(model, client):
    return kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)


def begun(model, ids):
    """A call in a thread that stands still, and where its answer comes to."""
    held, answers = Held(), []
    processors = transformers.LogitsProcessorList([held])

    def run():
        answers.append(generate(model, ids, 24, logits_processor=processors)[0])

    thread = threading.Thread(target=run)
    thread.start()
    assert held.reached.wait(DEADLINE_S)
    return held, answers, thread


def test_it_waits_for_a_running_call(model, kv, client):
    ids, before = prompt(70), model.config._attn_implementation
    plain = type(model).generate.__get__(model)(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    generate(model, ids)
    held, answers, thread = begun(model, ids)
    detaching = threading.Thread(target=kv.detach)
    detaching.start()
    while "generate" in model.__dict__:
        assert detaching.is_alive() or "generate" not in model.__dict__
    calls = kv.stats["requests"]
    assert torch.equal(generate(model, ids, 24)[0], plain), "one that begins now goes without the store"
    assert kv.stats["requests"] == calls and detaching.is_alive()
    assert model.config._attn_implementation == before, "the running call's attention is not taken away"
    held.go.set()
    thread.join(DEADLINE_S)
    detaching.join(DEADLINE_S)
    assert torch.equal(answers[0], plain)
    assert (kv.last.bypassed, kv.last.reused_tokens, kv.stats["requests"]) == (None, 64, calls + 1)
    assert "_prefill" not in model.__dict__ and model.config._attn_implementation == "sdpa"
    assert client.stats()["pins"] == 0


def test_within_a_call_of_its_own_thread_it_does_not_wait(model, client):
    kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False, in_place=False)

    class Detaches(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            kv.detach()
            return scores

    ids = prompt(70)
    wanted = generate(build("llama"), ids)[0]
    found = generate(model, ids, logits_processor=transformers.LogitsProcessorList([Detaches()]))[0]
    assert torch.equal(found, wanted) and "generate" not in model.__dict__


def test_a_call_that_does_not_end_is_named_and_waited_for_again(model, kv, monkeypatch):
    monkeypatch.setattr(running.Running.wait, "__defaults__", (0.01,))
    held, _, thread = begun(model, prompt(70))
    with pytest.raises(DeadlineExceeded, match="1 threads still run"):
        kv.detach()
    held.go.set()
    thread.join(DEADLINE_S)
    kv.detach()
    kv.detach()
    assert not {"generate", "_prefill", "_kvstored"} & model.__dict__.keys()
