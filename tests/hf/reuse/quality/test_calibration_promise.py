"""Goal: calibrate(max_kl=) measures the promise on (prompt, answer) pairs, and what it finds is what
repair="auto" is used with from then on, here and in later attachments of the model.

Method: a tiny random model, and an estimate that is planted too low by a factor, as it would be for a model
that it was not tuned on. Interrupted in the middle of the second caution it tries. The cache directory is the
test's.
"""

import json
import math

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.model.identity import digest_weights
from kvclient.hf.proof.measure import CAUTIONS
from kvclient.hf.reuse import estimate, products
from kvclient.hf.reuse.quality import calibration, verify
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import AUTO, BLOCK, COMPUTED, DOCUMENT, divergence
from tests.hf.zoo import build, generate, prompt

ANSWER = prompt(9, seed=7)[0].tolist()
PAIRS = [(prompt(150, seed=seed)[0].tolist(), ANSWER) for seed in (1, 2)]
STEPS = 2 * 2 * len(CAUTIONS)  # both pairs, as a prefix and by "auto"
MAX_KL = 0.015


@pytest.fixture
def too_low(monkeypatch):
    """A small part of what this model's answers are off by, on any processor's path."""
    monkeypatch.setattr(products, "IN_PAIRS", ())
    monkeypatch.setattr(estimate, "LEFT", 1.0)


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
    asked = (Repair(max_kl=MAX_KL), "calibrated", Repair(max_kl=1.0))
    for wanted, max_kl in zip(asked, (MAX_KL, MAX_KL, 1.0), strict=True):
        with kvclient.hf.attach(model, client, block_tokens=16, repair=wanted, self_test=False) as later:
            assert (later.repair.caution, later.repair.max_kl) == (found.caution, max_kl)
            assert not later.repair.uncalibrated
            assert later.verify(PAIRS)["prefix"].passed
    for wanted in ("attention", Repair(max_kl=None)):  # these promise nothing
        with kvclient.hf.attach(model, client, block_tokens=16, repair=wanted, self_test=False) as later:
            assert later.repair == Repair(later.repair.method, max_kl=later.repair.max_kl)
    with kvclient.hf.attach(model, client, block_tokens=16, repair="auto", self_test=False) as later:
        assert later.repair.uncalibrated  # less than what was measured
    with kvclient.hf.attach(build("llama", seed=1), client, repair="auto", self_test=False) as other:
        assert other.repair == Repair() and other.repair.uncalibrated


def test_caution_multiplies_the_estimate():
    careless, careful = estimate.Gauge(8), estimate.Gauge(8, 4.0)
    careless._moved = careful._moved = 1e-3
    assert math.isclose(careful.left(True), 4 * careless.left(True))
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
    assert kv.repair is None and not list(cache.glob("*.partial"))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "little"])
def test_a_wrong_promise_is_named(kv, wrong):
    with pytest.raises(InvalidArgument, match="max_kl"):
        kv.calibrate(PAIRS, max_kl=wrong)


def kl_of(kv, model, ids):
    """Of the answer, to a cold run; and the report."""
    with kv.bypass():
        plain = generate(model, ids, 9)[1]
    logits = generate(model, ids, 9)[1]
    return divergence(logits, plain), kv.last


def test_before_it_was_measured_nothing_is_reused_for_a_promise(model, client, too_low, monkeypatch):
    """A model that hangs on its context more than the estimate knows."""
    monkeypatch.setattr(estimate, "LEFT", 1e-4)
    ids = torch.cat([prompt(37, seed=7), DOCUMENT, prompt(9, seed=4)], dim=1)
    batch = torch.cat([ids, torch.cat([prompt(37, seed=8), DOCUMENT, prompt(9, seed=4)], dim=1)])
    options = {"block_tokens": BLOCK, "self_test": False}
    with kvclient.hf.attach(model, client, repair=AUTO, **options) as kv:
        generate(model, COMPUTED)
        with kv.bypass(read=False):
            generate(model, COMPUTED)
        kl, report = kl_of(kv, model, ids)
        assert report.approximate_tokens == 100 and report.estimated_kl <= 5e-3 < kl  # so it is not known
    with (
        kvclient.InMemoryClient(64 << 20) as fresh,
        kvclient.hf.attach(model, fresh, repair="auto", **options) as kv,
    ):
        with pytest.warns(UserWarning, match=r"calibrate\(max_kl=0.005\)") as warned:
            generate(model, COMPUTED)
            kl, report = kl_of(kv, model, ids)
            assert kl == 0 and (report.approximate_tokens, report.estimated_kl) == (0, None)
            generate(model, batch, attention_mask=torch.ones_like(batch))
            assert kv.last.inside_bypassed == "uncalibrated" and kv.last.bypassed is None
        assert len(warned) == 1 and kv.stats["bypassed"] == {"uncalibrated": 3, "bypass": 1}
        kv.calibrate(PAIRS, max_kl=1e3)  # that it keeps
        assert kv.repair.promised == 1e3
        assert kl_of(kv, model, torch.cat([prompt(21, seed=9), ids], dim=1))[1].approximate_tokens > 90


def test_each_codec_has_to_be_measured(model, client, cache):
    options = {"block_tokens": 32, "repair": "auto", "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        unsalted = kv._served().unsalted
    outcome = verify.Outcome("auto", "none", 0.9, 1e-3, 2e-3, 1.0, None, 0.5, 1.0, limit=5e-3)
    calibration.update(unsalted, lambda found: found.with_passed(Repair(caution=2.0), outcome))
    with kvclient.hf.attach(model, client, **options) as kv:
        assert kv.repair.caution == 2
        with kv.coded("int8"):
            assert kv.repair.uncalibrated
        with kv.salted("ours"):
            assert kv.repair.caution == 2


def test_what_is_known_of_weights_counts(model, client, monkeypatch):
    digest = digest_weights(model).hex()
    monkeypatch.setitem(calibration.KNOWN, digest, Repair(caution=3.0, max_kl=1e-2))
    for repair, caution in ((Repair(max_kl=2e-2), 3), ("auto", None), (Repair(max_kl=2e-2, caution=4.0), 4)):
        with kvclient.hf.attach(model, client, block_tokens=32, repair=repair, self_test=False) as kv:
            assert kv.repair.caution == caution
            with kv.coded("int8"):
                assert kv.repair.caution in (None, 4)


def test_a_calibration_of_another_release_is_told_of_once(model, client, cache, caplog):
    with kvclient.hf.attach(model, client, block_tokens=16, repair="auto", self_test=False) as kv:
        path = cache / f"{kv._served().unsalted.hex()}.json"
    cache.mkdir()
    path.write_text(json.dumps({"version": 2, "identity": "", "method": "auto"}))
    for _ in range(2):
        with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
            assert kv.repair is None
    (said,) = [record.getMessage() for record in caplog.records if path.name in record.getMessage()]
    assert "version 2, not 6" in said and "calibrate()" in said
