"""Proves that prompts which join the step of those that run change no answer: whenever they come, whatever is
cancelled, and where the pass that they join fails.

Also that what they share is computed once, inside of a block too.

Method: the real loop on tiny models in fp32, let go step by step by the test, so that what comes between
which steps is the test's to say (Hypothesis); passes that fail behind the first layer; greedy tokens against
plain generate(). What is shared is counted in tokens that were computed.
"""

import functools
import itertools
import queue
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvclient
import kvclient.hf
from kvclient.hf.cache.ragged import RaggedLayer
from kvclient.serve.engine import passes
from kvclient.serve.engine.job import Done, Failed, Job
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, generate, prompt
from tests.serve.loop.test_loop import Letters, ended

LIMITS = Limits(max_batch=4, piece_tokens=48)
NEW, POISON = 6, 41
ALL = 1 << 10  # more steps than any of these takes
EXAMPLES = itertools.count()


class Stepped(Loop):
    """A loop that looks for work once for each permit."""

    def __init__(self, *args):
        self.permits = threading.Semaphore(0)
        super().__init__(*args)

    def _hear(self, block):
        self.permits.acquire()
        return super()._hear(False)

    def go_on(self, times):
        self.permits.release(times)

    def close(self):
        self.permits.release(ALL)
        super().close()


class Breaking:
    """Passes that prompts join: counted; those whose number is in `at`, or that `poison` is in, fail in the
    middle. Raised behind the first layer, as there each cache holds a token more than it ought to.
    """

    def __init__(self, patch):
        self.at, self.poison, self.joins, self.broken = set(), None, 0, 0
        self._breaks, step, attend = False, passes.step, RaggedLayer.attend

        def stepped(model, tokens, caches, wanted, *more):
            joined = [rest for rest, count in zip(tokens, wanted, strict=True) if len(rest) > count]
            poisoned = self.poison is not None and any(self.poison in rest for rest in joined)
            self._breaks = bool(joined) and (self.joins in self.at or poisoned)
            self.joins += bool(joined)
            try:
                return step(model, tokens, caches, wanted, *more)
            finally:
                self._breaks = False

        def attended(layer, *args):
            if self._breaks and layer.index == 1:
                self.broken += 1
                raise ValueError("broken behind the first layer")
            return attend(layer, *args)

        patch.setattr(passes, "step", stepped)
        patch.setattr(RaggedLayer, "attend", attended)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def served(request):
    model = build(request.param, layers=2)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv,
        pytest.MonkeyPatch.context() as patch,
    ):
        alone = functools.cache(functools.partial(said_alone, model, kv))
        yield model, kv, alone, Breaking(patch)


@pytest.fixture
def breaking(served):
    served[3].at, served[3].poison, served[3].joins, served[3].broken = set(), None, 0, 0
    return served[3]


def said_alone(model, kv, ids):
    import torch

    with kv.bypass():
        return generate(model, torch.tensor([ids]), NEW)[0][0, len(ids) :].tolist()[:NEW]


def ask(loop, ids, events, index, salt=b""):
    job = Job(
        list(ids), NEW, Sampler(Sampling(temperature=0), ids), Text(Letters()),
        lambda event: events.put((index, event)), salt=salt,
    )  # fmt: skip
    loop.submit(job)
    return job


def words(length, seed):
    return tuple(token if token != POISON else 1 for token in prompt(length, seed=seed)[0].tolist())


def test_a_pass_that_fails_is_computed_again_and_each_hears_what_it_says_alone(served, breaking):
    model, kv, alone, _ = served
    loop, events = Stepped(model, kv, LIMITS), queue.Queue()
    asked = [words(30 + 5 * index, seed=index) for index in range(4)]
    breaking.at = {1, 2}
    jobs = [ask(loop, asked[0], events, 0, b"fails")]
    for index in (1, 2, 3):
        loop.go_on(2)
        jobs.append(ask(loop, asked[index], events, index, b"fails"))
    loop.go_on(ALL)
    assert all(isinstance(end, Done) for end in ended(events, 4).values())
    loop.close()
    assert breaking.broken == 2, "no pass that was joined failed"
    assert [job.tokens for job in jobs] == [alone(ids) for ids in asked]
    assert loop.stats()["requests_running"] == 0


def test_a_prompt_that_breaks_every_pass_fails_by_itself(served, breaking, monkeypatch):
    model, kv, alone, _ = served
    generated = model.generate

    def generates(ids, *args, **more):
        if POISON in ids[0].tolist():
            raise ValueError("this prompt breaks")
        return generated(ids, *args, **more)

    monkeypatch.setattr(model, "generate", generates)
    breaking.poison = POISON
    loop, events = Stepped(model, kv, LIMITS), queue.Queue()
    asked = [words(33, seed=7), (*words(30, seed=8), POISON), words(38, seed=9)]
    jobs = [ask(loop, asked[0], events, 0, b"poison")]
    loop.go_on(2)
    jobs += [ask(loop, asked[index], events, index, b"poison") for index in (1, 2)]
    loop.go_on(ALL)
    ends = ended(events, 3)
    loop.close()
    assert breaking.broken and isinstance(ends[1], Failed) and "this prompt breaks" in ends[1].message
    for index in (0, 2):
        assert isinstance(ends[index], Done) and jobs[index].tokens == alone(asked[index])
    assert loop.stats()["requests_running"] == 0


@pytest.mark.parametrize(
    ("shared", "rests"),
    [(48 + 9, (7, 11, 7, 5)), (48 + 9, (20, 25, 30, 22)), (9, (0, 0, 0, 0)), (48 + 9, (0, 0, 3, 0))],
)
def test_what_prompts_share_is_computed_once_wherever_in_a_block_it_ends(served, shared, rests):
    """rests: tokens of each prompt's own behind what all share. A block has 16."""
    model, kv, alone, breaking = served
    breaking.at, breaking.poison = set(), None
    loop, events, salt = Stepped(model, kv, LIMITS), queue.Queue(), b"shared %d" % next(EXAMPLES)
    asked = [words(shared, seed=50) + words(rest, seed=51 + i) for i, rest in enumerate(rests)]
    jobs = [ask(loop, ids, events, index, salt) for index, ids in enumerate(asked)]
    loop.go_on(ALL)
    ended(events, len(jobs))
    computed = loop.stats()["prompt_tokens_computed_total"]
    loop.close()
    assert [job.tokens for job in jobs] == [alone(ids) for ids in asked]
    again = sum(max(rest, 1) for rest in rests[1:])  # of a prompt that is there whole its last token
    assert computed == len(asked[0]) + again


def test_what_a_prompt_would_cost_is_known_where_all_prompts_join(served):
    model, kv, _, breaking = served
    breaking.at, breaking.poison, events = set(), None, queue.Queue()
    loop = Stepped(model, kv, Limits(max_batch=4, piece_tokens=96))
    asked = [words(80, seed=60), words(80, seed=61), words(20, seed=62)]
    jobs = []
    for index, ids in enumerate(asked):
        jobs.append(ask(loop, ids, events, index, b"rate"))
        loop.go_on(2 * NEW)
        ended(events, 1)
    loop.close()
    assert breaking.joins and all(job.first.cold_s for job in jobs[1:])


def test_looking_at_a_prompt_again_reads_no_block_again(served, monkeypatch):
    model, kv, _, breaking = served
    breaking.at, breaking.poison, salt, events = set(), None, b"looks", queue.Queue()
    common = words(48 + 9, seed=50)
    loop = Stepped(model, kv, LIMITS)
    ask(loop, common + words(7, seed=51), events, 0, salt)
    loop.go_on(ALL)
    ended(events, 1)
    loop.close()
    gets, get = [], type(kv.client).get
    monkeypatch.setattr(type(kv.client), "get", lambda *a, **more: gets.append(1) or get(*a, **more))
    job = Job(common + words(7, seed=52), NEW, None, None, None, salt=salt)
    looked = {loop._joining.look(SimpleNamespace(job=job)) for _ in range(9)}
    assert [look.stored for look in looked] == [48 + 9] and len(gets) == 1


EVENT = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 100)),  # which words, and how many of them
    st.tuples(st.just("steps"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=25, deadline=None)
@given(come=st.lists(EVENT, min_size=2, max_size=14), fail=st.sets(st.integers(0, 5), max_size=4))
def test_whatever_comes_and_goes_each_says_what_it_says_alone(served, come, fail):
    model, kv, alone, breaking = served
    breaking.at, breaking.poison, breaking.joins, breaking.broken = fail, None, 0, 0
    loop, events, salt = Stepped(model, kv, LIMITS), queue.Queue(), b"example %d" % next(EXAMPLES)
    jobs, asked, cancelled = [], [], set()
    for kind, first, length in [("ask", 0, 40), ("steps", 2, 0), *come]:
        if kind == "ask":
            asked.append(words(100, seed=20 + first)[:length])
            jobs.append(ask(loop, asked[-1], events, len(jobs), salt))
        elif kind == "steps":
            loop.go_on(first)
        elif jobs:
            cancelled.add(first % len(jobs))
            loop.cancel(jobs[first % len(jobs)])
    loop.go_on(ALL)
    ends = {}
    while set(range(len(jobs))) - cancelled - set(ends):
        index, event = events.get(timeout=120)
        if isinstance(event, Done | Failed):
            assert index not in ends, "one request heard two ends"
            ends[index] = event
    loop.close()
    for index, job in enumerate(jobs):
        wanted = alone(asked[index])
        assert job.tokens == wanted[: len(job.tokens)]
        if index not in cancelled:
            assert isinstance(ends[index], Done) and job.tokens == wanted
    assert loop.stats()["requests_running"] == loop.stats()["requests_waiting"] == 0
