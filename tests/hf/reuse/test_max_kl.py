"""repair="auto" promises max_kl: passes follow each other until the error is estimated to be small enough, up
to a full prefill.

Tiny random models and the in-memory fake: the order of the passes, and what each of them computes. What the
estimate is worth on real text: tests/hf/test_inside_smollm2.py and bench.quality.
"""

import math

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.reuse import passes
from kvclient.hf.reuse.estimate import LEFT, SECOND_SHARE, Gauge
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import COMPUTED, DOCUMENT
from tests.hf.zoo import build, generate, prompt

LAYERS, SHIFT, QUESTION = 6, 13, 9
BARE = {"sink_tokens": 0, "recency_tokens": 0}


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
    monkeypatch.setattr(Gauge, "left_by_second", lambda *_args: next(left))


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
    results = []
    for repair in (
        Repair(max_kl=1e9, caution=1.0, attended_ratio=0.2, **BARE),
        Repair("attention", attended_ratio=0.2, **BARE),
    ):
        kv = attach(repair)
        rows.clear()
        with kv.bypass(read=False):
            results.append((generate(model, asked(), 3), kv.last.recomputed_tokens, rows[-4:]))
        assert (kv.last.estimated_kl is not None) == (repair.method == "auto")
        kv.detach()
    ((tokens, logits, _), count, passed), ((wanted, others, _), known, single) = results
    assert count == known and passed[1:] == single[1:]
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logits, others, rtol=0, atol=1e-4)


def test_a_second_pass_computes_what_the_first_left_out(attach, model, rows, monkeypatch):
    kv = attach(Repair(caution=1.0, attended_ratio=0.2, **BARE))
    rows.clear()
    told(monkeypatch, 1.0, 1e-3, 1e-3)  # behind the first; expected of the second, and behind it
    with kv.bypass(read=False):
        _, _, cache = generate(model, asked(), 1)
    assert kv.last.recomputed_tokens == round(100 * SECOND_SHARE) and kv.last.estimated_kl == 1e-3
    assert rows == [SHIFT + QUESTION, 20 + QUESTION, 40 + QUESTION]
    assert cache.get_seq_length() == asked().shape[1]
    with kv.bypass():
        _, _, plain = generate(model, asked(), 1)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):  # what stands before is as it must be
        assert torch.equal(ours.keys[:, :, :SHIFT], theirs.keys[:, :, :SHIFT])
    ours, theirs = cache.layers[0], plain.layers[0]
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-4)


@pytest.mark.parametrize("estimates", [(1.0, 1.0), (1.0, 1e-3, 1.0)])
def test_where_the_second_pass_is_not_enough_all_is_computed(attach, model, monkeypatch, estimates):
    kv = attach(Repair(caution=1.0, attended_ratio=0.2))
    told(monkeypatch, *estimates)
    with kv.bypass(read=False):
        _, logits, _ = generate(model, asked(), 4)
    with kv.bypass():
        _, plain, _ = generate(model, asked(), 4)
    assert torch.equal(logits, plain)


def test_what_the_last_pass_computed_is_published_once(attach, model, client, monkeypatch):
    """The text behind the document fills blocks of its own: found by content, and right."""
    kv = attach(Repair(caution=1.0, attended_ratio=0.2))
    told(monkeypatch, 1.0, 1e-3, 1e-3)
    longer = torch.cat([asked(), prompt(40, seed=11)], dim=1)
    generate(model, longer, 1)
    published = kv.last.published_blocks
    assert published and not kv.last.lost_blocks
    assert client.stats()["pins"] == 0


def test_a_pass_that_fails_leaves_no_hook(attach, model, monkeypatch):
    kv = attach(Repair(max_kl=1e-9, caution=1.0))
    told(monkeypatch, 1.0, 1.0)
    monkeypatch.setattr(passes.Blend, "more", lambda *_args: 1 / 0)
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
        assert gauge.left_by_second() < gauge.left(True) < gauge.left(False) or not known
    gauge = Gauge(8)
    for logits in (first, None):  # a pass whose logits nobody saw
        gauge._now = logits
        gauge.passed()
    assert gauge.left(True) == gauge.left_by_second() == math.inf


@pytest.mark.parametrize("wrong", [-1e-3, "little", math.nan])
def test_a_wrong_limit_is_named(wrong):
    with pytest.raises(InvalidArgument, match="max_kl"):
        kvclient.hf.Repair(max_kl=wrong)


def test_only_auto_promises():
    assert Repair().promises and Repair().max_kl == 5e-3
    assert not Repair("attention").promises and not Repair(max_kl=None).promises
    assert COMPUTED.shape[1] > DOCUMENT.shape[1]
