"""Options of generate() that bring a tokenizer along are served: stop strings, and token healing.

The same calls with and without the store, on a tiny random model with a tokenizer of bytes.
"""

import pytest
import torch
import transformers

import kvclient.hf

TEXT = "What is said here is said in many words, so that blocks of it are stored, and more than one."


@pytest.fixture(scope="module")
def loaded(home):
    model = transformers.AutoModelForCausalLM.from_pretrained(home).eval()
    model.generation_config.eos_token_id = None
    return model, transformers.AutoTokenizer.from_pretrained(home)


def answered(model, tokenizer, text, **options):
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **options)


def served(kv, reused):
    return kv.last.bypassed is None and kv.last.reused_tokens == reused


def test_a_tokenizer_and_stop_strings_are_served(loaded, client):
    model, tokenizer = loaded
    whole = answered(model, tokenizer, TEXT)
    said = tokenizer.decode(whole[0, len(TEXT) + 4 : len(TEXT) + 6])
    plain = answered(model, tokenizer, TEXT, stop_strings=[said])
    assert plain.shape[1] < whole.shape[1], "the answer ends at what it says in its middle"
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        for reused in (0, 80):
            assert torch.equal(answered(model, tokenizer, TEXT, stop_strings=[said]), plain)
            assert served(kv, reused)


def test_token_healing_is_served(loaded, client):
    """It takes the prompt's last token back, and lets the model say one that begins alike."""
    model, tokenizer = loaded
    if not hasattr(model, "heal_tokens"):
        pytest.skip("this transformers heals no tokens")
    plain = answered(model, tokenizer, TEXT, token_healing=True)
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        for reused in (0, 80):
            assert torch.equal(answered(model, tokenizer, TEXT, token_healing=True), plain)
            assert served(kv, reused)
