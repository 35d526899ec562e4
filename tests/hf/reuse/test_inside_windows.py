"""Reuse inside a prompt where layers see windows or chunks: what lies inside of one is moved and repaired,
what lies outside is not needed.

Owns models whose K and V hang on no context, because nothing but the last layer adds to what goes on: what is
reused there is exact wherever it is found, so the answer is that of a full prefill, or a row saw what it must
not, or missed what it must see. Random windows, documents and evictions of single groups, from seeds.
"""

import random

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.hf.reuse.repair import Repair
from tests.hf.models.test_layer_groups import chains
from tests.hf.zoo import VOCAB, WINDOWED, generate, known, near, prompt

FULL, SLIDING = "full_attention", "sliding_attention"


def context_free(kinds, window, seed=0):
    """The last layer alone adds to the hidden states."""
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=len(kinds),
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, initializer_range=0.15,
        max_position_embeddings=512, pad_token_id=0, sliding_window=window, layer_types=list(kinds),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for layer in model.model.layers[:-1]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def stored_and_asked(document, seed):
    stored = torch.cat([prompt(13 + seed, seed=seed + 50), document], dim=1)
    return stored, torch.cat([prompt(7, seed=seed + 60), document, prompt(21, seed=seed + 70)], dim=1)


def same_as_plain(kv, model, ids, new=12):
    with kv.bypass():
        plain, plain_logits, _ = generate(model, ids, new)
    tokens, logits, _ = generate(model, ids, new)
    return torch.equal(tokens, plain) and near(logits, plain_logits, 1e-4)


@pytest.mark.parametrize("kinds", [(FULL, SLIDING), (SLIDING, FULL), (SLIDING, SLIDING)])
@pytest.mark.parametrize("method", ["none", "cacheblend", "attention"])
def test_a_document_longer_than_a_window_is_reused_where_windows_are_stored(client, kinds, method):
    model, document = context_free(kinds, 16), prompt(100, seed=5)
    stored, ids = stored_and_asked(document, 1)
    repair = Repair(method, recency_tokens=4)
    with kvclient.hf.attach(model, client, block_tokens=8, repair=repair, self_test=False) as kv:
        generate(model, stored, 1)
        assert same_as_plain(kv, model, ids)
        assert kv.last.approximate_tokens >= 90
        assert kv.last.recomputed_tokens < 50
        assert same_as_plain(kv, model, ids)  # nothing behind what was approximate was taken for a prefix
        assert kv.last.reused_tokens == 0


def test_without_its_last_window_a_document_is_not_reused(client):
    model, document = context_free((FULL, SLIDING), 16), prompt(64, seed=5)
    stored = torch.cat([prompt(16, seed=1), document, prompt(48, seed=2)], dim=1)
    ids = torch.cat([prompt(7, seed=3), document, prompt(21, seed=4)], dim=1)
    with kvclient.hf.attach(model, client, block_tokens=8, repair="attention", self_test=False) as kv:
        generate(model, stored, 1)  # of the windows, the last ones lie in what follows the document
        assert same_as_plain(kv, model, ids)
        assert kv.last.approximate_tokens == 0


def test_keys_of_windows_that_are_not_used_are_not_told(client):
    model, document = context_free((FULL, SLIDING), 16), prompt(64, seed=5)
    stored = torch.cat([prompt(16, seed=1), document], dim=1)
    ids = torch.cat([prompt(7, seed=3), document, prompt(21, seed=4)], dim=1)
    with kvclient.hf.attach(model, client, block_tokens=8, repair="attention", self_test=False) as kv:
        generate(model, stored, 1)
        windows = chains(kv, stored)[-1].keys
        client.delete([windows[-2]])  # the last one is found, and sees what is not there
        assert same_as_plain(kv, model, ids)
        assert (kv.last.approximate_tokens, kv.last.inside_keys) == (0, b"")


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_windows_documents_and_evictions_of_single_groups(client, seed):
    draw = random.Random(seed)
    kinds = [draw.choice([FULL, SLIDING]) for _ in range(draw.randint(2, 4))]
    model = context_free(kinds, draw.randint(3, 70), seed)
    method = draw.choice(["none", "selective", "cacheblend", "attention", "auto"])
    ratio, max_kl = draw.choice([0.05, 0.5]), draw.choice([None, 5e-3])
    repair = Repair(method, ratio=ratio, max_kl=max_kl, caution=1.0, min_tokens=8)
    block, found = draw.choice([4, 8, 16]), 0
    documents = [prompt(draw.randint(40, 120), seed=seed * 10 + i) for i in range(3)]
    options = {"block_tokens": block, "repair": repair, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        for step in range(8):
            parts = [draw.choice(documents) for _ in range(draw.randint(1, 2))]
            between = [prompt(draw.randint(1, 30), seed=seed * 100 + step * 7 + i) for i in range(3)]
            rows = [t for part in zip(parts, between[1:], strict=False) for t in part]
            ids = torch.cat([between[0], *rows], dim=1)
            ids = ids[:, : ids.shape[1] - draw.choice([0, 0, between[len(parts)].shape[1]])]
            assert same_as_plain(kv, model, ids, 6), (seed, step, kv.last)
            assert kv.last.bypassed is None
            found += kv.last.approximate_tokens
            for chain in chains(kv, ids):
                if len(chain) and draw.random() < 0.3:
                    client.delete([draw.choice(list(chain.keys)) for _ in range(2)])
    assert found


SOME = ("gemma2", "llama4", "gpt_oss", "mistral_sliding")
ALL = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in WINDOWED]


@pytest.mark.parametrize("name", ALL)
def test_ratio_one_is_a_full_prefill_in_every_architecture(client, name):
    model, document = known(name), prompt(60, seed=5)
    stored, ids = stored_and_asked(document, 2)
    repairs = [
        Repair("attention", attended_ratio=1.0), Repair("cacheblend", ratio=1.0), Repair("auto", max_kl=0.0)
    ]  # fmt: skip
    for repair in repairs:
        with kvclient.hf.attach(model, client, block_tokens=16, repair=repair, self_test=False) as kv:
            generate(model, stored, 1)
            assert same_as_plain(kv, model, ids, 4)
            assert kv.last.approximate_tokens >= 40
            if repair.method != "cacheblend":
                assert kv.last.recomputed_tokens == kv.last.approximate_tokens
