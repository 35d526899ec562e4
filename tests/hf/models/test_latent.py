"""Latent attention (DeepSeek V2 and V3 and relatives): what the cache holds, a latent and a rope key for all
heads, is what is stored, and answers from it are those of plain generate().

test_architectures.py has these models among the others; here is what only they are asked.
"""

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.release import cache_of, passing
from tests.hf.zoo import LATENT, generate, known, prompt

BLOCK, NEW = 16, 20


def latent(name):
    """known(), or the test is skipped where transformers (5.0) keeps K and V of the heads instead."""
    model = known(name)
    with torch.no_grad():
        keys = cache_of(model(prompt(4), use_cache=True)).layers[0].keys
    if keys.shape[1] != 1:
        pytest.skip(f"this transformers caches no latent of {name}")
    return model


@pytest.mark.parametrize("name", LATENT)
def test_a_block_is_as_wide_as_the_latent_and_the_rope_key(name, client):
    model = latent(name)
    ids = prompt(61)
    with torch.no_grad():
        cache = cache_of(model(ids, use_cache=True))
    width = cache.layers[0].keys.shape[-1] + cache.layers[0].values.shape[-1]
    heads = cache.layers[0].keys.shape[1]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv.form.bytes_per_token == 3 * heads * width * 4
        generate(model, ids)
        chain = kv.chunker.chain(kv.identity, ids[0].numpy())
        stored = client.get(chain)[1].layer(2)
    layer = cache.layers[2]
    both = torch.cat([layer.keys, layer.values], -1)[0, :, BLOCK : 2 * BLOCK]
    assert torch.equal(torch.from_numpy(stored.copy())[0], both)


@pytest.mark.parametrize("name", LATENT)
def test_beams_samples_and_an_answer_that_goes_on(name, client):
    model, ids = known(name), prompt(45)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 5, "num_return_sequences": 2}):
            options = {"max_new_tokens": NEW, "pad_token_id": 0, **options}
            answers = []
            for bypass in (True, False, False):
                torch.manual_seed(3)
                with kv.bypass(bypass, bypass):
                    answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
            assert kv.last.reused_tokens
            assert all(torch.equal(answers[0], other) for other in answers[1:])
        answered, _, cache = generate(model, ids, NEW)
        longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
        with kv.bypass():
            plain, *_ = generate(model, longer, NEW)
        warm, *_ = generate(model, longer, NEW)
        assert kv.last.reused_tokens == 64  # of 65 whose KV was computed
        handed, *_ = generate(model, longer, NEW, **passing(cache))
    assert torch.equal(warm, plain)
    assert torch.equal(handed, plain)


def test_what_a_latent_cannot_have_is_refused_with_the_reason(client):
    model = latent("deepseek_v3")
    refused = {"codec": ("int8", "K of 16"), "in_place": (True, "attention"), "repair": ("auto", "latent")}
    for name, (value, reason) in refused.items():
        with pytest.raises(kvclient.InvalidArgument, match=reason):
            kvclient.hf.attach(model, client, **{name: value})
        assert "generate" not in model.__dict__
        assert not str(model.config._attn_implementation).startswith("kvclient")


def test_the_attention_is_the_models_own(client, left):
    model = latent("deepseek_v3")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, prompt(40))
        assert (kv.backend, kv.last.dense) == ("sdpa", "latent")
    assert "latent" in left()
