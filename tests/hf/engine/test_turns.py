"""Proves that a turn that fails, or cannot be saved, costs no other: neither here nor in the store.

Method: a tiny random model over the in-memory store, which is made to fail or to have no room between turns.
What is said afterwards must be what a conversation says to which nothing happened.
"""

import dataclasses

import pytest

import kvclient
from kvclient.errors import DeadlineExceeded, InvalidArgument
from kvclient.hf import Engine, Window
from kvclient.hf.engine.saved_state import SavedState
from tests.hf.engine.test_window import Words, ids
from tests.hf.store.test_store_fails import STEPS, fail
from tests.hf.zoo import build

SMALL = Window(recent=32, older=64)
FAILS = (RuntimeError, KeyboardInterrupt)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=2, head_dim=32)


@pytest.fixture
def engine(model, client):
    with Engine(model, Words(), client, block_tokens=32, repair=None, self_test=False) as engine:
        yield engine


@pytest.mark.parametrize("length", [5, 40, 300])  # nothing, something, and most of it becomes older, or goes
@pytest.mark.parametrize("error", FAILS)
def test_a_turn_that_fails_loses_none_that_were_not_saved(engine, client, monkeypatch, error, length):
    talk, wanted = (engine.conversation(name, window=SMALL) for name in ("broken", "whole"))
    create = client.store.create
    for turn, room in enumerate((True, False, False)):
        monkeypatch.setattr(client.store, "create", create if room else lambda *_args, **_given: "no_space")
        assert talk.say(ids(40, seed=turn), 5).saved == room
        monkeypatch.setattr(client.store, "create", create)
        wanted.say(ids(40, seed=turn), 5)

    def fail(*_):
        told.append(0)
        if len(told) == 3:
            raise error

    for _ in range(2):
        told = []
        with pytest.raises(error):
            talk.say(ids(length, seed=9), 5, on_token=fail)
        held = dataclasses.replace(talk.held, working_bytes=wanted.held.working_bytes)  # the most there was
        assert (talk.turn, held) == (wanted.turn, wanted.held)
    said = talk.say(ids(30, seed=4), 5)
    assert said.tokens == wanted.say(ids(30, seed=4), 5).tokens and said.saved and not said.taken_over
    other = engine.conversation("broken", window=SMALL)
    assert (other.turn, other.held.tokens) == (4, wanted.held.tokens)
    assert other.say(ids(9), 5).tokens == wanted.say(ids(9), 5).tokens


def test_a_first_turn_that_fails_leaves_nothing(engine):
    talk, wanted = (engine.conversation(name, system=ids(20), window=SMALL) for name in ("broken", "whole"))
    with pytest.raises(ZeroDivisionError):
        talk.say(ids(40), 5, on_token=lambda *_: 1 / 0)
    assert (talk.turn, talk.held.tokens) == (0, 0)
    assert talk.say(ids(30), 5).tokens == wanted.say(ids(30), 5).tokens


def test_the_newest_saved_state_outlives_turns_that_cannot_be_saved(engine, client, monkeypatch):
    """A process that dies behind any of them leaves the last turn of which `saved` was said."""
    talk, create = engine.conversation("full", window=SMALL), client.store.create
    for turn in range(4):
        room = turn < 2
        monkeypatch.setattr(client.store, "create", create if room else lambda *_args, **_given: "no_space")
        assert talk.say(ids(10, seed=turn), 2).saved == room
        newest = SavedState(client, lambda: engine.kv.identity, "full", SMALL, 50).newest()
        assert newest == min(turn + 1, 2)


def test_a_turn_that_cannot_be_saved_for_an_error_is_undone(engine, monkeypatch):
    talk, wanted = (engine.conversation(name, window=SMALL) for name in ("broken", "whole"))
    for conversation in (talk, wanted):
        conversation.say(ids(40), 5)
    with monkeypatch.context() as patch:
        patch.setattr(SavedState, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            talk.say(ids(30, seed=2), 5)
    assert talk.turn == 1
    assert talk.say(ids(30, seed=3), 5).tokens == wanted.say(ids(30, seed=3), 5).tokens


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, MemoryError, DeadlineExceeded])
@pytest.mark.parametrize("step", ["claim", "copy", "seal", "abort"])
def test_a_store_that_fails_while_it_keeps_a_turn_is_told(engine, monkeypatch, step, error):
    talk, wanted = (engine.conversation(name, window=SMALL) for name in ("broken", "whole"))
    for turn in range(3):
        with monkeypatch.context() as patch:
            if turn == 1:
                fail(patch, STEPS[step], error)
            said = talk.say(ids(40, seed=turn), 5)
        assert said.saved == (turn != 1)
        assert said.tokens == wanted.say(ids(40, seed=turn), 5).tokens
    other = engine.conversation("broken", window=SMALL)
    assert other.say(ids(9), 5).tokens == wanted.say(ids(9), 5).tokens


def test_a_window_that_no_block_can_hold_is_the_callers_to_mend(engine, monkeypatch):
    fail(monkeypatch, STEPS["claim"], InvalidArgument)
    with pytest.raises(InvalidArgument):
        engine.conversation("large", window=SMALL).say(ids(40), 5)


def test_a_store_without_room_is_told(model):
    with (
        kvclient.InMemoryClient(1 << 20) as client,
        Engine(model, Words(), client, repair=None, self_test=False) as engine,
    ):
        talk = engine.conversation("big", window=SMALL)
        assert talk.say(ids(10), 2).saved
        client.store.create = lambda *_args, **_given: "no_space"
        assert not talk.say(ids(10), 2).saved
