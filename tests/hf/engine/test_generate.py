"""generate() with the store, on tiny random models and the in-memory fake: every path gives what plain
generate() gives.

Owns the rules of kvclient.hf that a real daemon does not change: at most L-1 tokens are handed over, KV is
stored as computed, bitwise; what the store stays out of is counted with its reason.
"""

import sys

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

import kvclient
import kvclient.hf
from kvclient.blocks import meta
from kvclient.hf import attention
from kvclient.hf.cache.layer import Memory, Shape, StoreLayer
from tests.hf.zoo import build, generate, prompt

BLOCK = 16


@pytest.fixture
def model():
    return build("llama")


def hand_over(model, cache, count):
    """A plain cache with the first `count` tokens of another."""
    handed = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        handed.update(layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone(), index)
    return handed


def around_boundaries():
    return sorted({max(1, blocks * BLOCK + shift) for blocks in (0, 1, 2, 4) for shift in (-1, 0, 1)})


@pytest.mark.parametrize("length", around_boundaries())
def test_warm_equals_cold_and_the_floor(model, client, length):
    ids = prompt(length)
    plain, plain_logits, cache = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        cold, cold_logits, _ = generate(model, ids)
        assert kv.last.reused_tokens == 0
        assert kv.last.published_blocks == (length + 7) // BLOCK
        warm, warm_logits, _ = generate(model, ids)
        reused = kv.last.reused_tokens
    assert reused == min(length // BLOCK * BLOCK, length - 1)
    assert torch.equal(cold, plain)
    assert torch.equal(cold_logits, plain_logits)
    assert torch.equal(warm, plain)
    if reused:
        floor, floor_logits, _ = generate(model, ids, past_key_values=hand_over(model, cache, reused))
        assert torch.equal(warm, floor)
        assert torch.equal(warm_logits, floor_logits)


def test_a_whole_prompt_in_the_store_leaves_one_token_to_compute(model, client):
    """A cache that covers the prompt makes generate() feed it again, wrong and without an
    error.
    """
    ids = prompt(4 * BLOCK)
    plain, *_ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        for _ in range(2):
            tokens, _, cache = generate(model, ids)
            assert torch.equal(tokens, plain)
        assert kv.last.reused_tokens == 4 * BLOCK - 1
        assert cache.get_seq_length() == 4 * BLOCK + 7


@pytest.mark.parametrize("backend", [None, "torch", "cpu_avx512", "cpu_avx2"])
def test_kv_is_stored_as_computed(model, client, backend):
    """By whatever computes attention: the model's own, or a backend of ours, in place where it can."""
    ids = prompt(3 * BLOCK)
    if backend is not None:
        if reason := attention.available_backends()[backend]:
            pytest.skip(reason)
        attention.install(model, backend)
    _, _, cache = generate(model, ids, 1)
    in_place = None if backend is not None else False
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place) as kv:
        generate(model, ids, 1)
        chain = kvclient.chain(kv.identity, ids[0].tolist(), block_tokens=BLOCK)
    with client.get(chain) as blocks:
        assert blocks.hits == 3
        for number, block in enumerate(blocks):
            columns = slice(number * BLOCK, (number + 1) * BLOCK)
            for layer, computed in enumerate(cache.layers):
                assert torch.equal(block.tensor(layer)[0], computed.keys[0, :, columns])
                assert torch.equal(block.tensor(layer)[1], computed.values[0, :, columns])
            found = meta.unpack(block.meta, BLOCK)
            assert found.token_ids == ids[0, columns].to(torch.int32).numpy().tobytes()
            assert found.content_key == chain.content_keys[number]
            assert found.parent_key == (chain.keys[number - 1] if number else meta.NO_PARENT)


def test_another_continuation_shares_the_prefix(model, client):
    asked, other = prompt(70), prompt(70)
    other[0, 3 * BLOCK :] = prompt(70 - 3 * BLOCK, seed=9)
    plain, *_ = generate(model, other)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, asked)
        tokens, *_ = generate(model, other)
        assert kv.last.reused_tokens == 3 * BLOCK
    assert torch.equal(tokens, plain)


def test_another_prefix_shares_nothing(model, client):
    asked, other = prompt(70), prompt(70)
    other[0, 0] = (other[0, 0] + 1) % 300
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, asked)
        generate(model, other)
        assert kv.last.reused_tokens == 0


def test_generated_text_is_published_and_reused(model, client):
    ids = prompt(20)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        tokens, *_ = generate(model, ids, 60)
        assert kv.last.published_blocks == 79 // BLOCK
        longer = torch.cat([tokens, prompt(3, seed=5)], dim=1)
        warm, *_ = generate(model, longer)
        assert kv.last.reused_tokens == 79 // BLOCK * BLOCK
    plain, *_ = generate(model, longer)
    assert torch.equal(warm, plain)


def test_generated_text_is_not_published_when_told(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, publish_generated=False) as kv:
        generate(model, prompt(20), 60)
        assert kv.last.published_blocks == 1


def test_text_behind_its_end_is_not_published(model, client):
    ids = torch.cat([prompt(20), prompt(20, seed=2)])
    plain, *_ = generate(model, ids, 60)
    ended = int(plain[0, 22])
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        tokens, *_ = generate(model, ids, 60, eos_token_id=ended)
        row = tokens[0].tolist()
        stop = row.index(ended, 20) + 1
        chain = kvclient.chain(kv.identity, row, block_tokens=BLOCK)
        assert client.lookup(chain).resident <= stop // BLOCK


# ---------------------------------------------------------------- when something goes wrong


class Broken(Exception):
    pass


def break_at(monkeypatch, layer_index):
    original = DynamicCache.update

    def update(self, keys, values, index, *args, **kwargs):
        if index == layer_index:
            raise Broken
        return original(self, keys, values, index, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", update)


def test_an_error_in_the_model_leaves_nothing_behind(model, client, monkeypatch):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, prompt(20), 1)
        with monkeypatch.context() as broken:
            break_at(broken, 2)
            with pytest.raises(Broken):
                generate(model, prompt(70))
        stats = client.stats()
        assert (stats["blocks"], stats["created"], stats["pins"]) == (1, 0, 0)
        generate(model, prompt(70))
        assert kv.last.reused_tokens == BLOCK


def test_no_pins_are_left_after_a_hit(model, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK):
        for _ in range(2):
            generate(model, prompt(70))
    assert client.stats()["pins"] == 0


def test_a_pool_too_small_costs_reuse_only(model):
    ids = prompt(200)
    plain, *_ = generate(model, ids)
    with (
        kvclient.InMemoryClient(48 << 10) as small,
        kvclient.hf.attach(model, small, block_tokens=BLOCK) as kv,
    ):
        for _ in range(2):
            tokens, *_ = generate(model, ids)
            assert torch.equal(tokens, plain)
        assert kv.stats["no_space"] > 0


def test_a_block_with_other_tokens_in_its_meta_is_a_miss(model, client, monkeypatch):
    ids = prompt(70)
    plain, *_ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        pack = meta.pack

        def lie(what):
            return pack(what._replace(token_ids=bytes(len(what.token_ids))))

        with monkeypatch.context() as lying:
            lying.setattr(meta, "pack", lie)
            generate(model, ids)
        tokens, *_ = generate(model, ids)
        assert kv.last.reused_tokens == 0
    assert torch.equal(tokens, plain)


def test_another_layout_under_the_same_key_is_a_miss(model, client):
    ids = prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        chain = kvclient.chain(kv.identity, ids[0].tolist(), block_tokens=BLOCK)
        other = client.register_layout(
            kvclient.Layout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=BLOCK)
        )
        with client.create(chain, other) as writer:
            for index in writer.granted:
                writer[index].layer(0)[...] = 1
                writer[index].mark_layer(0)
        generate(model, ids)
        assert kv.last.reused_tokens == 0


# ---------------------------------------------------------------- the layer alone


def test_store_layer_is_a_dynamic_layer():
    """The same calls give the same keys, whatever their order."""
    generator = torch.Generator().manual_seed(3)
    shape = Shape(2, 3, 8, torch.float32, torch.device("cpu"), 10)
    for _ in range(30):
        ours, theirs = StoreLayer(0, shape), DynamicLayer()
        for _ in range(12):
            act = int(torch.randint(0, 6, (1,), generator=generator))
            rows = theirs.keys.shape[0] if theirs.get_seq_length() else 2
            if act <= 2 or not theirs.get_seq_length():
                new = torch.randn(2, rows, 3, 1 + act * 4, 8, generator=generator)
                for layer in (ours, theirs):
                    layer.update(new[0], new[1])
            elif act == 3:
                order = torch.randint(0, rows, (rows,), generator=generator)
                for layer in (ours, theirs):
                    layer.reorder_cache(order)
            elif act == 4 and theirs.get_seq_length() > 2:
                for layer in (ours, theirs):
                    layer.crop(-2)
            else:
                chosen = torch.tensor([0] * rows)
                for layer in (ours, theirs):
                    layer.batch_select_indices(chosen)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        ours.reset()
        assert ours.get_seq_length() == 0


@pytest.mark.parametrize("fewer", [0, 1])
def test_memory_is_used_again_only_when_nobody_holds_it(fewer, monkeypatch):
    """Also where sys.getrefcount says one less than is held, as of Python 3.14 for what the stack borrows."""
    counted = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda what: counted(what) - 1 - fewer)
    memory = Memory()
    first = memory.take(1000)
    view = torch.from_numpy(first[100:200]).view(torch.float32)[3:]
    address = first.ctypes.data
    del first
    assert memory.take(1000).ctypes.data != address, "a tensor still shows it"
    del view
    held = [memory.take(1000) for _ in range(2)]
    assert address in [array.ctypes.data for array in held]
    assert len({array.ctypes.data for array in held}) == 2
    assert memory.take(100).nbytes == 100, "a large array for a small need"


def test_what_requests_outgrew_is_not_kept_nor_what_nobody_uses_for_ever():
    memory = Memory()
    kept = lambda: sorted(spare.memory.nbytes for spare in memory._spare)  # noqa: E731
    held = memory.take(900)
    for size in (300, 1000, 1100, 1200):  # each but the first would do in the place of those before it
        memory.take(size)
    assert kept() == [300, 900, 1200]
    memory.give_back()
    assert kept() == [900], "whose array is held"
    del held
    memory.give_back()
    assert kept() == []


def test_the_caches_of_two_calls_share_nothing(model, client):
    ids = prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK):
        generate(model, ids)
        _, _, first = generate(model, ids)
        before = [layer.keys.clone() for layer in first.layers]
        generate(model, prompt(70, seed=2))
        generate(model, ids)
    assert all(torch.equal(layer.keys, kept) for layer, kept in zip(first.layers, before, strict=True))
