"""Proves that a store which fails in any of its steps, with whatever error, ends no request of a server and
not the server: each answer is what it is alone. What the model's own pass raises still ends its request.

Method: the real loop on a tiny model over the in-memory store, whose calls and handles raise: prompts that
join the step of others, that are cut into pieces, that share, and windowed ones whose turn before is stored.
"""

import queue
import warnings

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import Unavailable
from kvclient.hf.engine.window import Window
from kvclient.hf.request.tolerance import Rest
from kvclient.serve.engine.job import Done, Failed
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.windowed import WindowedCache, Windowing
from kvclient.serve.http.asking import Asking
from kvclient.serve.scheduler import Limits
from kvclient.testing.in_memory_store import InMemoryStore
from tests.hf.store.test_store_fails import STEPS, fail
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import alone, ask, ended

ERRORS = [OSError, RuntimeError, ValueError, MemoryError, Unavailable]
FAILS = {**STEPS, "question": (InMemoryStore, "state"), "siblings": (InMemoryStore, "children")}
WINDOWING = Windowing(Window(64, 64), head_tokens=8, turn_ends=60)
SHARED = prompt(100)
ASKED = [  # a prompt whose rest is short, two that share more, one that is cut into pieces, one of its own
    SHARED[:, :90],
    torch.cat([SHARED[:, :87], prompt(12, seed=2)], dim=1),
    torch.cat([SHARED[:, :87], prompt(30, seed=3)], dim=1),
    prompt(230, seed=4),
    prompt(9, seed=5),
]


def in_turn(steps):
    """Each step with two of the errors."""
    places = enumerate(sorted(steps))
    return [(step, ERRORS[(index + more) % len(ERRORS)]) for index, step in places for more in (0, 2)]


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=2)


@pytest.fixture
def served(model):
    """A loop that has answered once, so that there is something to find."""
    with (
        warnings.catch_warnings(),
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv,
    ):
        warnings.simplefilter("ignore")
        loop = Loop(model, kv, Limits(max_batch=6, piece_tokens=48))
        asked(loop, [SHARED])
        yield kv, loop
        loop.close()


def asked(loop, prompts, windowed=()):
    """Tokens of each, and how each ended."""
    events = queue.Queue()
    jobs = [ask(loop, ids, events, index, windowing=WINDOWING if index in windowed else None)
            for index, ids in enumerate(prompts)]  # fmt: skip
    ends = ended(events, len(jobs))
    return [job.tokens for job in jobs], [ends[index] for index in range(len(jobs))], jobs


@pytest.mark.parametrize(("step", "error"), in_turn(FAILS))
def test_each_answer_is_what_it_is_alone(model, served, monkeypatch, step, error):
    kv, loop = served
    wanted = alone(model, kv, ASKED)
    with monkeypatch.context() as patch:
        failing = fail(patch, FAILS[step], error)
        for _ in range(2):
            said, ends, _ = asked(loop, ASKED)
            assert all(isinstance(end, Done) for end in ends), ends
            assert said == wanted
            kv._rest = Rest()
        assert failing.failed or step == "abort", "nothing failed"
    said, ends, jobs = asked(loop, ASKED)
    assert said == wanted and jobs[0].first.cached_tokens >= 80, "the store is back"


@pytest.mark.parametrize(("step", "error"), in_turn(FAILS.keys() - {"question", "siblings"}))
def test_a_window_is_what_it_is_without_a_store(model, served, monkeypatch, step, error):
    """Its turn before cannot be read, or only its first layers; its own state cannot be kept."""
    kv, loop = served
    before, turn, failed = prompt(60, seed=8), WindowedCache(model, kv, WINDOWING), 0
    turn.feed(before[0].tolist())
    assert turn.save(before[0].tolist())
    for good in range(4):
        ids = torch.cat([before, prompt(30, seed=20 + good)], dim=1)
        with monkeypatch.context() as patch:
            failing = fail(patch, FAILS[step], error, good)
            said, (end,), _ = asked(loop, [ids], {0})
            assert isinstance(end, Done), end
            failed += failing.failed
        found, _, (job,) = asked(loop, [ids], {0})
        assert said == found and job.first.cached_tokens == 60
    assert failed, "nothing failed"


@pytest.mark.parametrize("error", ERRORS)
def test_figures_that_cannot_be_had_are_none(served, monkeypatch, error):
    _, loop = served
    asking = Asking.__new__(Asking)
    asking.loop = loop
    assert asking.store_stats()["created"] == 0 and loop.stored(SHARED[0].tolist(), b"") >= 80
    with monkeypatch.context() as patch:
        fail(patch, (InMemoryStore, "stats"), error)
        fail(patch, (InMemoryStore, "state"), error)
        assert asking.store_stats() == {} and loop.stored(SHARED[0].tolist(), b"") == 0


@pytest.mark.parametrize("error", ERRORS)
def test_what_the_models_own_pass_raises_ends_its_request(model, served, monkeypatch, error):
    kv, loop = served
    wanted, poison, mlp = alone(model, kv, ASKED[:2]), prompt(33, seed=9), type(model.model.layers[1].mlp)
    plain = mlp.forward

    def forward(self, states):
        if states.shape[-2] == poison.shape[1]:
            raise error("the model's own")
        return plain(self, states)

    monkeypatch.setattr(mlp, "forward", forward)
    said, ends, _ = asked(loop, [ASKED[0], poison, ASKED[1]])
    assert isinstance(ends[1], Failed) and "the model's own" in ends[1].message
    assert [said[0], said[2]] == wanted
