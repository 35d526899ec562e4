"""Proves that install() gives no model another attention than its own, and that masks mean what they say.

Method: models whose attention the kernels cannot stand in for (a window in the mask only, in the call only,
an argument of their own, scores built on the mask) are refused with the reason and stay as they were;
attach() serves them without the kernels; those that can have them pass, and are tried once.
"""

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf import attach, attention
from kvclient.hf.attention import backends, proof, registered, switch, torch_reference
from kvclient.testing.in_memory import InMemoryClient
from tests.hf.zoo import known, near, prompt

_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
_FAR = 300  # more than the tokens that are tried: no logit shows it
_SLIDING = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SPARSE = {"layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16, "head_dim": 16}
OTHERS = {
    "phimoe": ({"sliding_window": 8, "num_local_experts": 4}, "mask has a window of 8"),
    "phimoe far": ({"sliding_window": _FAR, "num_local_experts": 4}, f"mask has a window of {_FAR}"),
    "qwen2_moe": ({"sliding_window": _FAR, **_SLIDING, **_EXPERTS}, f"mask has a window of {_FAR}"),
    "olmoe": ({"sliding_window": _FAR, "num_experts": 8}, f"attention one of {_FAR}"),
    "doge": ({}, "logits differ"),
    "minimax_m3_vl_text": (
        {**_SPARSE, "index_block_size": 4, "index_topk_blocks": 1, "num_local_experts": 4,
         "num_experts_per_tok": 2},
        "block_indices",
    ),
    "inkling2_text": ({}, "sinks"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.setattr(proof, "_same", set())


def other(name):
    try:
        config = transformers.AutoConfig.for_model(name.split()[0], **_SIZES, **OTHERS[name][0])
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()
    except ValueError as error:
        pytest.skip(f"this transformers has no {name}: {error}")


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_would_get_another_attention_is_refused_with_the_reason(name):
    model, before = other(name), attention.fallbacks()
    used = model.config._attn_implementation
    with pytest.raises(InvalidArgument, match=OTHERS[name][1]):
        attention.install(model)
    assert model.config._attn_implementation == used and switch.PLACE not in model.__dict__
    assert attention.fallbacks() == before


def test_attach_serves_such_a_model_without_the_kernels():
    model = other("doge")
    with InMemoryClient(1 << 20) as client, attach(model, client, self_test=False) as kv:
        assert kv.backend == "sdpa"


def test_a_model_that_can_have_them_is_tried_once(monkeypatch):
    model = known("mistral_sliding").train()
    runs, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: runs.append(1) or forward(**kwargs))
    for _ in range(2):
        attention.install(model)
        attention.uninstall(model)
    assert len(runs) == 3 and model.training


def test_a_mask_of_padding_that_was_copied_counts():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 8, 16, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    seen = torch_reference.visible(8, 8, torch.tensor([3, 0]), 0, True, query.device)
    wanted = torch_reference.attend(query, key, value, seen, 0.25)
    chosen, module = backends.choose(torch.device("cpu"), torch.float32, 16), torch.nn.Module()
    found, _ = registered.attention(chosen, module, query, key, value, mask, scaling=0.25)
    assert near(found[0, 3:], wanted[0, 3:]) and near(found[1], wanted[1])
    with pytest.raises(InvalidArgument, match="8 keys"):
        registered.attention(chosen, module, query, key, value, mask[:, :5], scaling=0.25)


def test_a_model_that_has_them_can_be_exported():
    model, ids = known("llama"), prompt(12)
    attention.install(model)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), kwargs={"use_cache": False}, strict=False).module()
        assert near(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
