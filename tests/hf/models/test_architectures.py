"""kvclient.hf on tiny random models of many architectures: exact, or refused with the reason.

Runs with the installed transformers in `make test`; test_releases.py runs this very file with others.
"""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvclient
import kvclient.hf
from kvclient.hf import Repair
from kvclient.hf.release import passing
from tests.hf.zoo import LATENT, MOVED, REFUSED, SERVED, UNMOVED, generate, known, prompt

BLOCK = 16
WHOLE = (*SERVED, *LATENT)  # all tokens of all layers are stored
LENGTHS = (BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 1, 61)
# Where a hit ends, and what a ratio computes anew, is the prompt's doing, not the model's: every length, and
# every way of repair, of two; of the others the repair that must equal plain generate(). `--whole`: of all.
IN_FULL = ("llama", "deepseek_v3")


def floor(model, ids, cache, count):
    """Plain generate(), handed the same KV in memory."""
    handed = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        handed.update(layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone(), index)
    return generate(model, ids, **passing(handed))


@pytest.mark.matrix(0, *IN_FULL)
@pytest.mark.parametrize("name", WHOLE)
def test_warm_equals_cold_in_fp32(name, client, whole):
    model = known(name)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        for length in LENGTHS if whole or name in IN_FULL else LENGTHS[1::2]:
            ids = prompt(length, seed=length)
            with kv.bypass():
                plain, plain_logits, cache = generate(model, ids)
            cold, cold_logits, _ = generate(model, ids)
            assert kv.last.reused_tokens == 0
            warm, warm_logits, _ = generate(model, ids)
            reused = kv.last.reused_tokens
            assert reused == min(length // BLOCK * BLOCK, length - 1)
            assert torch.equal(cold, plain)
            assert torch.equal(cold_logits, plain_logits)
            assert torch.equal(warm, plain)
            if reused:
                same, same_logits, _ = floor(model, ids, cache, reused)
                assert torch.equal(warm, same)
                assert torch.equal(warm_logits, same_logits)


@pytest.mark.matrix(1, *IN_FULL)
@pytest.mark.parametrize("name", WHOLE)
def test_bf16_is_bitwise_that_of_the_same_kv_from_memory(name, client):
    model, ids = known(name, dtype=torch.bfloat16), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        _, _, cache = generate(model, ids, 1)
        warm, warm_logits, _ = generate(model, ids)
        assert kv.last.reused_tokens == 48
        with kv.bypass():
            same, same_logits, _ = floor(model, ids, cache, 48)
    assert torch.equal(warm, same)
    assert torch.equal(warm_logits, same_logits)


@pytest.mark.matrix(2, *IN_FULL, *MOVED)
@pytest.mark.parametrize("name", [name for name in (*SERVED, *MOVED) if name not in UNMOVED])
def test_a_document_inside_is_found_and_ratio_one_is_a_full_prefill(name, client, left, whole):
    """attach() itself proves that cut passes and moved keys are right for the architecture, or refuses. What
    attends to cut rows are the kernels, where the model's attention is theirs.
    """
    model, document = known(name), prompt(60, seed=5)
    ids = torch.cat([prompt(13, seed=2), document, prompt(7, seed=3)], dim=1)
    options = {"check_layer": 0, "recency_tokens": 0}
    repairs = [
        Repair(method, ratio=ratio, attended_ratio=ratio, **options)
        for ratio in (0.1, 1.0)
        for method in ("attention", "cacheblend")
    ]
    for repair in repairs if whole or name in IN_FULL else repairs[3:]:
        with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=repair) as kv:
            generate(model, torch.cat([prompt(5, seed=4), document, prompt(20, seed=5)], dim=1))
            tokens, logits, _ = generate(model, ids)
            assert kv.last.approximate_tokens == 60
            assert kv.last.recomputed_tokens == (60 if repair.ratio == 1.0 else 6)
            with kv.bypass():
                plain, plain_logits, _ = generate(model, ids)
        if repair.ratio == 1.0:
            assert torch.equal(tokens, plain)
            assert torch.equal(logits, plain_logits)
    makes_its_own = hasattr(model.base_model, "_update_causal_mask")  # stablelm in transformers 5.0
    assert makes_its_own or "mask" not in left()


@pytest.mark.parametrize("name", UNMOVED)
def test_keys_that_cannot_be_moved_are_refused_with_the_reason(name, client):
    with pytest.raises(kvclient.hf.Refused, match=UNMOVED[name]):
        kvclient.hf.attach(known(name), client, repair="auto")


@pytest.mark.matrix(1, *IN_FULL)
@pytest.mark.parametrize("name", WHOLE)
def test_left_padded_rows(name, client):
    model = known(name)
    ids = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        with kv.bypass():
            plain, *_ = generate(model, ids, attention_mask=mask)
        for reused in (0, 48 + 27):
            tokens, *_ = generate(model, ids, attention_mask=mask)
            assert kv.last.reused_tokens == reused or kv.last.bypassed == "padding"
            assert torch.equal(tokens, plain)


@pytest.mark.matrix(0, *IN_FULL)
@pytest.mark.parametrize("name", WHOLE)
def test_wrong_kv_would_be_seen(name):
    """What the tests above rest on: with this model, another KV gives other logits."""
    model, ids = known(name), prompt(61)
    _, logits, cache = generate(model, ids, 1)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.roll(1, dims=2), layer.values.roll(1, dims=2)
    _, other, _ = floor(model, ids, cache, 48)
    assert not torch.allclose(logits[0], other[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations(attention, client):
    model, ids = known("llama", attention=attention), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        cold, *_ = generate(model, ids)
        warm, *_ = generate(model, ids)
        assert kv.last.reused_tokens == 48
    assert torch.equal(cold, warm)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name, client):
    """What would be silently wrong is refused."""
    model = known(name)
    with pytest.raises(kvclient.hf.Refused, match=REFUSED[name][3]):
        kvclient.hf.attach(model, client)
    assert "generate" not in model.__dict__
