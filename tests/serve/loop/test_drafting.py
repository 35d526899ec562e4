"""Proves that drafts change no answer: rows with and without them in one pass, chains of a small model and
look-ups in the text, greedy, with a seed, with a grammar-like sampler, ended in the middle of a draft; that
what is drawn by rejection has the model's distribution; and that drafting stops where it does not pay.

Method: the real loop on tiny random models in fp32, against plain generate(); the cost of a step and a
request's record alone, with seconds the test makes up.
"""

import queue
from collections import Counter

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.speculation import NOTHING, Draft, DraftModel, PromptLookup
from kvclient.serve.engine.drafting import CHECKED, REST, Drafting, Record, StepCost, accept
from kvclient.serve.engine.job import Done
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import NEW, alone, ask, ended

LIMITS = Limits(max_batch=4, piece_tokens=64)


class Oracle:
    """Guesses right, or wrong in every third token, from answers it is told; nothing for others."""

    def __init__(self):
        self.answers = {}

    def begin(self, vocabulary):
        return self

    def draft(self, ids, depth, nodes, sample):
        for known, answer in self.answers.items():
            if tuple(ids[: len(known)]) == known:
                said = len(ids) - len(known)
                guess = [t if (said + i) % 3 else t ^ 1 for i, t in enumerate(answer[said : said + depth])]
                return Draft.chain(guess) if guess else NOTHING
        return NOTHING


class Always(Drafting):
    """Every step has drafts: the pace is not what these tests are about."""

    def begin(self):
        record = super().begin()
        record.due = lambda cost: True
        return record


@pytest.fixture(params=["llama", "gpt_oss"])
def scene(request):
    model, oracle = build(request.param, layers=2), Oracle()
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        loop = Loop(model, kv, LIMITS, Always(oracle, 5, model.config.vocab_size))
        yield model, kv, loop, oracle
        loop.close()


def test_rows_with_and_without_drafts_say_what_they_say_alone(scene):
    model, kv, loop, oracle = scene
    prompts = [prompt(200), prompt(33, seed=5), prompt(8, seed=9), prompt(90, seed=2), prompt(61, seed=3)]
    wanted, events = alone(model, kv, prompts), queue.Queue()
    for index in (0, 1, 3):
        oracle.answers[tuple(prompts[index][0].tolist())] = wanted[index]
    jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
    ends = ended(events, len(jobs))
    assert [job.tokens for job in jobs] == wanted
    stats = loop.stats()
    assert stats["draft_tokens_accepted_total"] == sum(end.accepted for end in ends.values()) > 10
    assert stats["draft_tokens_rejected_total"] == sum(end.rejected for end in ends.values()) > 3
    assert ends[2].accepted == ends[2].rejected == 0
    turn = torch.tensor([[*prompts[0][0].tolist(), *wanted[0], *prompt(20, seed=4)[0].tolist()]])
    wanted = alone(model, kv, [turn])[0]
    again = ask(loop, turn, events, 9)
    ended(events, 1)
    assert again.tokens == wanted, "what was published has rejected tokens in it"


def test_a_seed_says_the_same_with_drafts_and_an_end_within_a_draft_ends(scene):
    _, _, loop, oracle = scene
    events, ids = queue.Queue(), prompt(40)

    def seeded():
        return Sampler(Sampling(temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.2), ids[0].tolist())

    first = ask(loop, ids, events, 0, seeded())
    ended(events, 1)
    oracle.answers[tuple(ids[0].tolist())] = first.tokens
    again = ask(loop, ids, events, 1, seeded())
    end = ended(events, 1)[1]
    assert again.tokens == first.tokens and end.accepted
    until = first.tokens[7]
    stops = ask(loop, ids, events, 2, seeded(), ends=frozenset([until]))
    assert ended(events, 1)[2].reason == "stop"
    assert stops.tokens == first.tokens[: first.tokens.index(until) + 1]


def test_a_draft_model_and_a_look_up_change_nothing():
    model, small = build("llama", layers=2), build("llama", layers=1)
    small.load_state_dict(model.state_dict(), strict=False)
    looping = torch.cat([prompt(30)] * 3, -1)
    with kvclient.InMemoryClient(64 << 20) as client, kvclient.hf.attach(model, client) as kv:
        prompts = [looping, prompt(50, seed=2)]
        wanted = alone(model, kv, prompts)
        for drafter in (PromptLookup(), DraftModel(small), DraftModel(build("llama", layers=2))):
            loop, events = Loop(model, kv, LIMITS, Always(drafter, 4, model.config.vocab_size)), queue.Queue()
            jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
            ends = ended(events, 2)
            loop.close()
            assert [job.tokens for job in jobs] == wanted
            assert all(isinstance(end, Done) for end in ends.values())
        assert ends[0].accepted >= NEW // 2, "the model itself, as its own draft, is mostly right"


def test_what_is_drawn_by_rejection_has_the_models_distribution():
    """Of two tokens behind a draft that is drawn from another distribution: the joint shares, 4 x 4."""
    chance = torch.Generator().manual_seed(5)
    logits, guess = torch.randn(3, 4, generator=chance), torch.randn(2, 4, generator=chance).softmax(-1)
    wanted, met, rounds = logits.softmax(-1), Counter(), 4000
    sampler = Sampler(Sampling(temperature=1.0), [])
    sampler._generator.manual_seed(3)
    for _ in range(rounds):
        tokens = [int(torch.multinomial(guess[i], 1, generator=chance)) for i in range(2)]
        draft = Draft((tokens[0], tokens[1]), (0, 1), {0: guess[0], 1: guess[1]})
        path, said = accept(draft, sampler, logits)
        assert [drawn.token for drawn in said] == list(path.tokens)
        met[path.tokens[0]] += 1
    for token in range(4):
        share, error = float(wanted[0, token]), 5 * (0.25 / rounds) ** 0.5
        assert abs(met[token] / rounds - share) < error


def test_the_cost_of_a_row_is_what_the_steps_say():
    cost = StepCost()
    for _ in range(20):
        cost.note(4, 0.10)
    assert cost.each is None
    for rows in (1, 9, 4, 12):
        cost.note(rows, 0.06 + 0.01 * rows)
    assert cost.each == pytest.approx(0.01, abs=1e-6) and cost.of(6) == pytest.approx(0.12, abs=1e-6)


@pytest.mark.parametrize(("accepted", "stays"), [(0, False), (1, False), (6, True)])
def test_it_stops_where_it_does_not_pay_and_tries_again(accepted, stays):
    cost = StepCost()
    for rows in range(1, 20):
        cost.note(rows, 0.05 + 0.02 * rows)  # eight rows more cost 0.16, a token alone 0.07
    record, drafted = Record(None), []
    for row in range(8 * REST):
        if record.due(cost):
            drafted.append(row)
            record.note(8, accepted, 0.0, cost, 1)
    if stays:
        assert len(drafted) >= 8 * REST * (1 - 2 / CHECKED)
    else:
        assert 16 <= len(drafted) < 8 * REST // 4
