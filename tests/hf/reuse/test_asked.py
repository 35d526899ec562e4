"""Repair by the question's attention: the tokens it attends to are computed anew, the others moved by what
those were off by.

Owns the rules of kvclient.hf's `attention` repair on a tiny random model and the in-memory fake. The
attention expected here is transformers' own, over the cache that a pass without repair leaves behind.
"""

import numpy as np
import pytest
import torch

import kvclient.hf
from kvclient.blocks.reuse_plan import APPROXIMATE, Segment
from kvclient.hf.attention import registered
from kvclient.hf.attention.handle import tell
from kvclient.hf.attention.switch import without
from kvclient.hf.model.rope import Rope, Turning, rotated
from kvclient.hf.reuse.attention_scores import AttentionScores
from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.drift import ALIKE, MOST, NOISE, REACHES, Drift
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import BLOCK, COMPUTED, DOCUMENT, divergence
from tests.hf.zoo import build, generate, prompt

LAYERS, ASKED = 6, slice(1, 4)  # the layers that are asked
BARE = {"sink_tokens": 0, "recency_tokens": 0}
SHIFT, QUESTION = 13, 9


def asked(shift):
    return torch.cat([prompt(shift, seed=7), DOCUMENT, prompt(QUESTION, seed=4)], dim=1)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=LAYERS)


@pytest.fixture
def chosen(monkeypatch):
    """The columns of each pass that were chosen, and what of them goes through the layers."""
    seen = []
    original = Blend._choose

    def choose(blend, fresh, *args):
        original(blend, fresh, *args)
        seen.append((torch.nonzero(fresh).squeeze(1).tolist(), blend.columns().tolist()))

    monkeypatch.setattr(Blend, "_choose", choose)
    return seen


@torch.no_grad()
def told_by_the_question(model, cache, ids):
    """Per column, by transformers' eager attention over what is stored: (weight times the distance from its
    value to what the head says) squared.
    """
    for layer in cache.layers:
        layer.crop(-(layer.get_seq_length() - (ids.shape[1] - QUESTION)))
    with without(model):
        before = model.config._attn_implementation
        model.config._attn_implementation_internal = "eager"
        out = model(ids[:, -QUESTION:], past_key_values=cache, output_attentions=True)
        model.config._attn_implementation_internal = before
    told = 0
    for weights, layer in zip(out.attentions[ASKED], cache.layers[ASKED], strict=True):
        values = layer.values[0].repeat_interleave(weights.shape[1] // layer.values.shape[1], 0)
        away = (values[:, None] - (weights[0] @ values)[:, :, None]).square().sum(-1)
        told = told + (weights[0].square() * away).sum((0, 1)) / values.square().sum(-1).mean()
    return told


def test_what_the_question_attends_to_is_computed_anew(attach, model, chosen):
    ids = asked(SHIFT)
    kv = attach(Repair("none", **BARE))
    with kv.bypass(read=False):
        _, _, stored = generate(model, ids, 1)
    assert kv.last.approximate_tokens == 100
    told = told_by_the_question(model, stored, ids)[SHIFT : SHIFT + 100]
    kv.detach()
    kv = attach(Repair("attention", attended_ratio=0.2, **BARE))
    chosen.clear()
    with kv.bypass(read=False):
        generate(model, ids, 1)
    (first, scouted), (picked, rows) = chosen
    live = [*range(SHIFT), *range(SHIFT + 100, SHIFT + 100 + QUESTION)]
    assert first == scouted == live
    wanted = sorted((told.topk(20).indices + SHIFT).tolist())
    assert [column for column in picked if column not in live] == wanted
    assert rows == [*wanted, *live[SHIFT:]]  # what stands before the document was right in the first pass
    assert kv.last.recomputed_tokens == 20 and kv.last.approximate_tokens == 100


def test_the_first_pass_ends_where_nobody_is_asked(attach, model):
    """What stands before the document goes on from there with the others, where it left off."""
    rows = []
    kv = attach(Repair("attention", attended_ratio=0.2, **BARE))
    hooks = [
        layer.mlp.register_forward_hook(lambda _m, args, _out: rows.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    kv._model_state.watch = type(kv._model_state.watch)(model)  # these hooks are no change of the model
    try:
        for shift in (SHIFT, 0):
            rows.clear()
            with kv.bypass(read=False):
                generate(model, asked(shift), 1)
            assert kv.last.approximate_tokens == 100
            assert rows[:4] == [shift + QUESTION] * 4
            assert rows[4:8] == [20 + QUESTION] * 4
            assert rows[8:] == [shift + 20 + QUESTION, 1]  # of the last layer one row is wanted
    finally:
        for hook in hooks:
            hook.remove()


def test_planted_attention_is_found():
    """Every head of the second group looks at five keys; the others at all alike."""
    heads, group, length, planted = 2, 3, 50, [7, 8, 31]
    keys, query = torch.zeros(1, heads, length, 16), torch.zeros(1, heads * group, 4, 16)
    values = torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(5))
    query[:, group:, :, 0] = 1.0
    keys[:, 1, [*planted, 11, 12], 0] = 40.0
    values[:, 1, [11, 12]] = values[:, 1, planted].mean(-2, keepdim=True)  # say what the head says anyhow
    keys[:, 0, 20, 0] = 40.0  # of a group that does not look for it
    scores = AttentionScores(length, 4, 6)
    for layer in (0, 4, 5):
        tell(scores.handed(layer, keys, values), query, 1.0)
    assert scores.of() is None  # neither the first layers nor the last are asked
    tell(scores.handed(1, keys, values), query, 1.0)
    found = scores.of()
    assert found.topk(3).indices.sort().values.tolist() == planted


@pytest.mark.parametrize("shift", [1, 16, 40])
def test_ratio_one_is_a_full_prefill_bit_by_bit(attach, model, shift):
    kv = attach(Repair("attention", attended_ratio=1.0))
    tokens, logits, cache = generate(model, asked(shift))
    assert kv.last.approximate_tokens == 100 and kv.last.recomputed_tokens == 100
    with kv.bypass():
        plain, plain_logits, plain_cache = generate(model, asked(shift))
    assert torch.equal(tokens, plain) and torch.equal(logits, plain_logits)
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def errors_of(attach, model, ratios):
    kv = attach("none")
    with kv.bypass():
        plain = {shift: generate(model, asked(shift), 1)[1] for shift in range(3, 60, 8)}
    kv.detach()
    errors = []
    for ratio in ratios:
        kv = attach(Repair("attention", attended_ratio=ratio))
        errors.append(np.mean([divergence(generate(model, asked(s), 1)[1], p) for s, p in plain.items()]))
        kv.detach()
    return errors


def test_error_falls_with_the_ratio(attach, model):
    errors = errors_of(attach, model, (0.0, 0.2, 0.5, 0.75, 0.9, 1.0))
    assert errors == sorted(errors, reverse=True), errors
    assert errors[0] > 100 * errors[-1] or errors[-1] == 0, errors


def test_live_columns_before_and_behind_are_as_computed(attach, model):
    """What the first pass computed before the document stays; of the document only the keys and values of
    what was not chosen are estimates, in layers that know the context.
    """
    ids = asked(SHIFT)
    kv = attach(Repair("attention", attended_ratio=0.2, **BARE))
    with kv.bypass(read=False):
        _, _, cache = generate(model, ids, 1)
    with kv.bypass():
        _, _, plain = generate(model, ids, 1)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys[:, :, :SHIFT], theirs.keys[:, :, :SHIFT])
        assert torch.equal(ours.values[:, :, :SHIFT], theirs.values[:, :, :SHIFT])
    ours, theirs = cache.layers[0], plain.layers[0]  # there a token is all that counts
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-4)


def test_another_attention_tells_nothing_and_deviation_decides(attach, model, chosen, monkeypatch):
    monkeypatch.setattr(registered, "tell", lambda *_args: None)
    results = []
    for repair in (Repair("attention", ratio=0.1, **BARE), Repair("cacheblend", ratio=0.1, **BARE)):
        kv = attach(repair)
        with kv.bypass(read=False):
            _, logits, _ = generate(model, asked(SHIFT), 1)
        results.append((kv.last.recomputed_tokens, chosen[-1], logits))
        kv.detach()
    (count, rows, logits), (wanted, others, plain) = results
    assert count == wanted == 10 and rows == others
    assert torch.equal(logits, plain)


@pytest.mark.parametrize(("ratio", "count"), [(0.2, 10), (1.0, 100)])
def test_another_attention_is_not_asked(client, chosen, ratio, count):
    """It would pay for a pass that tells nothing. Ratio 1.0 computes all even so."""
    falcon = build("falcon", layers=LAYERS)
    repair = Repair("attention", ratio=0.1, attended_ratio=ratio, **BARE)
    with kvclient.hf.attach(falcon, client, block_tokens=BLOCK, repair=repair, self_test=False) as kv:
        generate(falcon, COMPUTED)
        chosen.clear()
        with kv.bypass(read=False):
            _, logits, _ = generate(falcon, asked(SHIFT), 1)
        assert kv.last.approximate_tokens == 100 and kv.last.recomputed_tokens == count
        assert kv.backend == "sdpa" and len(chosen) == 1
        with kv.bypass():
            _, plain, _ = generate(falcon, asked(SHIFT), 1)
        assert torch.equal(logits, plain) == (ratio == 1)


@pytest.mark.parametrize(("behind", "asks"), [(40, False), (39, True)])
def test_auto_asks_where_much_stands_before(attach, model, chosen, behind, asks):
    kv = attach(Repair("auto", max_kl=None, behind_tokens=behind + 1, attended_ratio=0.3, **BARE))
    chosen.clear()
    with kv.bypass(read=False):
        generate(model, asked(40), 1)
    assert kv.last.approximate_tokens == 100
    assert kv.last.recomputed_tokens == (30 if asks else 5)
    assert len(chosen) == 1 + asks


def test_no_pin_stays_and_what_is_said_goes_on(attach, model, client):
    kv = attach(Repair("attention"))
    tokens, *_ = generate(model, asked(5), 30)
    assert kv.last.approximate_tokens == 100 and tokens.shape[1] == 5 + 100 + QUESTION + 30
    assert client.stats()["pins"] == 0
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------- what the others are moved by


@pytest.mark.parametrize("convention", ["half", "interleaved"])
def test_a_common_error_is_found_and_taken_off(convention):
    """All stored keys and values of one stretch are off by the same, keys before they are turned."""
    frequencies = np.array([1.0, 0.3, 0.05])
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1, 2, 80, 8, generator=generator)
    true = torch.randn(2, 1, 2, 80, 8, generator=generator)
    off = torch.randn(2, 1, 2, 1, 8, generator=generator)
    near, storage = slice(10, 60), true.clone()
    storage[1, :, :, near] -= off[1]
    for column in range(10, 60):
        storage[0, :, :, column] -= rotated(off[0, :, :, 0], frequencies, column, convention).float()
    columns = torch.tensor([12, 20, 33, 50, 78, 79])
    before = storage - true
    drift = make_drift(Rope([Turning(convention, frequencies)]), values)
    drift.add(0, storage, columns, true[:, :, :, columns])
    deviation = values[0, :, near] - values[0, :, near].mean(1, keepdim=True)
    apart = (torch.arange(50)[:, None] - torch.arange(50)).abs()
    common = sum(torch.exp(-apart / reach) for reach in REACHES)
    alike = torch.einsum("hnd,hmd->nm", deviation, deviation) / deviation.square().sum((0, 2)).mean()
    common += ALIKE * alike
    known = columns[:4] - 10
    weights = common[:, known] @ torch.linalg.inv(common[known][:, known] + NOISE * torch.eye(4))
    left = 1 - weights.sum(1, keepdim=True)  # of the error
    after = storage - true
    torch.testing.assert_close(after[..., near, :], before[..., near, :] * left, rtol=0, atol=1e-4)
    assert torch.equal(after[..., :10, :], before[..., :10, :])  # live
    assert torch.equal(after[..., 60:, :], before[..., 60:, :])  # the other stretch


def test_what_is_alike_is_off_alike():
    """Two kinds of tokens by turns, of which one is off: it is told, the other next to it much less."""
    chosen = torch.zeros(100, dtype=torch.bool)
    chosen[::5] = True
    kinds = torch.arange(100) % 2
    values = torch.stack([kinds, 1 - kinds], dim=1).float()[None, None]
    storage = torch.zeros(2, 1, 1, 100, 6)
    storage[..., kinds == 1, :] = -1.0
    rope = Rope([Turning("half", None)])
    segments = [Segment(0, 100, APPROXIMATE, (), 9)]
    for alike, told in ((values, True), (torch.zeros_like(values), False)):
        moved = storage.clone()
        drift = Drift(rope, segments, chosen, [alike])
        drift.add(0, moved, torch.nonzero(chosen).squeeze(1), torch.zeros_like(moved[..., chosen, :]))
        by = (moved - storage)[..., ~chosen, :]
        odd = kinds[~chosen] == 1
        assert (by[..., odd, :].mean() > 3 * by[..., ~odd, :].mean()) == told


def test_a_long_stretch_is_told_in_parts():
    """What its first half is off by says nothing of the second."""
    chosen = torch.zeros(MOST + 100, dtype=torch.bool)
    chosen[::5] = True
    half = len(chosen) // 2
    storage = torch.zeros(2, 1, 1, len(chosen), 6)
    storage[..., :half, :] = -1.0
    segments = [Segment(0, len(chosen), APPROXIMATE, (), 9)]
    drift = Drift(Rope([Turning("half", None)]), segments, chosen, [torch.zeros(1, 1, len(chosen), 6)])
    drift.add(0, storage, torch.nonzero(chosen).squeeze(1), torch.zeros_like(storage[..., chosen, :]))
    assert (storage[..., :half, :] > -0.2).all()
    assert not storage[..., half:, :].any()


def make_drift(rope, values):
    segments = [Segment(10, 60, APPROXIMATE, (), 500), Segment(60, 78, APPROXIMATE, (), 5)]
    chosen = torch.zeros(80, dtype=torch.bool)
    chosen[:10] = chosen[78:] = True
    chosen[[12, 20, 33, 50]] = True
    return Drift(rope, segments, chosen, [values])
