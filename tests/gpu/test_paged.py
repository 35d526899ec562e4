"""Proves attach(paged=True) on a GPU: what is not in the store lies in pages of device memory, is shared and
copied as on a CPU, and the model says what it says without.

Method: that of tests/hf/attention/test_paged.py, on a GPU and on the emulation, where the pool, the tables
and the kernels are the same over host memory. Order between streams is tested with streams that only
record.
"""

import copy
import gc

import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

import kvclient.hf
from kvclient.hf.cache.page_pool import PagePool
from kvclient.hf.cache.paged import PagedDeviceLayer
from kvclient.kernels import contract
from tests.gpu.models.bound import bound, model_on
from tests.hf.zoo import generate, near, prompt


def attached(model, client, **options):
    options["self_test"] = model.device.type != "cpu"
    return kvclient.hf.attach(model, client, paged=True, **{"block_tokens": 16} | options)


def used(kv) -> int:
    gc.collect()
    return kv.paged_stats().used


def padded_rows(place):
    """Two rows, the second with a first page of nothing but padding."""
    rows = torch.cat([prompt(75), prompt(75, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :67] = mask[1, :67] = 0
    return rows.to(place), mask.to(place)


def test_equals_plain_generation(place, client, left):
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    rows, mask = padded_rows(place)
    plain, logits, _ = generate(model, ids, 5)
    plain_rows, row_logits, _ = generate(model, rows, 2, attention_mask=mask)
    with attached(model, client) as kv:
        for reused in (0, 48):
            tokens, found, cache = generate(model, ids, 5)
            assert kv.last.reused_tokens == reused and used(kv) == (2 if reused == 0 else 1)
            assert near(found[:1], logits[:1], **bound(place))
            assert place.type != "cpu" or torch.equal(tokens, plain)
        assert all(type(layer) is PagedDeviceLayer for layer in cache.layers)
        for _ in range(2):
            tokens, found = generate(model, rows, 2, attention_mask=mask)[:2]
            assert near(found[:1], row_logits[:1], **bound(place))
            assert place.type != "cpu" or torch.equal(tokens, plain_rows)
        del cache
        assert used(kv) == 0
    assert left() == {}


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_hit_takes_pages_for_what_is_computed(place, client, left, codec):
    """Blocks lie as they are in device memory; who reads all of it gets one tensor, and is counted."""
    model, ids = model_on(place, "llama"), prompt(99).to(place)
    _, _, plain = generate(model, ids, 1)
    with attached(model, client, block_tokens=32, codec=codec) as kv:
        generate(model, ids, 1)
        _, _, cache = generate(model, ids, 1)
        assert kv.last.reused_tokens == 96 and used(kv) == 1
        kinds = {struct.codec for _, struct in cache.layers[0]._prefix}
        assert (contract.INT8 in kinds) == (codec is not None) and left() == {}
        keys = cache.layers[0].keys
        assert near(keys, plain.layers[0].keys, 3e-2 if codec else bound(place).get("bound", 1e-3))
        assert left() == {"read": 1}


def test_beams_stay_in_pages(place, client, left):
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    options = {"num_beams": 2, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with attached(model, client) as kv:
        for _ in range(2):
            found = model.generate(ids, **options)
            assert place.type != "cpu" or torch.equal(found, plain)
        assert kv.last.reused_tokens == 2 * 48
        assert kv.paged_stats().copied > 0 and used(kv) == 0
    assert left() == {}


@torch.no_grad()
def test_rows_and_copies_part_when_they_write(place, client):
    model, ids = model_on(place, "llama"), prompt(70).to(place)
    more = torch.tensor([[5], [6]], device=place)
    with attached(model, client, salt="new") as kv:
        options = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 2, "pad_token_id": 0}
        cache = model.generate(ids, return_dict_in_generate=True, **options).past_key_values
        stats = kv.paged_stats()
        assert (stats.used, stats.shared, stats.copied) == (2, 2, 0)
        other = copy.deepcopy(cache)
        for past in (cache, other):
            rows = [model(torch.cat([ids, token[None]], 1)).logits[0, -1] for token in more]
            found = model(more, past_key_values=past).logits[:, -1]
            assert near(found, torch.stack(rows), **bound(place))
        stats = kv.paged_stats()
        assert (stats.used, stats.shared) == (1 + 4, 1) and stats.copied == 3
        before = cache.get_seq_length()
        cache.crop(-1)
        found = model(more.flip(0), past_key_values=cache).logits[:, -1]
        assert near(found, torch.stack(rows[::-1]), **bound(place))
        assert cache.get_seq_length() == before
        del cache, other, past
        assert used(kv) == 0


def test_a_stream_waits_for_those_that_had_the_pages(monkeypatch):
    """Pages change hands between calls on several streams, and those are not ordered by themselves."""

    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            self.waited.append(other)

    pool = PagePool(1, 1, 1, torch.float32, torch.device("meta"), 64)
    pool.memory = type("OnGpu", (), {"device": torch.device("cuda")})
    first, second = Stream(), Stream()
    for stream in (first, first, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, chosen=stream: chosen)
        pool.follow()
    assert first.waited == [second] and second.waited == [first]
