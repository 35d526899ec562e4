"""Reuse inside a prompt needs no memory in proportion to the square of its length: rows that do not follow
each other are told by their columns where the attention is ours, and what needs too large a mask is computed.

Method: the masks that the layers are given in a pass are looked at; logits beside those of other attentions.
"""

import pytest
import torch

import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.request import inside
from kvclient.hf.reuse import blend
from tests.hf.inside import BLOCK, COMPUTED, DOCUMENT
from tests.hf.zoo import build, generate, near, prompt

ASKED = torch.cat([prompt(21, seed=7), DOCUMENT, prompt(9, seed=4)], dim=1)


@pytest.fixture
def masks(monkeypatch):
    """Of the rows of each pass, as they are made."""
    made, masked = [], blend.Blend._masked

    def note(self, mask, hidden, rows):
        made.append(masked(self, mask, hidden, rows))
        return made[-1]

    monkeypatch.setattr(blend.Blend, "_masked", note)
    return made


@pytest.mark.parametrize("repair", ["selective", "cacheblend", "attention"])
def test_our_attention_is_told_the_columns_and_no_mask(client, masks, repair):
    model, answers = build("llama"), []
    for backend in (None, "torch"):
        if backend:
            attention.install(model, backend)
        with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=repair, self_test=False) as kv:
            generate(model, COMPUTED, 1)
            masks.clear()
            with kv.bypass(read=False):
                answers.append(generate(model, ASKED, 1)[1])
            assert kv.last.approximate_tokens == 100 and masks
            assert all(mask.untyped_storage().nbytes() <= 8 for mask in masks)
            assert {mask.shape[3] for mask in masks} == {ASKED.shape[1]}
    assert near(answers[1], answers[0], 1e-4)


def test_a_mask_beyond_the_limit_is_not_made(client, masks, monkeypatch):
    model = build("llama")
    options = {"block_tokens": BLOCK, "repair": "none", "in_place": False, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, COMPUTED, 1)
        with kv.bypass():
            _, plain, _ = generate(model, ASKED, 1)
        rows = 21 + 9 + 16 + 4 - 4  # live ones, the recency, the document's sinks
        for limit, found in ((rows * 130 * 4, 100), (rows * 130 * 4 - 1, 0)):
            monkeypatch.setattr(inside, "MOST_MASK_BYTES", limit)
            masks.clear()
            with kv.bypass(read=False):
                if found:
                    generate(model, ASKED, 1)
                else:
                    with pytest.warns(UserWarning, match=f"{limit + 1} bytes for sdpa, at most {limit}"):
                        _, logits, _ = generate(model, ASKED, 1)
            assert kv.last.approximate_tokens == found and bool(masks) == bool(found)
    assert torch.equal(logits, plain)
    assert client.stats()["pins"] == 0
