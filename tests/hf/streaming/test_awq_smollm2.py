"""Proves that an AWQ checkpoint of a real model loads from safetensors and says what its weights say; and how
far its logits, in memory or streamed, may be from those of the dequantised model.

Method: the first layers of SmolLM2, packed by tests/hf/awq_checkpoint.py in the groups that the kernels
take, and tiny models; the same model with the dequantised weights in ordinary linear layers of fp32 is the
oracle, which is fed the answer, token by token.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from kvclient.hf import awq
from kvclient.hf.awq.packing import LANES_OUTPUTS
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint
from tests.hf.zoo import generate, near

ROOT = Path(__file__).resolve().parents[3]
LAYERS, GROUP = 3, 64
BOUND = 1e-5  # of the largest logit: what docs/streaming.md says


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import model as example_model

    transformers.logging.disable_progress_bar()
    home = example_model.ensure()
    sys.modules.pop("model")
    return transformers.AutoModelForCausalLM.from_pretrained(
        home, dtype=torch.float32, num_hidden_layers=LAYERS
    ).eval()


def test_a_packed_checkpoint_of_smollm2(model, tmp_path):
    loaded = awq.from_pretrained(write_checkpoint(tmp_path, model, GROUP))
    packed = [module for module in loaded.modules() if isinstance(module, awq.AwqLinear)]
    assert len(packed) == LAYERS * 7
    assert all(module.out_features % LANES_OUTPUTS == 0 for module in packed)  # a GPU's kernels take them
    ids = torch.tensor([[1, 504, 260, 2240, 282, 253, 6400]])
    tokens, logits, _ = generate(model, ids, 3)
    found, values, _ = generate(loaded, ids, 3)
    assert torch.equal(found, tokens) and near(values, logits)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("residency", ["full_resident", "full_stream"])
def test_greedy_answers_are_those_of_the_dequantised_model_within_the_bound(tmp_path, residency, group):
    """Each token is the oracle's likeliest, or no further below it than twice the bound on logits."""
    oracle = tiny_llama()
    if group == 64:  # the narrow one has 96 inputs of a feed-forward part
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15,
        )  # fmt: skip
        oracle = transformers.LlamaForCausalLM(config).eval()
    home = write_checkpoint(tmp_path, oracle, group)  # gives it the dequantised weights
    model = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency=residency))
    far = 0.0
    for seed in range(6):
        ids = torch.randint(1, 128, (1, 9 + 8 * seed), generator=torch.Generator().manual_seed(seed))
        answer, values, _ = generate(model, ids, 32)
        with torch.inference_mode():
            wanted = oracle(answer).logits[0, ids.shape[1] - 1 : -1]
        bound = BOUND * float(wanted.abs().max())
        far = max(far, float((values[:, 0] - wanted).abs().max()) / bound)
        chosen = wanted.gather(1, answer[0, ids.shape[1] :, None])[:, 0]
        assert (chosen >= wanted.max(-1).values - 2 * bound).all()
    assert 0 < far <= 1
    streams_of(model).close()
