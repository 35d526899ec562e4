"""attach() and detach(): the identity of a live model, refusals, and that nothing of the model is left
changed.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention

import kvclient
import kvclient.hf
from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.model import structure
from kvclient.hf.proof import self_test
from tests.hf.zoo import build, generate, prompt

BLOCK = 16


def reuse_of(model, client, **options):
    """Tokens that this model, attached now, takes from the store for a prompt of four blocks and a bit."""
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False, **options) as kv:
        generate(model, prompt(70), 1)
        return kv.last.reused_tokens


# ---------------------------------------------------------------- identity (docs/design.md §8; cases 10 and
# 19 of docs/proof.md)


def test_an_equal_model_hits(client):
    reuse_of(build("llama"), client)
    assert reuse_of(build("llama"), client) == 64


def scaled(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    return model


def through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data[3, 3] += 1.0
    return model


def with_config(**fields):
    def change(model):
        for name, value in fields.items():
            setattr(model.config, name, value)
        return model

    return change


def with_rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)
    return model


CHANGES = {
    "one weight": scaled,
    "one weight, written through .data": through_data,
    "another seed": lambda model: build("llama", seed=1),
    "dtype": lambda model: model.to(torch.bfloat16),
    "attention implementation": lambda model: build("llama", attention="eager"),
    "revision": with_config(_commit_hash="abc"),
    "a configuration field": with_config(rms_norm_eps=1e-3),
    "an unknown configuration field": with_config(of_next_year=1),
    "rope table": with_rope,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_difference_of_the_model_misses(client, change):
    reuse_of(build("llama"), client)
    assert reuse_of(CHANGES[change](build("llama")), client) == 0


@pytest.mark.parametrize("options", [{"salt": b"tenant"}, {"salt": "tenant"}, {"weights_digest": bytes(32)}])
def test_any_difference_of_the_options_misses(client, options):
    reuse_of(build("llama"), client)
    assert reuse_of(build("llama"), client, **options) == 0
    assert reuse_of(build("llama"), client, **options) == 64


def test_the_namespaces_salt_is_part_of_the_identity(client):
    """Whether it was known at attach, comes with the first daemon, or changes with a later one."""
    reuse_of(build("llama"), client)
    client.salt = bytes(31) + b"1"
    assert reuse_of(build("llama"), client) == 0
    assert reuse_of(build("llama"), client) == 64
    assert reuse_of(build("llama"), client, salt=b"own") == 0, "the caller's own salt counts beside it"
    model, ids = build("llama"), prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        salted = kv.identity
    client.salt = None  # no daemon has said yet
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        seen = {None: kv.identity}
        for salt in (b"", bytes(32), bytes(31) + b"1", bytes(32), None, b""):
            client.salt = salt
            generate(model, ids)
            seen.setdefault(salt, kv.identity)
            assert kv.identity == seen[salt] or salt is None, salt
        assert seen[None] == seen[b""] and len(set(seen.values())) == 3
        assert salted == seen[bytes(31) + b"1"], "it counts from the first moment"


def test_what_cannot_matter_hits(client):
    reuse_of(build("llama"), client)
    changed = with_config(_name_or_path="elsewhere", eos_token_id=7, architectures=["X"])(build("llama"))
    assert reuse_of(changed, client) == 64


def test_a_model_that_changes_while_attached_is_digested_anew(client):
    model, ids = build("llama"), prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        before = kv.identity
        scaled(model)
        plain = type(model).generate(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=8,
                                     do_sample=False, pad_token_id=0)  # fmt: skip
        tokens, *_ = generate(model, ids)
        assert kv.last.reused_tokens == 0
        assert kv.identity != before
        assert torch.equal(tokens, plain)
        model.to(torch.bfloat16)
        generate(model, ids)
        assert kv.last.bypassed is None
        assert kv.last.reused_tokens == 0
        generate(model, ids)
        assert kv.last.reused_tokens == 64


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_is_a_change_fused_ones_count_no_versions(client, fused):
    model, other, ids = build("llama"), build("llama", seed=1), prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        for trained, reused in ((other, 64), (model, 0)):
            optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, fused=fused)
            trained(ids, labels=ids).loss.backward()
            optimizer.step()
            tokens, *_ = generate(model, ids)
            assert kv.last.reused_tokens == reused
            with kv.bypass():
                assert torch.equal(generate(model, ids)[0], tokens)


def test_refresh_sees_what_was_written_through_data(client):
    model = build("llama")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        before = kv.identity
        through_data(model)
        kv.refresh()
        assert kv.identity != before
    with pytest.raises(kvclient.Closed):
        kv.refresh()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("on", [r"layers\.1", "all modules"])
def test_a_foreign_hook_is_refused_at_attach_and_while_attached(client, on):
    model = build("llama")
    everywhere = torch.nn.modules.module.register_module_forward_hook
    put = everywhere if on == "all modules" else model.model.layers[1].register_forward_hook
    handle = put(lambda *_: None)
    with pytest.raises(kvclient.hf.Refused, match=f"hook.*{on}"):
        kvclient.hf.attach(model, client)
    handle.remove()
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, prompt(70))
        handle = put(lambda *_: None)
        generate(model, prompt(70))
        assert kv.last.bypassed == "refused"
        handle.remove()
        generate(model, prompt(70))
        assert kv.last.reused_tokens == 64


def test_another_function_in_the_place_of_torchs_is_refused(client, monkeypatch):
    model, attention = build("llama", layers=2), torch.nn.functional.scaled_dot_product_attention
    other = lambda *args, **kwargs: attention(*args, **kwargs)  # noqa: E731
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, prompt(70))
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)
            generate(model, prompt(70))
            assert kv.last.bypassed == "refused" and "lambda" in kv.last.bypass_detail
            with pytest.raises(kvclient.hf.Refused, match="lambda"):
                kvclient.hf.attach(build("llama", layers=2), client)
        generate(model, prompt(70))
        assert kv.last.reused_tokens == 64


def test_what_is_no_causal_model_is_refused(client):
    with pytest.raises(kvclient.hf.Refused, match="generate"):
        kvclient.hf.attach(torch.nn.Linear(2, 2), client)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(kvclient.hf.Refused, match="encoder-decoder"):
        kvclient.hf.attach(transformers.T5ForConditionalGeneration(config).eval(), client)


def test_the_self_test_refuses_wrong_kv(client, monkeypatch, verdicts):
    """Each of the self-test's comparisons fails when what it compares is wrong."""
    original = StoreLayer._open

    def shifted(self, *args):
        opened = self._storage is None
        original(self, *args)
        if opened and self._length:
            self._storage[:, :, :, : self._length] += 0.1

    monkeypatch.setattr(StoreLayer, "_open", shifted)
    with pytest.raises(kvclient.hf.Refused, match="KV from the store"):
        kvclient.hf.attach(build("llama"), client, in_place=False)


def test_the_self_test_refuses_a_model_that_looks_ahead(client, verdicts):
    """A bidirectional model: the KV of a prefix depends on what follows it."""
    model = build("llama")

    class LooksAhead(torch.nn.Embedding):
        def forward(self, ids):
            out = super().forward(ids)
            return out + out.mean(dim=1, keepdim=True)

    model.model.embed_tokens.__class__ = LooksAhead
    with pytest.raises(kvclient.hf.Refused, match="depends on what follows"):
        kvclient.hf.attach(model, client)


class ByLength(LlamaAttention):
    """What a token becomes hangs on how many there are by its pass, as RoPE that grows with the prompt."""

    def forward(self, hidden_states, **others):
        cache = others.get("past_key_values")
        count = hidden_states.shape[1] + (0 if cache is None else cache.get_seq_length(self.layer_idx))
        return super().forward(hidden_states * (1 + 0.02 * count), **others)


class Counts(torch.nn.Embedding):
    calls = 0

    def forward(self, ids):
        type(self).calls += 1
        return super().forward(ids) * (1 + 1e-6 * self.calls)


@pytest.mark.parametrize(("kind", "why"), [(ByLength, "depends on what"), (Counts, "each pass changes")])
def test_the_self_test_refuses_what_hangs_on_the_pass(client, verdicts, kind, why):
    model = build("llama", layers=2)
    for module in model.modules():
        if type(module) is kind.__base__:
            module.__class__ = kind
    with pytest.raises(kvclient.hf.Refused, match=why):
        kvclient.hf.attach(model, client, in_place=False)


def test_the_self_test_refuses_when_generate_goes_elsewhere(client, verdicts, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(
        type(model), "_prefill", lambda self, ids, config, kwargs, **_: self(ids, use_cache=False)
    )
    with pytest.raises(kvclient.hf.Refused):
        kvclient.hf.attach(model, client)


def test_the_self_test_runs_once_per_kind_of_model(client, verdicts, monkeypatch):
    runs = []
    original = self_test._Trial.run
    monkeypatch.setattr(self_test._Trial, "run", lambda *args: runs.append(1) or original(*args))
    for name in ("llama", "llama", "qwen2"):
        kvclient.hf.attach(build(name), client).detach()
    assert len(runs) == 2


def test_the_self_test_leaves_no_trace(client, verdicts):
    model = build("llama")
    torch.manual_seed(3)
    state, keys = torch.get_rng_state(), set(model.__dict__)
    verdict = kvclient.hf.self_test(model)
    assert verdict.padded
    assert verdict.difference < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert set(model.__dict__) == keys
    assert client.stats()["blocks"] == 0


def test_padding_is_left_alone_where_the_self_test_found_it_wrong(client):
    model = build("llama")
    ids = prompt(40)
    mask = torch.tensor([[0] * 4 + [1] * 36])
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        kv.padded = False
        generate(model, ids, 1, attention_mask=mask)
        assert kv.last.bypassed == "padding"
        generate(model, ids, 1)
        assert kv.last.bypassed is None


def test_length_dependent_rope_is_refused():
    config = build("llama").config
    for kind in structure.LENGTH_DEPENDENT_ROPE:
        assert kind in {"dynamic", "longrope"}
        config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
        model = build("llama")
        model.config = config
        with pytest.raises(kvclient.hf.Refused, match=kind):
            structure.check_structure(model)


# ---------------------------------------------------------------- the model is left as it was


def test_detach_restores_the_model(client):
    model = build("llama")
    before = dict(model.__dict__)
    kv = kvclient.hf.attach(model, client, block_tokens=BLOCK)
    with pytest.raises(kvclient.InvalidArgument, match="attached already"):
        kvclient.hf.attach(model, client)
    kv.detach()
    kv.detach()
    assert model.__dict__ == before
    generate(model, prompt(40))
    assert client.stats()["blocks"] == 0
    kvclient.hf.attach(model, client).detach()


def test_an_own_generate_of_the_instance_is_kept(client):
    model = build("llama")
    calls = []
    original = model.generate

    def mine(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    model.generate = mine
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(40))
        assert kv.last.published_blocks == 2
    assert calls == [1]
    assert model.generate is mine


def test_copies_are_not_attached(client):
    model, ids = build("llama"), prompt(40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            copied.lm_head.weight.neg_()
        requests = kv.stats["requests"]
        ours, theirs = generate(model, ids)[0], generate(copied, ids)[0]
        assert not torch.equal(ours, theirs), "the copy ran the original"
        assert torch.equal(generate(unpickled, ids)[0], ours)
        assert kv.stats["requests"] == requests + 1
        with kvclient.hf.attach(copied, client, block_tokens=BLOCK) as other:
            generate(copied, ids)
            assert other.last.published_blocks == 2


def test_a_dropped_model_is_collected(client):
    model = build("llama")
    kvclient.hf.attach(model, client, block_tokens=BLOCK)
    generate(model, prompt(40))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_the_report_adds_up(client):
    model, ids = build("llama"), prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        generate(model, ids)
        last, stats = kv.last, kv.stats
    assert last.prompt_tokens == 70
    assert last.reused_by_tier == {"shm": 64, "disk": 0, "peer": 0}
    assert 0 < last.load_s < last.ttft_s < last.total_s
    assert last.lookup_s + last.load_s + last.prefill_s <= last.ttft_s
    assert (stats["requests"], stats["hits"], stats["reused_tokens"]) == (2, 1, 64)
    assert stats["bypassed"] == {} and stats["reused_by_tier"] == last.reused_by_tier


@pytest.mark.parametrize("timeout_s", [0, -1, 4000])
def test_bounds_are_checked(client, timeout_s):
    with pytest.raises(kvclient.InvalidArgument, match="follow_timeout_s"):
        kvclient.hf.attach(build("llama"), client, follow_timeout_s=timeout_s)
