"""Proves the order of the server's work on the scheduler alone: no model, no thread, a clock the test moves.

Method: random arrivals, lengths, cancels and times (Hypothesis) against the invariants its docstring states,
and a few cases by hand.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.serve.scheduler import Decode, Limits, Look, Prefill, QueueFull, Scheduler

LIMITS = Limits(max_batch=3, max_queue=4, piece_tokens=100, memory_tokens=2000, timeout_s=50)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler(clock):
    return Scheduler(LIMITS, clock)


def test_a_long_prompt_does_not_stop_those_who_run(scheduler):
    running = scheduler.submit("short", 10, 100)
    assert scheduler.next() == Prefill(running, 10)
    scheduler.filled(running, 10)
    long = scheduler.submit("long", 1000, 10)
    kinds = []
    for _ in range(8):
        work = scheduler.next()
        kinds.append(type(work))
        if isinstance(work, Prefill):
            assert work.upto - long.filled <= 100
            scheduler.filled(long, work.upto)
    assert kinds == [Decode, Prefill] * 4 or kinds == [Prefill, Decode] * 4


def test_alone_a_prompt_is_computed_whole(scheduler):
    """Pieces meet in the store: in the codec of the request, on its disk."""
    entry = scheduler.submit("alone", 1000, 10)
    assert scheduler.next() == Prefill(entry, 1000)
    scheduler.submit("other", 1000, 10)
    assert scheduler.next() == Prefill(entry, 100)


def test_alone_a_prompt_with_a_cache_of_its_own_is_computed_in_pieces_of_one_length(clock):
    """Where it was one piece, who came waited for all of it."""
    scheduler = Scheduler(LIMITS, clock, lambda entry: Look(entry.filled))
    entry = scheduler.submit("alone", 350, 10)
    for upto in (88, 176, 263):
        assert scheduler.next() == Prefill(entry, upto, True)
        scheduler.filled(entry, upto)
    assert scheduler.next() == Decode([], (Prefill(entry, 350),))
    dear = Scheduler(replace(LIMITS, alone_whole=True), clock, lambda entry: Look(entry.filled))
    assert dear.next() is None
    entry = dear.submit("alone", 350, 10)
    assert dear.next() == Prefill(entry, 350), "each piece reads all layers"


def test_what_another_computes_waits_while_there_is_something_else(clock):
    scheduler = Scheduler(LIMITS, clock, lambda entry: Look(entry.filled, held=entry.job == "held"))
    held, long = scheduler.submit("held", 50, 10), scheduler.submit("long", 1000, 10)
    while long.left:
        work = scheduler.next()
        piece = work.pieces[0] if isinstance(work, Decode) else work
        assert piece.entry is long
        scheduler.filled(long, piece.upto)
    assert not held.filled


def test_short_rests_go_with_the_step_and_what_they_share_is_computed_once(clock):
    looks = {"a": Look(170), "b": Look(150), "same": Look(60, b"x"), "too": Look(60, b"x"), "alone": None}
    scheduler = Scheduler(Limits(max_batch=8, piece_tokens=100), clock, lambda entry: looks[entry.job])
    made = {name: scheduler.submit(name, 200 if name in "ab" else 65, 10) for name in looks}
    work = scheduler.next()
    short = [made[name] for name in ("same", "a", "b")]
    assert work == Decode([], tuple(Prefill(entry, entry.prompt_tokens) for entry in short))
    for piece in work.pieces:
        scheduler.filled(piece.entry, piece.upto)
    work = scheduler.next()
    assert [entry.job for entry in work.entries] == ["same", "a", "b"]
    assert [piece.entry.job for piece in work.pieces] == ["too"], "alone is computed by itself"


def test_the_oldest_prompt_is_not_starved_by_short_ones(scheduler):
    long = scheduler.submit("long", 1500, 10)
    scheduler.submit("other", 50, 10)
    pieces = 0
    while long.left and pieces < 200:
        work = scheduler.next()
        if isinstance(work, Prefill):
            scheduler.filled(work.entry, work.upto)
            pieces += work.entry is long
            if work.entry is not long and not work.entry.left:
                scheduler.remove(work.entry)
                scheduler.submit("again", 50, 10)
    assert not long.left and pieces <= 60


def test_a_full_queue_says_so(scheduler):
    for name in range(4):
        scheduler.submit(name, 10, 10)
    with pytest.raises(QueueFull, match="4 requests wait already, 4 may"):
        scheduler.submit("one more", 10, 10)


def test_what_is_late_is_told_once(scheduler, clock):
    early = scheduler.submit("early", 10, 10)
    clock.now = 30.0
    scheduler.submit("later", 10, 10)
    clock.now = 50.0
    assert scheduler.expired() == [early]
    scheduler.remove(early)
    assert scheduler.expired() == []


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 1500), st.integers(1, 300)),
        st.tuples(st.just("work"), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 20), st.just(0)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_the_invariants_hold_whatever_comes(events):
    clock = Clock()
    scheduler, made, left_pieces = Scheduler(LIMITS, clock), [], 0
    for kind, first, second in events:
        if kind == "submit":
            try:
                made.append(scheduler.submit(len(made), first, second))
            except QueueFull:
                assert scheduler.waiting == LIMITS.max_queue
        elif kind == "cancel" and made:
            scheduler.remove(made[first % len(made)])
        elif kind == "wait":
            clock.now += first
            for entry in scheduler.expired():
                assert entry.deadline <= clock.now
                scheduler.remove(entry)
        running = [entry for entry in scheduler.entries if not entry.left]
        work = scheduler.next()
        assert (work is None) == scheduler.idle
        if isinstance(work, Prefill):
            assert work.upto - work.entry.filled > 0
            left_pieces = left_pieces + 1 if running else 0
            assert left_pieces <= 1, "two pieces followed each other while some ran"
            scheduler.filled(work.entry, work.upto)
        elif isinstance(work, Decode):
            assert work.entries == running
            left_pieces = 0
        assert scheduler.active <= LIMITS.max_batch
        assert scheduler.active <= 1 or scheduler.held_tokens <= LIMITS.memory_tokens
