"""Goal: what makes a repair's passes cheaper changes nothing but rounding: linear layers of few rows by
native/cpu, some of them in bf16, and stored columns that are put in place once.

Method: a tiny random model in both ways, layer by layer and prompt by prompt; another thread's pass
meanwhile.
"""

import threading

import pytest
import torch

from kvclient.hf.reuse import products
from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.estimate import LEFT_ROUNDED, Gauge
from kvclient.hf.reuse.repair import Repair
from kvclient.hf.streaming.placement.costs import with_threads
from kvclient.kernels import contract
from tests.hf.inside import BLOCK, DOCUMENT
from tests.hf.zoo import build, generate, prompt

kernels = pytest.mark.skipif(not products.available(), reason="no kernels here")
RULES = {"caution": 1.0, "attended_ratio": 0.4, "front_tokens": 30}
REPAIR, TIGHT = Repair(max_kl=1e9, **RULES), Repair(max_kl=1e-4, **RULES)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=6)


def asked(shift=13):
    return torch.cat([prompt(shift, seed=7), DOCUMENT, prompt(9, seed=4)], dim=1)


@kernels
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_few_rows_is_the_kernels_for_its_own_thread_alone(monkeypatch, bias):
    monkeypatch.setattr(products, "IN_PAIRS", ())
    layers = torch.nn.ModuleList([torch.nn.Linear(48, 33, bias=bias), torch.nn.Linear(20, 5)])
    x, computed, usual, other = torch.randn(1, 7, 48), [], 0, []
    wanted, original = layers[0](x).detach(), products.multiply_into
    monkeypatch.setattr(products, "multiply_into", lambda *args: computed.append(0) or original(*args))
    with torch.no_grad(), products.few_rows(layers, lambda: usual, False):
        torch.testing.assert_close(layers[0](x), wanted, rtol=1e-5, atol=1e-5)
        assert len(computed) == 1
        thread = threading.Thread(target=lambda: other.append(layers[0](x).detach()))
        thread.start()
        thread.join()
        assert torch.equal(other[0], wanted) and len(computed) == 1
        for left in (x[0], torch.randn(2, 7, 48)):  # not rows of a pass: the layer answers itself
            layers[0](left)
        layers[1](torch.randn(1, 7, 20))  # of a width that the kernel does not take
        usual = None
        assert torch.equal(layers[0](x), wanted) and len(computed) == 1
    assert torch.equal(layers[0](x).detach(), wanted)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


@kernels
def test_the_first_rows_are_torchs_and_the_others_rounded(monkeypatch):
    layer = torch.nn.ModuleList([torch.nn.Linear(48, 33)])
    x = torch.randn(1, 20, 48)
    exact = layer[0](x).detach()
    halves = torch.nn.functional.linear(
        x.bfloat16().float(), layer[0].weight.bfloat16().float(), layer[0].bias
    )
    for paths, others in (((contract.auto_path(),), halves.detach()), ((), exact)):
        monkeypatch.setattr(products, "IN_PAIRS", paths)
        assert products.rounds(layer) == bool(paths)
        with torch.no_grad(), products.few_rows(layer, lambda: 5, bool(paths)):
            found = layer[0](x)
        torch.testing.assert_close(found[:, :5], exact[:, :5], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[:, 5:], others[:, 5:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(exact, halves, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("first", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("rows", [3, 10, 400])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_first_rows_have_the_bits_of_many(first, rows, threads):
    """Also where the whole pass has few, and on several threads, where torch's fours begin anew."""
    layer = torch.nn.ModuleList([torch.nn.Linear(576, 1536)])
    x, first = torch.randn(1, 400, 576), min(first, rows)
    with with_threads(threads), torch.no_grad():
        wanted = layer[0](x)
        with products.few_rows(layer, lambda: first, False):
            assert torch.equal(layer[0](x[:, :rows])[:, :first], wanted[:, :first])


@kernels
@pytest.mark.parametrize(("repair", "rounded"), [(REPAIR, True), (TIGHT, False)])
def test_nothing_is_rounded_that_less_is_promised_of(attach, model, monkeypatch, repair, rounded):
    """The gauge compares two passes, and would not see what moves both alike. What rows say never is, and is
    not torch's product either."""
    seen, said, original = [], [], products.multiply_into

    def noted(*args):
        (said if args[2] is model.lm_head.weight else seen).append(args[-1])
        return original(*args)

    monkeypatch.setattr(products, "multiply_into", noted)
    monkeypatch.setattr(products, "IN_PAIRS", (contract.auto_path(),))
    answered(attach, model, repair)
    assert seen and set(seen) == {rounded} and said == [False, False]
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks


def answered(attach, model, repair, seen=None):
    """seen: emptied behind attach(), which tries a model."""
    kv = attach(repair)
    if seen is not None:
        seen.clear()
    with kv.bypass(read=False):
        _, logits, cache = generate(model, asked(), 1)
    report = kv.last
    kv.detach()
    return logits, cache, report


@kernels
@pytest.mark.parametrize("repair", [REPAIR, TIGHT])
def test_what_is_repaired_differs_by_the_order_of_sums(attach, model, monkeypatch, repair):
    computed, original = [], products.multiply_into
    monkeypatch.setattr(products, "multiply_into", lambda *args: computed.append(0) or original(*args))
    monkeypatch.setattr(products, "IN_PAIRS", ())  # without rounding
    logits, cache, report = answered(attach, model, repair)
    assert bool(computed) and report.approximate_tokens == 100
    monkeypatch.setattr(products, "available", lambda: False)
    plain_logits, plain_cache, plain_report = answered(attach, model, repair)
    assert report.recomputed_tokens == plain_report.recomputed_tokens
    torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
    if report.recomputed_tokens == 100:  # all were computed in the end, by the last pass: those are exact
        assert torch.equal(logits, plain_logits)


@kernels
def test_what_others_find_as_a_prefix_is_torchs_and_all_else_rounded(attach, model, monkeypatch):
    """Of 21 tokens before the document a block of 16, as long as the call publishes it."""
    monkeypatch.setattr(products, "IN_PAIRS", (contract.auto_path(),))
    kv, ids = attach(REPAIR), asked(21)
    with kv.bypass():
        plain = generate(model, ids, 1)[2]
    for writes, exact in ((False, 0), (True, BLOCK)):
        with kv.bypass(read=False, write=not writes):
            cache = generate(model, ids, 1)[2]
        assert (kv.last.reused_tokens, kv.last.approximate_tokens) == (0, 100)
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(ours.keys[:, :, :exact], theirs.keys[:, :, :exact])
            assert torch.equal(ours.values[:, :, :exact], theirs.values[:, :, :exact])
            assert not torch.equal(ours.values[:, :, exact:21], theirs.values[:, :, exact:21])
            torch.testing.assert_close(ours.values[:, :, :21], theirs.values[:, :, :21], rtol=0, atol=0.1)
    generate(model, ids, 1)
    assert kv.last.reused_tokens == BLOCK


def test_what_is_stored_is_put_in_place_once(attach, model, monkeypatch):
    loaded, original = [], Blend.load
    monkeypatch.setattr(Blend, "load", lambda self, *args: loaded.append(args[0]) or original(self, *args))
    report = answered(attach, model, REPAIR, loaded)[2]
    assert report.recomputed_tokens < 100 and sorted(loaded) == list(range(6))


@kernels
def test_what_one_pass_does_not_repair_is_computed_rounded(attach, model, monkeypatch):
    monkeypatch.setattr(products, "IN_PAIRS", (contract.auto_path(),))
    monkeypatch.setattr(Gauge, "left", lambda *_args: 1.0)
    _, cache, report = answered(attach, model, Repair(**RULES))
    assert report.recomputed_tokens == 100 and report.estimated_kl == LEFT_ROUNDED
    with torch.no_grad():
        plain = model(asked(), use_cache=True).past_key_values
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :122], theirs.keys, rtol=0, atol=0.2)
