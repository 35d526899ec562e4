"""Quantised blocks: half or a quarter of the bytes, near what was computed, and never taken for another
codec's.

Tiny random models and the in-memory fake. The arithmetic is tests/kernels'; how near a real model's answers
stay is tests/hf/reuse/test_inside_smollm2.py's.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.blocks.codec import Kivi
from kvclient.errors import InvalidArgument
from kvclient.hf import Engine
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.kernels import NotQuantisable
from tests.hf.zoo import build, generate, prompt

BLOCK = 32
TEXT = "The first tokens and the last block of a text are stored as computed, beside quantised ones. " * 2


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=2)


def reference(x, bits, axis_groups):
    """KIVI as the paper says it, in torch: [..., n] along the last axis, one scale and zero a group."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((x - low) / scale.clamp_min(1e-30)).round().clamp(0, 2**bits - 1)
    return codes * scale + low


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_comes_back_as_near_as_the_reference(bits, group, dtype):
    form = BlockFormat(1, 3, 16, dtype, Kivi(bits, group))
    source = torch.randn(2, 3, 128, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    size = form.codec.bytes_per_token(3, 16) * 128

    class Block:
        tokens = 128
        memory = np.zeros(size, np.uint8)

        def layer(self, _index):
            return self.memory

    block = Block()
    form.write(block, 0, source)
    assert form.fits(block, 128, 0)
    got = form.read_tensor(block, 0).double()
    keys = source[0].double().reshape(3, 128 // group, group, 16).transpose(2, 3)
    wanted_k = reference(keys, bits, group).transpose(2, 3).reshape(3, 128, 16)
    wanted_v = reference(source[1].double(), bits, 0)
    step = 6.0 / (2**bits - 1)  # of values that span about that much
    for ours, theirs, exact in ((got[0], wanted_k, source[0]), (got[1], wanted_v, source[1])):
        error, best = (ours - exact.double()).abs(), (theirs - exact.double()).abs()
        assert error.max() <= 1.2 * best.max() + 0.01
        assert error.mean() <= 1.1 * best.mean() + 0.002 * step + (0.004 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize(
    ("bits", "group", "share"), [(8, 32, 0.55), (4, 32, 0.30), (8, 128, 0.53), (4, 128, 0.28)]
)
def test_bytes_per_token(bits, group, share):
    assert Kivi(bits, group).bytes_per_token(3, 64) <= share * 2 * 3 * 64 * 2
    small = BlockFormat(2, 3, 64, torch.bfloat16, Kivi(bits, group)).layout(128)
    assert (
        small.block_bytes()
        <= (share + 0.05) * BlockFormat(2, 3, 64, torch.bfloat16).layout(128).block_bytes() + 4096
    )
    assert kvclient.Layout.from_blob(bytes(small)) == small


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_prefix_is_reused_near_what_was_computed(model, client, codec):
    ids = prompt(101)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec=codec, self_test=False) as kv:
        with kv.bypass():
            plain, plain_logits, _ = generate(model, ids)
        cold, cold_logits, _ = generate(model, ids)
        assert torch.equal(cold, plain) and torch.equal(cold_logits, plain_logits)  # storing changes nothing
        assert kv.last.published_blocks == 3
        _, logits, cache = generate(model, ids)
        assert kv.last.reused_tokens == 96
        with kv.bypass():
            _, _, floor = generate(model, ids)
    for ours, theirs in zip(cache.layers, floor.layers, strict=True):
        far = (ours.keys[:, :, :96] - theirs.keys[:, :, :96]).norm() / theirs.keys[:, :, :96].norm()
        assert 0 < far < (0.01 if codec == "int8" else 0.15)
    difference = float((logits[0] - plain_logits[0]).abs().max() / plain_logits[0].abs().max())
    assert difference < (0.1 if codec == "int8" else 1.5)


def test_blocks_of_one_codec_do_not_serve_another(model, client):
    identities = set()
    for codec in (None, "int8", "int4", Kivi(8, 64), Kivi(4, 64)):
        with kvclient.hf.attach(model, client, block_tokens=64, codec=codec, self_test=False) as kv:
            identities.add(kv.identity)
            generate(model, prompt(130))
            assert kv.last.reused_tokens == 0
            generate(model, prompt(130))
            assert kv.last.reused_tokens == 128
    assert len(identities) == 5


def test_a_document_inside_a_prompt_is_found_and_moved(model, client):
    document = prompt(100, seed=5)
    with kvclient.hf.attach(
        model, client, block_tokens=BLOCK, codec="int8", repair="none", self_test=False
    ) as kv:
        generate(model, torch.cat([prompt(21, seed=2), document, prompt(70, seed=3)], dim=1))
        assert (
            kv.last.published_blocks == 6
        )  # 191 tokens: five whole ones, and none for the 31 that fill no group
        ids = torch.cat([prompt(38, seed=7), document, prompt(9, seed=4)], dim=1)
        _, _, cache = generate(model, ids, 1)
        assert kv.last.approximate_tokens == 100
        with kv.bypass():
            _, _, plain = generate(model, ids, 1)
    far = (cache.layers[0].keys - plain.layers[0].keys).norm() / plain.layers[0].keys.norm()
    assert 0 < far < 0.01  # in the first layer only the codec's error is left


def test_what_the_codec_cannot_hold_is_not_stored_and_counted(model, client, monkeypatch):
    def beyond(*_args):
        raise NotQuantisable("beyond 65504")

    monkeypatch.setattr(BlockFormat, "write", beyond)
    plain, *_ = generate(model, prompt(101))
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int8", self_test=False) as kv:
        tokens, *_ = generate(model, prompt(101))
        assert kv.last.published_blocks == 0 and kv.last.not_quantisable == 3
        assert kv.stats["not_quantisable"] == 3
        assert kv.last.published_full_blocks == kv.stats["published_full_blocks"] == 2
    assert torch.equal(tokens, plain)
    assert (client.stats()["blocks"], client.stats()["created"]) == (2, 0)  # first and last, as computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_tokens_stay_as_computed(client, dtype):
    model, ids = build("llama", dtype=dtype, layers=2), prompt(101)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int4", self_test=False) as kv:
        generate(model, ids)
        assert client.stats()["blocks"] == 5  # three, the sinks, and the last in full
        assert kv.last.published_full_blocks == 2
        other = torch.cat([ids[:, :64], prompt(30, seed=2)], dim=1)
        for asked in (ids, other):
            _, _, cache = generate(model, asked, 1)
            assert kv.last.reused_tokens >= 64
            with kv.bypass():
                _, _, plain = generate(model, asked, 1)
            for ours, theirs in zip(cache.layers, plain.layers, strict=True):
                assert torch.equal(ours.keys[:, :, :4], theirs.keys[:, :, :4])
                assert torch.equal(ours.values[:, :, :4], theirs.values[:, :, :4])
                assert not torch.equal(ours.keys[:, :, 4:32], theirs.keys[:, :, 4:32])
        padded = torch.cat(
            [torch.cat([torch.zeros(1, 7, dtype=torch.int64), ids], dim=1), prompt(108, seed=4)]
        )
        mask = torch.ones_like(padded)
        mask[0, :7] = 0
        generate(model, padded, 1, attention_mask=mask)
        _, _, cache = generate(model, padded, 1, attention_mask=mask)
        assert kv.last.reused_tokens > 96
        with kv.bypass():
            _, _, plain = generate(model, padded, 1, attention_mask=mask)
        torch.testing.assert_close(cache.layers[0].keys[0, :, 7:11], plain.layers[0].keys[0, :, 7:11])


@pytest.mark.parametrize("pad", [31, 32, 33, 34, 40])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_row_whose_padding_is_longer_than_what_is_handed_over(client, pad, in_place):
    """Another row has one block only: of this one, whose first tokens are stored too, next to nothing is."""
    model, length = build("llama"), 101
    ids, other = prompt(length), prompt(length - pad, seed=2)
    rows, mask = torch.cat([ids, ids]), torch.ones((2, length), dtype=torch.int64)
    rows[1, pad:], mask[1, :pad] = other, 0
    _, wanted, _ = generate(model, rows, 2, attention_mask=mask)
    options = {"block_tokens": 32, "codec": "int8", "in_place": in_place, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, ids[:, :40], 1)
        generate(model, other, 1)
        _, found, _ = generate(model, rows, 2, attention_mask=mask)
        assert kv.last.reused_tokens == 32 + max(0, 32 - pad)
    assert float((found - wanted).abs().max()) <= 3e-2 * float(wanted.abs().max())


def test_sinks_are_stored_only_by_who_computed_them(model, client):
    ids = prompt(101)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int4", self_test=False) as kv:
        generate(model, ids)
        sinks = kv._model_state.served.sinks
        key = kvclient.chain(sinks.first.identity, ids[0, :4].tolist(), 4)
        assert client.delete(key) == 1
        generate(model, ids)
        assert kv.last.reused_tokens == 96
        assert client.lookup(key).resident == 0  # its own first tokens came quantised
        assert client.stats()["pins"] == client.stats()["created"] == 0


def equal_tokens(cache, plain):
    """Which tokens of the first layer's keys are those of a plain run, bit by bit."""
    ours, theirs = cache.layers[1], plain.layers[1]
    count = min(ours.keys.shape[2], theirs.keys.shape[2])
    same = (ours.keys[0, :, :count] == theirs.keys[0, :, :count]).all(2).all(0)
    return torch.nonzero(same).flatten().tolist()


@pytest.mark.parametrize("length", [96, 101, 127])
def test_the_last_whole_block_stays_as_computed(model, client, length):
    ids = prompt(length)
    more = torch.cat([ids, prompt(20, seed=2)], dim=1)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int4", self_test=False) as kv:
        with kv.bypass():
            _, _, plain = generate(model, more, 1)
        generate(model, ids, 1)
        assert kv.last.published_full_blocks == 2  # the sinks and the last
        _, _, cache = generate(model, more, 1)
        found = length // BLOCK * BLOCK
        assert (kv.last.reused_tokens, kv.last.full_tokens) == (found, 4 + BLOCK)
        assert kv.stats["full_tokens"] == 4 + BLOCK
        # What follows the reused tokens depends on the quantised ones.
        same = [at for at in equal_tokens(cache, plain) if at < found]
        assert same == [*range(4), *range(found - BLOCK, found)]


def test_the_last_block_of_an_answer_stays_as_computed(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int4", self_test=False) as kv:
        tokens, _, plain = generate(model, prompt(40), 90)
        before = client.stats()["blocks"]
        assert before == 4 + 1 + 2, "four blocks, the sinks, the prompt's last and the answer's last"
        _, _, cache = generate(model, torch.cat([tokens, prompt(9, seed=3)], dim=1), 1)
        assert kv.last.reused_tokens == 128 and kv.last.full_tokens == 4 + BLOCK
        assert set(range(96, 128)) <= set(equal_tokens(cache, plain))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_is_kept_as_computed_is_pinned_too(home, codec):
    with (
        kvclient.InMemoryClient(1 << 20) as client,
        Engine.from_pretrained(
            home, client, dtype=torch.float32, block_tokens=BLOCK, repair=None, self_test=False, codec=codec
        ) as engine,
    ):
        engine.warm(TEXT)
        stored = client.stats()["blocks"]
        assert stored == len(TEXT) // BLOCK + 2  # the first tokens and the last block, as computed
        assert engine.pin(TEXT) == client.stats()["pins"] == stored
        for number in range(200):
            engine.warm(f"{number} " + TEXT[number % 50 :])
            if client.stats()["evictions"] > 4 * stored:
                break
        assert client.stats()["evictions"] > 4 * stored
        report = engine.generate(TEXT + "?", 1).report
        assert (report.reused_tokens, report.full_tokens) == (len(TEXT) // BLOCK * BLOCK, 4 + BLOCK)
        engine.unpin(TEXT)
        assert client.stats()["pins"] == engine.stats()["pinned"] == 0


def test_what_was_loaded_in_part_is_no_block_as_computed(model, client):
    ids = prompt(70)
    with kvclient.hf.attach(
        model, client, block_tokens=BLOCK, codec="int4", repair="none", self_test=False
    ) as kv:
        generate(model, torch.cat([ids, prompt(30, seed=2)], dim=1), 1)
        other = torch.cat([ids, prompt(27, seed=3)], dim=1)
        generate(model, other, 1)
        assert kv.last.reused_tokens == 70 and kv.last.published_full_blocks == 0


def test_generated_text_and_chunked_prefill_are_stored_whole(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int8", self_test=False) as kv:
        tokens, *_ = generate(model, prompt(40), 60)
        assert kv.last.published_blocks == 3
        generate(model, prompt(101, seed=3), prefill_chunk_size=10)
        assert kv.last.published_blocks == 3
        generate(model, torch.cat([tokens, prompt(5)], dim=1))
        assert kv.last.reused_tokens == 96


def test_verify_says_which_codec_and_can_fail(model, client, monkeypatch):
    prompts = [prompt(200, seed=seed)[0].tolist() for seed in (1, 2)]
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, codec="int4", self_test=False) as kv:
        outcome = kv.verify(prompts)["prefix"]
        assert outcome.codec == "int4" and outcome.found > 0.8 and outcome.mean_kl > 1e-5
        assert outcome.passed == (outcome.mean_kl <= 5e-3)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [({"codec": "int3"}, "int3"), ({"codec": "int8", "block_tokens": 48}, "multiple")],
)
def test_wrong_arguments_are_named(model, client, wrong, word):
    with pytest.raises(InvalidArgument, match=word):
        kvclient.hf.attach(model, client, self_test=False, **wrong)
    for values in ((5, 32), (8, 16)):
        with pytest.raises(InvalidArgument):
            Kivi(*values)


def test_a_call_chooses_its_codec(model, client):
    """The attachment's stays what it is, and each finds what it stored itself."""
    ids = prompt(130)
    with kvclient.hf.attach(model, client, block_tokens=64, self_test=False) as kv:
        identity = kv.identity
        for codec in ("int8", "int4", Kivi(8, 64), "none"):
            with kv.coded(codec):
                assert (kv.identity == identity) == (codec == "none")
                generate(model, ids)
                assert kv.last.reused_tokens == 0, codec
                generate(model, ids)
                assert kv.last.reused_tokens == 128, codec
                assert (kv.last.full_tokens > 0) == (codec != "none")
            assert kv.identity == identity
        generate(model, ids)
        assert kv.last.reused_tokens == 128 and kv.last.full_tokens == 0
        with kv.coded("int8"), kv.coded("int4"):
            outcome = kv.verify([prompt(120)[0].tolist()]).outcomes[0]
            assert outcome.codec == "int4" and outcome.mean_kl > 0
    with kvclient.hf.attach(model, client, block_tokens=64, codec="int8", self_test=False) as kv:
        generate(model, ids)
        assert kv.last.reused_tokens == 128, "what a call stored, an attachment of that codec finds"
        with kv.coded("none"):
            assert kv.identity == identity


def test_threads_choose_for_themselves(model, client):
    with kvclient.hf.attach(model, client, block_tokens=64, self_test=False) as kv, kv.coded("int8"):
        chosen = kv.identity
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: kv.identity).result() != chosen


def test_a_codec_that_cannot_be_is_refused_by_the_call(model, client):
    with kvclient.hf.attach(model, client, block_tokens=32, self_test=False) as kv:
        for wrong in ("int5", Kivi(8, 64)):
            with pytest.raises(InvalidArgument), kv.coded(wrong):
                pass
        assert kv.form.codec is None


def test_approximate_reuse_goes_on_in_a_codec_of_the_call(model, client):
    document = prompt(100, seed=5)
    first = torch.cat([prompt(21, seed=2), document, prompt(70, seed=3)], dim=1)
    ids = torch.cat([prompt(38, seed=7), document, prompt(9, seed=4)], dim=1)
    options = {"block_tokens": BLOCK, "repair": "none", "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        with kv.coded("int8"):
            generate(model, first)
        generate(model, ids, 1)
        assert kv.last.approximate_tokens == 0
        with kv.coded("int8"):
            generate(model, ids, 1)
        assert kv.last.approximate_tokens == 100
