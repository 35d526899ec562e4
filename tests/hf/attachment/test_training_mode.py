"""Goal: a model some of whose modules are in training mode is served as soon as that changes nothing, as a
fresh adapter is, and left alone as long as anything in it is random or learns.

Method: tiny random models with dropout of each kind, other numbers that only training mode reads, layers
that learns, code that asks for the mode; plain generate() in evaluation mode is the reference.
"""

import pytest
import torch

import kvclient.hf
from kvclient.hf.model.modes import Modes
from tests.hf.zoo import build, generate, known, prompt

BLOCK = 16


class Adapter(torch.nn.Module):
    """A linear layer and what a fresh LoRA adds to it: nothing yet. peft puts it in in training mode."""

    def __init__(self, base, dropout):
        super().__init__()
        self.base_layer, self.rank = base, 4
        self.down = torch.nn.Linear(base.in_features, self.rank, bias=False)
        self.up = torch.nn.Linear(self.rank, base.out_features, bias=False)
        self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(self.dropout(x)))


def adapted(dropout):
    model = build("llama", layers=2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj, dropout).train()
    return model


def test_a_fresh_adapter_without_dropout_is_served(client):
    ids = prompt(70)
    model = adapted(0.0)
    plain = generate(build("llama", layers=2), ids)[0]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for reused in (0, 64):
            assert torch.equal(generate(model, ids)[0], plain)
            assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)
        model.eval()
        generate(model, ids)
        assert kv.last.reused_tokens == 64, "training mode has published what evaluation mode takes"


def test_one_with_dropout_is_served_from_eval_on(client):
    ids, model = prompt(70), adapted(0.05)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids, 1)
        assert kv.last.bypassed == "training" and "Dropout(p=0.05)" in kv.last.bypass_detail
        assert "eval()" in kv.last.bypass_detail and client.stats()["blocks"] == 0
        model.eval()
        generate(model, ids, 1)
        assert (kv.last.bypassed, kv.last.published_blocks) == (None, 4)


class Doubles(torch.nn.Module):
    """A module whose code, and nothing else, knows of the mode."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * (2 if self.training else 1)


def dropout(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))


def number(model):
    model.model.layers[1].mlp.jitter_noise = 0.01


def configured(model):
    model.config.attention_dropout = 0.1


def learning(model):
    model.model.layers[1].mlp.act_fn = torch.nn.BatchNorm1d(4)


def checkpointing(model):
    model.gradient_checkpointing_enable()


def code(model):
    model.model.layers[1].mlp.up_proj = Doubles(model.model.layers[1].mlp.up_proj)


CASES = {
    dropout: "Dropout", number: "jitter_noise", configured: "attention_dropout", learning: "BatchNorm1d",
    checkpointing: "checkpointing", code: "other logits",
}  # fmt: skip


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_what_is_random_or_learns_is_named(change):
    model = build("llama", layers=2)
    change(model)
    modes = Modes(model.eval(), list(model.modules()))
    assert modes.random() is None, "in evaluation mode"
    model.train()
    before = torch.get_rng_state()
    assert CASES[change] in modes.random()
    assert torch.equal(torch.get_rng_state(), before) and all(module.training for module in model.modules())
    model.eval()
    assert modes.random() is None


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "mixtral", "gemma3", "opt", "bloom"])
def test_models_of_other_kinds(name):
    """Whatever is said of them, it is so: the same logits, or a reason."""
    model = known(name)
    ids = prompt(40)
    with torch.no_grad():
        wanted = model(ids).logits
        model.train()
        random = Modes(model, list(model.modules())).random()
        same = torch.equal(model(ids).logits, wanted)
    assert same or random, "another answer would be published"


def test_the_verdict_is_found_once_per_combination(monkeypatch):
    model = build("llama", layers=2)
    modes, calls = Modes(model, list(model.modules())), []
    judge = modes._judge
    monkeypatch.setattr(modes, "_judge", lambda: calls.append(0) or judge())
    for _ in range(3):
        model.train()
        assert modes.random() is None
        model.model.layers[0].eval()
        assert modes.random() is None
    assert len(calls) == 2
