"""Proves what a report says of drafts, that a budget of nodes is kept, and that an answer stops drafting
where that does not pay.

Method: a tiny llama, a clock that goes on by one each time it is asked (twice in a plain pass, three times in
one with a draft), so that every figure is known; a drafter that is never right; drafters that are watched.
"""

import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.speculation import DraftModel, PromptLookup, Speculation
from kvclient.hf.speculation.pace import TRIAL
from tests.hf.engine.test_speculation import Told, plain, prompts, tiny


class Clock:
    """Each look at it takes a second."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def model():
    return tiny()


def test_every_figure_of_a_report(model):
    ids = prompts()[1]
    want = plain(model, ids)
    speculation = Speculation(Told(want[0].tolist(), right=3), clock=Clock())
    assert torch.equal(plain(model, ids, custom_generate=speculation), want)
    last = speculation.last
    made, drafted, passes = last.tokens - 1, last.drafted_passes, last.passes
    assert last.accepted == made - passes
    assert 0 < drafted < passes  # the first one says what a plain pass takes
    assert last.plain_pass_s == 1 and last.draft_s == drafted
    assert last.decode_s == 2 * passes + drafted + 1
    assert last.tokens_per_pass == made / passes and last.acceptance == last.accepted / last.drafted
    assert last.speed_up == made * 1.0 / last.decode_s


def test_an_answer_stops_drafting_where_it_does_not_pay(model):
    """A pass with a draft that is never right takes twice as long by this clock."""
    ids, new = prompts()[1], 400
    want = plain(model, ids, max_new_tokens=new)
    speculation = Speculation(Told(want[0].tolist(), right=0), clock=Clock())
    assert torch.equal(plain(model, ids, max_new_tokens=new, custom_generate=speculation), want)
    last = speculation.last
    assert last.accepted == 0 and last.passes == new - 1
    assert TRIAL <= last.drafted_passes <= 5 * TRIAL  # rests of 32, 64, 128 and 256 passes between trials


class Watched:
    """Hands on to a drafter, and keeps what was asked and drafted."""

    def __init__(self, drafter):
        self.drafter, self.seen = drafter, []

    def begin(self, vocabulary):
        self.session = self.drafter.begin(vocabulary)
        return self

    def draft(self, ids, depth, nodes, sample):
        found = self.session.draft(ids, depth, nodes, sample)
        self.seen.append((max(found.depths), depth, len(found.tokens), nodes))
        return found


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 5, 15])
@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_a_tree_keeps_its_budget_of_nodes_and_its_depth(model, kind, nodes, sample):
    small = tiny(4, layers=1)
    drafter = DraftModel(small, branches=3) if kind == "model" else PromptLookup(run=2, least=1, branches=3)
    watched, widest, used = Watched(drafter), 0, 0
    for ids in prompts()[:2]:
        speculation = Speculation(watched, depth=4, nodes=nodes, clock=lambda: 0.0)
        plain(model, ids, do_sample=sample, custom_generate=speculation)
    for deep, depth, found, most in watched.seen:
        assert deep <= depth <= 4 and found <= most == nodes
        widest, used = max(widest, found - deep), max(used, found)
    if kind == "model":  # all of it is spent
        assert used == nodes and (widest > 0) == (nodes > 1)
    assert used >= min(nodes, 4)


def test_what_is_no_budget_is_refused():
    for name, value, most in (("nodes", 0, 255), ("nodes", 256, 255), ("depth", 0, 64), ("depth", 65, 64)):
        with pytest.raises(InvalidArgument, match=rf"{name}={value}; it must be an integer in 1\.\.{most}"):
            Speculation(**{name: value})
    for made in (DraftModel, lambda _, **options: PromptLookup(**options)):
        with pytest.raises(InvalidArgument, match=r"branches=9; it must be an integer in 1\.\.8"):
            made(tiny(layers=1), branches=9)
