"""verify() and calibrate(): numbers about a model that can fail, and what is switched on by them.

Tiny random models, whose approximate KV is far off, so that calibration fails on them as it should; where it
must pass, the limit is raised. The cache directory is the test's.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.model.rope import Rope
from kvclient.hf.proof import measure
from kvclient.hf.reuse.quality import calibration, verify
from kvclient.hf.reuse.repair import Repair
from tests.hf.zoo import build, generate, known, near, prompt

TWO = [prompt(200, seed=seed)[0].tolist() for seed in (1, 2)]
PROMPTS = TWO[:1]  # enough to say what is switched on


def test_it_measures_every_strategy_and_leaves_the_store_alone(kv, client):
    before = (client.stats()["blocks"], kv.stats, torch.random.get_rng_state())
    measured = kv.verify(TWO)
    assert [outcome.strategy for outcome in measured.outcomes] == [
        "prefix",
        "none",
        "selective",
        "cacheblend",
        "attention",
    ]
    prefix, none, _, blend, attention = measured.outcomes
    assert prefix.passed and prefix.mean_kl < 1e-6 and prefix.top1 == 1 and prefix.first_divergence is None
    assert prefix.found > 0.9 and none.found > 0.6
    assert none.mean_kl > 1e-3 and none.max_kl >= none.mean_kl and not none.passed
    assert blend.mean_kl < none.mean_kl and attention.mean_kl < none.mean_kl
    assert all(outcome.ttft_s > 0 and outcome.cold_ttft_s > 0 for outcome in measured.outcomes)
    assert not measured.passed
    assert "FAILED" in str(measured) and "cacheblend" in str(measured)
    assert (client.stats()["blocks"], kv.stats) == before[:2] and kv.last is None
    assert torch.equal(torch.random.get_rng_state(), before[2])


def test_a_wrong_byte_in_a_prefix_is_seen(kv, model, monkeypatch):
    from kvclient.hf.connector import load

    honest, in_place = load.PrefixSource.load, load.PrefixSource.arrays

    def wrong(self, layer, storage):
        honest(self, layer, storage)
        storage[1, :, :, 5] += 1

    def wrong_in_place(self, layer):
        parts = in_place(self, layer)
        return [part._replace(block=(part.block[0], part.block[1] + np.float32(1))) for part in parts]

    monkeypatch.setattr(load.PrefixSource, "load", wrong)
    monkeypatch.setattr(load.PrefixSource, "arrays", wrong_in_place)
    assert not kv.verify(PROMPTS)["prefix"].passed


@pytest.mark.parametrize("name", ["mamba", "lfm2", "llama"])
def test_what_follows_is_said_behind_the_prompts_cache(name):
    """Mamba takes its cache under a name of its own: the answer was measured behind nothing."""
    model, ids = known(name), prompt(40, seed=2)[0].tolist()
    said = verify._said(model, verify._first(model, ids[:30], plain=True), ids[30:])
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, 29:-1].double().log_softmax(-1)
    assert near(said, wanted, 1e-4)


def test_keys_that_are_not_moved_are_seen(kv, monkeypatch):
    """verify() does not take the proof at attach for granted."""
    right = kv.verify(PROMPTS)["none"].mean_kl

    def still(self, layer, keys, shift, out):
        out[...] = keys

    monkeypatch.setattr("kvclient.hf.proof.measure.examine_non_prefix", _without_proof)
    monkeypatch.setattr(Rope, "turn", still)
    assert kv.verify(PROMPTS)["none"].mean_kl > right


def _without_proof(model, kv, repair):
    from kvclient.hf.model.rope import probe_rope
    from kvclient.hf.reuse.blend import NonPrefixReuse, decoder_layers

    return NonPrefixReuse(probe_rope(model), decoder_layers(model, kv.layers), repair, model.config)


def test_without_prompts_the_model_writes_them(kv, monkeypatch):
    monkeypatch.setattr(verify, "OWN_TOKENS", 120)
    assert kv.verify()["prefix"].passed


@pytest.mark.parametrize("positions", [128, 90])
def test_a_model_of_few_positions_writes_no_more_than_it_can(client, positions):
    longer = build("gpt2")
    longer.config.n_positions = positions
    model = type(longer)(longer.config).eval()
    with kvclient.hf.attach(model, client, self_test=False) as kv:
        if positions > 96:
            assert kv.verify()["prefix"].passed
        else:
            with pytest.raises(InvalidArgument, match="90 positions"):
                kv.verify()


def test_prompts_too_short_to_say_anything_are_refused(kv):
    for prompts in ([], [PROMPTS[0][:50]]):
        with pytest.raises(InvalidArgument, match="96"):
            kv.verify(prompts)


def test_a_model_whose_keys_cannot_be_moved_has_its_prefixes_verified(client):
    with kvclient.hf.attach(build("gpt2"), client, self_test=False) as kv:
        measured = kv.verify(PROMPTS)
        assert [outcome.strategy for outcome in measured.outcomes] == ["prefix"] and measured.passed
        with pytest.raises(kvclient.hf.Refused, match="learned"):
            kv.calibrate(PROMPTS)


def test_approximate_reuse_is_off_until_calibration_has_passed(kv, model, client, monkeypatch, cache):
    assert kv.repair is None
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 1e-9)
    assert not kv.calibrate(PROMPTS).passed
    assert kv.repair is None and not list(cache.glob("*"))
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    kv.calibrate(PROMPTS)
    assert kv.repair == Repair("selective")
    document, shifted = prompt(100, seed=5), prompt(13, seed=6)
    generate(model, document)
    generate(model, torch.cat([shifted, document], dim=1))
    assert kv.last.approximate_tokens > 80
    kv.detach()
    with kvclient.hf.attach(model, client, block_tokens=16, salt="x", self_test=False) as later:
        assert later.repair == Repair("selective")  # on this machine, whatever the salt
    with kvclient.hf.attach(model, client, block_tokens=16, repair=None, self_test=False) as off:
        assert off.repair is None
    with kvclient.hf.attach(build("llama", seed=1), client, block_tokens=16, self_test=False) as other:
        assert other.repair is None  # other weights


def test_what_has_passed_is_off_for_changed_weights_and_when_it_no_longer_passes(kv, monkeypatch, cache):
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    kv.calibrate(PROMPTS)
    assert kv.repair is not None
    weight = kv._attached_model().model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        before = weight.clone()
        weight.add_(0.5)
    try:
        generate(kv._attached_model(), prompt(20))
        assert kv.repair is None  # other weights: nobody has measured those
    finally:
        with torch.no_grad():
            weight.copy_(before)
    generate(kv._attached_model(), prompt(20))
    assert kv.repair == Repair("selective")  # as it was calibrated
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 1e-9)
    kv.calibrate(PROMPTS)
    assert kv.repair is None and not list(cache.glob("*"))


def test_a_repair_that_was_told_outlives_a_calibration_that_fails(model, client, monkeypatch):
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 1e-9)
    with kvclient.hf.attach(model, client, block_tokens=16, repair="none", self_test=False) as kv:
        assert not kv.calibrate(PROMPTS).passed and kv.repair == Repair("none")


def test_a_calibration_that_cannot_be_kept_holds_here(kv, monkeypatch, cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the directory should be")
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    with pytest.warns(UserWarning, match="cannot be kept"):
        kv.calibrate(PROMPTS)
    assert kv.repair == Repair("selective")
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 1e-9)
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert not kv.calibrate(PROMPTS).passed
    assert kv.repair is None


def test_calibration_takes_the_cheapest_that_passes(kv, monkeypatch):
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    tried = [(o.strategy, o.mean_kl) for o in kv.calibrate(PROMPTS).outcomes[1:]]
    names = [name for name, _ in tried]
    assert names == ["selective", "cacheblend 0.05", "cacheblend 0.10", "cacheblend 0.15", "attention"]
    best = min(kl for _, kl in tried)
    monkeypatch.setattr(verify, "MAX_MEAN_KL", best)
    kv.calibrate(PROMPTS)
    name = next(name for name, kl in tried if kl == best)
    assert name.split()[0] == kv.repair.method
    assert name.split()[1:] in ([], [f"{kv.repair.ratio:.2f}"])


def test_what_is_kept_is_what_was_measured(model, client, monkeypatch):
    """A repair of one's own has more to it than the file says: another process has Repair's defaults."""
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    with kvclient.hf.attach(model, client, block_tokens=16, repair="selective", self_test=False) as kv:
        wanted = kv.calibrate(PROMPTS)["selective"]
        repair = Repair("selective", seam_tokens=60, sink_tokens=9, recency_tokens=30)
        served = kv._model_state.served
        kv._model_state.served = dataclasses.replace(
            served, non_prefix=dataclasses.replace(served.non_prefix, repair=repair)
        )
        found = kv.calibrate(PROMPTS)["selective"]
        assert (found.found, found.mean_kl) == (wanted.found, wanted.mean_kl)
        here = kv.repair
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as later:
        assert later.repair == here == Repair("selective")


def test_what_was_all_computed_anew_is_not_found(model, client):
    everything = Repair("selective", seam_tokens=10_000)
    with kvclient.hf.attach(model, client, block_tokens=16, repair=everything, self_test=False) as kv:
        outcome = kv.verify(PROMPTS)["selective"]
    assert outcome.mean_kl < 1e-6 and outcome.found == 0 and not outcome.passed


def test_a_calls_codec_needs_a_calibration_of_its_own(model, client, monkeypatch):
    """What has passed with blocks as computed says nothing of int4, whose blocks are farther off."""
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    document, shifts = prompt(100, seed=5), iter(range(13, 20))

    def approximate(kv):
        with kv.coded("int4"):
            generate(model, document)
            generate(model, torch.cat([prompt(next(shifts), seed=6), document], dim=1))
            return kv.last.approximate_tokens, kv.repair

    options = {"block_tokens": 32, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        kv.calibrate(PROMPTS)
        assert kv.repair == Repair("selective") and approximate(kv) == (0, None)
    with kvclient.hf.attach(model, client, codec="int4", **options) as kv:
        assert kv.repair is None
        monkeypatch.setattr(measure, "RATIOS", ())
        kv.calibrate(PROMPTS)
    with kvclient.hf.attach(model, client, **options) as kv:
        found, repair = approximate(kv)
        assert found > 80 and repair == Repair("selective")
    with kvclient.hf.attach(model, client, repair="none", **options) as kv:
        found, repair = approximate(kv)
        assert found > 80 and repair == Repair("none")  # who says so does not ask


OF = '{"repair": {"method": "none", "ratio": 0.1}, "passed": true, "mean_kl": 0.1, "top1": 1.0}'


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "null", '{"version": 2}', "x" * 10_000, "[" * 4000,
        '{"version": 5, "identity": "ID", "found": [OF]}', '{"version": 6, "identity": "00", "found": [OF]}',
        '{"version": 6, "identity": "ID", "found": [OF, 7]}', '{"version": 6, "identity": "ID", "found": 7}',
        *(
            '{"version": 6, "identity": "ID", "found": [OF]}'.replace("OF", OF.replace(*change))
            for change in (
                ('"none"', '"best"'), ("0.1", "7"), ("0.1", "null"), ("true", "false"), ("ratio", "x"),
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_calibration_counts_as_none(cache, damage):
    identity = bytes(32)
    cache.mkdir()
    path = cache / f"{identity.hex()}.json"
    path.write_text(damage.replace("ID", identity.hex()).replace("OF", OF))
    assert calibration.load(identity) == calibration.Findings()
    sound = '{"version": 6, "identity": "ID", "found": [OF]}'
    path.write_text(sound.replace("ID", identity.hex()).replace("OF", OF))
    assert calibration.load(identity).switched_on == Repair("none", ratio=0.1)


def test_a_calibration_is_read_as_written(cache, kv):
    outcome = kv.verify(PROMPTS)["cacheblend"]
    repair = Repair("cacheblend", ratio=0.1, check_layer=1)
    calibration.update(bytes(32), lambda found: found.with_passed(repair, outcome))
    assert calibration.load(bytes(32)).switched_on == repair
    assert calibration.load(bytes([1]) * 32) == calibration.Findings()
    (path,) = cache.iterdir()
    assert json.loads(path.read_text())["found"][0]["mean_kl"] == outcome.mean_kl
    calibration.update(bytes(32), lambda found: found.with_failed(repair, outcome))
    assert not list(cache.iterdir()) and calibration.load(bytes(32)) == calibration.Findings()
