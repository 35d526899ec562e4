"""Goal: a calibration counts for what it measured and for nothing else: a promise with other rules has to be
measured itself, one that was found not to be kept is given up at once, and what one way of repair was found
to be worth stays when another is measured.

Method: a tiny random model whose answers are far off, with limits that are planted so that they are kept or
not; random sequences of calibrations against a rule that is written out. The cache directory is the test's.
"""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvclient.hf
from kvclient.hf.model.identity import digest_weights
from kvclient.hf.reuse.quality import calibration, verify
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import BLOCK, COMPUTED, DOCUMENT
from tests.hf.zoo import generate, prompt

ANSWER = prompt(9, seed=7)[0].tolist()
PAIRS = [(prompt(150, seed=1)[0].tolist(), ANSWER)]  # what is measured of several: test_calibration_pairs.py
OUTCOME = verify.Outcome("auto", "none", 0.9, 1e-3, 2e-3, 1.0, None, 0.5, 1.0, limit=5e-3)
WIDE = Repair(attended_ratio=0.4, max_kl=1e3)
NEVER = 1e-9  # nats: of these models no answer is so near


def repair_of(model, client, repair):
    with kvclient.hf.attach(model, client, block_tokens=16, repair=repair, self_test=False) as kv:
        return kv.repair


OTHER_RULES = [
    {"attended_ratio": 0.05}, {"ratio": 0.01}, {"check_layer": 1}, {"scan_tokens": 8}, {"sink_tokens": 0},
    {"recency_tokens": 0}, {"min_tokens": 1},
]  # fmt: skip


def test_other_rules_than_those_that_were_measured_have_no_promise(model, client, kv):
    kv.calibrate(PAIRS, max_kl=1e3)
    kv.detach()
    assert repair_of(model, client, Repair(max_kl=1e3)).caution == 1
    promised = [r for r in OTHER_RULES if not repair_of(model, client, Repair(max_kl=1e3, **r)).uncalibrated]
    assert not promised


def test_what_is_known_of_weights_is_of_the_defaults(model, client, monkeypatch):
    monkeypatch.setitem(calibration.KNOWN, digest_weights(model).hex(), Repair(caution=3.0))
    assert repair_of(model, client, "auto").caution == 3
    assert repair_of(model, client, Repair(attended_ratio=0.05)).uncalibrated


def test_rules_of_ones_own_can_be_measured(model, client):
    with kvclient.hf.attach(model, client, block_tokens=16, repair=WIDE, self_test=False) as kv:
        assert kv.repair.uncalibrated
        assert kv.calibrate(PAIRS, max_kl=1e3).passed
        assert kv.repair == dataclasses.replace(WIDE, caution=1.0)
    assert repair_of(model, client, WIDE).caution == 1
    assert repair_of(model, client, Repair(max_kl=1e3)).uncalibrated


def test_a_promise_that_is_not_kept_ends_what_runs(model, client, monkeypatch):
    """Also where the weights' own figure is built in, and for attachments that follow."""
    monkeypatch.setitem(calibration.KNOWN, digest_weights(model).hex(), Repair(caution=1.0, max_kl=NEVER))
    wanted = Repair(max_kl=1e3)
    shifts = iter(range(21, 40))

    def approximate(kv):
        generate(model, torch.cat([prompt(next(shifts), seed=7), DOCUMENT, prompt(9, seed=4)], dim=1))
        return kv.last.approximate_tokens, kv.last.inside_bypassed

    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=wanted, self_test=False) as kv:
        generate(model, COMPUTED)
        assert approximate(kv)[0] > 90
        monkeypatch.setattr("kvclient.hf.proof.measure._near", lambda *_: False)
        kv.calibrate(PAIRS, max_kl=1e3)
        assert kv.repair.uncalibrated
        with pytest.warns(UserWarning, match="calibrate"):
            assert approximate(kv) == (0, "uncalibrated")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=wanted, self_test=False) as kv:
        assert kv.repair.uncalibrated
    assert not repair_of(model, client, Repair(max_kl=2e3)).uncalibrated  # of which that says nothing


def test_it_ends_where_nothing_can_be_kept(model, client, cache, monkeypatch):
    monkeypatch.setitem(calibration.KNOWN, digest_weights(model).hex(), Repair(caution=1.0))
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the directory should be")
    with kvclient.hf.attach(model, client, block_tokens=16, repair="auto", self_test=False) as kv:
        assert kv.repair.caution == 1
        with pytest.warns(UserWarning, match="cannot be kept"):
            kv.calibrate(PAIRS, max_kl=kv.repair.max_kl)
        assert kv.repair.uncalibrated


def test_one_strategy_leaves_what_another_found(model, client, kv, monkeypatch):
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    kv.calibrate(PAIRS, max_kl=1e3)
    kv.calibrate(PAIRS)
    assert kv.repair == Repair("selective")
    kv.detach()
    assert repair_of(model, client, Repair(max_kl=1e3)).caution == 1
    assert repair_of(model, client, "calibrated") == Repair("selective")  # the newest
    monkeypatch.setattr(verify, "MAX_MEAN_KL", NEVER)
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as later:
        later.calibrate(PAIRS)
        assert later.repair == Repair(max_kl=1e3, caution=1.0)
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as later:
        later.calibrate(PAIRS, max_kl=NEVER)
        assert later.repair == Repair(max_kl=1e3, caution=1.0)


PROMISED = st.sampled_from([1e-3, 2e-3, 5e-3, 1e-2])
STEPS = st.lists(st.tuples(PROMISED, st.booleans(), st.sampled_from([1.0, 4.0]), st.booleans()), max_size=8)


@given(STEPS, PROMISED)
@settings(deadline=None)
def test_a_promise_hangs_on_the_newest_word_about_it(steps, wanted):
    found = calibration.Findings()
    for max_kl, passed, caution, wide in steps:
        repair = Repair(max_kl=max_kl, caution=caution, attended_ratio=0.4 if wide else None)
        found = (found.with_passed if passed else found.with_failed)(repair, OUTCOME)
    about = [(max_kl, passed, caution) for max_kl, passed, caution, wide in steps if not wide]
    # A promise that was kept is kept for more as well, one that was not kept not for less.
    counted = []
    for at, (max_kl, passed, caution) in enumerate(about):
        against = (
            later <= max_kl if later_passed else later >= max_kl
            for later, later_passed, _ in about[at + 1 :]
            if later_passed != passed
        )
        again = any(later == max_kl for later, later_passed, _ in about[at + 1 :] if later_passed == passed)
        if not any(against) and not again:
            counted.append((max_kl, passed, caution))
    kept = [(max_kl, caution) for max_kl, passed, caution in counted if passed and max_kl <= wanted]
    failed = any(not passed and max_kl >= wanted for max_kl, passed, _ in counted)
    assert not (kept and failed)
    expected = max(kept)[1] if kept else None
    assert found.cautious(Repair(max_kl=wanted), None).caution == expected
    known = Repair(max_kl=1e-3)
    anything = any(passed for _, passed, _ in counted)
    assert (found.cautious(Repair(max_kl=wanted), known).caution is None) == (
        failed or (anything and not kept)
    )
    on = [passed for _, passed, _, _ in steps]
    assert (found.switched_on is not None) <= any(on)


def test_no_more_is_kept_than_has_its_bound():
    found = calibration.Findings()
    for number in range(1, 2 * calibration.MOST_FOUND + 1):
        found = found.with_passed(Repair(max_kl=number * 1e-3, caution=1.0), OUTCOME)
    assert len(found.found) == calibration.MOST_FOUND
    assert found.switched_on.max_kl == 2 * calibration.MOST_FOUND * 1e-3


@pytest.mark.parametrize("wanted", ["auto", Repair(max_kl=1e3), Repair(max_kl=NEVER)])
def test_who_was_told_to_promise_goes_on_promising(model, client, monkeypatch, wanted):
    """calibrate() that is told nothing measures that promise, the first time and the next."""
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)  # whatever promises nothing would pass
    promised = (wanted if isinstance(wanted, Repair) else Repair()).max_kl
    with kvclient.hf.attach(model, client, block_tokens=16, repair=wanted, self_test=False) as kv:
        for _ in range(2):
            measured = kv.calibrate(PAIRS)
            assert [outcome.strategy.split()[0] for outcome in measured.outcomes] == ["prefix", "auto"]
            assert (kv.repair.method, kv.repair.max_kl) == ("auto", promised)
            assert kv.repair.uncalibrated == (promised < 1)
        if promised == 1e3:  # another one is measured, and promised, where that is said
            kv.calibrate(PAIRS, max_kl=2e3)
            assert (kv.repair.max_kl, kv.repair.caution) == (2e3, 1.0)


@pytest.mark.filterwarnings("ignore:nothing is reused inside prompts")
def test_what_others_find_without_a_promise_weakens_none(model, client, monkeypatch):
    """Not even once the weights have changed and everything is read anew."""
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    with kvclient.hf.attach(model, client, block_tokens=16, repair=Repair(max_kl=1e3), self_test=False) as kv:
        kv.calibrate(PAIRS)
        for weight in (2.0, 0.5):  # there and back
            with torch.no_grad():
                model.model.norm.weight.mul_(weight)
            with (
                kvclient.InMemoryClient(64 << 20) as other,
                kvclient.hf.attach(copy.deepcopy(model), other, block_tokens=16, self_test=False) as found,
            ):
                found.calibrate(PAIRS)
                assert found.repair == Repair("selective")
            generate(model, prompt(40))
            assert (kv.repair.method, kv.repair.max_kl) == ("auto", 1e3)
            assert kv.repair.uncalibrated == (weight == 2.0)
