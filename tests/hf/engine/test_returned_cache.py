"""Goal: a caller's cache is served where it is certain what it holds: an empty one as if there were none, one
that an earlier call gave back is gone on with, and what it grows by is published. Any other is left alone.

Method: tiny random models in place and dense, rows with padding, caches that were written to, cut, or
exchanged between models; what is published is loaded again by a fresh model, against plain generate().
"""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvclient.hf
from tests.hf.zoo import build, generate, prompt

BLOCK = 8


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture(params=[True, False], ids=["in_place", "dense"])
def kv(request, model, client):
    options = {"block_tokens": BLOCK, "self_test": False, "in_place": request.param}
    with kvclient.hf.attach(model, client, **options) as kv:
        yield kv


def again(kv, model):
    """Another model on the same store, whose attention is the same."""
    in_place = kv._model_state.options.in_place is not None
    return kvclient.hf.attach(model, kv.client, block_tokens=BLOCK, self_test=False, in_place=in_place)


def longer(tokens, count=30, seed=5):
    more = torch.cat([prompt(count, seed=seed + row) for row in range(len(tokens))])
    return torch.cat([tokens, more], dim=1)


def plain(model, ids, new_tokens=24, **options):
    """Without a cache, and without the store."""
    return generate(build("llama"), ids, new_tokens, **options)[0]


@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=build("llama").config)])
def test_an_empty_cache_is_served(model, kv, make):
    ids = prompt(70)
    for reused in (0, 64):
        cache = make()
        found, _, back = generate(model, ids, 24, past_key_values=cache)
        assert torch.equal(found, plain(model, ids)) and back is cache
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)
        assert cache.get_seq_length() == 93


@pytest.mark.parametrize("warm", [False, True])
def test_one_that_goes_on_is_published(model, kv, client, warm):
    """Its prompt and its answer, each turn what is new of them."""
    ids = prompt(70)
    if warm:
        generate(model, ids, 1)
    tokens, _, cache = generate(model, ids, 24)
    for turn in range(3):
        ids = longer(tokens, seed=10 * turn + 5)
        tokens, _, cache = generate(model, ids, 24, past_key_values=cache)
        assert torch.equal(tokens, plain(model, ids))
        assert (kv.last.bypassed, kv.last.read_bypassed, kv.last.reused_tokens) == (None, "user_cache", 0)
        assert kv.last.prompt_tokens == ids.shape[1] and kv.last.published_blocks >= 6
    fresh, whole = build("llama"), longer(tokens)
    with again(kv, fresh) as other:
        assert torch.equal(generate(fresh, whole, 24)[0], plain(model, whole))
        assert other.last.reused_tokens == (tokens.shape[1] - 1) // BLOCK * BLOCK
    assert (client.stats()["created"], client.stats()["pins"]) == (0, client.stats()["pins"])


def test_rows_with_padding_go_on(model, kv, client):
    ids = torch.cat([prompt(40), torch.cat([torch.zeros(1, 13, dtype=torch.int64), prompt(27, 2)], 1)])
    mask = (ids != 0).long()
    tokens, _, cache = generate(model, ids, 24, attention_mask=mask)
    ids = longer(tokens)
    mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.int64)], dim=1)
    found = generate(model, ids, 24, attention_mask=mask, past_key_values=cache)[0]
    assert torch.equal(found, plain(model, ids, attention_mask=mask))
    assert kv.last.bypassed is None and kv.last.published_blocks > 8
    single = found[1:, 13:]
    fresh = build("llama")
    with again(kv, fresh) as other:
        assert torch.equal(generate(fresh, single, 8)[0], plain(model, single, 8))
        assert other.last.reused_tokens == (single.shape[1] - 1) // BLOCK * BLOCK


def written(model, cache, ids):
    with torch.no_grad():
        model(prompt(5, seed=9), past_key_values=cache)
    return torch.cat([ids, prompt(1), prompt(5, seed=9), prompt(8)], dim=1)


def other_ids(model, cache, ids):
    return longer(torch.cat([ids[:, :50], prompt(1, seed=7), ids[:, 51:]], dim=1))


def by_hand(model, cache, ids):
    layer = cache.layers[0]
    layer.storage[0, :, :, -30:] *= 0.5
    return longer(ids)


def another_model(model, cache, ids):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    return longer(ids)


@pytest.mark.parametrize("change", [written, other_ids, by_hand, another_model])
def test_one_that_is_not_what_was_given_back_is_left_alone(model, kv, client, change):
    tokens, _, cache = generate(model, prompt(70), 24)
    ids = change(model, cache, tokens)
    blocks = client.stats()["blocks"]
    generate(model, ids, 24, past_key_values=cache)
    assert (kv.last.bypassed, kv.last.published_blocks) == ("user_cache", 0)
    assert client.stats()["blocks"] == blocks


def test_one_that_was_cut_goes_on_from_there(model, kv, client):
    tokens, _, cache = generate(model, prompt(70), 24)
    cache.crop(-20)  # to 73 tokens
    ids = longer(tokens[:, :74])
    found = generate(model, ids, 24, past_key_values=cache)[0]
    assert torch.equal(found, plain(model, ids))
    assert kv.last.bypassed is None or not kv.last.published_blocks
    fresh = build("llama")
    with again(kv, fresh):
        whole = longer(found)
        assert torch.equal(generate(fresh, whole, 24)[0], plain(model, whole))


def test_what_is_near_only_is_never_gone_on_with(client):
    """Behind approximate tokens nothing is exact."""
    model, document = build("llama"), prompt(64, seed=4)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair="selective", self_test=False) as kv:
        generate(model, document, 1)
        ids = torch.cat([prompt(11, seed=5), document, prompt(15, seed=6)], dim=1)
        tokens, _, cache = generate(model, ids)
        assert kv.last.approximate_tokens
        generate(model, longer(tokens), past_key_values=cache)
        assert kv.last.bypassed == "user_cache"


def test_beams_are_never_gone_on_with(model, kv):
    _, _, cache = generate(model, prompt(70), 8, num_beams=2)
    ids = prompt(120)
    try:
        generate(model, ids.repeat(2, 1), 4, past_key_values=cache)
    except Exception:  # whatever transformers makes of it
        return
    assert kv.last.published_blocks == 0


def padded(lengths, seed):
    rows, most = [prompt(count, seed=seed + row) for row, count in enumerate(lengths)], max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (most - row.shape[1], 0)) for row in rows])
    return ids, (ids != 0).long()


@pytest.mark.parametrize("lengths", [(33, 33), (20, 45), (30,), (30, 22, 30)])
@pytest.mark.parametrize("how", ["reset", "crop"])
def test_an_emptied_one_holds_the_rows_and_the_padding_of_whom_it_is_given_to(model, kv, lengths, how):
    ids, mask = padded((40, 25), 0)
    cache = generate(model, ids, 6, attention_mask=mask)[2]
    if how == "reset":
        cache.reset()
    elif len(lengths) == 2:  # transformers' own keeps its rows too
        cache.crop(-cache.get_seq_length())
    else:
        return
    ids, mask = padded(lengths, 50)
    found = generate(model, ids, 6, attention_mask=mask, past_key_values=cache)[0]
    assert torch.equal(found, plain(model, ids, 6, attention_mask=mask))


@pytest.mark.parametrize("hidden", [0, 3, 20])
def test_tokens_that_a_later_call_hides_or_shows_are_hidden_or_shown(model, kv, hidden):
    """Over blocks of the store, too: the last mask says what is seen, whatever the first one said."""
    ids, mask = padded((40, 25), 0)
    generate(model, ids, 1, attention_mask=mask)
    cache, bare = generate(model, ids, 6, attention_mask=mask)[2], build("llama")
    wanted = generate(bare, ids, 6, attention_mask=mask)[2]
    more, columns = prompt(4, seed=9).repeat(2, 1), cache.get_seq_length()
    seen = torch.ones(2, columns + 4, dtype=torch.long)
    seen[:, :hidden] = 0
    with torch.no_grad():
        found = model(more, attention_mask=seen, past_key_values=cache).logits
        wanted = bare(more, attention_mask=seen, past_key_values=wanted).logits
    assert torch.allclose(found, wanted, atol=1e-3)


def test_one_that_was_cut_and_written_to_by_another_pass_is_left_alone(model, kv, client):
    ids = prompt(70)
    tokens, _, cache = generate(model, ids, 24)
    same = tokens[:, cache.get_seq_length() - 20 : cache.get_seq_length()]
    cache.crop(-20)
    with torch.no_grad():
        for token in same[0]:  # the same tokens, but elsewhere
            model(token[None, None], past_key_values=cache, position_ids=torch.tensor([[300]]))
    blocks, ids = client.stats()["blocks"], longer(tokens)
    generate(model, ids, 24, past_key_values=cache)
    assert kv.last.bypassed == "user_cache" and client.stats()["blocks"] == blocks
