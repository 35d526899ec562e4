"""Proves that what only looks like a layer that native/cpu computes stays torch's, and that nothing done to a
model afterwards is passed over: adapters, hooks, other types, copies, files and traces.

Method: models and modules of transformers that were wrongly taken once (found by reading), beside themselves
without the kernels.
"""

import copy
import pickle

import pytest
import torch
import transformers

from kvclient.hf import layers
from kvclient.hf.attention import switch
from kvclient.hf.layers import appended, kinds, stack
from kvclient.hf.release import CACHE
from tests.hf.layers.test_decoder import made
from tests.hf.zoo import build, prompt


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True)


def off(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("head_dim", [32, 96])
def test_a_model_that_turns_a_part_of_a_head(head_dim):
    """Nemotron's attention has Llama's code; its cosines are narrower than a head."""
    torch.manual_seed(0)
    config = transformers.NemotronConfig(
        hidden_size=2 * head_dim, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, vocab_size=500,
    )  # fmt: skip
    model, ids = transformers.NemotronForCausalLM(config).eval(), prompt(40)
    wanted = logits(model, ids)
    assert layers.install(model)
    found = logits(model, ids)
    assert off(found.logits, wanted.logits) < 1e-4
    keys = [out.past_key_values.layers[0].keys for out in (found, wanted)]
    assert off(*keys) < 1e-4


class Clamped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(64, 64, bias=False), torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


@torch.no_grad()
def test_an_mlp_that_clamps_what_only_large_numbers_reach():
    module = Clamped()
    x = 300 * torch.randn(1, 4, 64)
    wanted = module(x)
    layers.install(torch.nn.Sequential(module))
    assert "forward" not in module.__dict__ and off(module(x), wanted) < 1e-5


class LateRMSNorm(torch.nn.Module):
    """Rounds once, behind its weight: the same norm in fp32, in bf16 another."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(64)), 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


class SiLUOfTypes(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) / (1 if x.itemsize == 4 else 2)


class HalvedMLP(Clamped):
    """Another MLP in bf16 than in fp32."""

    def __init__(self):
        super().__init__()
        self.act_fn = SiLUOfTypes()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("made", [LateRMSNorm, HalvedMLP])
@torch.no_grad()
def test_what_is_proven_in_one_type_is_not_in_another(made):
    """Also where it changes its type afterwards: a norm in words of its own is computed as it was proven."""
    model = torch.nn.Sequential(made(), made().to(torch.bfloat16))
    layers.install(model)
    assert "forward" in model[0].__dict__ and "forward" not in model[1].__dict__
    x = torch.randn(1, 40, 64).to(torch.bfloat16)
    model[0].to(torch.bfloat16)
    assert torch.equal(model[0](x), made.forward(model[0], x))


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_layer_proven_in_one_type_is_not_in_another(tokens):
    """Its MLP's activation is another function there."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = build("llama", layers=2, **sizes)
    for layer in model.model.layers:
        layer.mlp.act_fn = SiLUOfTypes()
    plain = copy.deepcopy(model).to(torch.bfloat16)
    assert layers.install(model)
    ids = prompt(tokens)
    found, wanted = (logits(each, ids).logits for each in (model.to(torch.bfloat16), plain))
    assert off(found, wanted) < 4e-2


class Silent(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 0 * self.layer(x)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_what_is_put_round_a_part_of_an_mlp_counts(name):
    model, ids = build("llama", layers=2), prompt(30)
    layers.install(model)
    plain = logits(model, ids).logits
    seen = []
    mlp = model.model.layers[1].mlp
    handle = getattr(mlp, name).register_forward_hook(lambda *_: seen.append(1))
    assert off(logits(model, ids).logits, plain) < 1e-4 and seen
    handle.remove()
    setattr(mlp, name, Silent(getattr(mlp, name)))
    changed = logits(model, ids).logits
    wanted = build("llama", layers=2)
    wanted.model.layers[1].mlp.down_proj.weight.data.zero_()
    assert off(changed, logits(wanted, ids).logits) < 1e-4


def test_a_forward_that_was_exchanged_before_stays():
    model, ids = build("llama", layers=2), prompt(30)
    layer = model.model.layers[1].mlp.gate_proj
    layer.forward = lambda x: 0 * torch.nn.Linear.forward(layer, x)
    wanted = logits(model, ids).logits
    layers.install(model)
    assert off(logits(model, ids).logits, wanted) < 1e-4


def test_a_copy_and_one_from_a_file_have_their_weights():
    model, ids = build("llama", layers=2, head_dim=32), prompt(30)
    layers.install(model)
    wanted = logits(model, ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert off(logits(other, ids).logits, wanted) < 1e-4
        other.model.layers[0].mlp.down_proj.weight.data.mul_(3)
        other.model.layers[1].self_attn.q_proj.weight.data.mul_(3)
        other.lm_head.weight.data.zero_()
        assert not logits(other, ids).logits.any()
        assert off(logits(model, ids).logits, wanted) < 1e-6


SHALLOW = {
    "norm": lambda copied: setattr(copied, "variance_epsilon", 0.5),
    "post_attention_layernorm": lambda copied: setattr(copied, "weight", torch.nn.Parameter(torch.zeros(64))),
    "self_attn": lambda copied: setattr(copied, "scaling", 3.0),
    "self_attn.q_proj": lambda copied: setattr(copied, "weight", torch.nn.Parameter(torch.ones(64, 64))),
    "mlp": lambda copied: setattr(copied, "down_proj", torch.nn.Linear(64, 64)),
    "": lambda copied: setattr(copied, "mlp", torch.nn.Identity()),
}


@pytest.mark.parametrize("name", SHALLOW)
@torch.no_grad()
def test_a_shallow_copy_computes_with_what_it_holds(name):
    """copy.copy() takes a module's __dict__ along; what is set in the copy is nobody else's."""
    model = build("llama", layers=2, hidden_size=64, num_attention_heads=2, head_dim=32)
    layers.install(model)
    module = model.model.norm if name == "norm" else model.model.layers[0].get_submodule(name)
    assert "forward" in module.__dict__ or name in ("", "self_attn")  # early transformers have neither
    x = torch.randn(1, 5, module.in_features if name.endswith("proj") else 64)
    angles = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    told = {"position_embeddings": angles, "attention_mask": None} if name in ("", "self_attn") else {}
    before = first(module(x, **told))
    copied = copy.copy(module)
    for held in ("_modules", "_parameters"):
        copied.__dict__[held] = dict(copied.__dict__[held])
    SHALLOW[name](copied)
    wanted = first(type(module).forward(copied, x, **told))
    assert off(wanted, before) > 1e-3
    assert torch.equal(first(copied(x, **told)), wanted)
    assert torch.equal(first(module(x, **told)), before)


def first(out):
    return out[0] if isinstance(out, tuple) else out


def test_a_forward_that_is_set_afterwards_goes_along_with_a_copy():
    module = torch.nn.Linear(64, 64)
    layers.install(torch.nn.Sequential(module))
    module.forward = torch.zeros_like
    x = torch.randn(2, 64)
    assert not copy.copy(module)(x).any() and not copy.deepcopy(module)(x).any()


def test_what_somebody_keeps_of_the_queries_is_not_turned():
    model, ids = build("llama", layers=2, hidden_size=64, num_attention_heads=2, head_dim=32), prompt(30)
    kept = []

    def keep(_module, _args, out):
        kept.append(out)

    for install in (False, True):
        if install:
            layers.install(model)
        handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(keep)
        logits(model, ids)
        handle.remove()
    assert off(kept[1], kept[0]) < 1e-4


def test_another_type_is_refused_as_torch_refuses_it():
    model, ids = build("llama", layers=2), prompt(30)
    layers.install(model)
    model.model.layers[0].mlp.down_proj.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        logits(model, ids)


def test_biases_and_the_last_layer_can_be_trained():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64))
    module[0].weight.requires_grad_(False)
    layers.install(module)
    module(torch.randn(2, 64)).sum().backward()
    assert torch.equal(module[0].bias.grad, torch.full((64,), 2.0))


@torch.no_grad()
def test_a_trace_is_torchs():
    module = torch.nn.Sequential(torch.nn.Linear(64, 32))
    layers.install(module)
    traced = torch.jit.trace(module, torch.randn(2, 64))
    x = torch.randn(2, 64)
    assert off(traced(x), module(x)) < 1e-5


@torch.no_grad()
def test_a_view_of_other_signs_is_what_it_says():
    module = torch.nn.Sequential(torch.nn.Linear(64, 32))
    x = torch.randn(2, 64, dtype=torch.complex64).conj().imag
    wanted = module(x)
    layers.install(module)
    assert off(module(x), wanted) < 1e-5


@pytest.mark.skipif(not appended.known() or kinds.model(made().model) is None, reason="left to torch")
def test_layers_that_keep_their_tensors_elsewhere_are_asked(monkeypatch):
    """As those of a window do: in a stock cache, and their keys are no tensor."""

    class Elsewhere(transformers.cache_utils.DynamicLayer):
        def update(self, *states, **more):
            if self.is_initialized:
                self.keys, self.values = self.held
            self.held = super().update(*states, **more)
            self.keys = self.values = None
            return self.held

        def get_seq_length(self):
            return self.held[0].shape[2] if self.is_initialized else 0

    def said(model):
        cache = transformers.DynamicCache(config=model.config)
        cache.layers = [Elsewhere() for _ in cache.layers]
        with torch.no_grad():
            return [model(input_ids=ids, **{CACHE: cache}).logits for ids in (prompt(10), prompt(1))]

    model, seen = made(), []
    assert layers.install(model) and switch.install(model)
    monkeypatch.setattr(stack.Step, "__call__", lambda *_: seen.append(1))
    found = said(model)
    del model.model.__dict__["forward"]
    assert all(map(torch.equal, found, said(model))) and not seen
