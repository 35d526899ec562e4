"""Models with layers that see a window or a chunk: prefixes from the store, and the answers stay the same.

The store's cache keeps every token of every layer; transformers' own drops what left the window. The same is
summed, in tensors of another length: tokens are compared for equality, logits to rounding.
"""

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from tests.hf.zoo import WINDOWED, generate, known, near, prompt

WINDOW, BLOCK, NEW = 16, 8, 18  # an answer is longer than the window
# Around the border of a block and of the window, and a few windows: of each kind of window one model (layers
# in turn, chunks, sinks); the others have two lengths, one text behind a prefix and no beams, or all with
# `--whole`.
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 61)
EVERY_LENGTH = ("gemma2", "llama4", "gpt_oss", "mistral_sliding")


def same(found, other) -> bool:
    return all(near(a, b) for a, b in zip(found, other, strict=True))


@pytest.mark.matrix(0, *EVERY_LENGTH)
@pytest.mark.parametrize("in_place", [False, None])
@pytest.mark.parametrize("name", WINDOWED)
def test_warm_and_cold_are_plain(name, in_place, client, whole):
    """Where blocks are copied around every border; read in place, one border and a length without."""
    model = known(name)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place) as kv:
        every = in_place is False and (whole or name in EVERY_LENGTH)
        for length in LENGTHS if every else (WINDOW, 61):
            ids = prompt(length, seed=length)
            with kv.bypass():
                plain, plain_logits, _ = generate(model, ids, NEW)
            for reused in (0, min(length // BLOCK * BLOCK, length - 1)):
                tokens, logits, _ = generate(model, ids, NEW)
                assert (kv.last.reused_tokens, kv.last.bypassed) == (reused, None)
                assert torch.equal(tokens, plain)
                assert same(logits, plain_logits)


@pytest.mark.matrix(1, *EVERY_LENGTH)
@pytest.mark.parametrize("name", WINDOWED)
def test_another_prompt_behind_the_same_prefix(name, client, whole):
    """What follows the hit sees the window's end in what was loaded, and no other token. Behind a short
    question, less than a block or a quarter of a window, the second prompt hits already.
    """
    model, prefix = known(name), prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, torch.cat([prefix, prompt(9, seed=2)], dim=1))
        for more in (1, WINDOW, WINDOW + 1) if whole or name in EVERY_LENGTH else (WINDOW + 1,):
            ids = torch.cat([prefix, prompt(more, seed=20 + more)], dim=1)
            with kv.bypass():
                plain, plain_logits, _ = generate(model, ids, NEW)
            warm, warm_logits, _ = generate(model, ids, NEW)
            assert kv.last.reused_tokens >= 40
            assert torch.equal(warm, plain)
            assert same(warm_logits, plain_logits)


def test_behind_a_long_tail_the_second_prompt_tells_where_they_part(client):
    model, prefix = known("gemma2"), prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for seed, reused in ((2, 0), (3, 0), (4, 40)):
            generate(model, torch.cat([prefix, prompt(50, seed=seed)], dim=1))
            assert kv.last.reused_tokens == reused


@pytest.mark.matrix(2, *EVERY_LENGTH)
@pytest.mark.parametrize("name", WINDOWED)
def test_padded_rows_beams_and_an_answer_that_goes_on(name, client, whole):
    model = known(name)
    ids = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for beams in (1, 3) if whole or name in EVERY_LENGTH else (1,):
            options = {"attention_mask": mask, "num_beams": beams}
            with kv.bypass():
                plain, *_ = generate(model, ids, NEW, **options)
            for _ in range(2):
                tokens, *_ = generate(model, ids, NEW, **options)
                assert torch.equal(tokens, plain)
            assert kv.last.reused_tokens or kv.last.bypassed == "padding"
        answered, _, _ = generate(model, prompt(30, seed=3), NEW)
        longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
        with kv.bypass():
            plain, *_ = generate(model, longer, NEW)
        warm, *_ = generate(model, longer, NEW)
        assert kv.last.reused_tokens == 40  # the KV of the last token was never computed
        assert torch.equal(warm, plain)


@pytest.mark.matrix(0, *EVERY_LENGTH)
@pytest.mark.parametrize("name", WINDOWED)
def test_wrong_kv_would_be_seen_in_the_window(name, client):
    """What the tests above rest on."""
    model, ids = known(name), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, torch.cat([prompt(40, seed=9), ids[:, 40:]], dim=1), 1)
        _, right, _ = generate(model, ids, 1)
        with kv.bypass():
            _, other, _ = generate(model, torch.cat([prompt(40, seed=9), ids[:, 40:]], dim=1), 1)
    assert not near(right[0], other[0], 1e-4)


def olmoe(window):
    config = transformers.OlmoeConfig(
        vocab_size=320, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0, initializer_range=0.15,
    )  # fmt: skip
    config.sliding_window = window
    torch.manual_seed(0)
    model = transformers.OlmoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("window", [100, 128, 160, 161, 300])
def test_windows_that_are_in_no_mask_serve_what_is_no_longer(window, client):
    """OLMoE's cache drops what left the window, and its mask does not: with all tokens it would see more."""
    model = olmoe(window)
    if window <= 160:  # of which the self-test would not be sure
        with pytest.raises(kvclient.hf.Refused, match=f"sliding-window layers of {window}"):
            kvclient.hf.attach(model, client)
        return
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for length, word in ((window - NEW, None), (window - NEW + 1, "window")):
            ids = prompt(length)
            with kv.bypass():
                plain, *_ = generate(model, ids, NEW)
            for _ in range(2):
                tokens, *_ = generate(model, ids, NEW)
                assert torch.equal(tokens, plain)
            assert kv.last.bypassed == word
            assert word or kv.last.reused_tokens == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("in_place", [False, None])
def test_a_cache_that_goes_on_is_not_led_beyond_a_window_that_is_in_no_mask(in_place, client):
    model, ids = olmoe(300), prompt(300 - NEW)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place):
        answered, _, cache = generate(model, ids, NEW)
        with torch.no_grad():
            model(answered[:, -1:], past_key_values=cache)
            with pytest.raises(kvclient.InvalidArgument, match="301 tokens in a cache of 300"):
                model(answered[:, -1:], past_key_values=cache)


def test_windows_in_code_of_ones_own_are_refused(client):
    model = known("mistral_sliding")
    model.__class__ = type("Own", (type(model),), {"__module__": __name__})
    with pytest.raises(kvclient.hf.Refused, match="sliding-window layers of 16"):
        kvclient.hf.attach(model, client)


@pytest.mark.parametrize("handed", [False, True])
def test_what_a_hit_did_not_load_is_not_sealed_behind_the_answer(handed, client):
    """A hit loads a window, and the layers hold zeros before it, where the slack of the answer's end begins.
    handed: the answer is published by its caller.
    """
    model, ids = known("mistral_sliding", sliding_window=64), prompt(161)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        generate(model, ids, NEW)
        (stored,) = kv._chosen().groups
        before = kv.chunker.chain(stored.identity, ids[0, : (160 - 63) // BLOCK * BLOCK].numpy())
        client.delete(before.keys)
        with kv.bypass(read=False, write=handed):
            answered, _, cache = generate(model, ids, BLOCK + 1)
        assert kv.last.reused_tokens == 160
        if handed:
            kv.publish(answered[0, :-1].tolist(), cache)
        assert not any(client.lookup(before).states)
        parted = torch.cat([ids[:, :152], prompt(9, seed=5)], dim=1)
        with kv.bypass():
            plain, *_ = generate(model, parted, NEW)
        tokens, *_ = generate(model, parted, NEW)
        assert torch.equal(tokens, plain)
