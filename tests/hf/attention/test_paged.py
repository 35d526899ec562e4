"""Proves attach(paged=True): what is not in the store lies in pages of a fixed pool, stored once and copied
only when its owners part; and the model says what it says without.

Method: tiny random models against plain generate(), alone, in padded rows, in beams, in copies of a cache.
What is shared and what is copied is read off the pool's own counts; in the end no page is in use.
"""

import copy
import gc
import pickle
import sys
import threading

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument, PagesExhausted
from kvclient.hf import attention
from kvclient.hf.cache.page_pool import NOTHING, PAGE_TOKENS, PagePool, PageTable
from kvclient.hf.cache.paged import PagedLayer
from tests.hf.zoo import SERVED, generate, known, near, prompt

BLOCK = 16
WINDOWS_ONLY = ("mistral_sliding", "gemma3")  # no layer of theirs needs all tokens
OWN_ATTENTION = ("falcon", "falcon_alibi", "bloom", "mpt")
TELLING = ("llama", "qwen3", "gemma", "gpt2", "mistral_sliding")  # the rest is slow
NAMES = [
    pytest.param(name, marks=[] if name in TELLING else pytest.mark.slow)
    for name in (*SERVED, *WINDOWS_ONLY)
    if name not in OWN_ATTENTION
]

pytestmark = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)


def attached(model, client, **options):
    return kvclient.hf.attach(model, client, block_tokens=BLOCK, paged=True, **options)


def used(kv) -> int:
    gc.collect()
    return kv.paged_stats().used


def masks_by_itself(model) -> bool:
    """Models of transformers 5.0 make their own masks of padded rows, which torch has to take, counted."""
    return not hasattr(sys.modules[type(model).__module__], "create_causal_mask")


@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_generation(name, client, left):
    """Over several pages, cold and warm, alone and in padded rows."""
    model, ids = known(name), prompt(61)
    rows = torch.cat([prompt(140), prompt(140, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :101] = mask[1, :101] = 0  # its first page is all padding
    plain, logits, _ = generate(model, ids)
    plain_rows, row_logits, _ = generate(model, rows, attention_mask=mask)
    with attached(model, client) as kv:
        for reused in (0, 48):
            tokens, found = generate(model, ids)[:2]
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain) and near(found, logits)
        for _ in range(2):
            tokens, found = generate(model, rows, attention_mask=mask)[:2]
            assert torch.equal(tokens, plain_rows) and near(found, row_logits)
        assert used(kv) == 0
    assert set(left()) == ({"mask"} if masks_by_itself(model) else set())


@pytest.mark.parametrize(
    ("length", "new_tokens"), [*((length, new) for length in (61, 64) for new in (1, 4, 5)), (61, 70)]
)
def test_around_the_boundaries_of_pages(length, new_tokens, client):
    model, ids = known("llama"), prompt(length)
    plain, logits, _ = generate(model, ids, new_tokens)
    with attached(model, client) as kv:
        for _ in range(2):
            tokens, found, cache = generate(model, ids, new_tokens)
            assert torch.equal(tokens, plain) and near(found, logits)
            held = cache.get_seq_length() - cache.layers[0].origin
            assert used(kv) == -(-held // PAGE_TOKENS)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_the_stores_blocks_are_read_where_they_lie(client, left, codec):
    """A hit takes pages for what is computed, and for nothing else."""
    model, ids = known("llama"), prompt(163)
    with kvclient.hf.attach(model, client, block_tokens=32, codec=codec, paged=True) as kv:
        generate(model, ids)
        _, _, cache = generate(model, ids)
        assert kv.last.reused_tokens == 160
        assert used(kv) == 1
        assert all(layer.storage.shape[3] == 163 + 7 - 160 for layer in cache.layers)
        segments = cache.layers[0]._call[3]
        blocks = [part.block[0] for part in cache.layers[0]._prefix]
        where = [getattr(block, "codes", block).ctypes.data for block in blocks]
        assert segments["k"][0, :-1].tolist() == where
        del cache
        assert used(kv) == 0
    assert left() == {}


def test_rows_that_say_the_same_share_pages_until_they_differ(client):
    """Three samples of one prompt: 100 tokens in two pages, stored once; each row parts from the second."""
    model, ids = known("llama"), prompt(100)
    with attached(model, client, salt="new") as kv:
        with torch.no_grad():
            config = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
            out = model.generate(ids, return_dict_in_generate=True, **config)
        stats = kv.paged_stats()
        assert (stats.used, stats.shared, stats.copied) == (2, 2, 0)
        cache = out.past_key_values
        with torch.no_grad():
            model(torch.tensor([[5], [6], [7]]), past_key_values=cache)
        stats = kv.paged_stats()
        assert (stats.used, stats.shared, stats.copied) == (1 + 3, 1, 2)  # the last owner needs no copy
        with torch.no_grad():
            model(torch.tensor([[5], [6], [7]]), past_key_values=cache)
        assert kv.paged_stats().copied == 2
        del out, cache
        assert used(kv) == 0


def test_rows_that_differ_share_what_the_store_has_of_them(client):
    model, shared = known("llama"), prompt(64)
    rows = torch.cat([torch.cat([shared, prompt(9, seed=s)], 1) for s in (2, 3)])
    plain, *_ = generate(model, rows)
    with attached(model, client) as kv:
        generate(model, shared, 1)
        tokens, _, cache = generate(model, rows)
        assert kv.last.reused_tokens == 128
        assert torch.equal(tokens, plain)
        parts = cache.layers[0]._prefix
        assert len({part.block[0].ctypes.data for part in parts}) == 4 == len(parts) // 2
        assert (kv.paged_stats().used, kv.paged_stats().shared) == (2, 0)


@pytest.mark.parametrize("reuse", [False, True])
def test_beams_equal_the_dense_path(client, left, reuse):
    model, ids = known("llama"), prompt(61)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 80, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with attached(model, client) as kv:
        if reuse:
            generate(model, ids)
        assert torch.equal(model.generate(ids, **options), plain)
        assert kv.last.reused_tokens == (4 * 48 if reuse else 0)
        stats = kv.paged_stats()
        assert stats.copied > 0
        assert stats.peak <= 3 + 2 * 4  # what is common is there once
        assert used(kv) == 0
    assert left() == {}


def test_a_copied_cache_shares_what_it_has_and_parts_when_written(client):
    model, ids = known("llama"), prompt(100)
    ends = [torch.cat([ids, prompt(9, seed=s)], 1) for s in (8, 9)]
    plain = [generate(model, end, 4)[0] for end in ends]
    with attached(model, client) as kv:
        generate(model, ids)
        _, _, cache = generate(model, ids, 1)
        copies = [copy.deepcopy(cache) for _ in ends]
        stats = kv.paged_stats()
        assert (stats.used, stats.shared, stats.copied) == (1, 1, 0)
        for end, copied, wanted in zip(ends, copies, plain, strict=True):
            assert torch.equal(generate(model, end, 4, past_key_values=copied)[0], wanted)
        assert kv.paged_stats().copied == 2
        rest = generate(model, torch.cat([ids, prompt(9, seed=8)], 1), 4, past_key_values=cache)[0]
        assert torch.equal(rest, plain[0])
        del cache, copies, copied
        assert used(kv) == 0


def test_a_full_pool_is_an_error_that_names_the_limit_and_leaves_nothing(client):
    model, ids = known("llama"), prompt(100)
    plain, *_ = generate(model, ids, 20)
    with attached(model, client, paged_tokens=128) as kv:
        with pytest.raises(PagesExhausted, match=r"2 pages of 64 tokens.*paged_tokens=128"):
            generate(model, prompt(140), 1)
        assert used(kv) == 0
        with pytest.raises(PagesExhausted):  # while it generates: 100 and 28 fit
            generate(model, ids, 40)
        assert used(kv) == 0
        assert client.stats()["created"] == 0
        tokens, *_ = generate(model, ids, 20)  # what the first try published is not computed again
        assert kv.last.reused_tokens > 0
        assert torch.equal(tokens, plain)


def test_calls_in_threads_share_one_pool(client):
    model = known("llama")
    texts = [prompt(90, seed=s) for s in range(4)]
    plain = [generate(model, ids, 60)[0] for ids in texts]
    found: list = [None] * 4
    with attached(model, client) as kv:

        def call(number: int) -> None:
            for _ in range(2):
                found[number] = generate(model, texts[number], 60)[0]

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert used(kv) == 0
        assert kv.paged_stats().peak > 3
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_what_only_one_tensor_can_give_is_given_and_counted(client, left):
    model = known("llama")
    rows = torch.cat([prompt(100), prompt(100, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :70] = mask[1, :70] = 0
    _, _, dense = generate(model, rows, attention_mask=mask)
    with attached(model, client) as kv:
        for _ in range(2):
            _, _, cache = generate(model, rows, attention_mask=mask)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        dense.batch_select_indices(torch.tensor([1, 0, 1]))
        for layer, plain in zip(cache.layers, dense.layers, strict=True):
            assert layer.keys.isfinite().all()
            for row, pad in enumerate((70, 0, 70)):
                assert near(layer.keys[row, :, pad:], plain.keys[row, :, pad:])
                assert near(layer.values[row, :, pad:], plain.values[row, :, pad:])
        del layer, cache
        assert used(kv) == 0
    assert left() == {"read": 3}


def test_pages_that_became_tensors_are_free_and_the_cache_goes_on(client, left):
    """With the last layer; not before, as the pages span all layers."""
    model, ids = known("llama"), prompt(100)
    _, _, plain = generate(model, ids)
    with attached(model, client) as kv:
        _, _, cache = generate(model, ids)
        with pytest.raises(InvalidArgument, match=r"cannot be pickled.*Read `keys` of each"):
            pickle.dumps(cache)
        copied = copy.deepcopy(cache)
        for layer in cache.layers[:-1]:
            assert layer.keys is not None
        half = copy.deepcopy(cache)
        assert kv.paged_stats().used == 2
        for past in (cache, half):
            assert past.layers[-1].values is not None
        del copied
        assert used(kv) == 0
        for past in (cache, half, plain):  # rows that no table has
            past.batch_repeat_interleave(3)
            past.batch_select_indices(torch.tensor([2]))
        with torch.no_grad():
            wanted = model(prompt(1, seed=5), past_key_values=plain).logits
            for past in (cache, half):
                assert near(model(prompt(1, seed=5), past_key_values=past).logits, wanted)
        again = pickle.loads(pickle.dumps(cache))
        for layer, twin in zip(cache.layers, again.layers, strict=True):
            assert torch.equal(layer.keys, twin.keys) and torch.equal(layer.values, twin.values)
        again.reset()
        again.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert left() == {"read": 3}


def test_crops_stay_in_pages(client, left):
    model, ids = known("llama"), prompt(100)
    with attached(model, client) as kv:
        _, _, cache = generate(model, ids, 60)
        assert kv.paged_stats().used == 3
        cache.crop(-60)
        assert cache.get_seq_length() == 99
        assert kv.paged_stats().used == 2
        with torch.no_grad():
            found = model(prompt(1, seed=5), past_key_values=cache).logits
            wanted = model(torch.cat([ids[:, :99], prompt(1, seed=5)], 1)).logits[:, -1:]
        assert near(found, wanted)
        cache.reset()
        assert kv.paged_stats().used == 0
        with torch.no_grad():
            assert near(model(ids, past_key_values=cache).logits, model(ids).logits)
    assert left() == {"reset": 3}


def test_generated_text_is_published_from_pages(client):
    model, ids = known("llama"), prompt(20)
    with attached(model, client) as kv:
        tokens, *_ = generate(model, ids, 160)
        assert kv.last.published_blocks == 179 // BLOCK
        longer = torch.cat([tokens, prompt(3, seed=5)], dim=1)
        warm, *_ = generate(model, longer)
        assert kv.last.reused_tokens == 179 // BLOCK * BLOCK
    assert torch.equal(warm, generate(model, longer)[0])


def test_wrong_use_is_said(client):
    model = known("llama")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv, pytest.raises(InvalidArgument):
        kv.paged_stats()
    for tokens in (0, 63, 1 << 25, 640.5, "640"):
        with pytest.raises(InvalidArgument, match=f"paged_tokens={tokens!r}"):
            attached(model, client, paged_tokens=tokens)
    with pytest.raises(InvalidArgument, match="in_place=False"):
        attached(model, client, in_place=False)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(InvalidArgument, match="its own attention"):
        attached(known("falcon"), client)


def test_columns_of_padding_are_zero_where_pages_become_a_tensor(client, left):
    """Pages hold what others left there, NaN perhaps: masked, and yet 0 x NaN is NaN."""
    model, rows = known("llama"), torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :30], mask[1, :30] = 5, 0
    with attached(model, client) as kv:
        kv._model_state.options.pool.memory.fill_(torch.nan)
        _, _, cache = generate(model, rows, 2, attention_mask=mask)
        assert all(layer.keys.isfinite().all() and layer.values.isfinite().all() for layer in cache.layers)
        assert float(cache.layers[0].keys[1, :, :30].abs().max()) == 0
    assert left() == {"read": len(cache.layers)}


# ---------------------------------------------------------------- tables, without a model


def test_rows_that_find_no_page_leave_those_that_their_table_took():
    """Three rows, two pages: what the first two took is free again although no row has it yet."""
    pool = PagePool(1, 1, 1, torch.float32, torch.device("cpu"), 2 * PAGE_TOKENS)
    table = PageTable(pool, [0, 0, 0], [0, 1, 2], 0)
    with pytest.raises(PagesExhausted, match="all 2 pages"):
        table.extend(0, 1)
    assert (pool.stats.used, pool.stats.free) == (0, 2) and table.rows == [[], [], []]
    assert table.extend(0, 0) == [0, 1, 2]


def test_a_table_never_writes_what_another_owner_reads():
    """Random forks, choices, cuts and extensions, against lists of columns that each row should show."""
    generator = torch.Generator().manual_seed(7)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    pool = PagePool(1, 1, 1, torch.float32, torch.device("cpu"), 64 * PAGE_TOKENS)
    tables = [(PageTable(pool, [0, 0], [0, 0], 100), [[], []])]
    stamp = 0.0
    for _ in range(300):
        number = draw(len(tables))
        table, shown = tables[number]
        what = draw(6)
        if what < 3 and table.stop < 300:
            start, stop = table.stop, table.stop + 1 + draw(40)
            stop = min(stop, table._common) if start < table._common else stop
            rows = table.extend(start, stop)
            for row in rows:
                for column in range(start, stop):
                    stamp += 1
                    page, at = divmod(column, PAGE_TOKENS)
                    pool.memory[table.rows[row][page], 0, 0, 0, at, 0] = stamp
                    same = range(len(shown)) if len(rows) < len(shown) else [row]
                    for other in same:
                        shown[other].append(stamp)
        elif what == 3 and len(tables) < 4:
            tables.append((table.fork(), [list(row) for row in shown]))
        elif what == 4 and table.stop:
            rows = [draw(len(shown)) for _ in range(1 + draw(3))]
            table.choose(rows)
            tables[number] = (table, [list(shown[row]) for row in rows])
        elif what == 5 and len(tables) > 1:
            table.clear()
            del tables[number]
        elif table.stop:
            stop = draw(table.stop)
            table.cut(stop)
            for row in shown:
                del row[stop:]
        for table, shown in tables:
            for pages, row in zip(table.rows, shown, strict=True):
                assert NOTHING not in pages
                assert pool.memory[pages, 0, 0, 0, :, 0].flatten()[: len(row)].tolist() == row
        counts = torch.zeros(pool.pages + 1, dtype=torch.int64)
        for table, _ in tables:
            for pages in table.rows:
                counts += torch.bincount(torch.tensor(pages, dtype=torch.int64), minlength=pool.pages + 1)
        assert counts.tolist() == pool._owners
    for table, _ in tables:
        table.clear()
    assert pool.stats.used == 0


def test_every_layer_is_paged(client):
    model = known("llama")
    with attached(model, client):
        _, _, cache = generate(model, prompt(40))
        assert all(type(layer) is PagedLayer for layer in cache.layers)
        assert len({id(layer.table) for layer in cache.layers}) == 1
