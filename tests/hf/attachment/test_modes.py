"""Batches, beams, samples and the other ways to generate, with the store: as plain generate(), or left alone
and counted.

Tiny random models and the in-memory fake; the plain cases are tests/hf/engine/test_generate.py's.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvclient
import kvclient.hf
from tests.hf.zoo import build, generate, prompt

BLOCK = 16


@pytest.fixture
def model():
    return build("llama")


# ---------------------------------------------------------------- batches


def padded(rows, lengths):
    width = max(lengths)
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.int64),
        torch.zeros(len(rows), width, dtype=torch.int64),
    )
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[number, width - length :] = row[:length]
        mask[number, width - length :] = 1
    return ids, mask


@pytest.mark.parametrize("lengths", [(70, 70), (70, 41), (33, 70, 15), (70, 1), (16, 32, 48)])
def test_left_padded_rows_equal_plain(model, client, lengths):
    rows = [prompt(70, seed=number)[0] for number in range(len(lengths))]
    ids, mask = padded(rows, lengths)
    plain, plain_logits, _ = generate(model, ids, attention_mask=mask)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        _cold, cold_logits, _ = generate(model, ids, attention_mask=mask)
        assert torch.equal(cold_logits, plain_logits)
        warm, warm_logits, _ = generate(model, ids, attention_mask=mask)
        assert kv.last.bypassed is None
        pads = [max(lengths) - length for length in lengths]
        held = [length // BLOCK * BLOCK for length in lengths]
        columns = min(max(lengths) - 1, *(pad + count for pad, count in zip(pads, held, strict=True)))
        assert kv.last.reused_tokens == sum(max(0, columns - pad) for pad in pads)
        single, *_ = generate(model, rows[0][None, : lengths[0]])
        assert kv.last.reused_tokens == min(held[0], lengths[0] - 1)
    assert torch.equal(warm, plain)
    assert torch.allclose(warm_logits, plain_logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(single[0, lengths[0] :], plain[0, max(lengths) :])


def test_rows_with_an_equal_prefix_are_published_once(model, client):
    shared = prompt(48)[0]
    rows = torch.stack([torch.cat([shared, prompt(20, seed=number)[0]]) for number in range(3)])
    plain, *_ = generate(model, rows)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        cold, *_ = generate(model, rows)
        assert kv.last.published_blocks == 3 + 3  # the prefix once, and one block of each row
        warm, *_ = generate(model, rows)
        assert kv.last.reused_tokens == 3 * 64
        assert kv.last.published_blocks == 0
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)
    assert client.stats()["blocks"] == 6


def test_rows_with_different_reuse(model, client):
    rows = torch.cat([prompt(70), prompt(70, seed=2)])
    plain, *_ = generate(model, rows)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, rows[:1, :40])
        generate(model, rows[1:, :70])
        tokens, *_ = generate(model, rows)
        assert kv.last.reused_tokens == 2 * 32  # the columns that every row has
    assert torch.equal(tokens, plain)


# ---------------------------------------------------------------- ways to generate


@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beam_search(model, client, beams):
    ids = prompt(40)
    plain, *_ = generate(model, ids, 24, **beams)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for reused in (0, 32):
            tokens, *_ = generate(model, ids, 24, **beams)
            assert kv.last.reused_tokens == reused * beams["num_beams"]
            assert torch.equal(tokens, plain)
    assert client.stats()["blocks"] == 2, "what beams generated is no text of one row"


def test_samples_of_one_prompt(model, client):
    ids = prompt(40)
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 30, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    torch.manual_seed(5)
    plain = model.generate(ids, attention_mask=mask, **options)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for _ in range(2):
            torch.manual_seed(5)
            assert torch.equal(model.generate(ids, attention_mask=mask, **options), plain)
        assert kv.last.reused_tokens == 3 * 32


def test_prefill_in_chunks(model, client):
    ids = prompt(70)
    plain, *_ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        cold, *_ = generate(model, ids, prefill_chunk_size=24)
        assert kv.last.published_blocks == 4
        warm, *_ = generate(model, ids, prefill_chunk_size=24)
        assert kv.last.reused_tokens == 64 or kv.last.read_bypassed == "prefill_chunk_size"
        again, *_ = generate(model, ids)
        assert kv.last.reused_tokens == 64
    for tokens in (cold, warm, again):
        assert torch.equal(tokens, plain)


def test_the_returned_cache_can_be_used_further(model, client):
    ids = prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        first, _, cache = generate(model, ids)
        longer = torch.cat([first, prompt(5, seed=3)], dim=1)
        tokens, *_ = generate(model, longer, past_key_values=cache)
        assert (kv.last.bypassed, kv.last.read_bypassed) == (None, "user_cache")
    plain, *_ = generate(model, longer)
    assert torch.equal(tokens, plain)


def test_hidden_states_of_the_whole_prompt_are_computed(model, client):
    ids = prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0,
            output_hidden_states=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.hidden_states[0][0].shape[1] == 40
        assert kv.last.read_bypassed == "prompt_outputs"
        assert kv.last.reused_tokens == 0


BYPASSED = {
    "attention_mask": lambda ids: {"attention_mask": torch.tensor([[0, 1, 0] + [1] * 37])},
    "position_ids": lambda ids: {"position_ids": torch.arange(5, 45)[None]},
    "no_cache": lambda ids: {"use_cache": False},
    "cache_implementation": lambda ids: {"cache_implementation": "static"},
}


@pytest.mark.parametrize("reason", BYPASSED)
def test_what_is_not_an_exact_prefix_is_left_alone_and_counted(model, client, reason):
    ids = prompt(40)
    options = BYPASSED[reason](ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        generate(model, ids, 2, **options)
        assert kv.last.bypassed == reason
        assert kv.last.reused_tokens == 0
        assert kv.last.published_blocks == 0
        assert kv.stats["bypassed"] == {reason: 1}


def test_embeddings_are_left_alone(model, client):
    ids = prompt(40)
    embeddings = model.get_input_embeddings()(ids).detach()
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        model.generate(inputs_embeds=embeddings, max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert kv.last.bypassed == "inputs"


def test_a_soft_prompt_is_left_alone(model, client):
    """As peft's prompt tuning puts it before the tokens: inside the call, from outside of the model."""
    ids, soft = prompt(40), torch.full((1, 5, 48), 0.7)
    before = model.prepare_inputs_for_generation

    def with_soft_prompt(input_ids, **kwargs):
        inputs = before(input_ids, **kwargs)
        if inputs["input_ids"].shape[1] == ids.shape[1]:
            rows = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs |= {"input_ids": None, "inputs_embeds": torch.cat([soft, rows], 1), "position_ids": None}
            inputs.pop("cache_position", None)  # before transformers 5.4: of the tokens alone
        return inputs

    plain = generate(model, ids)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        model.prepare_inputs_for_generation = with_soft_prompt
        try:
            with kv.bypass():
                wanted = generate(model, ids, attention_mask=None)[0]
            assert torch.equal(generate(model, ids, attention_mask=None)[0], wanted)
            assert kv.last.bypassed == "prepare_inputs" and not torch.equal(wanted, plain)
        finally:
            model.prepare_inputs_for_generation = before  # as peft does: an attribute still, of the class's
        assert torch.equal(generate(model, ids)[0], plain)
        assert kv.last.reused_tokens > 0
        del model.__dict__["prepare_inputs_for_generation"]


def test_training_and_autocast_are_left_alone(model, client):
    ids, model.model.layers[0].self_attn.attention_dropout = prompt(40), 0.1
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        model.train()
        generate(model, ids, 1)
        assert kv.last.bypassed == "training"
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model, ids, 1)
        assert kv.last.bypassed == "autocast"
    assert client.stats()["blocks"] == 0


class Halves(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.nn.functional.silu else out


class HalvesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.silu.default else out


@pytest.mark.parametrize("mode", [Halves, HalvesBelow])
def test_what_sees_all_that_torch_computes_is_left_alone(model, client, mode):
    ids = prompt(40)
    with mode():
        wanted = generate(model, ids)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        plain = generate(model, ids)[0]
        with mode():
            assert torch.equal(generate(model, ids)[0], wanted) and not torch.equal(wanted, plain)
        assert kv.last.bypassed == "torch_mode" and mode.__name__ in kv.last.bypass_detail
        with torch.device("cpu"):  # a mode too, which changes nothing
            generate(model, ids)
        assert kv.last.reused_tokens > 0


def test_bypass_of_reading_writing_and_both(model, client):
    ids, new = prompt(40), prompt(40, seed=2)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        with kv.bypass(write=False):
            generate(model, ids)
            assert (kv.last.reused_tokens, kv.last.bypassed) == (0, None)
        with kv.bypass(read=False):
            generate(model, ids)
            assert kv.last.reused_tokens == 32
            generate(model, new)
            assert kv.last.published_blocks == 0
        with kv.bypass():
            generate(model, ids)
            assert kv.last.bypassed == "bypass"
        generate(model, ids)
        assert kv.last.reused_tokens == 32
