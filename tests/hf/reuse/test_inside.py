"""Reuse inside a prompt: found at any shift, moved to its place, repaired, and never taken for a prefix.

Owns the rules of kvclient.hf's approximate reuse on a tiny random model and the in-memory fake. How near the
answers are on a real model is test_inside_smollm2.py's, which architectures are served: test_architectures.
"""

import threading

import numpy as np
import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.blocks import meta
from kvclient.blocks.match import Piece
from kvclient.blocks.reuse_plan import APPROXIMATE, Segment
from kvclient.hf.call import Clock, Lost
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.rope import probe_rope
from kvclient.hf.request import request
from kvclient.hf.reuse.blend import Blend, NonPrefixReuse, decoder_layers
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import AUTO, BLOCK, COMPUTED, DOCUMENT, divergence
from tests.hf.zoo import build, generate, prompt


def asked(shift):
    """The document behind other tokens, at another offset."""
    return torch.cat([prompt(shift, seed=7), DOCUMENT, prompt(9, seed=4)], dim=1)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=6)


# ---------------------------------------------------------------- found


@pytest.mark.parametrize("shift", [1, 5, 15, 16, 21, 37])
def test_a_document_is_found_at_any_shift(attach, model, shift):
    kv = attach("none")
    generate(model, asked(shift))
    assert kv.last.reused_tokens == 0
    assert kv.last.approximate_tokens == 100
    assert kv.stats["approximate_tokens"] == 100


def test_what_is_found_starts_behind_the_exact_prefix(attach, model):
    kv = attach(AUTO)
    ids = torch.cat([COMPUTED[:, :64], prompt(3, seed=8), DOCUMENT, prompt(9, seed=4)], dim=1)
    generate(model, ids)
    assert kv.last.reused_tokens == 64
    assert kv.last.approximate_tokens == 100


def test_the_exact_prefix_goes_on_into_a_block_that_agrees_in_part(attach, model, client):
    kv = attach(AUTO)
    for agreed in (
        BLOCK * 4 + 1,
        BLOCK * 5 - 1,
        141 - 2,
    ):  # the last of these lies in the prompt's shorter last block
        ids = torch.cat([COMPUTED[:, :agreed], prompt(30, seed=agreed)], dim=1)
        ids[0, agreed] = (COMPUTED[0, min(agreed, 140)] + 1) % 300 + 3
        with kv.bypass():
            plain, plain_logits, cache = generate(model, ids, 1)
        tokens, logits, _ = generate(model, ids, 1)
        assert kv.last.reused_tokens == agreed
        assert kv.last.approximate_tokens == 0
        assert torch.equal(tokens, plain)
        torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-3)
        assert kv.last.published_blocks == len(ids[0]) // BLOCK - agreed // BLOCK + 1
        _, _, ours = generate(model, torch.cat([ids, prompt(3, seed=3)], dim=1), 1)
        assert kv.last.reused_tokens == len(ids[0])
        for mine, theirs in zip(ours.layers, cache.layers, strict=True):
            count = len(ids[0])  # blocks that begin with what was loaded are whole
            torch.testing.assert_close(mine.keys[:, :, :count], theirs.keys[:, :, :count], rtol=0, atol=1e-4)


def test_an_identical_prompt_leaves_one_token(attach, model):
    kv = attach(AUTO)
    tokens, logits, _ = generate(model, COMPUTED)
    assert kv.last.reused_tokens == 140
    with kv.bypass():
        plain, plain_logits, _ = generate(model, COMPUTED)
    assert torch.equal(tokens, plain)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-3)


def test_without_repair_only_prefixes_are_reused(attach, model):
    kv = attach(None)
    plain, plain_logits, _ = generate(model, asked(5))
    assert kv.last.reused_tokens == kv.last.approximate_tokens == 0
    with kv.bypass():
        again, logits, _ = generate(model, asked(5))
    assert torch.equal(plain, again) and torch.equal(plain_logits, logits)


def test_the_last_token_is_always_computed(attach, model):
    kv = attach("none")
    ids = torch.cat([prompt(5, seed=7), DOCUMENT], dim=1)
    generate(model, ids)
    assert kv.last.approximate_tokens == 99


def test_short_stretches_are_computed(attach, model):
    kv = attach(Repair("none", min_tokens=101))
    generate(model, asked(5))
    assert kv.last.approximate_tokens == 0


def test_chunked_prefill_stays_with_prefixes(attach, model):
    kv = attach("none")
    generate(model, asked(5), prefill_chunk_size=32)
    assert kv.last.approximate_tokens == 0


def test_beams_of_one_prompt_are_reused_inside(attach, model):
    kv = attach("none")
    generate(model, asked(6), num_beams=2)
    assert kv.last.approximate_tokens >= 200  # two rows of one prompt


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("method", ["cacheblend", "auto"])
def test_ratio_one_is_a_full_prefill_bit_by_bit(attach, model, method):
    kv = attach(Repair(method, ratio=1.0, caution=1.0))
    for shift in (1, 16, 40):
        tokens, logits, cache = generate(model, asked(shift))
        assert kv.last.approximate_tokens == 100 and kv.last.recomputed_tokens == 100
        with kv.bypass():
            plain, plain_logits, plain_cache = generate(model, asked(shift))
        assert torch.equal(tokens, plain)
        assert torch.equal(logits, plain_logits)
        for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_every_seam_token_is_a_full_prefill_too(attach, model):
    kv = attach(Repair("selective", seam_tokens=100))
    _, logits, _ = generate(model, asked(5))
    with kv.bypass():
        _, plain_logits, _ = generate(model, asked(5))
    assert torch.equal(logits, plain_logits)


def test_error_falls_with_the_ratio(attach, model):
    errors = []
    kv = attach("none")
    with kv.bypass():
        plain = {shift: generate(model, asked(shift), 1)[1] for shift in range(3, 60, 8)}
    kv.detach()
    for ratio in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        kv = attach(Repair("cacheblend", ratio=ratio))
        errors.append(np.mean([divergence(generate(model, asked(s), 1)[1], p) for s, p in plain.items()]))
        kv.detach()
    assert errors == sorted(errors, reverse=True), errors
    assert errors[0] > 100 * errors[-1] or errors[-1] == 0, errors


def test_moved_keys_are_those_of_the_new_place(attach, model):
    """In the first layer K and V depend on the token and its position only: there, moving is exact."""
    kv = attach("none")
    for shift in (1, 16, 300):
        _, _, cache = generate(model, asked(shift), 1)
        assert kv.last.approximate_tokens == 100
        with kv.bypass():
            _, _, plain = generate(model, asked(shift), 1)
        for ours, theirs in (
            (cache.layers[0].keys, plain.layers[0].keys),
            (cache.layers[0].values, plain.layers[0].values),
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_planted_seams_are_found(model):
    """Tokens whose stored KV is off are the ones that are computed anew."""
    planted = [3, 40, 41, 77]
    kv = Planted(model, 100, planted)
    non_prefix = NonPrefixReuse(
        probe_rope(model),
        decoder_layers(model, 6),
        Repair("cacheblend", ratio=0.04, sink_tokens=0, recency_tokens=0),
        model.config,
    )
    segment = Segment(10, 110, APPROXIMATE, (Piece(kv, 0, 100),), 10)
    form = BlockFormat(6, 2, 8, torch.float32)
    blend = Blend(non_prefix, [segment], 0, 120, Clock(), form)
    blend.check(1, kv.fresh)
    columns = blend.columns().tolist()
    assert [c - 10 for c in columns if 10 <= c < 110] == planted
    assert blend.recomputed == 4


class Planted:
    """A stored stretch equal to the fresh K and V but for some tokens."""

    def __init__(self, model, count, planted):
        generator = torch.Generator().manual_seed(1)
        self.fresh = torch.randn(2, 1, 2, 120, 8, generator=generator)
        self._stored = self.fresh[:, 0, :, 10:110].clone()
        self._stored[1, :, planted] += 0.3
        self.tokens = count

    def layer(self, _index):
        return self._stored.numpy()


@pytest.mark.parametrize(("check_layer", "scan_tokens"), [(1, 256), (1, 40), (3, 60)])
def test_only_chosen_rows_go_through_the_layers(attach, model, check_layer, scan_tokens):
    """Layers before the check see the scanned rows, the check and those behind it the chosen ones; the last
    one, of which nobody wants more than K and V, the prompt's last row.
    """
    checked = {"check_layer": check_layer, "scan_tokens": scan_tokens}
    kv = attach(Repair("cacheblend", ratio=0.1, sink_tokens=0, recency_tokens=0, **checked))
    seen = []
    hooks = [
        layer.mlp.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    kv._model_state.watch = type(kv._model_state.watch)(model)  # these hooks are no change of the model
    try:
        generate(model, asked(13), 1)
    finally:
        for hook in hooks:
            hook.remove()
    scanned, chosen = 13 + min(scan_tokens, 100) + 9, 13 + 10 + 9
    assert kv.last.approximate_tokens == 100
    assert seen[:6] == [scanned] * check_layer + [chosen] * (5 - check_layer) + [1]


def test_what_was_not_scanned_is_as_it_was_stored(attach, model):
    kv = attach(Repair("cacheblend", ratio=0.1, scan_tokens=40, sink_tokens=0, recency_tokens=0))
    with kv.bypass(read=False):
        _, _, cache = generate(model, asked(13), 1)
    with kv.bypass():
        _, _, plain = generate(model, asked(13), 1)
    client = kv.client
    kv.detach()
    none = Repair("none", sink_tokens=0, recency_tokens=0)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=none, self_test=False):
        _, _, stored = generate(model, asked(13), 1)
    for index in (0, 1, 2, 3):
        scanned, full, moved = (past.layers[index].keys[0, :, 13:113] for past in (cache, plain, stored))
        assert torch.equal(scanned[:, 40:], moved[:, 40:])
        if index <= 1:  # up to the check all that was scanned is fresh
            torch.testing.assert_close(scanned[:, :40], full[:, :40], atol=1e-5, rtol=1e-4)


def test_sinks_and_recency_are_fresh():
    segments = [Segment(0, 40, APPROXIMATE, (), 500), Segment(50, 90, APPROXIMATE, (), 1)]
    repair = Repair("none", sink_tokens=4, recency_tokens=5)
    fresh = repair.fresh(segments, 100)
    assert torch.nonzero(fresh).squeeze(1).tolist() == [
        0, 1, 2, 3,  # the prompt's first tokens
        *range(40, 50),
        50, 51, 52,  # of a chunk that was computed from position 1 on: positions 1 to 3 were sinks there
        *range(85, 90),
        *range(90, 100),
    ]  # fmt: skip


# ---------------------------------------------------------------- never taken for a prefix


def test_nothing_behind_approximate_tokens_is_published_as_a_prefix(attach, model, client):
    kv = attach(AUTO)
    ids = asked(37)
    before = client.stats()["blocks"]
    tokens, *_ = generate(model, ids, 60)
    behind = (9 + 59) // BLOCK  # the question and the answer, whose last token has no KV
    assert kv.last.published_blocks == 37 // BLOCK + behind
    assert client.stats()["blocks"] == before + 37 // BLOCK + behind
    chain = kvclient.chain(kv.identity, tokens[0].tolist(), block_tokens=BLOCK)
    assert client.lookup(chain).resident == 37 // BLOCK
    with kv.bypass():
        plain, *_ = generate(model, torch.cat([ids[:, :37], prompt(30, seed=9)], dim=1))
    warm, *_ = generate(model, torch.cat([ids[:, :37], prompt(30, seed=9)], dim=1))
    assert kv.last.reused_tokens == 32
    assert torch.equal(warm, plain)


def test_no_pin_stays(attach, model, client):
    kv = attach(AUTO)
    generate(model, asked(5))
    assert kv.last.approximate_tokens
    assert client.stats()["pins"] == 0


class Broken(Exception):
    pass


def test_a_pass_that_fails_leaves_no_hook_and_no_pin(attach, model, client, monkeypatch):
    kv = attach("cacheblend")

    def fail(*_args):
        raise Broken

    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(Blend, "check", fail)
        generate(model, asked(5))
    assert client.stats()["pins"] == 0
    assert not any(module._forward_pre_hooks for module in model.modules())
    generate(model, asked(5))
    assert kv.last.approximate_tokens == 100


def test_another_threads_forward_pass_is_left_alone(attach, model):
    attach("cacheblend")
    plain = model(asked(5)).logits
    seen = []
    original = Blend.check

    def check(self, *args):
        thread = threading.Thread(target=lambda: seen.append(model(asked(5)).logits))
        thread.start(), thread.join()
        return original(self, *args)

    Blend.check = check
    try:
        generate(model, asked(5))
    finally:
        Blend.check = original
    assert torch.equal(seen[0], plain)


def test_a_block_evicted_between_is_computed(attach, model, client):
    kv = attach("none")
    chain = kvclient.chain(kv.identity, COMPUTED[0].tolist(), block_tokens=BLOCK)
    client.delete(chain[3:4])
    generate(model, asked(5))
    assert 0 < kv.last.approximate_tokens < 100
    client.delete(chain)
    generate(model, asked(5))
    assert kv.last.approximate_tokens == 0


def test_the_keys_that_are_told_are_of_the_try_that_answered(attach, model, monkeypatch):
    """Two tries end, as where a writer that is followed dies; the third reads nothing."""
    kv, told = attach("none"), []

    def lost(*_):
        told.append(kv._local.request.report.inside_keys)
        raise Lost

    generate(model, asked(5), 1)
    assert kv.last.approximate_tokens > 0 and len(kv.last.inside_keys) >= 32
    monkeypatch.setattr(request, "run_passes", lost)
    generate(model, asked(21), 1)
    assert kv.last.followed_lost == 2 and all(told), told
    assert (kv.last.approximate_tokens, kv.last.inside_keys) == (0, b"")


def test_a_block_behind_the_prefix_that_has_extra_ids_too_is_no_part_of_it(attach, model, client):
    """The same tokens, but one stands for an image: what is stored is not what this prompt needs."""
    kv = attach("none")
    ids = torch.cat([COMPUTED[:, : 2 * BLOCK], prompt(9, seed=6)], dim=1)
    block = np.r_[ids[0].numpy(), np.zeros(BLOCK - 9)].astype(np.int32)
    extra = np.zeros(3 * BLOCK, np.uint64)
    extra[2 * BLOCK] = 77
    chain = kvclient.chain(kv.identity, block, BLOCK, extra)
    with client.create(chain[2:], client.register_layout(kv.form.layout(BLOCK))) as writer:
        said = meta.Meta(
            chain.parent_keys[2], chain.content_keys[2], block[2 * BLOCK :].tobytes(),
            extra[2 * BLOCK :].tobytes(), kv.identity,
        )  # fmt: skip
        meta.put(writer[0].meta, said)
        writer.seal(zero_rest=True)
    with kv.bypass():
        _, plain, _ = generate(model, ids, 1)
    _, logits, _ = generate(model, ids, 1)
    assert kv.last.reused_tokens == 2 * BLOCK
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-3)
