"""Proves that attach() reads blocks in place wherever it can, by itself, and nowhere else without saying so.

Method: every reason against it is made to hold for a tiny model; what is then generated is the model's own
answer, from a dense cache, `backend` says what computes it, and the reason is counted once.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention import backends
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.connector.load import PrefixSource
from tests.hf.census import TINY
from tests.hf.zoo import VOCAB, generate, known, near, prompt

BLOCK = 16

pytestmark = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)


def in_place(model, client):
    return kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=True)


def test_it_is_the_default_and_leaves_with_the_attachment(client, left):
    model, ids = known("llama"), prompt(61)
    plain, logits, _ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv.backend.startswith("cpu_")
        for _ in range(2):
            tokens, found, cache = generate(model, ids)
            assert torch.equal(tokens, plain) and near(found, logits)
        assert all(isinstance(layer, InPlaceLayer) and layer.origin == 48 for layer in cache.layers)
    assert torch.equal(generate(model, ids)[1], logits)
    assert model.config._attn_implementation == "sdpa"
    assert left() == {}


def refuse_self_test(monkeypatch):
    original = PrefixSource.arrays

    def wrong(self, layer):
        return [
            part._replace(block=(part.block[0], part.block[1] + np.float32(1)))
            for part in original(self, layer)
        ]

    monkeypatch.setattr(PrefixSource, "arrays", wrong)


def choose_eager(model):
    model.set_attn_implementation("eager")


DENSE = {
    "own_attention": ("falcon", None),
    "chosen_attention": ("llama", choose_eager),
    "dtype": ("llama", lambda model: model.to(torch.float64)),
    "torch": ("llama", lambda model: attention.install(model, "torch")),
}


@pytest.mark.parametrize("reason", DENSE)
def test_what_cannot_be_served_in_place_is_served_dense_and_counted(client, left, reason):
    name, change = DENSE[reason]
    model, ids = known(name), prompt(61)
    if change is not None:
        change(model)
    before = model.config._attn_implementation
    if reason == "dtype":  # no block holds float64
        with pytest.raises(kvclient.hf.Refused):
            kvclient.hf.attach(model, client, block_tokens=BLOCK)
        assert left() == {reason: 1}
        return
    plain, logits, _ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv.backend == (attention.installed(model) or before)
        for reused in (0, 48):
            tokens, found, cache = generate(model, ids)
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain) and near(found, logits)
        assert not any(isinstance(layer, InPlaceLayer) for layer in cache.layers)
    assert model.config._attn_implementation == before
    assert left() == {reason: 1}


def test_a_backend_forced_to_torch_is_dense_and_counted(client, left, monkeypatch):
    monkeypatch.setenv(backends.ENVIRONMENT, "torch")
    with kvclient.hf.attach(known("llama"), client, block_tokens=BLOCK) as kv:
        assert kv.backend == "sdpa"
    assert left() == {"torch": 1}


@pytest.mark.usefixtures("verdicts")
def test_a_self_test_that_fails_in_place_leaves_the_dense_way(client, left, monkeypatch):
    refuse_self_test(monkeypatch)
    model, ids = known("llama"), prompt(61)
    plain, logits, _ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv.backend == "sdpa"
        for _ in range(2):
            tokens, found, _ = generate(model, ids)
            assert torch.equal(tokens, plain) and near(found, logits)
        assert kv.last.reused_tokens == 48
    assert left() == {"self_test": 1}
    with pytest.raises(kvclient.hf.Refused, match="KV from the store"):
        in_place(model, client)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("verdicts")
def test_kernels_that_say_something_else_than_the_model_are_refused(client, monkeypatch):
    registered, original = attention.registered, attention.registered.attention

    def wrong(*args, **kwargs):
        return original(*args, **kwargs)[0] * 1.5, None

    monkeypatch.setattr(registered, "attention", wrong)
    registered.register.cache_clear()
    try:
        with pytest.raises(kvclient.hf.Refused, match="not the model's own"):
            in_place(known("llama"), client)
    finally:
        monkeypatch.undo()
        registered.register.cache_clear()
        registered.register(backends.choose(torch.device("cpu"), torch.float32, 8))


def test_kernels_that_the_user_installed_since_stay_when_the_attachment_leaves(client):
    """What an attachment brought is its own; what was installed in its place is not."""
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids)
    kv = kvclient.hf.attach(model, client, block_tokens=BLOCK)
    with pytest.raises(InvalidArgument, match="already"):
        attention.install(model)
    attention.uninstall(model)
    name = attention.install(model)
    assert torch.equal(generate(model, ids)[0], plain)
    kv.detach()
    assert attention.installed(model) == name
    attention.uninstall(model)
    assert model.config._attn_implementation == "sdpa"


def test_attention_switched_by_the_user_is_followed_and_counted(client, left):
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        model.set_attn_implementation("eager")
        for reused in (0, 48):  # another identity
            tokens, _, cache = generate(model, ids)
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain)
        assert not any(isinstance(layer, InPlaceLayer) for layer in cache.layers)
        assert kv.backend == "eager"
    assert model.config._attn_implementation == "eager"
    assert left() == {"switched": 1}


def test_a_copy_of_an_attached_model_has_the_kernels_until_it_is_attached_itself(client):
    model, ids = known("llama"), prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK):
        twin = copy.deepcopy(model)
    plain, *_ = generate(model, ids)
    assert torch.equal(generate(twin, ids)[0], plain)
    kvclient.hf.attach(twin, client, block_tokens=BLOCK).detach()
    assert twin.config._attn_implementation == model.config._attn_implementation == "sdpa"


class WithoutUs(pickle.Unpickler):
    """As in a process that does not have this library."""

    def find_class(self, module, name):
        assert not module.startswith("kvclient"), f"needs {module}.{name}"
        return super().find_class(module, name)


@pytest.mark.parametrize("by", [attention.install, kvclient.hf.attach])
def test_a_model_from_a_file_has_the_attention_of_before(client, by):
    model, ids = known("llama"), prompt(40)
    plain, *_ = generate(model, ids)
    by(model, *[client] * (by is kvclient.hf.attach))
    assert model.config._attn_implementation.startswith("kvclient_")
    copies = model, copy.deepcopy(model), model.config, copy.deepcopy(model.config)
    restored, other, *configs = [WithoutUs(io.BytesIO(pickle.dumps(copied))).load() for copied in copies]
    for loaded in (restored, other):
        assert torch.equal(generate(loaded, ids)[0], plain)
    assert {copied._attn_implementation for copied in (restored.config, other.config, *configs)} == {"sdpa"}
    attention.install(restored)
    with kvclient.hf.attach(restored, client, block_tokens=BLOCK) as kv:
        assert torch.equal(generate(restored, ids)[0], plain)
        assert kv.backend == attention.installed(restored)
    assert attention.installed(restored), "installed by name: not the attachment's to take off"


def test_layers_of_two_shapes_have_no_pages(client):
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    other = {"head_dim": 16, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    sizes = {**TINY, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    sizes |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, **other)).eval()
    with pytest.raises(InvalidArgument, match=r"1 heads of 16 and 2 heads of 16, .* one shape"):
        kvclient.hf.attach(model, client, paged=True)
    generate(model, prompt(20))  # it has the attention again that it had
