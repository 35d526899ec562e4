"""repair="auto" does not begin what is likely to end with all computed anew: documents behind others that
they were not computed behind, where little may be off.

Tiny random models and the in-memory fake; which prompts those are was found by bench.quality (docs/log.md).
"""

import copy

import pytest
import torch

import kvclient.hf
from kvclient.blocks.match import Piece
from kvclient.blocks.reuse_plan import APPROXIMATE, Segment
from kvclient.hf.request import inside, request
from kvclient.hf.reuse import products
from kvclient.hf.reuse.estimate import LEFT_ROUNDED
from kvclient.hf.reuse.repair import LEAST_BEHIND_OTHERS, LEAST_IN_HALVES, Repair
from kvclient.kernels import contract
from tests.hf.inside import BLOCK, COMPUTED, DOCUMENT
from tests.hf.zoo import build, generate, prompt

OTHER = prompt(96, seed=15)
SWAPPED = torch.cat([prompt(13, seed=7), OTHER, DOCUMENT, prompt(9, seed=4)], dim=1)
FEW = {"behind_tokens": 90}


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=6)


@pytest.fixture
def store_other(model):
    """`store_other()`: behind the document, which `attach` stored, as a prompt of its own."""
    return lambda: generate(model, torch.cat([prompt(130, seed=21), OTHER, prompt(20, seed=3)], dim=1))


def same(kv, model, ids):
    with kv.bypass():
        _, plain, _ = generate(model, ids, 4)
    return torch.equal(generate(model, ids, 4)[1], plain)


def test_such_a_prompt_is_a_prefill_and_a_prefix_from_then_on(attach, model, store_other, monkeypatch):
    monkeypatch.setattr(products, "IN_PAIRS", ())
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    passes = []
    monkeypatch.setattr("kvclient.hf.request.request.run_passes", lambda *_: passes.append(1))
    assert same(kv, model, SWAPPED) and not passes
    assert (kv.last.approximate_tokens, kv.last.inside_bypassed) == (0, "reordered")
    assert kv.last.bypassed is None and kv.stats["bypassed"]["reordered"] == 1
    another = torch.cat([SWAPPED[:, :-9], prompt(12, seed=5)], dim=1)
    generate(model, another)
    assert kv.last.reused_tokens >= 13 + 96 + 90 and kv.last.inside_bypassed is None
    assert kv.client.stats()["pins"] == 0


@pytest.fixture
def in_pairs(monkeypatch):
    """As on a processor that multiplies bf16 in pairs."""
    if not products.available():
        pytest.skip("no kernels here")
    monkeypatch.setattr(products, "IN_PAIRS", (contract.auto_path(),))


def near(kv, model, ids):
    """Whether the logits are those of a prefill but for bf16; and the report."""
    with kv.bypass():
        plain = generate(model, ids, 4)[1]
    logits = generate(model, ids, 4)[1]
    assert kv.client.stats()["pins"] == 0
    # Not equal: torch's products of these rows have other bits.
    return not torch.equal(logits, plain) and torch.allclose(logits, plain, atol=0.05), kv.last


def test_where_products_are_rounded_it_is_one_pass_and_what_it_computed_is_gone_on_from(
    attach, model, store_other, in_pairs
):
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    good, report = near(kv, model, SWAPPED)
    assert good and (report.approximate_tokens, report.inside_bypassed) == (0, "reordered")
    assert report.estimated_kl == LEFT_ROUNDED and report.reused_tokens == 0
    said = generate(model, SWAPPED, 40)[0]  # its blocks go the same way
    rest = prompt(12, seed=5)
    for ids, least in (
        (torch.cat([SWAPPED[:, :-9], rest], dim=1), 176),
        (torch.cat([said, rest], dim=1), 224),
    ):
        good, report = near(kv, model, ids)
        assert good and report.approximate_tokens >= least
        assert (report.recomputed_tokens, report.inside_bypassed) == (0, None)
        assert report.estimated_kl == LEFT_ROUNDED and report.reused_tokens <= 13


def test_what_was_computed_rounded_is_said_to_be_nothing_to_publish(attach, model, store_other, in_pairs):
    """Though no token of it is approximate."""
    kv = attach(Repair(caution=1.0, **FEW))
    assert kv.last.exact
    store_other()
    generate(model, SWAPPED, 4)
    assert (kv.last.approximate_tokens, kv.last.estimated_kl, kv.last.exact) == (0, LEFT_ROUNDED, False)
    two = torch.cat([SWAPPED, torch.cat([prompt(13, seed=8), SWAPPED[:, 13:]], dim=1)])
    generate(model, two, 4)
    assert not kv.last.exact
    generate(model, torch.cat([prompt(80, seed=31), prompt(80, seed=32)]), 4)
    assert kv.last.exact


def test_what_was_computed_rounded_is_nobodys_prefix(attach, model, store_other, in_pairs):
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    generate(model, SWAPPED)
    kv.detach()
    kv = attach(Repair(caution=1.0, max_kl=LEFT_ROUNDED / 2, **FEW))  # more is promised: text like any
    generate(model, SWAPPED)
    assert kv.last.reused_tokens == 0 and kv.last.estimated_kl < LEFT_ROUNDED
    kv.detach()
    kv = attach(None)
    assert same(kv, model, SWAPPED) and kv.last.reused_tokens <= 13


@pytest.mark.parametrize(
    ("repair", "rows"), [(Repair(caution=1.0, **FEW), 2), (Repair(caution=8.0, max_kl=5e-3, **FEW), 1)]
)
def test_equal_rows_and_what_a_caution_leaves_too_little_of_are_a_prefill(
    attach, model, store_other, in_pairs, repair, rows
):
    kv = attach(repair)
    store_other()
    text = SWAPPED.repeat(rows, 1)
    assert same(kv, model, text) and kv.last.inside_bypassed == "reordered"
    generate(model, text)
    assert kv.last.reused_tokens >= rows * (13 + 96 + 90)


def test_a_prefix_that_goes_on_into_what_was_computed_so(attach, model, store_other, in_pairs):
    """Another text has an exact block there, of which the first tokens are this prompt's."""
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    beginning = prompt(24, seed=7)
    text = torch.cat([beginning, OTHER, DOCUMENT], dim=1)
    generate(model, torch.cat([text, prompt(9, seed=4)], dim=1))
    assert kv.last.inside_bypassed == "reordered"
    generate(model, torch.cat([beginning[:, :22], prompt(40, seed=31)], dim=1))
    good, report = near(kv, model, torch.cat([text, prompt(12, seed=5)], dim=1))
    assert good and report.reused_tokens == 22 and report.approximate_tokens >= 160
    assert (report.recomputed_tokens, report.inside_bypassed) == (0, None)


@pytest.mark.parametrize(
    ("tokens", "left"), [(0, [(0, 5), (0, 7)]), (3, [(3, 2), (0, 7)]), (5, [(0, 7)]), (9, [(4, 3)]), (12, [])]
)
def test_pieces_behind_a_prefix(tokens, left):
    pieces = inside._behind([Piece(None, 0, 5), Piece(None, 0, 7)], tokens)
    assert [(piece.offset, piece.count) for piece in pieces] == left


def test_behind_another_beginning_it_is_text_like_any(attach, model, store_other, in_pairs):
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    generate(model, SWAPPED)
    generate(model, torch.cat([prompt(13, seed=8), SWAPPED[:, 13:]], dim=1))
    assert kv.last.approximate_tokens > 100 and kv.last.recomputed_tokens > 0


@pytest.mark.parametrize(
    "repair",
    [
        Repair(caution=1.0, behind_tokens=97), Repair(caution=1.0, max_kl=LEAST_BEHIND_OTHERS, **FEW),
        Repair(max_kl=None, **FEW), Repair("attention", **FEW), Repair("none", **FEW),
    ],
)  # fmt: skip
def test_others_are_tried(attach, model, store_other, repair):
    kv = attach(repair)
    store_other()
    generate(model, SWAPPED)
    assert kv.last.approximate_tokens == 196 and kv.last.inside_bypassed is None


def test_a_batch_of_such_prompts_is_one_prefill(attach, model, store_other, monkeypatch):
    monkeypatch.setattr(products, "IN_PAIRS", ())
    kv = attach(Repair(caution=1.0, **FEW))
    store_other()
    batch = torch.cat([SWAPPED, torch.cat([prompt(13, seed=8), SWAPPED[:, 13:]], dim=1)])
    with kv.bypass():
        _, plain, _ = generate(model, batch, attention_mask=torch.ones_like(batch))
    _, logits, _ = generate(model, batch, attention_mask=torch.ones_like(batch))
    assert torch.equal(logits, plain) and kv.last.approximate_tokens == 0


def chunk(start, tokens, position):
    return Segment(start, start + tokens, APPROXIMATE, (), position)


@pytest.mark.parametrize(
    ("segments", "worth"),
    [
        ([chunk(400, 1000, 0)], True),  # behind live tokens alone
        ([chunk(10, 300, 340), chunk(310, 300, 40)], False),  # changed places
        ([chunk(10, 300, 0), chunk(310, 300, 0)], False),  # computed apart
        ([chunk(10, 255, 295), chunk(265, 300, 40)], True),  # behind little
        ([chunk(10, 128, 0), chunk(150, 128, 0), chunk(300, 90, 0)], False),  # behind several
        ([chunk(10, 300, 40), chunk(330, 300, 340)], True),  # in their order; something stands between
    ],
)
def test_which_these_are(segments, worth):
    why = None if worth else "reordered"
    assert Repair().not_worth_trying(segments, False) == why
    careful = Repair(max_kl=LEAST_BEHIND_OTHERS, caution=2.0)
    assert careful.not_worth_trying(segments, False) == why
    assert Repair(max_kl=0.0).not_worth_trying(segments, False) is None
    assert careful.not_worth_trying(segments, True) == "rounding"
    assert Repair(max_kl=LEAST_IN_HALVES).not_worth_trying(segments, True) is None
    assert Repair(max_kl=None).not_worth_trying(segments, True) is None


@pytest.mark.parametrize(("max_kl", "tried"), [(5e-3, False), (LEAST_IN_HALVES, True)])
def test_in_16_bits_little_is_not_tried_and_much_is(model, client, monkeypatch, max_kl, tried):
    halves = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.cat([prompt(37, seed=7), DOCUMENT, prompt(9, seed=4)], dim=1)
    passes, original = [], request.run_passes
    monkeypatch.setattr(request, "run_passes", lambda *args: passes.append(1) or original(*args))
    repair = Repair(max_kl=max_kl, caution=1.0)
    with kvclient.hf.attach(halves, client, block_tokens=BLOCK, repair=repair, self_test=False) as kv:
        generate(halves, COMPUTED)
        good = same(kv, halves, ids)
        assert bool(passes) is tried
        assert kv.last.inside_bypassed == (None if tried else "rounding")
        assert tried or (good and kv.stats["bypassed"]["rounding"] == 1)
