"""Layers that compress tokens to entries (DeepSeek V4): entries, and what the next needs of the last one's
tokens, are stored beside the window, and answers from them are those of plain generate().

A tiny random model in fp32 whose entries are of four and of eight tokens: a hit ends behind a multiple of
eight, at whatever place of a window or an entry the prompt ends. Of the entries of four an indexer chooses
four, so that other entries give other answers.
"""

import pytest
import torch

import kvclient
import kvclient.hf
from tests.hf.zoo import generate, known, prompt

BLOCK, NEW = 8, 6


def check(model, kv, ids, reused, **options):
    with kv.bypass():
        plain, plain_logits, _ = generate(model, ids, NEW, **options)
    tokens, logits, _ = generate(model, ids, NEW, **options)
    assert (kv.last.reused_tokens, kv.last.bypassed) == (reused, None)
    assert torch.equal(tokens, plain)
    assert torch.allclose(logits, plain_logits, atol=1e-4, rtol=1e-4)
    return tokens


@pytest.mark.slow
def test_cold_warm_continued_beams_and_batches(client):
    model = known("deepseek_v4")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv._model_state.kv.stride == 8
        for length in (BLOCK, BLOCK + 1, 5 * BLOCK + 3, 61):
            ids = prompt(length, seed=length)
            check(model, kv, ids, 0)
            answered = check(model, kv, ids, (length - 1) // BLOCK * BLOCK)
        longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
        check(model, kv, longer, (61 + NEW - 1) // BLOCK * BLOCK)
        check(model, kv, ids, 2 * 56, num_beams=2)
        rows = torch.cat([ids, prompt(61, seed=2)])
        check(model, kv, rows, 0)
        check(model, kv, rows, 2 * 56)


def test_a_hit_ends_where_every_part_is(client):
    model, ids = known("deepseek_v4"), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        served = kv._chosen()
        plain = check(model, kv, ids, 0)
        for stored in (served, *served.groups):
            client.delete([kv.chunker.chain(stored.identity, ids[0].numpy()).keys[6]])
            tokens, *_ = generate(model, ids, NEW)
            assert kv.last.reused_tokens < 56
            assert torch.equal(tokens, plain)
            check(model, kv, ids, 56)


def test_two_layers_of_a_kind_are_published(client):
    """Their parts are complete in another order than that of the layers."""
    sparse, ids = "compressed_sparse_attention", prompt(61)
    model = known("deepseek_v4", layer_types=["sliding_attention", sparse, sparse])
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        check(model, kv, ids, 0)
        assert kv.last.store_error is None
        check(model, kv, ids, 56)


def test_blocks_have_to_hold_whole_entries(client):
    model = known("deepseek_v4")
    for options in ({"block_tokens": 12}, {"block_tokens": 4}):
        with pytest.raises(kvclient.InvalidArgument, match="multiples of 8 tokens"):
            kvclient.hf.attach(model, client, **options)
        assert "generate" not in model.__dict__


def test_a_tail_holds_whole_entries(client):
    """Of 61 tokens 32 are in a block and 24 in a shorter one; the last five are in no entry of eight."""
    model, ids = known("deepseek_v4"), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=4 * BLOCK) as kv, kv.keeping(tails=True):
        check(model, kv, ids, 0)
        check(model, kv, ids, 56)
        check(model, kv, torch.cat([ids[:, :59], prompt(20, seed=2)], dim=1), 56)


def test_padded_rows_go_without_the_store_even_where_nothing_was_tried(client):
    """Entries are of columns, not of a row's tokens: of a padded row they are no other row's."""
    model, rows = known("deepseek_v4"), torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :3] = mask[1, :3] = 0
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, rows, NEW, attention_mask=mask)
        assert kv.last.bypassed == "padding"
        check(model, kv, prompt(61), 0)
