"""Proves that an AWQ checkpoint of a real model loads from safetensors and says what its weights say.

Method: the first layers of SmolLM2, packed by tests/hf/awq_checkpoint.py in the groups that the kernels
take; the same model with the dequantised weights in ordinary linear layers is the oracle.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from kvclient.hf import awq
from kvclient.hf.awq.packing import LANES_OUTPUTS
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.zoo import generate, near

ROOT = Path(__file__).resolve().parents[3]
LAYERS, GROUP = 3, 64


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
