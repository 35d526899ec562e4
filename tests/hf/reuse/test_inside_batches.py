"""Batches of different prompts are reused inside, each row by its own plan.

Goal: at ratio 1.0 a row has the K and V of a full prefill, whatever stands beside it and however it is
padded; with repair it has what a call of that prompt alone has. Method: a tiny random model and the in-memory
fake; rows with a document at different offsets, rows without any match, rows that share a prefix, beams, a
store that ends under it.
"""

import pytest
import torch

import kvclient.errors
import kvclient.hf
from kvclient.hf.request.batch import row_by_row
from kvclient.hf.reuse.repair import Repair
from tests.hf.inside import AUTO, BLOCK, COMPUTED, DOCUMENT
from tests.hf.zoo import build, generate, prompt


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=6)


def asked(shift, seed=7):
    """The document behind other tokens, at another offset."""
    return torch.cat([prompt(shift, seed=seed), DOCUMENT, prompt(9, seed=seed + 1)], dim=1)


def padded(*rows):
    """(a batch of these, padded left; its mask)."""
    length = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length)
    for at, row in enumerate(rows):
        ids[at, length - row.shape[1] :], mask[at, length - row.shape[1] :] = row[0], 1
    return ids, mask.long()


ROWS = (asked(5), asked(37, seed=11), prompt(60, seed=13), torch.cat([COMPUTED[:, :50], prompt(8)], dim=1))


@pytest.mark.parametrize("method", ["cacheblend", "auto"])
def test_ratio_one_is_a_full_prefill_of_every_row(attach, model, method):
    kv = attach(Repair(method, ratio=1.0, attended_ratio=1.0))
    ids, mask = padded(*ROWS)
    tokens, logits, cache = generate(model, ids, attention_mask=mask)
    assert [row.approximate_tokens for row in kv.last.rows] == [100, 100, 0, 0]
    assert [row.recomputed_tokens for row in kv.last.rows] == [100, 100, 0, 0]
    assert [row.reused_tokens for row in kv.last.rows][3] == 50
    assert kv.last.approximate_tokens == 200 and kv.stats["approximate_tokens"] == 200
    with kv.bypass():
        plain, plain_logits, plain_cache = generate(model, ids, attention_mask=mask)
    assert torch.equal(tokens, plain)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-3)
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        for row, pad in enumerate((mask == 0).sum(1)):
            for side in ("keys", "values"):
                columns = (getattr(layer, side)[row, :, pad:] for layer in (ours, theirs))
                torch.testing.assert_close(*columns, rtol=0, atol=1e-4)


@pytest.mark.parametrize("repair", ["none", "selective", "cacheblend", "attention", AUTO], ids=str)
def test_a_row_is_answered_as_if_it_were_alone(attach, model, repair):
    kv = attach(repair)
    alone, reports = [], []
    with kv.bypass(read=False):
        for row in ROWS:
            alone.append(generate(model, row)[1][:, 0])
            reports.append(kv.last)
    ids, mask = padded(*ROWS)
    with kv.bypass(read=False):
        _, logits, _ = generate(model, ids, attention_mask=mask)
    assert kv.last.approximate_tokens == sum(report.approximate_tokens for report in reports) == 200
    assert kv.last.recomputed_tokens == sum(report.recomputed_tokens for report in reports)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(logits[:, row], expected, rtol=0, atol=1e-3)


def test_the_error_is_promised_row_by_row(attach, model):
    kv = attach(Repair("auto", max_kl=1e-9, caution=1.0))
    ids, mask = padded(*ROWS)
    with kv.bypass():
        plain = generate(model, ids, attention_mask=mask)[1]
    _, logits, _ = generate(model, ids, attention_mask=mask)
    estimated = [row.estimated_kl for row in kv.last.rows]
    assert estimated == [0.0, 0.0, None, None] and kv.last.estimated_kl == 0  # all was computed
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-3)
    kv.detach()
    kv = attach(Repair("auto", max_kl=100.0, caution=1.0))
    generate(model, ids, attention_mask=mask)
    estimated = [row.estimated_kl for row in kv.last.rows]
    assert 0 < estimated[0] < 100 and 0 < estimated[1] < 100 and estimated[2:] == [None, None]
    assert kv.last.estimated_kl == max(estimated[:2]) and kv.last.recomputed_tokens < 200


def test_a_prompt_behind_padding_is_reused_inside(attach, model):
    kv = attach(Repair("auto", attended_ratio=1.0))
    ids, mask = padded(asked(5), asked(5))
    ids, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(mask, (3, 0))
    tokens, *_ = generate(model, ids, attention_mask=mask)
    assert kv.last.approximate_tokens == 200
    with kv.bypass():
        assert torch.equal(tokens, generate(model, ids, attention_mask=mask)[0])


def test_a_prompt_behind_padding_is_looked_up_in_and_reused_inside(attach, model):
    """Its prompt is computed ahead of a loop that knows no prefill, by a request of its own for the row."""
    kv = attach(Repair("auto", attended_ratio=1.0))
    ids, mask = (torch.nn.functional.pad(each, (3, 0)) for each in padded(asked(5)))
    with kv.bypass():
        plain, *_ = generate(model, ids, attention_mask=mask)
    tokens, *_ = generate(model, ids, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert kv.last.approximate_tokens == 100 and torch.equal(tokens, plain)


def test_beams_of_different_prompts(attach, model):
    kv = attach(Repair("auto", attended_ratio=1.0))
    ids, mask = padded(*ROWS[:3])
    tokens, *_ = generate(model, ids, attention_mask=mask, num_beams=2)
    assert [row.approximate_tokens for row in kv.last.rows] == [100, 100, 100, 100, 0, 0]
    with kv.bypass():
        assert torch.equal(tokens, generate(model, ids, attention_mask=mask, num_beams=2)[0])


def test_what_rows_say_is_published(attach, model):
    """Behind approximate tokens by content only; of a row without a match, as its prefix."""
    kv = attach("none")
    ids, mask = padded(asked(5), prompt(60, seed=13))
    tokens, *_ = generate(model, ids, 40, attention_mask=mask)
    said = torch.cat([tokens[1:2, (mask[1] == 0).sum() :], prompt(4, seed=3)], dim=1)
    with kv.bypass():
        plain, *_ = generate(model, said)
    again, *_ = generate(model, said)
    assert kv.last.reused_tokens >= 60 + 40 - BLOCK and torch.equal(again, plain)
    behind = torch.cat([tokens[:1, (mask[0] == 0).sum() :], prompt(4, seed=3)], dim=1)
    generate(model, behind)
    assert kv.last.reused_tokens < 105 <= kv.last.reused_tokens + kv.last.approximate_tokens


def test_a_batch_of_which_nothing_is_found_inside_is_one_pass(attach, model, monkeypatch):
    kv = attach(AUTO)
    monkeypatch.setattr(row_by_row, "Request", None)  # nobody makes one
    ids, mask = padded(COMPUTED[:, :90], torch.cat([COMPUTED[:, :70], prompt(30, seed=13)], dim=1))
    generate(model, ids, 1, attention_mask=mask)
    assert [row.approximate_tokens for row in kv.last.rows] == [0, 0] and kv.last.reused_tokens > 100


def test_windows_and_odd_layers(client):
    for name in ("gemma2", "gptj", "llama4"):
        model = build(name)
        options = {"block_tokens": 8, "repair": Repair("auto", attended_ratio=1.0), "self_test": False}
        with kvclient.hf.attach(model, client, **options) as kv:
            kv.warm(DOCUMENT[0].tolist())
            ids, mask = padded(asked(5), asked(37, seed=11), prompt(60, seed=13))
            with kv.bypass():
                plain, *_ = generate(model, ids, attention_mask=mask)
            tokens, *_ = generate(model, ids, attention_mask=mask)
            assert kv.last.bypassed is None, (name, kv.last)
            assert kv.last.approximate_tokens > 100, (name, kv.last)
            assert torch.equal(tokens, plain), name


@pytest.mark.parametrize("calls", [1, 3, 8, 20])
def test_a_store_that_ends_meanwhile_costs_nothing_but_its_hits(attach, model, client, calls, monkeypatch):
    kv = attach(Repair("auto", attended_ratio=1.0))
    ids, mask = padded(*ROWS)
    with kv.bypass():
        plain, *_ = generate(model, ids, attention_mask=mask)
    left = [calls]
    for name in ("get", "create"):
        original = getattr(type(client), name)

        def failing(self, *args, original=original, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise kvclient.errors.Unavailable("gone")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(type(client), name, failing)
    with pytest.warns(UserWarning, match="without the store"):
        tokens, *_ = generate(model, ids, attention_mask=mask)
    assert torch.equal(tokens, plain)
    assert kv.last.store_error is not None
