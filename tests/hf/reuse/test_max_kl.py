"""repair="auto" promises max_kl: passes follow each other until the error is estimated to be small enough, up
to a full prefill.

Tiny random models and the in-memory fake: the order of the passes, and what each of them computes. What the
estimate is worth on real text: test_inside_smollm2.py and bench.quality.
"""

import math

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.reuse import passes
from kvclient.hf.reuse.estimate import LEFT, LEFT_HALVES, LEFT_ROUNDED, Gauge
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import COMPUTED, DOCUMENT
from tests.hf.zoo import build, generate, prompt

LAYERS, SHIFT, QUESTION = 6, 13, 9
BARE = {"sink_tokens": 0, "recency_tokens": 0, "front_tokens": 0}


def asked(shift=SHIFT):
    return torch.cat([prompt(shift, seed=7), DOCUMENT, prompt(QUESTION, seed=4)], dim=1)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=LAYERS)


@pytest.fixture
def rows(model, monkeypatch):
    """How many rows go through the second layer, pass by pass."""
    seen = []
    layer = model.model.layers[1]
    original = type(layer).forward

    def forward(self, hidden_states, *args, **kwargs):
        if self is layer:
            seen.append(hidden_states.shape[1])
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward", forward)
    return seen


def told(monkeypatch, *estimates):
    """The estimates that the gauge gives, one after the other."""
    left = iter(estimates)
    monkeypatch.setattr(Gauge, "left", lambda *_args: next(left))


@pytest.mark.parametrize("kernels", [True, False])
def test_nothing_may_be_off_so_all_is_computed(attach, model, kernels):
    kv = attach(Repair(max_kl=0.0), in_place=None if kernels else False)
    tokens, logits, cache = generate(model, asked())
    assert (kv.last.approximate_tokens, kv.last.recomputed_tokens) == (100, 100)
    assert kv.last.estimated_kl == 0
    with kv.bypass():
        plain, plain_logits, plain_cache = generate(model, asked())
    assert torch.equal(tokens, plain) and torch.equal(logits, plain_logits)
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_anything_may_be_off_so_one_pass_repairs(attach, model, rows):
    kv = attach(Repair(max_kl=1e9, caution=1.0, attended_ratio=0.2, **BARE))
    rows.clear()
    with kv.bypass(read=False):
        generate(model, asked(), 3)
    assert kv.last.recomputed_tokens == 20 and kv.last.estimated_kl is not None
    assert rows == [SHIFT + QUESTION, 20 + QUESTION, 1, 1]


def test_the_front_of_a_document_is_exact_behind_the_first_pass(attach, model, rows):
    rules = {"caution": 1.0, "attended_ratio": 0.1, "sink_tokens": 0, "recency_tokens": 0}
    kv = attach(Repair(max_kl=1e9, front_tokens=30, **rules))
    rows.clear()
    with kv.bypass(read=False):
        _, _, cache = generate(model, asked(), 1)
    assert kv.last.recomputed_tokens == 37  # and a tenth of the others
    assert rows == [SHIFT + 30 + QUESTION, 7 + QUESTION]
    with kv.bypass():
        _, _, plain = generate(model, asked(), 1)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        end = SHIFT + 30
        torch.testing.assert_close(ours.keys[:, :, :end], theirs.keys[:, :, :end], rtol=0, atol=0.05)
    assert any(
        not torch.allclose(ours.keys[:, :, SHIFT + 30 :], theirs.keys[:, :, SHIFT + 30 :], rtol=0, atol=0.05)
        for ours, theirs in zip(cache.layers, plain.layers, strict=True)
    )


def test_a_text_that_is_all_front_is_computed_at_once(attach, model, rows):
    kv = attach(Repair(caution=1.0, front_tokens=100))
    rows.clear()
    _, logits, _ = generate(model, asked(), 1)
    assert (kv.last.recomputed_tokens, kv.last.estimated_kl) == (100, 0)
    assert rows == [SHIFT + 100 + QUESTION]
    with kv.bypass():
        assert torch.equal(logits, generate(model, asked(), 1)[1])


@pytest.mark.parametrize("rounds", [True, False])
def test_where_one_pass_is_not_enough_all_is_computed_rounded_or_anew(
    attach, model, rows, monkeypatch, rounds
):
    kv = attach(Repair(caution=1.0, attended_ratio=0.2, **BARE | {"front_tokens": 10}))
    rows.clear()
    told(monkeypatch, 1.0)
    monkeypatch.setattr(passes.Blend, "rounds", rounds)
    with kv.bypass(read=False):
        _, logits, cache = generate(model, asked(), 1)
    assert kv.last.recomputed_tokens == 100 and kv.last.estimated_kl == (LEFT_ROUNDED if rounds else 0)
    total = SHIFT + 100 + QUESTION
    assert rows == [SHIFT + 10 + QUESTION, 18 + QUESTION, total - SHIFT - 10 if rounds else total]
    assert cache.get_seq_length() == asked().shape[1]
    with kv.bypass():
        _, plain_logits, plain = generate(model, asked(), 1)
    assert rounds or torch.equal(logits, plain_logits)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert rounds or torch.equal(ours.keys[:, :, :SHIFT], theirs.keys[:, :, :SHIFT])
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0.2)


def test_what_rounding_may_leave_is_not_tried_for_less(attach, model, monkeypatch):
    kv = attach(Repair(max_kl=LEFT_ROUNDED / 2, caution=1.0, attended_ratio=0.2))
    told(monkeypatch, 1.0)
    monkeypatch.setattr(passes.Blend, "rounds", True)
    with kv.bypass(read=False):
        _, logits, _ = generate(model, asked(), 4)
    with kv.bypass():
        _, plain, _ = generate(model, asked(), 4)
    assert torch.equal(logits, plain)


@pytest.mark.parametrize(("estimate", "computed"), [(1.0, 100), (0.0, 5)])
def test_an_attention_that_tells_nothing_keeps_the_promise_too(
    attach, model, monkeypatch, estimate, computed
):
    """Every row enters the first layers of the second pass, which may be the last or not."""
    kv = attach(Repair(caution=1.0, **BARE), in_place=False)
    told(monkeypatch, estimate)
    with kv.bypass(read=False):
        tokens, logits, cache = generate(model, asked(), 4)
    assert (kv.last.approximate_tokens, kv.last.recomputed_tokens) == (100, computed)
    assert cache.get_seq_length() == asked().shape[1] + 3
    with kv.bypass():
        plain, plain_logits, whole = generate(model, asked(), 4)
    if computed == 100:
        assert torch.equal(tokens, plain) and torch.equal(logits, plain_logits)
    for ours, theirs in zip(cache.layers, whole.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape


def test_what_the_last_pass_computed_is_published_once(attach, model, client, monkeypatch):
    """The text behind the document fills blocks of its own: found by content, and right."""
    kv = attach(Repair(caution=1.0, attended_ratio=0.2))
    told(monkeypatch, 1.0)
    longer = torch.cat([asked(), prompt(40, seed=11)], dim=1)
    generate(model, longer, 1)
    published = kv.last.published_blocks
    assert published and not kv.last.lost_blocks
    assert client.stats()["pins"] == 0


def test_a_pass_that_fails_leaves_no_hook(attach, model, monkeypatch):
    kv = attach(Repair(max_kl=1e-9, caution=1.0))
    told(monkeypatch, 1.0)
    monkeypatch.setattr(passes.Blend, "more", lambda *_args, **_how: 1 / 0)
    before = (len(model._forward_hooks), len(model._forward_pre_hooks))
    with kv.bypass(read=False), pytest.raises(ZeroDivisionError):
        generate(model, asked(), 1)
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == before
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_logits_are_as_the_caller_asked_for(attach, model):
    kv = attach(Repair(max_kl=1e9, caution=1.0))
    out = model.generate(
        asked(), max_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert kv.last.approximate_tokens == 100
    assert [tuple(scores.shape) for scores in out.logits] == [(1, out.logits[0].shape[-1])] * 2


def test_the_estimate_of_planted_distributions():
    first, second = torch.zeros(8, 8), torch.zeros(8, 8)
    second[:, 0] = 1.0
    chance = second[0].softmax(-1)
    kl = float((chance * (chance * 8).log()).sum())
    for rows, known in ((8, True), (7, False)):  # of so few nothing is said
        gauge = Gauge(rows)
        for logits in (first, second):
            gauge._now = logits[:rows]
            gauge.passed()
        assert (
            math.isclose(gauge.left(True), LEFT * kl, rel_tol=1e-5) if known else gauge.left(True) == math.inf
        )
        assert gauge.left(True) < gauge.left(False) or not known
    halves = Gauge(8)
    for logits in (first, second):
        halves._now = logits.bfloat16()
        halves.passed()
    assert math.isclose(halves.left(True), LEFT_HALVES * kl, rel_tol=1e-5)
    gauge = Gauge(8)
    for logits in (first, None):  # a pass whose logits nobody saw
        gauge._now = logits
        gauge.passed()
    assert gauge.left(True) == math.inf


@pytest.mark.parametrize("wrong", [-1e-3, "little", math.nan])
def test_a_wrong_limit_is_named(wrong):
    with pytest.raises(InvalidArgument, match="max_kl"):
        kvclient.hf.Repair(max_kl=wrong)


def test_only_auto_promises():
    assert Repair().promises and Repair().max_kl == 5e-3
    assert not Repair("attention").promises and not Repair(max_kl=None).promises
    assert COMPUTED.shape[1] > DOCUMENT.shape[1]
