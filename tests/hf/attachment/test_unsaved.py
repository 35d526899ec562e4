"""Goal: what a model computes with and no state_dict has (numbers, tensors, classes, code, configuration) is
watched while attached, and part of the identity.

Method: as test_changed.py, whose subject are weights, hooks and modes.
"""

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.attachment import model_state
from tests.hf.zoo import build, generate, prompt

OPTIONS = {"block_tokens": 16, "self_test": False, "in_place": False}


@pytest.fixture
def model():
    return build("llama", layers=2)


@pytest.fixture
def kv(model, client):
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        yield kv


def reused(model, client):
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        return kv.last.reused_tokens


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Louder(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.5


def put_plain_table(model, factor=0.5):
    rope = model.model.rotary_emb
    rope.inv_freq = rope._buffers.pop("inv_freq") * factor


def halve_plain_table(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


PLAIN = {
    "a norm's epsilon": lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "a scale": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 1.0),
    "a scale that is a tensor": lambda m: setattr(m.model.layers[0].self_attn, "scaling", torch.tensor(1.0)),
    "an activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", Doubled().eval()),
    "a class": lambda m: setattr(m.model.layers[0].mlp.up_proj, "__class__", Louder),
    "a table as a plain tensor": put_plain_table,
    "a buffer that is not saved": lambda m: m.model.layers[0].scale.mul_(1.5),
}


def with_buffer(model):
    """As Gemma's scaled embedding has one."""
    layer = model.model.layers[0]
    layer.register_buffer("scale", torch.tensor(2.0), persistent=False)
    layer.mlp.act_fn = Scaled(layer).eval()
    return model


class Scaled(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.held = (layer,)

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.held[0].scale


@pytest.mark.parametrize("change", PLAIN)
def test_what_is_no_weight_is_watched_and_part_of_the_identity(client, change):
    def fresh():
        return with_buffer(build("llama", layers=2))

    model, other, ids = fresh(), fresh(), prompt(70)
    PLAIN[change](other)
    wanted, logits, _ = generate(other, ids)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, ids)
        PLAIN[change](model)
        tokens, found, _ = generate(model, ids)
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)
        assert torch.equal(tokens, wanted) and torch.equal(found, logits)
        generate(model, ids)
        assert kv.last.reused_tokens == 64
    assert reused(fresh(), client) == 64
    assert reused(other, client) == 64, "the same in another process"


def test_a_plain_table_that_is_exchanged_is_another(client):
    model, ids = build("llama", layers=2), prompt(70)
    put_plain_table(model)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, ids)
        halve_plain_table(model)
        generate(model, ids)
        assert kv.last.reused_tokens == 0
        model.model.rotary_emb.inv_freq.mul_(0.5)
        generate(model, ids)
        assert kv.last.reused_tokens == 0


def test_a_class_that_was_patched_is_part_of_the_identity(model, kv, client, monkeypatch):
    kind = type(model.model.layers[0].mlp)
    original = kind.forward

    def forward(self, x):
        return original(self, x) * 3

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 0
        kv.detach()
        assert reused(build("llama", layers=2), client) == 64
    assert reused(build("llama", layers=2), client) == 64


def test_a_field_of_the_configuration_is_watched(model, kv):
    """Passes read some of them while they run: of masks above all."""
    model.config.sliding_window = 8
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 0
    model.config.layer_types = ["sliding_attention"] * 2
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused" and "sliding" in kv.last.bypass_detail
    del model.config.sliding_window, model.config.layer_types
    model.config.use_cache = model.config.use_cache  # one that says nothing of KV
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 64


class Counting(torch.nn.Embedding):
    calls, last = 0, None

    def forward(self, ids):
        self.calls, self.last = self.calls + 1, ids
        return super().forward(ids)


def test_what_a_pass_itself_changes_is_no_change(model, client, monkeypatch):
    """A counter, and the newest of something: neither examined again and again, nor part of the identity."""
    model.model.embed_tokens.__class__ = Counting
    model.model.embed_tokens.calls, model.model.embed_tokens.last = 0, torch.zeros(1)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        with monkeypatch.context() as patch:
            patch.setattr(kv._model_state, "examine", None)
            for options in ({}, {"num_beams": 2}, {"use_cache": False}, {"output_attentions": True}):
                generate(model, prompt(70), 3, **options)
        assert kv.stats["reused_tokens"] > 0
    assert reused(model, client) == 64


NOTED: list[int] = []


def test_what_the_code_notes_down_is_no_change(model, client, monkeypatch):
    """In a list of its closure, and of its file: a function put around a layer's forward to look on."""
    kind, noted = type(model.model.layers[0]), []
    original = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        noted.append(hidden_states.shape[1])
        NOTED.append(hidden_states.shape[1])
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        with monkeypatch.context() as patch:
            patch.setattr(kv._model_state, "examine", None)
            generate(model, prompt(70), 3)
        assert kv.last.reused_tokens == 64 and noted and NOTED
    noted.clear()
    assert reused(model, client) == 64


def look_both_ways(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


class Mixed(torch.nn.Linear):
    """One scale for all tokens of a pass, as activations that are quantised dynamically have it."""

    def forward(self, x):
        scale = x.abs().max() / 7
        return super().forward((x / scale).round() * scale)


AHEAD = {
    "attention both ways": look_both_ways,
    "so configured": lambda m: setattr(m.config, "is_causal", False),
    "one scale for a pass": lambda m: setattr(m.model.layers[0].mlp.up_proj, "__class__", Mixed),
}


@pytest.mark.parametrize("change", AHEAD)
def test_one_that_is_changed_to_look_ahead_is_refused(client, model, kv, change):
    """The KV of a prefix hangs on what follows it then; attach() refuses such a model."""
    kv.detach()
    with kvclient.hf.attach(model, client, block_tokens=16) as kv:
        AHEAD[change](model)
        generate(model, prompt(70), 1)
        assert kv.last.bypassed == "refused" and "what follows" in kv.last.bypass_detail
    with pytest.raises(kvclient.hf.Refused, match="depends on what follows"):  # the class has passed
        kvclient.hf.attach(model, client, block_tokens=16)


def test_one_that_is_changed_is_tried_as_it_computes_and_once(client, model, kv, monkeypatch):
    """Not as a caller's autocast has it; what was accepted is not tried again; no memory is no refusal."""
    tried, scaling = [], model.model.layers[0].self_attn.scaling
    whole = model_state.goes_on
    monkeypatch.setattr(model_state, "goes_on", lambda m: tried.append(0) or whole(m))
    for factor in (1.5, 1.0, 1.5):
        model.model.layers[0].self_attn.scaling = scaling * factor
        with torch.autocast("cpu", torch.bfloat16):
            generate(model, prompt(70), 1)
        assert kv.last.bypassed == "autocast"
        generate(model, prompt(70), 1)
        assert kv.last.bypassed is None
    assert len(tried) == 1
    model.model.layers[0].self_attn.scaling = scaling * 2

    def without_memory(_model):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model_state, "goes_on", without_memory)
        generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused"
    generate(model, prompt(70), 1)
    assert kv.last.bypassed is None


class Packed(torch.nn.Module):
    """Weights that are no tensors of its own, as those of torch.ao.quantization.quantize_dynamic()."""

    def __init__(self, inner, factor, scale=None):
        super().__init__()
        self._inner, self._held = [inner], torch.full((1000,), factor)
        if scale is not None:
            self._held = torch.quantize_per_tensor(self._held, scale, 0, torch.qint8)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}packed"] = (self._held, {"bias": None})

    def forward(self, x):
        held = self._held.dequantize() if self._held.is_quantized else self._held
        return self._inner[0](x) * held[0]


def test_weights_in_containers_are_of_the_identity_quantised_ones_are_refused(client):
    def with_packed(*how):
        model = build("llama", layers=2)
        model.model.layers[0].mlp = Packed(model.model.layers[0].mlp, *how).eval()
        return model

    assert reused(with_packed(1.0), client) == 0
    assert reused(with_packed(1.0), client) == 64
    assert reused(with_packed(0.5), client) == 0
    with pytest.raises(InvalidArgument, match="has no plain bytes"):
        reused(with_packed(1.0, 0.1), client)
