"""Proves that a step of one token of each of several requests, which a model's body computes as one, has the
bits of its layers one by one, logits and caches, whatever is changed of the model, or fails; and that of the
last layer of a step with prompts nothing is computed that nobody wants, with the same bits.

Method: tiny attached models of Llama's, Qwen's and Mistral's kind, beside themselves with the same layers but
without the body's forward.
"""

import contextlib

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.attention import handle
from kvclient.hf.cache.ragged import step
from kvclient.hf.layers import appended, decoder, kinds, rows
from kvclient.hf.release import cache_of
from tests.hf.layers.test_decoder import made
from tests.hf.layers.test_stack import CHANGES, KINDS, both
from tests.hf.zoo import prompt

pytestmark = pytest.mark.skipif(
    not appended.known() or kinds.model(made().model) is None, reason="this release's bodies are torch's"
)
LENGTHS = (40, 7, 90)


@pytest.fixture
def steps(monkeypatch):
    """A list, with one entry more for each step that was computed as one."""
    usual, seen = rows.Rows.__call__, []
    monkeypatch.setattr(rows.Rows, "__call__", lambda *args: seen.append(1) or usual(*args))
    return seen


class Talks:
    """Of a model, several requests behind their prompts."""

    def __init__(self, model, lengths=LENGTHS):
        self.model, self.caches = model, []
        for seed, length in enumerate(lengths):
            out = model.generate(
                prompt(length, seed=seed), max_new_tokens=1, do_sample=False, pad_token_id=0,
                eos_token_id=None, return_dict_in_generate=True,
            )  # fmt: skip
            self.caches.append(cache_of(out))

    def say(self, tokens, wanted=None):
        return torch.cat(step(self.model, tokens, self.caches, wanted))

    def held(self):
        return [layer.storage[:, :, :, : layer.get_seq_length() - layer.origin]
                for cache in self.caches for layer in cache.layers]  # fmt: skip


@pytest.fixture
def pair(request):
    """`pair(dtype, kind)`: two Talks, with the body's forward and with the layers' alone."""
    with contextlib.ExitStack() as stack:

        def make(dtype=torch.float32, kind="llama", lengths=LENGTHS):
            talks = []
            for model in both(dtype, kind):
                client = stack.enter_context(kvclient.InMemoryClient(64 << 20))
                stack.enter_context(kvclient.hf.attach(model, client, block_tokens=16))
                talks.append(Talks(model, lengths))
            return talks

        yield make


def alike(talks, tokens=((5,), (6,), (7,)), wanted=None):
    ours, theirs = (talk.say([list(each) for each in tokens], wanted) for talk in talks)
    return torch.equal(ours, theirs) and all(map(torch.equal, *(talk.held() for talk in talks)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_caches_are_those_of_the_layers(pair, kind, dtype, steps):
    talks = pair(dtype, kind)
    for token in range(20):  # of which some find no room behind a tail, and go layer by layer
        assert alike(talks, [(token,), (token + 1,), (3,)])
    assert len(steps) > 12
    for talk in talks:
        del talk.caches[1]
    assert alike(talks, [(5,), (6,)]), "another number of requests"
    assert alike(talks, [(5, 6), (7,)]), "a draft beside it"
    assert alike(talks, [(5,), (6,)])


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_is_changed_of_a_model_counts(pair, change, steps):
    if change.__name__ in ("_eager", "_reference"):
        pytest.skip("a cache in place is told that its attention is another, and says so")
    talks = pair()
    assert all(alike(talks) for _ in range(3))
    assert len(steps) == 2, "the first is tried beside the layers, the next is taken"
    for talk in talks:
        change(talk.model)
    assert alike(talks) and alike(talks)


@pytest.mark.parametrize("name, value", [("training", True), ("is_causal", False)])
def test_each_layers_attention_is_asked_what_it_is(pair, name, value, steps):
    """Only the first one's was, and one that is not causal is none of the kernels'."""
    talks = pair()
    assert all(alike(talks) for _ in range(3)) and len(steps) == 2
    for talk in talks:
        setattr(talk.model.model.layers[1].self_attn, name, value)
    with pytest.raises(RuntimeError) if name == "is_causal" else contextlib.nullcontext():
        assert alike(talks)
    assert len(steps) == 2 and not handle.in_step() and not handle.awaited()


def test_an_error_within_a_step_leaves_the_caches_as_they_were(pair, monkeypatch, steps):
    talks = pair()
    assert alike(talks) and alike(talks)

    def fails(status):
        raise MemoryError

    before, count = [cache.get_seq_length() for cache in talks[0].caches], len(steps)
    with monkeypatch.context() as patched:
        patched.setattr(rows.contract, "check", fails)
        with pytest.raises(MemoryError):
            talks[0].say([[5], [6], [7]])
    assert len(steps) == count + 1 and not handle.in_step()
    assert [layer.get_seq_length() for cache in talks[0].caches for layer in cache.layers] == [
        length for length in before for _ in talks[0].caches[0].layers
    ]
    assert alike(talks) and alike(talks)


def test_a_body_that_computes_otherwise_is_found_out(pair, monkeypatch, steps):
    """By its first step, which is computed both ways."""
    talks, usual = pair(), rows.Rows.__call__
    monkeypatch.setattr(rows.Rows, "__call__", lambda *args: usual(*args).nextafter(torch.tensor(9.0)))
    for _ in range(3):
        assert alike(talks)
    assert len(steps) == 1


def test_what_is_written_otherwise_is_found_out(pair, monkeypatch, steps):
    talks, usual = pair(), rows.Rows.__call__

    def turned(self, hidden, angles, caches, places):
        out = usual(self, hidden, angles, caches, places)
        for at, memory, _ in places[1]:
            memory[1, 0, :, at] += 1
        return out

    monkeypatch.setattr(rows.Rows, "__call__", turned)
    for _ in range(3):
        assert alike(talks)
    assert len(steps) == 1


def test_a_first_step_that_cannot_be_tried_is_answered_once(pair, monkeypatch, steps):
    talks = pair()

    def refused(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(rows.Rows, "__call__", refused)
        assert alike(talks)
    assert alike(talks) and not steps


def test_of_the_last_layer_nothing_is_computed_that_nobody_wants(pair, monkeypatch):
    """A prompt of 60 tokens, the newest token of another, and one of which two tokens are looked at."""
    seen, usual = [], decoder.Layer._apart

    def noted(self, hidden, out):
        seen.append((self.attends.module.layer_idx, len(hidden)))
        return usual(self, hidden, out)

    monkeypatch.setattr(decoder.Layer, "_apart", noted)
    talks = pair()
    last = len(talks[0].model.model.layers) - 1
    tokens = [[*range(3, 63)], [6], [7, 8]]
    seen.clear()
    ours = talks[0].say(tokens, [1, 1, 2])
    assert (last, 4) in seen and {count for at, count in seen if at != last} == {63}
    theirs = talks[1].say(tokens, [1, 1, 2])
    assert torch.equal(ours, theirs) and len(ours) == 4
    assert all(map(torch.equal, *(talk.held() for talk in talks)))
    assert alike(talks, tokens), "all of a step's tokens"
    talks[0].model.model.layers[last].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    talks[0].say(tokens, [1, 1, 2])
    assert seen[-1] == 63, "who looks at a layer sees all of it"


@pytest.mark.parametrize("place", ["body", "head"])
def test_who_looks_at_the_body_or_at_what_goes_into_the_head_sees_all(pair, place):
    seen, tokens = [], [[*range(3, 63)], [6], [7, 8]]
    talks = pair()
    for talk in talks:
        body, head = talk.model.model, talk.model.lm_head
        if place == "body":
            body.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state.clone()))
        else:
            head.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    seen.clear()
    ours, theirs = (talk.say(tokens, [1, 1, 2]) for talk in talks)
    assert torch.equal(ours, theirs) and len(ours) == 4
    assert [each.shape for each in seen] == [(63, 1, 64)] * 2 and torch.equal(*seen)
