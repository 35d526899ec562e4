"""Goal: a model that is changed while attached is never served KV of what it was, whatever goes wrong then.

Method: tiny random models whose weights, modes or code are changed between calls, on the in-memory fake;
plain generation of the changed model as reference.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
import transformers

import kvclient.hf
from kvclient.client.tolerant import TolerantWriter
from kvclient.errors import DeadlineExceeded, Unavailable
from kvclient.hf.attention.handle import give_handle
from kvclient.hf.model import identity
from kvclient.hf.request.request import Request
from kvclient.hf.request.tolerance import Rest
from kvclient.hf.reuse.blend import _Hook
from kvclient.testing.in_memory import Writer
from tests.hf.zoo import build, generate, near, prompt

BLOCK = 16


def tiny():
    model = build("llama", layers=2)
    model.model.layers[0].self_attn.attention_dropout = 0.1  # nothing in evaluation mode
    return model


@pytest.fixture
def model():
    return tiny()


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
            patch.setattr(identity, "_digest_bytes", fail)
        if error is Unavailable:
            with pytest.warns(UserWarning, match="once"):
                generate(model, prompt(70), 1)
            assert kv.last.bypassed == "unavailable" and "once" in kv.last.bypass_detail
        else:
            with pytest.raises(error):
                generate(model, prompt(70), 1)
    kv._rest = Rest()  # on a slow machine the store would be left alone for some milliseconds
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
    monkeypatch.setattr(kv._model_state, "examine", None)
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused"


def test_a_part_in_training_mode_is_left_alone(model, kv):
    model.model.layers[0].self_attn.train()
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


def test_a_forward_of_a_modules_own_is_refused_at_attach_and_while_attached(model, kv, client):
    module = model.model.layers[0].mlp
    original = module.forward
    module.forward = lambda x: original(x) * 3
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused"
    kv.detach()
    with pytest.raises(kvclient.hf.Refused, match=r"forward.*layers\.0\.mlp"):
        kvclient.hf.attach(model, client, self_test=False)
    module.forward = original  # as accelerate leaves it when it takes its hooks off
    assert reused(model, client) == 64


def test_what_only_goes_round_a_modules_forward_is_served(model, client):
    reused(model, client)
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, accelerate.hooks.ModelHook())
    module = model.model.layers[1].mlp
    module.forward = torch.compile(module.forward, backend="eager")
    assert reused(model, client) == 64


def test_a_scale_is_watched_and_part_of_the_identity(model, kv, client):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    generate(model, prompt(70), 1)
    assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)
    kv.detach()
    assert reused(tiny(), client) == 64
    assert reused(model, client) == 64


def reused(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        return kv.last.reused_tokens


# ---------------------------------------------------------------- conversations and trials


class Words:
    """A tokenizer of numbers."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))


@pytest.fixture
def engine(model, client):
    with kvclient.hf.Engine(model, Words(), client, block_tokens=32, self_test=False) as engine:
        yield engine


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has one switch for all backends"
)
def test_the_precision_of_one_backend_is_part_of_the_identity(model, kv):
    """torch then refuses to say one for all, which calls must not fail by."""
    switch, seen = torch.backends.mkldnn.matmul, {kv.identity}
    try:
        for precision in ("bf16", "tf32"):
            switch.fp32_precision = precision
            generate(model, prompt(70), 1)
            assert kv.last.reused_tokens == 0 and kv.identity not in seen
            seen.add(kv.identity)
    finally:
        switch.fp32_precision = "none"
    generate(model, prompt(70), 1)
    assert kv.last.reused_tokens == 64 and kv.identity in seen


def test_a_conversation_does_not_go_on_with_other_weights(engine, model):
    window = kvclient.hf.Window(recent=64, older=64)
    talk, text = engine.conversation("one", window=window), prompt(20)[0].tolist()
    talk.say(text, 2)
    weights = model.model.layers[0].self_attn.k_proj.weight
    before = weights.detach().clone()
    change(model)
    with pytest.raises(kvclient.hf.Refused, match="changed"):
        talk.say(text, 2)
    assert engine.conversation("one", window=window).turn == 0
    with torch.no_grad():
        weights.copy_(before)
    assert talk.say(text, 2).saved
    assert talk.turn == 2
    change(model)
    talk.forget()
    assert talk.say(text, 2).saved
    assert engine.conversation("one", window=window).turn == 1


def test_a_turn_whose_weights_change_meanwhile_is_undone(engine, model):
    talk, text = engine.conversation("two"), prompt(20)[0].tolist()
    with pytest.raises(kvclient.hf.Refused, match="changed"):
        talk.say(text, 2, on_token=lambda *_: change(model))
    assert (talk.turn, engine.conversation("two").turn) == (0, 0)


def test_a_conversation_is_refused_while_a_module_trains(engine, model):
    talk = engine.conversation("three")
    model.model.layers[0].self_attn.train()
    with pytest.raises(kvclient.hf.Refused, match="training"):
        talk.say([1, 2, 3], 2)
    model.eval()
    assert talk.say([1, 2, 3], 2).saved


def test_what_is_verified_is_the_model_as_it_is_now(model, kv):
    texts = [prompt(120)[0].tolist()]
    model.bfloat16()
    assert kv.verify(texts)["prefix"].passed
    model.model.layers[0].register_forward_hook(foreign_hook)
    for trial in (kv.verify, kv.calibrate):
        with pytest.raises(kvclient.hf.Refused, match="hook"):
            trial(texts)


# ---------------------------------------------------------------- arguments


def test_end_tokens_may_come_as_a_tensor(model, kv):
    generate(model, prompt(70), 2, eos_token_id=torch.tensor([2, 3]))
    assert kv.last.reused_tokens == 64


def test_a_hook_that_is_called_without_keywords_lets_them_be():
    assert _Hook(None, 0, threading.get_ident())(None, ()) is None


# ---------------------------------------------------------------- what a look at the model leaves


@pytest.mark.usefixtures("verdicts")
def test_each_module_keeps_its_mode(client):
    model = build("llama", layers=2).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair="none") as kv:
        kv.verify([prompt(120)[0].tolist()])
    assert [module.training for module in model.modules()] == modes


def test_a_call_whose_claims_cannot_be_given_back_is_counted(model, client, monkeypatch):
    """And what it read is let go of."""

    def fail(*_):
        raise Unavailable("gone")

    def late(*_):
        raise DeadlineExceeded("gone")

    options = {"self_test": False, "in_place": False, "on_error": "raise"}
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, **options) as kv:
        generate(model, prompt(40), 1)
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "abort", late)
            patch.setattr(Request, "token", fail)
            patch.setattr(Request, "_prefilled", fail)
            with pytest.raises(DeadlineExceeded):
                generate(model, prompt(70), 1)
        assert kv.stats["requests"] == 2
        assert client.stats()["pins"] == 0


def test_blocks_that_could_not_be_sealed_are_not_counted_as_published(model, client, monkeypatch):
    monkeypatch.setattr(Writer, "seal", lambda *_: False)  # a tolerant client's, whose store is gone
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        assert kv.last.published_blocks == 0


def test_a_cache_used_after_detach_spoils_no_other_attachment(model, client):
    options = {"block_tokens": BLOCK, "self_test": False}
    with kvclient.hf.attach(model, client, **options, in_place=True):
        _, _, cache = generate(model, prompt(70))
    give_handle(torch.zeros(1), cache.layers[0])  # as a pass over it without our attention leaves it
    assert reused(build("qwen2", layers=2), client) == 0


def test_a_tolerant_writer_says_what_it_could_not_seal():
    def fail(_index, _zero_rest):
        raise Unavailable("gone")

    client = SimpleNamespace(suppressed_total=0)
    assert TolerantWriter(client, SimpleNamespace(seal=fail)).seal() is False
    assert TolerantWriter(client, SimpleNamespace(seal=lambda *_: None)).seal() is True


# ---------------------------------------------------------------- what is said of a refusal


def test_a_call_that_is_left_alone_says_why_in_full(model, kv):
    handle = model.model.layers[1].register_forward_hook(foreign_hook)
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "refused" and "foreign_hook on model.layers.1" in kv.last.bypass_detail
    handle.remove()
    model.model.layers[0].self_attn.train()
    generate(model, prompt(70), 1)
    assert kv.last.bypassed == "training" and "eval()" in kv.last.bypass_detail
    model.eval()
    generate(model, prompt(70), 2, use_cache=True, position_ids=torch.arange(5, 75)[None])
    assert (kv.last.bypassed, kv.last.bypass_detail) == ("position_ids", "not 0 to n-1")
    generate(model, prompt(70), 1)
    assert (kv.last.bypassed, kv.last.bypass_detail) == (None, None)


def test_a_call_that_is_served_dense_says_why(model, client):
    options = {"block_tokens": BLOCK, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, prompt(70), 2)
        assert kv.last.dense is None
        _, _, cache = generate(model, prompt(70), 2)
        assert cache.layers[0].keys is not None
        assert kv.last.dense is None, "what becomes of the cache afterwards is not the call's"
        generate(model, prompt(70), 2, num_beams=2)
        assert kv.last.dense == "rows"
        model.set_attn_implementation("sdpa")
        generate(model, prompt(70), 2)
        assert kv.last.dense == "switched"
    with kvclient.hf.attach(model, client, **options, in_place=False) as kv:
        generate(model, prompt(70), 2)
        assert kv.last.dense is None, "that was asked for"


# ---------------------------------------------------------------- changes within a call


def trained(model):
    model.model.layers[0].self_attn.train()


def rescaled(model):
    model.model.layers[0].self_attn.scaling = 1.0


class After(transformers.LogitsProcessor):
    """Does something to the model once the text is so long."""

    def __init__(self, length, act, model):
        self.length, self.act, self.model = length, act, model

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            self.act(self.model)
        return scores


@pytest.mark.parametrize("act", [change, trained, rescaled])
def test_what_a_call_says_with_a_changed_model_is_not_published(model, kv, act):
    """It would have the identity of the model with which the call began."""
    ids, act_then = prompt(70, seed=2), [After(85, act, model)]
    tokens = generate(model, ids, 40, logits_processor=transformers.LogitsProcessorList(act_then))[0]
    assert (kv.last.write_bypassed, kv.last.published_blocks) == ("changed", 5), "one block behind the prompt"
    fresh = tiny()
    plain = generate(fresh, tokens, 4)[1]
    with kvclient.hf.attach(fresh, kv.client, block_tokens=BLOCK, self_test=False) as other:
        logits = generate(fresh, tokens, 4)[1]
        assert other.last.reused_tokens == 80 and near(logits, plain)


@pytest.mark.parametrize("act", [change, trained, rescaled])
def test_a_prompt_computed_while_the_model_changes_is_not_published(model, kv, client, monkeypatch, act):
    original, before = type(model)._prefill, client.stats()["blocks"]

    def prefill(model, *args, **kwargs):
        out = original(model, *args, **kwargs)
        act(model)
        return out

    monkeypatch.setattr(type(model), "_prefill", prefill)
    generate(model, prompt(70, seed=2), 30)
    assert (kv.last.write_bypassed, kv.last.published_blocks) == ("changed", 0)
    assert (client.stats()["blocks"], client.stats()["created"]) == (before, 0)
