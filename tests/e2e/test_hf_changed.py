"""Goal: a model that is changed while attached is never served KV of what it was, whatever goes wrong then.

Method: tiny random models whose weights, modes or code are changed between calls, on the in-memory fake;
plain generation of the changed model as reference.
"""

import pytest
import torch

import kvclient.hf
from kvclient.errors import Unavailable
from kvclient.hf import dimensions
from tests.engines.zoo import build, generate, prompt

BLOCK = 16


@pytest.fixture
def model():
    return build("llama", layers=2)


@pytest.fixture
def kv(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        yield kv


def change(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.5)


def foreign_hook(*_):
    return None


@pytest.mark.parametrize("error", [KeyboardInterrupt, Unavailable])
def test_an_examination_that_was_cut_off_is_made_again(model, kv, client, monkeypatch, error):
    def fail(*_):
        raise error("once")

    change(model)
    with monkeypatch.context() as patch:
        if error is Unavailable:
            patch.setattr(client, "register_layout", fail)
        else:
            patch.setattr(dimensions, "_digest_bytes", fail)
        with pytest.raises(error):
            generate(model, prompt(70), 1)
    generate(model, prompt(70), 1)
    assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 64


def test_a_refresh_that_is_refused_leaves_the_attachment_refused(model, kv):
    handle = model.model.layers[1].register_forward_hook(foreign_hook)
    with pytest.raises(kvclient.hf.Refused):
        kv.refresh()
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused"
    handle.remove()
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 64


def test_a_refusal_is_found_out_once(model, kv, monkeypatch):
    model.model.layers[1].register_forward_hook(foreign_hook)
    generate(model, prompt(70), 1)
    monkeypatch.setattr(kv, "_examine", None)
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused"


def test_a_part_in_training_mode_is_left_alone(model, kv):
    model.model.layers[0].mlp.train()
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "training"
    model.eval()
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 64


def test_a_weights_digest_that_was_given_ends_with_the_weights(model, client):
    options = {"block_tokens": BLOCK, "self_test": False, "weights_digest": bytes(32)}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, prompt(70), 1)
        change(model)
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 0
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 64
