"""Proves that a decoder layer computed by one forward is its class's: every kind of it, in fp32 and bf16; and
that whatever is done to one of its parts afterwards counts, as do strangers that only look like it.

Method: tiny models with weights of every norm at random, beside themselves without the kernels; each change
is made to both.
"""

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from kvclient.hf import layers
from kvclient.hf.layers import decoder, trial
from tests.hf.zoo import known, near, prompt

SIZES = {"layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
KINDS = {
    "llama": {}, "qwen2": {}, "mistral": {"sliding_window": 8}, "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.4, "embedding_multiplier": 2.0},
    "ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "cwm": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
# Whose attentions hand on where a cache stands: their layers are left to torch.
USUAL = inspect.unwrap(modeling_llama.LlamaAttention.forward)
EARLY = "cache_position" in inspect.signature(USUAL).parameters
CLOSE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}


def made(kind="llama", dtype=torch.float32, **changed):
    if kind == "cwm":
        torch.manual_seed(0)
        sizes = {name: value for name, value in SIZES.items() if name != "layers"} | KINDS[kind] | changed
        config = transformers.CwmConfig(
            num_hidden_layers=2, intermediate_size=96, vocab_size=320, initializer_range=0.15, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, **sizes,
        )  # fmt: skip
        model = transformers.CwmForCausalLM(config).to(dtype).eval()
    else:
        model = known(kind, dtype, **(SIZES | KINDS[kind] | changed))
    numbers = torch.Generator().manual_seed(4)
    for name, held in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            held.data.add_(0.3 * torch.randn(held.shape, generator=numbers).to(held.dtype))
    return model


def both(kind="llama", dtype=torch.float32, **changed):
    """(with the kernels, without)."""
    model = made(kind, dtype, **changed)
    plain = copy.deepcopy(model)
    assert layers.install(model)
    return model, plain


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids).logits


def as_one(model):
    return sum("forward" in layer.__dict__ for layer in model.model.layers)


@pytest.fixture
def passes(monkeypatch):
    """Which of the two ways layers were computed as one, in their order."""
    seen = []
    for way in ("few", "many"):
        usual = getattr(decoder.Layer, way)
        counted = lambda *args, way=way, usual=usual: seen.append(way) or usual(*args)  # noqa: E731
        monkeypatch.setattr(decoder.Layer, way, counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_class_does(kind, dtype, passes):
    model, plain = both(kind, dtype)
    passes.clear()  # of trials
    ids = prompt(70)
    assert as_one(model) == (0 if EARLY else 2)
    caches = [transformers.DynamicCache(config=each.config) for each in (model, plain)]
    with torch.no_grad():
        found, wanted = (each(input_ids=ids[:, :-3], past_key_values=cache).logits
                         for each, cache in zip((model, plain), caches, strict=True))  # fmt: skip
        assert near(found, wanted, CLOSE[dtype])
        for place in (-3, -2, -1):
            found, wanted = (each(input_ids=ids[:, place, None], past_key_values=cache).logits
                             for each, cache in zip((model, plain), caches, strict=True))  # fmt: skip
            assert near(found, wanted, CLOSE[dtype])
    assert passes == ([] if EARLY else ["many"] * 2 + ["few"] * 6)
    for ours, usual in zip(*(cache.layers for cache in caches), strict=True):
        assert ours.keys.shape == usual.keys.shape and near(ours.keys, usual.keys, CLOSE[dtype])
        assert near(ours.values, usual.values, CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_parts_to_the_bit(kind, dtype, passes):
    """Of few rows and of many; so a token's numbers do not depend on how many stand beside it."""
    model, _ = both(kind, dtype)
    ids = [prompt(20), prompt(20).expand(2, -1), prompt(60)]
    whole = [logits(model, each) for each in ids]
    counted = len(passes)
    for layer in model.model.layers:
        layer.__dict__.pop("forward", None)
    for each, wanted in zip(ids, whole, strict=True):
        assert torch.equal(logits(model, each), wanted)
    assert len(passes) == counted


class Round(torch.nn.Module):
    """What is put round something: half of its answer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **told):
        out = self.inner(*args, **told)
        return (0.5 * out[0], *out[1:]) if isinstance(out, tuple) else 0.5 * out


PARTS = [
    "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn", "input_layernorm",
    "post_attention_layernorm",
]  # fmt: skip


@pytest.mark.parametrize("how", ["hook", "pre-hook", "round", "forward", "class"])
@pytest.mark.parametrize("name", PARTS)
def test_what_is_put_at_a_part_counts(name, how):
    model, plain = both()
    ids = prompt(20)
    before = logits(model, ids)
    for each in (model, plain):
        layer = each.model.layers[1]
        part, (parent, _, last) = layer.get_submodule(name), name.rpartition(".")
        if how == "hook":
            part.register_forward_hook(lambda *told: Round(lambda: told[2])())
        elif how == "pre-hook" and name != "self_attn":
            part.register_forward_pre_hook(lambda _, args: (0.5 * args[0],))
        elif how == "round":
            setattr(layer.get_submodule(parent), last, Round(part))
        elif how == "class":
            usual = type(part).forward
            changed = {"forward": lambda self, *args, usual=usual, **told: Round(usual)(self, *args, **told)}
            part.__class__ = type("Other", (type(part),), changed)
        else:
            usual = part.forward
            part.forward = lambda *args, usual=usual, **told: Round(usual)(*args, **told)
    found, wanted = logits(model, ids), logits(plain, ids)
    assert near(found, wanted, 3e-5)
    assert not near(found, before, 1e-3) or "norm" in name  # which of half of it makes the same


CHANGES = {
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "scaling": lambda layer: setattr(layer.self_attn, "scaling", 0.9),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.GELU()),
    "weight": lambda layer: setattr(
        layer.mlp.up_proj, "weight", torch.nn.Parameter(2 * layer.mlp.up_proj.weight.data)
    ),
    "data": lambda layer: setattr(layer.self_attn.q_proj.weight, "data", -layer.self_attn.q_proj.weight.data),
    "turned weight": lambda layer: setattr(
        layer.self_attn.q_proj.weight, "data", layer.self_attn.q_proj.weight.data.t()
    ),
    "bias": lambda layer: setattr(layer.self_attn.o_proj, "bias", torch.nn.Parameter(torch.ones(64))),
    "number of all": lambda layer: setattr(layer.mlp.down_proj, "bias", torch.nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_of_a_layer_counts(change):
    model, plain = both()
    ids = prompt(20)
    before = logits(model, ids)
    for each in (model, plain):
        CHANGES[change](each.model.layers[0])
    found = logits(model, ids)
    assert near(found, logits(plain, ids), 3e-5) and not near(found, before, 1e-4)


@pytest.mark.parametrize(("kind", "change"), [
    ("granite", lambda layer: setattr(layer, "residual_multiplier", 0.9)),
    ("qwen2", lambda layer: setattr(layer.self_attn, "sliding_window", 3)),
    ("mistral", lambda layer: setattr(layer.self_attn.config, "sliding_window", 3)),
    ("smollm3", lambda layer: setattr(layer.self_attn, "use_rope", not layer.self_attn.use_rope)),
    ("qwen3", lambda layer: setattr(layer.self_attn.k_norm, "variance_epsilon", 0.5)),
])  # fmt: skip
def test_what_is_changed_of_a_kind_counts(kind, change):
    model, plain = both(kind)
    ids = prompt(20)
    for each in (model, plain):
        change(each.model.layers[0])
        each.set_attn_implementation("eager")
    assert near(logits(model, ids), logits(plain, ids), 3e-5)


@pytest.mark.parametrize("head_dim", [16, 64])
@torch.no_grad()
def test_heads_of_another_size_afterwards(head_dim):
    """Of 16 the kernel turns none; of 64 a struct made for 32 would turn others."""
    model, plain = both(hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    hidden = torch.randn(1, 3, 128)
    angles = [tuple(torch.randn(1, 3, wide) for _ in range(2)) for wide in (32, head_dim)]
    blocks = [each.model.layers[0] for each in (model, plain)]
    for size, turned in zip((32, head_dim), angles, strict=True):
        for block in blocks:
            block.self_attn.head_dim = size
        found, wanted = (block(hidden, position_embeddings=turned) for block in blocks)
        assert near(found, wanted, 3e-5)


def test_a_part_of_another_type_is_refused_as_torch_refuses_it():
    for name in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"):
        model, _ = both()
        model.model.layers[0].get_submodule(name).to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="dtype"):
            logits(model, prompt(8))


def test_gradients_and_training_are_torchs():
    model, plain = both(attention_dropout=0.0)
    model.train(), plain.train()
    found = []
    for each in (model, plain):
        each(input_ids=prompt(12), labels=prompt(12)).loss.backward()
        found.append([held.grad for held in each.parameters()])
    for ours, usual in zip(*found, strict=True):
        assert near(ours, usual, 1e-3)
    model.gradient_checkpointing_enable()
    model(input_ids=prompt(12), labels=prompt(12)).loss.backward()


@pytest.mark.parametrize("tokens", [5, 60])
@pytest.mark.parametrize("what", ["cache", "mask"])
def test_gradients_of_what_a_model_is_told_are_torchs(what, tokens):
    """Where no weight wants one: of K and V that it finds, of what is added to its scores."""
    found = []
    for each in both():
        each.eval().requires_grad_(False)
        numbers = torch.Generator().manual_seed(1)
        if what == "mask":
            wanted = [torch.zeros(1, 1, tokens, tokens).requires_grad_()]
            told = {"attention_mask": wanted[0], "use_cache": False}
        else:
            told = {"past_key_values": transformers.DynamicCache()}
            wanted = [torch.randn(1, 1, 3, 32, generator=numbers).requires_grad_() for _ in range(4)]
            for layer in range(2):
                told["past_key_values"].update(*wanted[2 * layer : 2 * layer + 2], layer)
        each(prompt(tokens), **told).logits.square().sum().backward()
        found.append([held.grad for held in wanted])
    for ours, usual in zip(*found, strict=True):
        assert usual.any() and near(ours, usual, 1e-3)


@pytest.mark.skipif(EARLY, reason="its layers are left to torch")
def test_layers_of_a_kind_are_tried_once(monkeypatch):
    tried, model = [], made()
    monkeypatch.setattr(trial, "same_attention", lambda module, *_: tried.append(type(module)) or True)
    layers.install(model)
    assert as_one(model) == 2
    assert tried == [modeling_llama.LlamaAttention, modeling_llama.LlamaDecoderLayer]


def test_copies_and_files_compute_with_their_weights():
    model, _ = both()
    ids = prompt(20)
    wanted = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert near(logits(other, ids), wanted, 3e-5)
        for held in other.parameters():
            held.data.zero_()
        assert not logits(other, ids).any()
        assert torch.equal(logits(model, ids), wanted)


def test_weights_and_states_that_are_asked_for():
    model, plain = both()
    for each in (model, plain):
        each.set_attn_implementation("eager")
    ids = prompt(12)
    for _ in range(2):
        with torch.no_grad():
            found, wanted = (each(input_ids=ids, output_attentions=True, output_hidden_states=True)
                             for each in (model, plain))  # fmt: skip
        assert len(found.hidden_states) == len(wanted.hidden_states) == 3
        for ours, usual in zip(found.attentions + found.hidden_states,
                               wanted.attentions + wanted.hidden_states, strict=True):  # fmt: skip
            assert near(ours, usual, 3e-5)


class Swapped(modeling_llama.LlamaDecoderLayer):
    """Llama's names and constants; what is added is the norm's answer."""

    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
        position_embeddings=None, **kwargs,
    ):  # fmt: skip
        hidden_states = self.input_layernorm(hidden_states)
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings,
            **kwargs,
        )  # fmt: skip
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Doubled(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return 2 * super().forward(hidden_states, **kwargs)


class Halved(modeling_llama.LlamaAttention):
    """Llama's names; its constants have one more."""

    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(hidden_states, **kwargs)
        return 0.5 * out, weights


@pytest.mark.parametrize("stranger", [Swapped, Doubled, Halved])
def test_a_layer_that_only_looks_like_one(stranger):
    model = made()
    for layer in model.model.layers:
        (layer.self_attn if stranger is Halved else layer).__class__ = stranger
    ids = prompt(20)
    wanted = logits(model, ids)
    layers.install(model)
    assert as_one(model) == 0 and near(logits(model, ids), wanted, 3e-5)


class Numbered(torch.nn.Module):
    """A norm that reads a number of its own, which is one while it is proven."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.times = torch.nn.Parameter(torch.rand(32)), 1e-6, 1.0

    def forward(self, x):
        return self.times * self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@torch.no_grad()
def test_a_norms_number_that_is_set_afterwards_counts():
    norm = type("NumberedRMSNorm", (Numbered,), {})()
    assert layers.install(torch.nn.Sequential(norm)) == 1
    x = torch.randn(3, 32)
    norm.times = 4.0
    assert near(norm(x), Numbered.forward(norm, x), 1e-5)


@torch.no_grad()
def test_queries_are_never_turned_in_memory_that_somebody_holds():
    """Layers that answer what they hold: read-only, shared by all rows, of an inference."""
    model, plain = both()

    class Held(torch.nn.Module):
        def __init__(self, out):
            super().__init__()
            self.out = out

        def forward(self, x):
            return self.out.expand(*x.shape[:-1], -1)

    with torch.inference_mode():
        of_inference = torch.randn(1, 1, 64)
    read_only = torch.frombuffer(bytes(torch.randn(64).numpy().tobytes()), dtype=torch.float32)[None, None]
    for held in (torch.randn(1, 1, 64), of_inference, read_only):
        kept = held.clone()
        for each in (model, plain):
            each.model.layers[0].self_attn.q_proj = Held(held)
        for ids in (prompt(1), prompt(12)):
            assert near(logits(model, ids), logits(plain, ids), 3e-5)
        assert torch.equal(held, kept)


@torch.no_grad()
@pytest.mark.skipif(EARLY, reason="its layers are left to torch")
def test_the_last_structs_of_a_layer_may_be_taken_by_another_thread_meanwhile():
    calls = decoder.Layer(both()[0].model.layers[0]).fused.calls(torch.float32)
    calls._free = type("Emptied", (list,), {"__bool__": lambda _: True})()  # as it was when it was asked
    assert calls.take().before is not calls.take().before
