"""Proves that memory which is promised to nobody costs no answer: where running requests outgrow it, the
youngest gives its pages back, waits, and goes on from the store with the tokens it would have said alone.

Method: the scheduler alone under random arrivals, lengths and cancels with a clock the test moves
(Hypothesis), and the real loop on tiny models in fp32 with memory for a fraction of what is asked.
"""

import queue
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvclient
import kvclient.hf
from kvclient.serve.engine.drafting import Drafting
from kvclient.serve.engine.job import Done, Job, Prompt
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.scheduler import Decode, Limits, Preempt, Prefill, QueueFull, Scheduler
from tests.hf.zoo import build, generate, prompt
from tests.serve.loop.test_drafting import Oracle
from tests.serve.loop.test_loop import Letters, ended

LIMITS = Limits(max_batch=4, max_queue=50, piece_tokens=100, memory_tokens=1000, timeout_s=1e9, step_tokens=3)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Simulated:
    """The scheduler under a model that computes nothing: each step gives 1 to step_tokens tokens."""

    def __init__(self, limits=LIMITS):
        self.clock = Clock()
        self.scheduler, self.limits = Scheduler(limits, self.clock), limits
        self.said, self.wanted, self.done, self.preempted = {}, {}, [], []

    def submit(self, prompt_tokens, new_tokens):
        entry = self.scheduler.submit(len(self.said), prompt_tokens, new_tokens)
        self.said[entry], self.wanted[entry] = 0, (prompt_tokens, new_tokens)
        return entry

    def work(self, gives=1):
        self.clock.now += 1
        work = self.scheduler.next()
        active = [entry for entry in self.said if entry not in self.scheduler._waiting]
        if isinstance(work, Preempt):
            entry = work.entry
            self.preempted.append(entry)
            assert entry.prompt_tokens == self.wanted[entry][0] + self.said[entry] and not entry.filled
            older = [e for e in active if e in self.scheduler.entries and e.arrived > entry.arrived]
            assert not older, "a younger one kept its memory"
        elif isinstance(work, Prefill):
            self.scheduler.filled(work.entry, work.upto)
            if work.upto == work.entry.prompt_tokens:
                self._say(work.entry, 1)
        elif isinstance(work, Decode):
            for entry in work.entries:
                self._say(entry, gives)
        held = self.scheduler.held_tokens
        assert held <= self.limits.memory_tokens or self.scheduler.active <= 1, held
        assert self.scheduler.active <= self.limits.max_batch
        return work

    def _say(self, entry, count):
        prompt_tokens, new_tokens = self.wanted[entry]
        self.said[entry] = min(new_tokens, self.said[entry] + count)
        if self.said[entry] == new_tokens:
            self.scheduler.remove(entry)
            self.done.append(entry)
        else:
            self.scheduler.generated(entry, prompt_tokens + self.said[entry] - entry.prompt_tokens)


REQUESTS = st.tuples(st.just("submit"), st.integers(1, 600), st.integers(1, 400))
EVENTS = st.lists(
    st.one_of(
        REQUESTS,
        st.tuples(st.just("work"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("work"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 3))
def test_whatever_comes_all_finish_within_the_memory(events, gives):
    simulated, cancelled = Simulated(), set()
    for kind, first, second in events:
        if kind == "submit":
            simulated.submit(first, second)
        elif kind == "work":
            simulated.work(first)
        elif simulated.said:
            entry = list(simulated.said)[first % len(simulated.said)]
            if entry not in simulated.done:
                cancelled.add(entry)
                simulated.scheduler.remove(entry)
    steps = 0
    while simulated.work(gives) is not None:
        steps += 1
        assert steps < 20_000, "they wait for each other"
    assert set(simulated.done) == set(simulated.said) - cancelled
    assert len(simulated.done) == len(set(simulated.done))
    assert simulated.scheduler.idle and simulated.scheduler.held_tokens == 0


def test_more_run_side_by_side_than_their_longest_answers_would_allow():
    simulated = Simulated(replace(LIMITS, step_tokens=1))
    entries = [simulated.submit(100, 800) for _ in range(3)]
    for _ in range(60):
        simulated.work()
    assert all(simulated.said[entry] > 40 for entry in entries) and not simulated.preempted


def test_the_oldest_is_never_the_one_that_waits_and_one_that_waits_comes_first():
    simulated = Simulated(replace(LIMITS, step_tokens=1, max_batch=3))
    oldest, younger, youngest = (simulated.submit(250, 600) for _ in range(3))
    while not simulated.preempted:
        simulated.work()
    assert simulated.preempted == [youngest]
    late = simulated.submit(10, 5)
    while younger not in simulated.done:
        simulated.work()
    assert oldest in simulated.done and oldest not in simulated.preempted
    while late not in simulated.done or youngest not in simulated.done:
        assert simulated.work() is not None
    assert simulated.done.index(youngest) < simulated.done.index(late) or simulated.said[youngest] == 600


def test_one_that_waits_again_takes_no_place_of_the_queue():
    simulated = Simulated(replace(LIMITS, step_tokens=1, max_queue=1))
    for _ in range(2):
        simulated.submit(400, 500)
        simulated.work()
    while not simulated.preempted:
        simulated.work()
    simulated.submit(10, 10)
    with pytest.raises(QueueFull):
        simulated.submit(10, 10)


def run(model, kv, limits, prompts, new, drafting=None, samplers=None, **more):
    loop, events = Loop(model, kv, limits, drafting), queue.Queue()
    jobs = []
    for index, ids in enumerate(prompts):
        ids = ids[0].tolist()
        sampler = samplers[index] if samplers else Sampler(Sampling(temperature=0), ids)
        jobs.append(Job(ids, new, sampler, Text(Letters()),
                        lambda event, index=index: events.put((index, event)), **more))  # fmt: skip
        loop.submit(jobs[-1])
    told, ends = [], {}
    while len(ends) < len(jobs):
        index, event = events.get(timeout=120)
        told += [index] * isinstance(event, Prompt)
        ends.update({index: event} if isinstance(event, Done) else {})
    stats = loop.stats()
    loop.close()
    assert sorted(told) == list(range(len(jobs))), "a prompt was told of twice"
    return jobs, stats


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_long_answers_in_little_memory_are_those_alone_and_little_is_computed_again(kind):
    model, new = build(kind, layers=2), 80
    prompts = [prompt(40 + 7 * index, seed=index) for index in range(5)]
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        with kv.bypass():
            wanted = [generate(model, ids, new)[0][0, ids.shape[1] :].tolist()[:new] for ids in prompts]
        limits = Limits(max_batch=5, memory_tokens=330)
        jobs, stats = run(model, kv, limits, prompts, new)
        assert [job.tokens for job in jobs] == wanted
        again = stats["prompt_tokens_computed_total"] - sum(ids.shape[1] for ids in prompts)
        assert stats["requests_preempted_total"] >= 1
        assert again <= 17 * stats["requests_preempted_total"], "more than a block was computed again"
        oracle = Oracle()
        oracle.answers = {tuple(p[0].tolist()): w for p, w in zip(prompts, wanted, strict=True)}
        drafted, stats = run(model, kv, limits, prompts, new,
                             Drafting(oracle, 5, model.config.vocab_size))  # fmt: skip
        assert [job.tokens for job in drafted] == wanted and stats["draft_tokens_accepted_total"] > 20
        unkept, _ = run(model, kv, limits, prompts, new, read=False, write=False)
        assert [job.tokens for job in unkept] == wanted, "without the store all of it is computed again"


def test_a_seed_says_the_same_whether_it_waited_or_not():
    model, new = build("llama", layers=2), 100
    prompts = [prompt(50, seed=index) for index in range(3)]
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        said = []
        for memory in (1 << 17, 260):
            samplers = [Sampler(Sampling(temperature=1.0, seed=n), []) for n in range(3)]
            jobs, stats = run(model, kv, Limits(memory_tokens=memory), prompts, new, samplers=samplers)
            said.append([job.tokens for job in jobs])
        assert stats["requests_preempted_total"] and said[0] == said[1]


def test_the_end_of_a_turn_is_heard_once_by_each():
    model = build("llama", layers=2)
    prompts = [prompt(60, seed=index) for index in range(4)]
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        loop, events = Loop(model, kv, Limits(memory_tokens=200)), queue.Queue()
        for index, ids in enumerate(prompts):
            ids = ids[0].tolist()
            loop.submit(Job(ids, 80, Sampler(Sampling(temperature=0), ids), Text(Letters()),
                            lambda event, index=index: events.put((index, event))))  # fmt: skip
        assert all(isinstance(end, Done) for end in ended(events, 4).values())
        loop.close()


def test_scores_of_a_prompt_are_told_once_though_its_request_waited_again():
    model = build("llama", layers=2)
    prompts = [prompt(50, seed=index) for index in range(3)]
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        jobs, stats = run(model, kv, Limits(memory_tokens=260), prompts, 60, prompt_logprobs=1)
    assert stats["requests_preempted_total"] and all(len(job.tokens) == 60 for job in jobs)
