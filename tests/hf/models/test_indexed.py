"""Layers with an indexer (DeepSeek V3.2 and others): its keys are stored beside the latent, and answers from
both are those of plain generate().

Tiny random models in fp32 that attend to 8 tokens of each prompt: with another key of the indexer they attend
to others. One whose scores are often equal chooses among equals by the length of its input, without a store
too; so these have eight heads.
"""

import copy

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.release import INDEXED, cache_of, passing
from tests.hf.zoo import generate, known, prompt

BLOCK, NEW = 8, 6
NAMES = ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)]
pytestmark = pytest.mark.skipif(not INDEXED, reason="this transformers has no layers with an indexer")


def check(model, kv, ids, reused, **options):
    with kv.bypass():
        plain, plain_logits, _ = generate(model, ids, NEW, **options)
    tokens, logits, cache = generate(model, ids, NEW, **options)
    assert (kv.last.reused_tokens, kv.last.bypassed) == (reused, None)
    assert torch.equal(tokens, plain)
    assert torch.allclose(logits, plain_logits, atol=1e-4, rtol=1e-4)
    return tokens, cache


@pytest.mark.parametrize("name", NAMES)
def test_cold_warm_continued_beams_and_padded(name, client):
    model = known(name)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for length in (BLOCK, BLOCK + 1, 61):
            ids = prompt(length, seed=length)
            check(model, kv, ids, 0)
            answered, cache = check(model, kv, ids, min(length // BLOCK * BLOCK, length - 1))
        assert kv.last.dense  # blocks are copied
        assert {part.get_seq_length() for layer in cache.layers for part in _parts(layer)} == {61 + NEW - 1}
        longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
        check(model, kv, longer, (61 + NEW - 1) // BLOCK * BLOCK)
        check(model, kv, ids, 2 * 56, num_beams=2)
        rows = torch.cat([prompt(61, seed=61), prompt(61, seed=2)])
        mask = torch.ones_like(rows)
        rows[1, :21] = mask[1, :21] = 0
        with kv.bypass():
            plain, *_ = generate(model, rows, attention_mask=mask)
        for _ in range(3):
            tokens, *_ = generate(model, rows, attention_mask=mask)
            assert torch.equal(tokens, plain)
        assert kv.last.reused_tokens == 56 + 35


def _parts(layer):
    return [layer, *([layer.indexer] if hasattr(layer, "indexer") else [])]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_block_of_the_indexer_a_hit_ends_before_it(name, client):
    model, ids = known(name), prompt(45)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        check(model, kv, ids, 0)
        (stored,) = kv._chosen().groups
        client.delete([kv.chunker.chain(stored.identity, ids[0].numpy()).keys[2]])
        check(model, kv, ids, 16)
        check(model, kv, ids, 40)


def test_other_keys_of_the_indexer_give_other_answers():
    """What the tests above rest on."""
    model, ids = known("deepseek_v32"), prompt(61)
    with torch.no_grad():
        cache = cache_of(model(ids[:, :48], use_cache=True))
        answers = []
        for turned in (0, 1):
            handed = copy.deepcopy(cache)
            for layer in handed.layers:
                layer.indexer_keys = layer.indexer_keys.roll(turned, dims=1)
            answers.append(model(ids[:, 48:], **passing(handed)).logits)
    assert not torch.allclose(*answers, atol=1e-2)


def test_what_an_indexer_cannot_have_is_refused_with_the_reason(client):
    model = known("deepseek_v32")
    refused = {"codec": ("int8", "K of 16"), "in_place": (True, "kernels"), "repair": ("auto", "latent")}
    for name, (value, reason) in refused.items():
        with pytest.raises(kvclient.InvalidArgument, match=reason):
            kvclient.hf.attach(model, client, **{name: value})
        assert "generate" not in model.__dict__
