"""Proves that a decoder layer of packed weights computed by one forward is its class's, for few rows; and
that words that are put in afterwards, hooks and other types count.

Method: a tiny AWQ checkpoint beside itself without the kernels.
"""

import copy

import pytest
import torch
import transformers

from kvclient.hf import awq, layers
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.layers.test_decoder import EARLY, logits
from tests.hf.zoo import near, prompt

CLOSE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}


@pytest.fixture
def home(tmp_path):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for norm in (part for part in model.modules() if type(part).__name__ == "LlamaRMSNorm"):
        norm.weight.data.uniform_(0.5, 1.5)
    return write_checkpoint(tmp_path, model, 32)


def both(home, dtype=torch.float32):
    model, plain = (awq.from_pretrained(home, dtype=dtype) for _ in range(2))
    assert layers.install(model)
    return model, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_computes_what_its_class_does(home, dtype, few):
    model, plain = both(home, dtype)
    few.clear()  # of trials
    for tokens, computed in ((60, 0), (40, 2), (1, 2)):
        found, wanted = (logits(each, prompt(tokens)) for each in (model, plain))
        assert near(found, wanted, CLOSE[dtype])
        assert len(few) == (0 if EARLY else computed)
        few.clear()


def test_a_token_has_its_bits_whatever_stands_beside_it(home):
    model, _ = both(home)
    block = model.model.layers[0]
    hidden = torch.randn(1, 12, 64)
    angles = tuple(torch.randn(1, 12, 32) for _ in range(2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = block(hidden, position_embeddings=angles, attention_mask=_alone(12))
        alone = block(hidden[:, 5:6], position_embeddings=tuple(each[:, 5:6] for each in angles))
    assert torch.equal(whole[:, 5:6], alone)


def _alone(tokens):
    """Each token sees itself."""
    mask = torch.full((1, 1, tokens, tokens), torch.finfo(torch.float32).min)
    mask[..., range(tokens), range(tokens)] = 0
    return mask


def words(layer):
    layer.self_attn.q_proj.qweight = layer.self_attn.q_proj.qweight.flip(1).contiguous()


def filled(layer):
    layer.mlp.up_proj.scales.fill_(0.01)


def hooked(layer):
    layer.mlp.down_proj.register_forward_hook(lambda _module, _args, out: 0.5 * out)


def plain_part(layer):
    made = torch.nn.Linear(64, 64, bias=False)
    made.weight.data = torch.eye(64)
    layer.self_attn.o_proj = made


def adapted(layer):
    usual = layer.mlp.gate_proj.forward
    layer.mlp.gate_proj.forward = lambda x: 0.5 * usual(x)


def biased(layer):
    layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(32), requires_grad=False)


@pytest.mark.parametrize("change", [words, filled, hooked, plain_part, adapted, biased])
def test_what_is_changed_of_a_packed_layer_counts(home, change):
    model, plain = both(home)
    ids = prompt(12)
    before = logits(model, ids)
    for each in (model, plain):
        change(each.model.layers[1])
    found = logits(model, ids)
    assert near(found, logits(plain, ids), 3e-5) and not near(found, before, 1e-4)


def test_copies_and_moves_compute_with_their_words(home):
    model, _ = both(home)
    ids = prompt(12)
    wanted = logits(model, ids)
    other = copy.deepcopy(model)
    assert near(logits(other, ids), wanted, 3e-5)
    for part in other.modules():
        if isinstance(part, awq.AwqLinear):
            part.scales.zero_()
    assert not near(logits(other, ids), wanted, 1e-2)
    assert torch.equal(logits(model, ids), wanted)
    assert near(logits(model.to(torch.bfloat16), ids).float(), wanted, 4e-2)


def of_attention(model):
    for layer in model.model.layers:
        yield from (getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_packed_layers_are_added_and_may_be_written(home, few, dtype):
    models = both(home, dtype)
    for part in (part for each in models for part in of_attention(each)):
        part.bias = torch.nn.Parameter(torch.zeros(part.out_features, dtype=dtype), requires_grad=False)
    for seed in range(2):
        for each in models:
            numbers = torch.Generator().manual_seed(seed)
            for part in of_attention(each):
                part.bias.data.copy_(torch.randn(part.out_features, generator=numbers))
        few.clear()
        assert near(*(logits(each, prompt(12)) for each in models), CLOSE[dtype])
        assert len(few) == (0 if EARLY else 2)
