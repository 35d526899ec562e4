"""Goal: KV of one adapter is never served to another, nor to the model without one.

Method: what peft 0.21 puts in the place of linear layers, as far as it shows from outside, is put into a tiny
model, switched, merged, written as peft's hotswap writes, and taken out, between calls; plain generation is
the reference.
"""

import pytest
import torch

import kvclient.hf
from tests.hf.zoo import build, generate, prompt

BLOCK, RANK = 16, 4


class Lora(torch.nn.Module):
    """Of adapters "one" and "other"."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ParameterDict(self.weights(RANK, base.in_features))
        self.lora_B = torch.nn.ParameterDict(self.weights(base.out_features, RANK))
        self.scaling = {"one": 1.0, "other": 1.0}
        self._active_adapter, self._disable_adapters, self.merged_adapters = ["one"], False, []

    @staticmethod
    def weights(*shape):
        return {name: torch.randn(shape) for name in ("one", "other")}

    def delta(self):
        name = self._active_adapter[0]
        return self.lora_B[name] @ self.lora_A[name] * self.scaling[name]

    def forward(self, x):
        if self._disable_adapters or self.merged_adapters:
            return self.base_layer(x)
        return self.base_layer(x) + x @ self.delta().T

    def merge(self):
        self.base_layer.weight.data += self.delta()
        self.merged_adapters.append(self._active_adapter[0])


Lora.__module__ = "peft.tuners.fake"


@pytest.fixture
def model():
    return build("llama", layers=2)


@pytest.fixture
def kv(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        yield kv


def put(model):
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj).eval()
    return [layer.self_attn.k_proj for layer in model.model.layers]


def take_out(model, loras):
    for layer, lora in zip(model.model.layers, loras, strict=True):
        layer.self_attn.k_proj = lora.base_layer


def reused(model, kv):
    """Of a call, which must answer as the model does without a store."""
    with kv.bypass():
        want = generate(model, prompt(70))[0]
    assert torch.equal(generate(model, prompt(70))[0], want)
    assert kv.last.bypassed is None
    return kv.last.reused_tokens


def test_each_adapter_has_its_own_kv(model, kv):
    loras = put(model)
    changes = {
        "one": lambda lora: None,
        "other": lambda lora: setattr(lora, "_active_adapter", ["other"]),
        "scaled": lambda lora: lora.scaling.update(other=1.5),
        "merged": Lora.merge,
    }
    for change in changes.values():
        for lora in loras:
            change(lora)
        assert reused(model, kv) == 0
        assert reused(model, kv) == 64
    take_out(model, loras)
    assert reused(model, kv) == 0, "it is not what it was: an adapter is merged into it"


def test_an_adapter_switched_off_or_taken_out_leaves_the_models_own_kv(model, kv):
    loras = put(model)
    assert reused(model, kv) == 0
    for lora in loras:
        lora._disable_adapters = True
    assert reused(model, kv) == 0, "switching an adapter off must miss"
    take_out(model, loras)
    assert reused(model, kv) == 64, "of the call before there was an adapter"


def test_weights_that_hotswap_writes_through_data_are_seen(model, kv):
    loras = put(model)
    reused(model, kv)
    for lora in loras:
        lora.lora_A["one"].data.copy_(torch.randn(lora.lora_A["one"].shape))
    assert reused(model, kv) == 0
    assert reused(model, kv) == 64


def test_a_scale_in_a_tensor_counts_in_full(model, kv):
    loras = put(model)
    for lora in loras:
        lora.scaling["one"] = torch.tensor(1.00001)
    reused(model, kv)
    for lora in loras:
        lora.scaling["one"].fill_(1.00002)
    assert reused(model, kv) == 0
