"""Goal: calibrate(max_kl=) measures the promise on (prompt, answer) pairs, and what it finds is what
repair="auto" is used with from then on, here and in later attachments of the model.

Method: a tiny random model, and an estimate that is planted too low by a factor, as it would be for a model
that it was not tuned on. Interrupted in the middle of the second caution it tries. The cache directory is the
test's.
"""

import math

import pytest

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.proof.measure import CAUTIONS
from kvclient.hf.reuse import estimate
from kvclient.hf.reuse.quality import verify
from kvclient.hf.reuse.repair import Repair
from tests.hf.zoo import build, prompt

ANSWER = prompt(9, seed=7)[0].tolist()
PAIRS = [(prompt(150, seed=seed)[0].tolist(), ANSWER) for seed in (1, 2)]
STEPS = 2 * 2 * len(CAUTIONS)  # both pairs, as a prefix and by "auto"
MAX_KL = 0.05


@pytest.fixture
def too_low(monkeypatch):
    """A small part of what this model's answers are off by."""
    monkeypatch.setattr(estimate, "LEFT", 0.04)
    monkeypatch.setattr(estimate, "MOST_MOVED", 100.0)


def ways(kv, monkeypatch, stop=99, pairs=PAIRS):
    """(the cautions that calibrate() tried, question by question, until so many were; what it said)."""
    tried, said = [], []
    original = verify._tried

    def once(model, trial, repair, *args):
        if repair is not None:
            if len(tried) == stop:
                raise KeyboardInterrupt
            tried.append(repair.caution)
        return original(model, trial, repair, *args)

    with monkeypatch.context() as patch:
        patch.setattr(verify, "_tried", once)
        try:
            measured = kv.calibrate(pairs, lambda *step: said.append(step), max_kl=MAX_KL)
        except KeyboardInterrupt:
            measured = None
    return tried, said, measured


def test_the_least_caution_that_keeps_the_promise_is_what_auto_has(kv, model, client, too_low, monkeypatch):
    tried, said, measured = ways(kv, monkeypatch)
    found = kv.repair
    assert found.method == "auto" and found.max_kl == MAX_KL and found.caution == tried[-1] > 1
    assert tried == [caution for caution in CAUTIONS if caution <= found.caution for _ in PAIRS]
    outcome = measured[f"auto x{found.caution}"]
    assert outcome.passed and outcome.mean_kl <= MAX_KL == outcome.limit and outcome.beyond == 0
    assert said[-1] == (STEPS, STEPS) and [done for done, _ in said] == sorted({done for done, _ in said})
    kv.detach()
    for wanted, max_kl in (("auto", 5e-3), ("calibrated", MAX_KL), (Repair(max_kl=1.0), 1.0)):
        with kvclient.hf.attach(model, client, block_tokens=16, repair=wanted, self_test=False) as later:
            assert (later.repair.caution, later.repair.max_kl) == (found.caution, max_kl)
            assert later.verify(PAIRS)["prefix"].passed
    for wanted in ("attention", Repair(max_kl=None)):  # these promise nothing
        with kvclient.hf.attach(model, client, block_tokens=16, repair=wanted, self_test=False) as later:
            assert later.repair.caution == 1
    with kvclient.hf.attach(build("llama", seed=1), client, repair="auto", self_test=False) as other:
        assert other.repair == Repair()


def test_caution_multiplies_the_estimate():
    careless, careful = estimate.Gauge(8), estimate.Gauge(8, 4.0)
    careless._moved = careful._moved = [1e-3]
    assert math.isclose(careful.left(True), 4 * careless.left(True))
    assert math.isclose(careful.left_by_second(), 4 * careless.left_by_second())
    for wrong in (0.5, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match="caution"):
            Repair(caution=wrong)


def test_an_interrupted_one_goes_on(kv, too_low, monkeypatch, cache):
    tried, _, measured = ways(kv, monkeypatch, stop=3)
    assert measured is None and kv.repair is None and len(list(cache.glob("*.partial"))) == 1
    again, said, measured = ways(kv, monkeypatch)
    assert len(tried) == 3 and again[0] == tried[-1] and measured is not None
    assert said[:3] == [(1, STEPS), (2, STEPS), (3, STEPS)] and not list(cache.glob("*.partial"))
    assert kv.repair.caution == again[-1]


def test_where_all_is_computed_nothing_is_switched_on(kv, cache):
    measured = kv.calibrate(PAIRS, max_kl=1e-9)
    assert [outcome.strategy for outcome in measured.outcomes] == ["prefix", "auto x1"]
    assert measured["auto x1"].found == 0 == measured["auto x1"].mean_kl
    assert kv.repair is None and not list(cache.glob("*"))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "little"])
def test_a_wrong_promise_is_named(kv, wrong):
    with pytest.raises(InvalidArgument, match="max_kl"):
        kv.calibrate(PAIRS, max_kl=wrong)
