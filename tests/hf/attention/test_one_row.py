"""Proves that a packed model decodes by the kernels' attention and else by torch's, and answers alike.

Method: torch's function is the oracle, and is replaced by one that refuses where it must not be called;
models of an AWQ checkpoint, loaded either way, copied, written to a file and attached.
"""

import copy
import io
import pickle

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvclient
import kvclient.hf
from kvclient.hf import awq
from kvclient.hf.attention import one_row
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint
from tests.hf.zoo import known, near, prompt

HERE = torch.nn.Module()
HERE.is_causal, HERE.num_key_value_groups = True, 7


def qkv(dtype, queries=1, keys=77, batch=2):
    torch.manual_seed(keys)
    shapes = (batch, 14, queries, 32), (batch, 2, keys, 32), (batch, 2, keys, 32)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def refuse(*_args, **_kwargs):
    raise AssertionError("torch was asked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [None, 0.25])
@pytest.mark.parametrize("keys", [1, 77, 600])
def test_one_query_over_all_keys(monkeypatch, dtype, scaling, keys):
    operands = qkv(dtype, keys=keys)
    wanted, _ = sdpa_attention_forward(HERE, *(t.float() for t in operands), None, scaling=scaling)
    monkeypatch.setattr(one_row, "sdpa_attention_forward", refuse)
    with torch.inference_mode():
        found, weights = one_row.attention(HERE, *operands, None, scaling=scaling)
    assert weights is None and found.dtype == dtype and found.shape == wanted.shape
    step = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert (found.float() - wanted).abs().max() <= step


def several(_):
    return qkv(torch.float32, queries=3, keys=3), {}


def masked(operands):
    return operands, {"attention_mask": torch.rand(2, 1, 1, 77) < 0.5}


def dropped(operands):
    return operands, {"dropout": 1.0}


def trained(operands):
    return (operands[0].requires_grad_(), *operands[1:]), {}


def double(operands):
    return tuple(t.double() for t in operands), {}


@pytest.mark.parametrize("asked", [several, masked, dropped, trained, double])
def test_anything_else_is_torchs(asked):
    operands, more = asked(qkv(torch.float32))
    more = {"attention_mask": None, **more}
    found, wanted = (f(HERE, *operands, **more)[0] for f in (one_row.attention, sdpa_attention_forward))
    assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad


def test_torch_is_what_the_environment_names(monkeypatch):
    operands = qkv(torch.float32)
    monkeypatch.setenv("KVCLIENT_BACKEND", "torch")
    assert torch.equal(
        one_row.attention(HERE, *operands, None)[0], sdpa_attention_forward(HERE, *operands, None)[0]
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("packed")
    write_checkpoint(home, tiny_llama(2), 32)
    return home


def test_packed_models_have_it_and_plain_ones_torchs(home, tmp_path):
    tiny_llama(2).save_pretrained(tmp_path)
    streamed = {
        where: StreamingCausalLM.from_pretrained(where, StreamingConfig(residency="full_stream"))
        for where in (home, tmp_path)
    }
    assert awq.from_pretrained(home).config._attn_implementation == one_row.ONE_ROW
    assert streamed[home].config._attn_implementation == one_row.ONE_ROW
    assert streamed[tmp_path].config._attn_implementation == "sdpa"
    for model in streamed.values():
        streams_of(model).close()


def test_a_step_of_a_packed_model_asks_torch_nothing(home, monkeypatch):
    model, ids = awq.from_pretrained(home), torch.arange(1, 12)[None]
    with torch.inference_mode():
        past = model(ids, use_cache=True).past_key_values
        wanted = model(torch.tensor([[5]]), past_key_values=copy.deepcopy(past)).logits
        monkeypatch.setattr(one_row, "sdpa_attention_forward", refuse)
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=past).logits, wanted)
        whole = torch.cat([ids, torch.tensor([[5]])], 1)
        with pytest.raises(AssertionError, match="torch was asked"):
            model(whole)
        monkeypatch.undo()
        assert (model(whole).logits[:, -1] - wanted[:, -1]).abs().max() <= 1e-4


def test_a_process_that_does_not_know_it_has_torchs(home):
    """What a file holds of the name is the usual one; a copy in this process has the kernels."""
    model = awq.from_pretrained(home)
    assert copy.deepcopy(model).config._attn_implementation == one_row.ONE_ROW
    assert pickle.loads(pickle.dumps(model.config._attn_implementation)) == "sdpa"
    held = io.BytesIO()
    torch.save(model.config, held)
    assert one_row.ONE_ROW.encode() not in held.getvalue()


def test_an_attached_model_reads_blocks_in_place_and_has_it_back(home):
    model, ids = awq.from_pretrained(home), torch.arange(1, 100)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    attachment = kvclient.hf.attach(model, kvclient.InMemoryClient(64 << 20))
    assert attachment.backend.startswith("cpu_")
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), wanted)
    attachment.detach()
    assert model.config._attn_implementation == one_row.ONE_ROW


@pytest.mark.parametrize(("kind", "takes"), [("llama", True), ("qwen2", True), ("deepseek_v32", False)])
def test_a_model_whose_code_asks_for_the_name_keeps_it(kind, takes):
    """Sparse attention puts its indices into the mask of "sdpa" and of no other name; Gemma 4 keeps rows."""
    model, ids = known(kind), prompt(40)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        one_row.give(model)
        assert (model.config._attn_implementation == one_row.ONE_ROW) is takes
        assert near(model(ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("told", ["cache", "softcap", "position_bias"])
def test_what_torchs_attention_is_told_besides_goes_there(monkeypatch, told):
    operands, seen = qkv(torch.float32), []
    torchs = "sdpa_attention_forward"
    monkeypatch.setattr(one_row, torchs, lambda *_, **more: seen.append(more) or (None, None))
    one_row.attention(HERE, *operands, None, **{told: object()})
    assert told in seen[0]


def test_transformers_batches_take_torchs_attention_by_its_name(home):
    """Which is asked for; in a small cache, for the usual one is all of the memory."""
    model = awq.from_pretrained(home)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    wanted = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    asked = {
        "generation_config": GenerationConfig(**(options | {"eos_token_id": -1})),
        "continuous_batching_config": ContinuousBatchingConfig(
            num_blocks=8, page_size=32, max_batch_tokens=32
        ),
    }
    with pytest.raises(ValueError, match=f"{one_row.ONE_ROW} is not supported.*'sdpa'"):
        model.generate_batch(prompts, **asked)
    model.set_attn_implementation("sdpa")
    found = model.generate_batch(prompts, **asked)
    assert [request.generated_tokens for request in found.values()] == wanted
    model.set_attn_implementation(one_row.ONE_ROW)
    assert model.generate(torch.tensor([prompts[0]]), **options)[0, 5:].tolist() == wanted[0]
