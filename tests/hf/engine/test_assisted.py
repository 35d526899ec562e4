"""Goal: assisted decoding and prompt look-up use the store: they answer what they answer without it, reuse
what is there, publish what they compute, and leave nothing behind on the model.

Method: tiny random models in place and dense; the assistant is the model itself, a worse one, or the prompt.
"""

import pytest
import torch
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

import kvclient.hf
from tests.hf.zoo import build, generate, known, prompt

BLOCK = 8
HOWS = {
    "look-up": lambda: {"prompt_lookup_num_tokens": 3},
    "good assistant": lambda: {"assistant_model": build("llama")},
    "bad assistant": lambda: {"assistant_model": build("llama", seed=1)},
}


def again(length, count=6):
    """A prompt that says the same several times, so that look-up finds candidates."""
    return prompt(length).repeat(1, count)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_it_uses_the_store(client, how, in_place):
    model, ids = build("llama"), again(12)
    plain = generate(build("llama"), ids, 24)[0]
    helped = HOWS[how]()
    options = {"block_tokens": BLOCK, "self_test": False, "in_place": in_place}
    with kvclient.hf.attach(model, client, **options) as kv:
        assert torch.equal(generate(model, ids, 24, **helped)[0], plain)
        assert (kv.last.bypassed, kv.last.reused_tokens, kv.last.prompt_tokens) == (None, 0, 72)
        assert kv.last.published_blocks >= 9 + 2, "the answer's too"
        assert kv.last.ttft_s > 0
        assert torch.equal(generate(model, ids, 24, **helped)[0], plain)
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 64)
        assert torch.equal(generate(model, plain, 24, **helped)[0], generate(build("llama"), plain, 24)[0])
        assert kv.last.reused_tokens >= 80
        assert torch.equal(generate(model, ids, 24)[0], plain)
        assert kv.last.reused_tokens == 71, "what it published plain generate() takes"
        assert not model._forward_pre_hooks
    assert "_get_candidate_generator" not in model.__dict__
    assert client.stats()["created"] == 0


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen2", "bloom"])
def test_models_of_other_kinds(client, name):
    model, ids = known(name), again(12)
    plain = generate(known(name), ids, 16, prompt_lookup_num_tokens=3)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        for reused in (0, 64):
            assert torch.equal(generate(model, ids, 16, prompt_lookup_num_tokens=3)[0], plain)
            assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)


@pytest.mark.parametrize("how", HOWS)
def test_padding_before_a_prompt_is_no_part_of_it(client, how):
    """It was computed as tokens: the answer was another, and its blocks were those of a text nobody said."""
    model, ids, pad = build("llama"), torch.cat([prompt(5, seed=9), again(12)], dim=1), 5
    mask = torch.ones_like(ids)
    mask[:, :pad] = 0
    plain = generate(build("llama"), ids, 24, attention_mask=mask)[0]
    assert torch.equal(plain[:, pad:], generate(build("llama"), ids[:, pad:], 24)[0])
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for reused in (0, 64):
            found = generate(model, ids, 24, attention_mask=mask, **HOWS[how]())[0]
            assert torch.equal(found, plain)
            assert (kv.last.bypassed, kv.last.reused_tokens, kv.last.prompt_tokens) == (None, reused, 72)
        generate(model, ids[:, pad:], 1)
        assert kv.last.reused_tokens == 71, "it is the same text without"
        single = mask.clone()
        single[:, :-1] = 0
        found = generate(model, ids, 8, attention_mask=single, **HOWS[how]())[0]
        assert torch.equal(found, generate(build("llama"), ids, 8, attention_mask=single)[0])
        assert kv.last.bypassed == "no_prefill"


def test_an_answer_that_ends_in_the_middle_of_candidates(client):
    model, ids = build("llama"), again(12)
    plain = generate(model, ids, 24)[0]
    ends = int(plain[0, 72 + 7])
    wanted = generate(model, ids, 24, eos_token_id=ends)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        for _ in range(2):
            found = generate(model, ids, 24, eos_token_id=ends, **HOWS["good assistant"]())[0]
            assert torch.equal(found, wanted) and kv.last.bypassed is None


def test_what_it_cannot_serve_is_left_alone(client):
    model, ids = build("llama"), again(12)
    plain = generate(model, ids, 8)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        tokens = generate(model, ids[:, :1], 8, prompt_lookup_num_tokens=3)[0]
        assert kv.last.bypassed == "no_prefill"
        assert torch.equal(tokens, generate(build("llama"), ids[:, :1], 8)[0])
        found = generate(model, ids, 8, prompt_lookup_num_tokens=3, output_hidden_states=True)[0]
        assert kv.last.bypassed == "no_prefill" and torch.equal(found, plain)
        with kv.bypass():
            assert torch.equal(generate(model, ids, 8, prompt_lookup_num_tokens=3)[0], plain)


def test_who_guesses_by_what_the_prompts_pass_says_sees_all_of_it(client, monkeypatch):
    """MTP, DFlash: of a prompt that was computed ahead they had the last token's hidden state alone."""
    model, ids, seen = build("llama"), again(12), []

    class Looks(CandidateGenerator):
        requires_model_outputs = True
        model_kwargs_overrides = {"output_hidden_states": True}  # noqa: RUF012

        def get_candidates(self, input_ids, model_outputs=None, **_):
            if model_outputs is not None:
                seen.append(model_outputs.hidden_states[-1].shape[1])
            return input_ids, None

    plain = generate(build("llama"), ids, 4)[0]
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda *_, **__: Looks())
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        assert torch.equal(generate(model, ids, 4, prompt_lookup_num_tokens=3)[0], plain)
        assert (seen, kv.last.bypassed) == ([72, 1, 1], "no_prefill")


def test_an_error_in_the_loop_leaves_no_hook(client, monkeypatch):
    model, ids = build("llama"), again(12)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:

        def fail(*_args, **_given):
            raise RuntimeError("no candidates")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no candidates"):
            patch.setattr(PromptLookupCandidateGenerator, "get_candidates", fail)
            generate(model, ids, 8, prompt_lookup_num_tokens=3)
        assert not model._forward_pre_hooks
        assert torch.equal(generate(model, ids, 8)[0], generate(build("llama"), ids, 8)[0])
        assert kv.last.reused_tokens == 64
