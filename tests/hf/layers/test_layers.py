"""Proves that a model whose layers native/cpu computes is the same model: near to rounding, under the same
identity; that a token's numbers do not depend on the tokens beside it; and that what is none of these layers
stays as it was.

Method: tiny random models of the zoo, with and without; modules that a hook, another type or another formula
keeps out, and calls that the kernels do not take.
"""

import copy

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf import layers
from kvclient.hf.layers import calls
from kvclient.hf.layers.trial import same_norm
from kvclient.kernels import contract
from tests.hf.layers.test_decoder import EARLY
from tests.hf.zoo import build, prompt


def changed(model):
    return {type(module).__name__ for module in model.modules() if "forward" in module.__dict__}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 3e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "olmo2", "qwen3_moe"])
def test_the_model_is_the_same_to_rounding(kind, dtype, close):
    model, ids = build(kind, dtype, layers=2), prompt(70)
    wanted = logits(model, ids)
    assert layers.install(model) == len([m for m in model.modules() if "forward" in m.__dict__])
    found = logits(model, ids)
    assert torch.allclose(found, wanted, rtol=0, atol=close * float(wanted.abs().max()))
    if dtype is torch.float32:
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_which_modules_are_computed():
    assert changed_of("llama") == {"Linear", "LlamaRMSNorm", "LlamaMLP"}  # heads of 16
    assert "Gemma2RMSNorm" not in changed_of("gemma2")  # 1 + weight: its own formula
    assert "Gemma2MLP" not in changed_of("gemma2")  # gelu


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma"])
def test_answers_of_a_model_whose_attention_is_computed(kind):
    model = build(kind, layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    ids = prompt(70)
    wanted = logits(model, ids)
    layers.install(model)
    assert any(name.endswith("Attention") for name in changed(model)) == (not EARLY), kind
    found = logits(model, ids)
    assert torch.allclose(found, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))
    with kvclient.InMemoryClient(16 << 20) as client, kvclient.hf.attach(model, client, block_tokens=16):
        said = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), said)


class Adapted(torch.nn.Module):
    """A layer with an adapter round it, which is trained while the layer is not."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, torch.nn.Parameter(torch.full((), 1.5))

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) * self.scale


def test_queries_that_a_gradient_is_wanted_of_are_not_written():
    """An adapter put in after the layers were exchanged: its gradient is the one without the kernels."""
    gradients = []
    for exchanged in (False, True):
        model = build(
            "llama", layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
        )
        model.requires_grad_(False)
        if exchanged:
            layers.install(model)
        attention = model.model.layers[0].self_attn
        attention.q_proj = adapted = Adapted(attention.q_proj)
        model(input_ids=prompt(20)).logits.square().mean().backward()
        gradients.append(adapted.scale.grad)
    assert torch.allclose(*gradients, rtol=1e-3)


def changed_of(kind):
    model = build(kind, layers=2)
    layers.install(model)
    return changed(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_numbers_do_not_depend_on_those_beside_it(dtype):
    """To the bit, of every module of rows alone; torch's product does not promise it."""
    model = build("llama", dtype, layers=2)
    layers.install(model)
    seen = 0
    for module in model.modules():
        if "forward" not in module.__dict__ or hasattr(module, "self_attn"):
            continue
        width = next(module.parameters()).shape[-1]
        x = torch.randn((1, 37, width), generator=torch.Generator().manual_seed(seen)).to(dtype)
        with torch.no_grad():
            whole = module(x)
            for rows in (1, 2, 3, 5, 8, 13):
                assert torch.equal(module(x[:, :rows].contiguous()), whole[:, :rows])
                assert torch.equal(module(x[0, -rows:, None].contiguous())[:, 0], whole[0, -rows:])
        seen += 1
    assert seen > 10


def test_the_identity_is_the_models_own():
    """KV of both is near, as of one prompt in pieces of other sizes: so it is shared."""
    identities, model = [], build("llama", layers=2)
    for before in (False, True):
        fresh = copy.deepcopy(model)
        with kvclient.InMemoryClient(16 << 20) as client:
            if before:
                layers.install(fresh)
            with kvclient.hf.attach(fresh, client, block_tokens=16) as kv:
                identities.append(kv.identity)
                if not before:
                    layers.install(fresh)
                assert not kv._model_state.watch.changed()
                fresh.generate(prompt(40), max_new_tokens=4, do_sample=False)
                fresh.generate(prompt(40), max_new_tokens=4, do_sample=False)
                assert kv.last_here.reused_tokens > 0
    assert identities[0] == identities[1]


def test_what_a_hook_or_an_adapter_touches_stays():
    model = build("llama", layers=2)
    first, second = model.model.layers
    first.mlp.up_proj.register_forward_hook(lambda *_: None)
    second.self_attn.q_proj.forward = second.self_attn.q_proj.forward
    kept = second.self_attn.q_proj.forward
    layers.install(model)
    assert "forward" not in first.mlp.up_proj.__dict__ and "forward" not in first.mlp.__dict__
    assert second.self_attn.q_proj.forward is kept
    assert "forward" in second.mlp.__dict__


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_stay(dtype):
    model = build("llama", layers=2).to(dtype)
    assert layers.install(model) == 0 and not changed(model)


def test_without_kernels_nothing_changes(monkeypatch):
    monkeypatch.setattr(contract, "auto_path", lambda: "reference")  # as on a CPU that is no x86-64
    assert layers.install(build("llama", layers=2)) == 0
    monkeypatch.undo()
    monkeypatch.setenv("KVCLIENT_BACKEND", "torch")
    assert layers.install(build("llama", layers=2)) == 0


def test_calls_that_the_kernels_do_not_take_are_torchs():
    """Another type since, a gradient, an x that is not whole: the class's own forward, to the bit."""
    linear = torch.nn.Linear(32, 8)
    plain = copy.deepcopy(linear)
    holder = torch.nn.Sequential(linear)
    assert layers.install(holder) == 1
    x = torch.randn((2, 5, 64))[..., ::2]
    assert torch.equal(holder(x), plain(x))
    wide = torch.randn((4, 32), requires_grad=True)
    holder(wide).sum().backward()
    assert wide.grad is not None and linear.weight.grad is not None
    with torch.no_grad():
        vector = torch.randn(32)
        assert torch.equal(holder(vector), plain(vector))
        assert holder(torch.randn((0, 32))).shape == (0, 8)
        with pytest.raises(RuntimeError):
            holder(torch.randn((4, 16)))
        moved = holder.to(torch.float16)
        half = torch.randn((4, 32), dtype=torch.float16)
        assert torch.equal(moved(half), plain.to(torch.float16)(half))


class Spelled(torch.nn.Module):
    """A norm in words that are nobody else's."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(64)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps))


@pytest.mark.parametrize("norm", [lambda: torch.nn.RMSNorm(64, eps=1e-6), type("MyRMSNorm", (Spelled,), {})])
@torch.no_grad()
def test_a_norm_in_other_words_is_computed_here(norm, monkeypatch):
    module, seen = norm(), []
    assert layers.install(torch.nn.Sequential(module)) == 1
    usual = calls.normalise
    monkeypatch.setattr(calls, "normalise", lambda *told: seen.append(1) or usual(*told))
    x = torch.randn(3, 64)
    found = [module(x) for _ in range(2)]
    assert seen == [1, 1]
    assert all(torch.allclose(each, type(module).forward(module, x), atol=1e-5) for each in found)


def test_a_class_that_computes_otherwise_is_found_out():
    class OddRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.rand(32)), 1e-5

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)

    model = torch.nn.Sequential(OddRMSNorm())
    assert layers.install(model) == 0
    assert not same_norm(model[0], lambda x: x)
