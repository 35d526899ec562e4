"""Handing over for batches, quantised blocks, pages, repair, and every class of models that is exact: the
host that decodes answers as one that found the same blocks does, and computes no block that the other had.

Tiny random models, two daemons that live for all of them: models of other names have other identities.
"""

import dataclasses
import threading

import pytest
import torch
from transformers import GenerationMixin

import kvclient
import kvclient.hf
from kvclient.hf import Handoff, Repair
from kvclient.hf.request import request
from tests.hf.zoo import (
    COMPRESSED,
    INDEXED,
    LATENT,
    MOVED,
    RECURRENT,
    SERVED,
    WINDOWED,
    build,
    generate,
    known,
    near,
    prompt,
)  # fmt: skip

BLOCK, WAIT_S = 16, 60.0
QUICK = ["deepseek_v2", "gemma2", "falcon_h1", "mamba2"]  # latent, windows, both, states alone
EXACT = {**SERVED, **MOVED, **LATENT, **INDEXED, **COMPRESSED, **WINDOWED, **RECURRENT}  # of the matrix
SLOW = sorted(set(EXACT) - {*QUICK})


@pytest.fixture(scope="module")
def clients(pair_of_hosts):
    with pair_of_hosts[0].connect() as here, pair_of_hosts[1].connect() as there:
        yield here, there


@pytest.fixture
def attached(clients):
    """attached(name, **options): a model of that name on each host, its own in each."""
    made = []

    def pair(name, **options):
        for client in clients:
            options = {"block_tokens": BLOCK, "self_test": False, **options}
            made.append(kvclient.hf.attach(known(name), client, **options))
        return made[-2:]

    yield pair
    for kv in made:
        kv.detach()


def passed_on(handoff):
    return Handoff.from_json(handoff.to_json())


def resumed(kv, handoff, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    out = kv.resume(passed_on(handoff), output_logits=True, return_dict_in_generate=True, **options)
    return out.sequences, torch.stack(out.logits)


def alone(name, ids, *before, **options):
    """(tokens, logits) of one host that computes the prompt, behind others, and is asked again."""
    with kvclient.InMemoryClient(64 << 20) as client:
        kv = kvclient.hf.attach(model := build(name), client, self_test=False, **options)
        with kv.keeping(tails=True):  # as a handoff does
            for each in (*before, ids):
                generate(model, each, 1)
            tokens, logits, _ = generate(model, ids, 6)
        kv.detach()
    return tokens, logits


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_class_of_models_is_handed_over(attached, name):
    prefilling, decoding = attached(name)
    ids = prompt(100, seed=7)
    handoff = prefilling.handoff(input_ids=ids)
    tokens, logits, _ = generate(build(name), ids, 6)
    found, found_logits = resumed(decoding, handoff)
    assert handoff.wait(WAIT_S)
    assert torch.equal(found, tokens) and near(found_logits, logits)
    found, found_logits = resumed(decoding, handoff)  # again, and all is there
    assert torch.equal(found, tokens) and near(found_logits, logits)
    assert decoding.last.reused_tokens >= 80, decoding.last
    handoff.release()


def left_padded(*rows):
    longest = max(row.shape[1] for row in rows)
    pads = [longest - row.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return ids, mask


def test_a_batch_with_padding_is_handed_over(attached):
    prefilling, decoding = attached("llama")
    ids, mask = left_padded(prompt(90, seed=3), prompt(100, seed=4), prompt(37, seed=5))
    handoff = prefilling.handoff(input_ids=ids, attention_mask=mask)
    assert [len(row) for row in handoff.rows] == [90, 100, 37]
    tokens, logits, _ = generate(build("llama"), ids, 6, attention_mask=mask)
    found, found_logits = resumed(decoding, handoff)
    assert handoff.wait(WAIT_S)
    assert torch.equal(found, tokens) and near(found_logits, logits)
    found, _ = resumed(decoding, handoff)
    assert torch.equal(found, tokens)
    assert decoding.last.reused_tokens > 0
    handoff.release()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_blocks_are_handed_over(attached, codec):
    prefilling, decoding = attached("llama", codec=codec, block_tokens=32)
    ids = prompt(100, seed=11)
    handoff = prefilling.handoff(input_ids=ids)
    assert handoff.wait(WAIT_S)
    found, logits = resumed(decoding, handoff)
    assert decoding.last.reused_tokens >= 96
    tokens, wanted = alone("llama", ids, codec=codec, block_tokens=32)
    assert torch.equal(found, tokens) and near(logits, wanted)
    handoff.release()


def test_what_is_kept_as_computed_beside_quantised_blocks_comes_along_unasked(clients):
    ids, options = prompt(100, seed=31), {"codec": "int8", "block_tokens": 32, "self_test": False}
    models = [build("llama"), build("llama")]
    pair = [kvclient.hf.attach(m, client, **options) for m, client in zip(models, clients, strict=True)]
    generate(models[0], ids, 1)
    tokens, logits, _ = generate(models[1], ids, 6)
    assert pair[1].last.reused_by_tier["peer"] >= 64
    wanted_tokens, wanted, _ = generate(models[0], ids, 6)
    assert torch.equal(tokens, wanted_tokens) and near(logits, wanted)
    for kv in pair:
        kv.detach()


@pytest.mark.parametrize("options", [{"in_place": True}, {"paged": True, "paged_tokens": 2048}], ids=str)
def test_blocks_are_read_where_they_lie_on_the_host_they_were_handed_to(attached, options):
    prefilling, decoding = attached("llama", **options)
    ids = prompt(100, seed=12)
    handoff = prefilling.handoff(input_ids=ids)
    tokens, logits, _ = generate(build("llama"), ids, 6)
    found, found_logits = resumed(decoding, handoff)
    assert handoff.wait(WAIT_S) and decoding.last.reused_tokens >= 96
    assert decoding.last.dense is None or "paged" in options
    assert torch.equal(found, tokens) and near(found_logits, logits, 1e-4)
    handoff.release()


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2: layers of windows have blocks of their own
def test_repair_uses_what_the_prefiller_used(attached, name):
    """The text was never on the host that decodes: the keys of its blocks come with the handoff."""
    options = {"repair": Repair("selective", max_kl=None)}
    prefilling, decoding = attached(name, **options)
    text, before = prompt(128, seed=21), prompt(32, seed=22)
    first = prefilling.handoff(input_ids=text)
    assert first.wait(WAIT_S)
    moved = torch.cat([before, text, prompt(8, seed=23)], 1)
    handoff = prefilling.handoff(input_ids=moved)
    assert handoff.wait(WAIT_S) and (used := prefilling.last.approximate_tokens) > 0
    found, logits = resumed(decoding, handoff)
    assert found.shape[1] == moved.shape[1] + 6
    assert decoding.last.approximate_tokens == used
    tokens, wanted = alone(name, moved, text, block_tokens=BLOCK, **options)
    assert torch.equal(found, tokens) and near(logits, wanted)
    for each in (first, handoff):
        each.release()


@pytest.fixture
def stopped(monkeypatch):
    """(computed, opened): a prefill that reuses what is inside waits behind its passes for `opened`."""
    computed, opened = threading.Event(), threading.Event()

    def run_passes(*arguments):
        outputs = original(*arguments)
        if threading.current_thread().name == "kvclient-handoff":
            computed.set()
            assert opened.wait(WAIT_S)
        return outputs

    original = request.run_passes
    monkeypatch.setattr(request, "run_passes", run_passes)
    yield computed, opened
    opened.set()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_that_is_repaired_is_handed_over_while_it_is_computed(attached, stopped, name):
    """With the keys of the text's blocks: the prefill ends only behind the decoder's answer."""
    options, (computed, opened) = {"repair": Repair("selective", max_kl=None)}, stopped
    prefilling, decoding = attached(name, **options)
    text, before = prompt(128, seed=24), prompt(32, seed=25)
    first = prefilling.handoff(input_ids=text)
    assert first.wait(WAIT_S)
    moved = torch.cat([before, text, prompt(8, seed=26)], 1)
    handoff = prefilling.handoff(input_ids=moved)
    assert not handoff.wait(0) and set(split(first.keys)[:4]) <= set(split(handoff.keys))
    found, logits = resumed(decoding, handoff)
    assert computed.wait(WAIT_S) and not handoff.wait(0)
    assert (used := decoding.last.approximate_tokens) > 0
    opened.set()
    assert handoff.wait(WAIT_S) and prefilling.last.approximate_tokens == used
    tokens, wanted = alone(name, moved, text, block_tokens=BLOCK, **options)
    assert torch.equal(found, tokens) and near(logits, wanted)
    for each in (first, handoff):
        each.release()


@pytest.mark.parametrize("more", [{}, {"output_hidden_states": True}], ids=["ahead", "nothing ahead"])
def test_a_prompt_that_is_looked_up_in_is_handed_over_while_it_is_computed(attached, monkeypatch, more):
    """Its loop knows no prefill: the pass ahead of it tells, or the loop that begins without."""
    opened, original = threading.Event(), GenerationMixin._update_model_kwargs_for_generation

    def behind_a_pass(*arguments, **options):
        if threading.current_thread().name == "kvclient-handoff":
            assert opened.wait(WAIT_S)
        return original(*arguments, **options)

    prefilling, decoding = attached("llama")
    monkeypatch.setattr(GenerationMixin, "_update_model_kwargs_for_generation", behind_a_pass)
    ids = prompt(25, seed=34).repeat(1, 4)
    handoff = prefilling.handoff(input_ids=ids, prompt_lookup_num_tokens=3, **more)
    assert handoff._prefill.begun.is_set() and not handoff.wait(0)
    opened.set()
    assert handoff.wait(WAIT_S)
    tokens, logits, _ = generate(build("llama"), ids, 6)
    found, found_logits = resumed(decoding, handoff)
    assert torch.equal(found, tokens) and near(found_logits, logits)
    handoff.release()


def split(keys):
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def test_a_batch_that_is_repaired_row_by_row_is_handed_over_while_it_is_computed(attached, stopped):
    """The rows' keys come as their turns do."""
    options, (_, opened) = {"repair": Repair("selective", max_kl=None)}, stopped
    prefilling, decoding = attached("llama", **options)
    texts, before = [prompt(128, seed=27), prompt(128, seed=28)], prompt(32, seed=29)
    firsts = [prefilling.handoff(input_ids=text) for text in texts]
    assert all(first.wait(WAIT_S) for first in firsts)
    rows = [torch.cat([before[:, : 32 - 5 * i], text], 1) for i, text in enumerate(texts)]
    ids, mask = left_padded(*rows)
    handoff = prefilling.handoff(input_ids=ids, attention_mask=mask)
    assert not handoff.wait(0) and set(split(firsts[0].keys)[:4]) <= set(split(handoff.keys))
    opened.set()
    assert handoff.wait(WAIT_S) and set(split(firsts[1].keys)[:4]) <= set(split(handoff.keys))
    assert split(handoff.keys).count(split(firsts[0].keys)[0]) == 1
    found, logits = resumed(decoding, handoff)
    assert decoding.last.approximate_tokens == prefilling.last.approximate_tokens > 0
    tokens, wanted = several(ids, mask, *texts, **options)
    assert torch.equal(found, tokens) and near(logits, wanted)
    for each in (*firsts, handoff):
        each.release()


def several(ids, mask, *before, **options):
    """As alone(), of a batch of llama's."""
    with kvclient.InMemoryClient(64 << 20) as client:
        options = {"block_tokens": BLOCK, "self_test": False, **options}
        kv = kvclient.hf.attach(model := build("llama"), client, **options)
        with kv.keeping(tails=True):
            for each in before:
                generate(model, each, 1)
            tokens, logits, _ = generate(model, ids, 6, attention_mask=mask)
        kv.detach()
    return tokens, logits


def test_seeded_sampling_is_that_of_one_host(attached):
    prefilling, decoding = attached("llama")
    ids, options = prompt(100, seed=13), {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
    handoff = prefilling.handoff(input_ids=ids)
    assert handoff.wait(WAIT_S)
    plain = build("llama")
    torch.manual_seed(5)
    tokens = plain.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **options
    )
    torch.manual_seed(5)
    assert torch.equal(resumed(decoding, handoff, **options)[0], tokens)
    handoff.release()


def test_what_the_thread_says_of_its_calls_holds_for_its_handoff(attached):
    prefilling, decoding = attached("llama", block_tokens=32)
    ids = prompt(100, seed=14)
    with prefilling.coded("int8"), prefilling.salted(b"tenant"):
        handoff = prefilling.handoff(input_ids=ids)
    assert handoff.wait(WAIT_S)
    assert handoff.identity != prefilling.identity
    with pytest.raises(kvclient.InvalidArgument, match="identity"):
        decoding.resume(handoff)
    with decoding.coded("int8"), decoding.salted(b"tenant"):
        resumed(decoding, handoff)
        assert decoding.last.reused_tokens >= 96
    changed = dataclasses.replace(handoff, rows=((1, 2, 3),))
    with decoding.coded("int8"), decoding.salted(b"tenant"):  # nothing of it is there: it is computed
        assert resumed(decoding, changed)[0].shape[1] == 9
    handoff.release()
