"""Goal: a store that fails under generate() never ends it, whatever step it fails in: the answer is that of
plain generate(), `last` says what failed, a warning says it once. Raising is for who asks.

Method: the in-memory store, whose calls and handles raise from a given call on, on tiny random models, in
place and dense; a real daemon that is killed is test_daemon.py's.
"""

import logging
import warnings

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import BlockLost, Closed, DeadlineExceeded, NoSpace, Unavailable
from kvclient.hf.connector.save import give_back
from kvclient.hf.connector.snapshots import Snapshots, StoredStates
from kvclient.hf.request import request
from kvclient.hf.request.tolerance import MOST_REST_S, REST, Rest
from kvclient.testing.in_memory_blocks import Blocks, BlockView
from kvclient.testing.in_memory_store import InMemoryStore
from kvclient.testing.in_memory_writer import GrantedBlock, Writer
from tests.hf.zoo import build, generate, known, prompt

BLOCK = 8
# What fails -> where: a load, a look-up, a claim, a copy into a block, sealing, giving back, a release.
STEPS = {
    "look-up": (InMemoryStore, "pin"),
    "claim": (InMemoryStore, "create"),
    "load": (BlockView, "layer"),
    "copy": (GrantedBlock, "mark_layer"),
    "seal": (Writer, "seal"),
    "abort": (Writer, "abort"),
    "release": (Blocks, "release"),
}


@pytest.fixture(scope="module")
def model():
    return build("llama")


ANSWER = 12  # tokens: with them a block of the answer is full
COLD, WARM = prompt(70), torch.cat([prompt(40), prompt(30, seed=2)], dim=1)


@pytest.fixture(scope="module")
def wanted(model):
    """What plain generate() answers to each."""
    return [generate(model, ids, ANSWER)[0] for ids in (COLD, WARM, COLD)]


class Fails:
    """A step that raises from its `good`th call on."""

    def __init__(self, step, error, good):
        self.step, self.error, self.left = step, error, good
        self.failed = 0

    def __call__(self, *args, **kwargs):
        if self.left:
            self.left -= 1
            return self.step(*args, **kwargs)
        self.failed += 1
        raise self.error("the store is gone")


def fail(monkeypatch, where, error=Unavailable, good=0):
    owner, name = where
    failing = Fails(getattr(owner, name), error, good)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: failing(*args, **kwargs))
    return failing


def attached(model, client, **options):
    return kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False, **options)


@pytest.mark.filterwarnings("ignore:generate.. goes on")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_an_answer_is_that_of_plain_generate(model, client, monkeypatch, wanted, step, good, in_place):
    with attached(model, client, in_place=in_place) as kv:
        generate(model, COLD, 4)
        with monkeypatch.context() as patch:
            failing = fail(patch, STEPS[step], good=good)
            found = [generate(model, ids, ANSWER)[0] for ids in (COLD, WARM, COLD)]
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
            if failing.failed:
                said = kv.last.store_error or kv.last.bypass_detail or ""
                assert kv.stats["store_errors"] and (kv.last.store_error is None or "gone" in said)
        kv._rest = Rest()
        assert torch.equal(generate(model, COLD, ANSWER)[0], wanted[0])
        assert (kv.last.bypassed, kv.last.store_error) == (None, None)
        assert kv.last.reused_tokens >= 64, "the store is back"
    client.store.settle()
    assert client.stats()["created"] == 0 or step == "abort", "nothing stays claimed"


@pytest.mark.parametrize("error", [Closed, BlockLost, DeadlineExceeded, NoSpace, ConnectionResetError])
def test_whatever_the_store_raises(model, client, monkeypatch, error):
    wanted = generate(model, prompt(70))[0]
    with attached(model, client) as kv, monkeypatch.context() as patch:
        fail(patch, STEPS["look-up"], error)
        with pytest.warns(UserWarning, match=f"{error.__name__}: the store is gone"):
            assert torch.equal(generate(model, prompt(70))[0], wanted)
        assert kv.last.store_error == f"{error.__name__}: the store is gone"


@pytest.mark.filterwarnings("ignore:generate.. goes on")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, MemoryError])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_its_own_code_raises(model, client, monkeypatch, wanted, step, error, in_place):
    """What a client's native half, NumPy or a full machine raise is no error of the library's kinds."""
    with attached(model, client, in_place=in_place) as kv:
        generate(model, COLD, 4)
        with monkeypatch.context() as patch:
            failing = fail(patch, STEPS[step], error)
            found = []
            for ids in (COLD, WARM, COLD):
                found.append(generate(model, ids, ANSWER)[0])
                kv._rest = Rest()
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
            assert bool(kv.stats["store_errors"]) == bool(failing.failed)
            if failing.failed and kv.last.store_error:
                assert kv.last.store_error == f"{error.__name__}: the store is gone"
        assert torch.equal(generate(model, COLD, ANSWER)[0], wanted[0]) and kv.last.reused_tokens >= 64


@pytest.mark.filterwarnings("ignore:generate.. goes on")
@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, MemoryError])
def test_a_load_inside_of_a_prompt_that_fails(model, client, monkeypatch, error):
    moved = torch.cat([prompt(11, seed=5), COLD[:, 8:64], prompt(9, seed=6)], dim=1)
    wanted = generate(model, moved, ANSWER)[0]
    repair = kvclient.hf.Repair("none", min_tokens=16)
    with attached(model, client, repair=repair) as kv:
        generate(model, COLD, 4)
        generate(model, moved, 1)
        assert kv.last.approximate_tokens
        with monkeypatch.context() as patch, kv.bypass(write=True, read=False):
            failing = fail(patch, STEPS["load"], error)
            assert torch.equal(generate(model, moved, ANSWER)[0], wanted)
            assert failing.failed and kv.last.store_error == f"{error.__name__}: the store is gone"
            assert kv.last.approximate_tokens == 0


@pytest.mark.filterwarnings("ignore:generate.. goes on")
@pytest.mark.parametrize("error", [RuntimeError, ValueError, MemoryError])
def test_a_layout_that_cannot_be_registered(model, client, monkeypatch, wanted, error):
    kv = kvclient.hf.attach(model, client, block_tokens=32, self_test=False)
    with kv, monkeypatch.context() as patch, kv.coded("int8"):
        failing = fail(patch, (InMemoryStore, "register_layout"), error)
        assert torch.equal(generate(model, COLD, ANSWER)[0], wanted[0])
        assert failing.failed and kv.last.store_error == f"{error.__name__}: the store is gone"


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, MemoryError])
def test_who_asks_is_told_what_a_load_raised(model, client, monkeypatch, error):
    with attached(model, client, on_error="raise"):
        generate(model, COLD, 4)
        with monkeypatch.context() as patch:
            fail(patch, STEPS["load"], error)
            with pytest.raises(error, match="the store is gone"):
                generate(model, COLD, 4)


@pytest.mark.parametrize("step", ["look-up", "load", "copy"])
@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError])
def test_a_broken_invariant_is_not_hidden(model, client, monkeypatch, step, error):
    with attached(model, client):
        generate(model, COLD, 4)
        with monkeypatch.context() as patch:
            fail(patch, STEPS[step], error)
            with pytest.raises(error, match="the store is gone"):
                generate(model, WARM if step == "copy" else COLD, 4)


def test_it_is_said_once_and_logged_each_time(model, client, monkeypatch, caplog):
    with attached(model, client) as kv, monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fail(patch, STEPS["look-up"])
        with pytest.warns(UserWarning, match="said once"):
            generate(model, prompt(70), 1)
        kv._rest = Rest()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, prompt(70), 1)
        assert [record.name for record in caplog.records] == ["kvclient.hf"] * 2
        assert (kv.stats["store_errors"], kv.stats["requests"]) == (2, 2)


def test_a_closed_client_is_a_store_that_failed(model, client):
    with attached(model, client) as kv:
        wanted = generate(model, prompt(70))[0]
        client.close()
        with pytest.warns(UserWarning, match="closed"):
            assert torch.equal(generate(model, prompt(70))[0], wanted)
        assert "Closed" in kv.last.store_error


def test_who_asks_is_told_by_an_exception(model, client, monkeypatch):
    with attached(model, client, on_error="raise"):
        for step in ("look-up", "claim", "seal"):
            with monkeypatch.context() as patch:
                fail(patch, STEPS[step])
                with pytest.raises(Unavailable, match="gone"):
                    generate(model, prompt(70, seed=len(step)))
    with pytest.raises(kvclient.InvalidArgument, match="on_error='never'"):
        attached(model, client, on_error="never")


@pytest.mark.parametrize("error", [OSError, Unavailable, RuntimeError, ValueError, MemoryError])
def test_the_models_own_errors_are_raised_at_once(model, client, monkeypatch, tmp_path, error):
    """Also those of the store's kinds, which a model that reads its layers from files raises: a pass that is
    tried again would hide one that comes once."""
    mlp, told = type(model.model.layers[1].mlp), tmp_path / "told"
    plain, raised = mlp.forward, tmp_path / "raised"

    def forward(self, *args):
        if told.exists() and self is model.model.layers[1].mlp:  # files are no part of what is watched
            raised.write_text(raised.read_text() + "x" if raised.exists() else "x")
            raise error("a layer's file is gone")
        return plain(self, *args)

    monkeypatch.setattr(mlp, "forward", forward)
    with attached(model, client) as kv:
        generate(model, prompt(70), 1)
        told.touch()
        with pytest.raises(error, match="layer's file"):
            generate(model, prompt(70), 1)
        assert (raised.read_text(), kv.last.bypassed, kv.stats["store_errors"]) == ("x", None, 0)


def test_a_store_that_failed_slowly_is_left_alone_for_a_while():
    rest = Rest()
    assert rest.over
    rest.begin(0.0)
    assert rest.over, "what cost nothing is asked again at once"
    rest.begin(1000.0)
    assert not rest.over
    assert REST > 1 and MOST_REST_S < 60


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
def test_states_that_come_back_half_are_no_start(monkeypatch, kind):
    """As if torch had no memory for the second: the prompt is computed as if nothing had been found."""
    model, ids = known(kind), prompt(61)
    with kvclient.InMemoryClient(64 << 20) as client:
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
        with kv.bypass():
            plain, logits, _ = generate(model, ids, ANSWER)
        generate(model, ids, ANSWER)
        restore, stack = request.restore, torch.stack

        def half(cache, states, rows, device):
            fails = Fails(stack, RuntimeError, 1)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "stack", fails)
                try:
                    return restore(cache, states, rows, device)
                finally:
                    assert fails.failed

        monkeypatch.setattr(request, "restore", half)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again, found, _ = generate(model, ids, ANSWER)
        assert torch.equal(again, plain) and kv.last.reused_tokens == 0
        torch.testing.assert_close(found, logits)


@pytest.mark.filterwarnings("ignore:generate.. goes on")
@pytest.mark.parametrize("error", [MemoryError, Unavailable])
@pytest.mark.parametrize("where", [(StoredStates, "write"), (Snapshots, "_seal")])
def test_a_state_that_cannot_be_stored_is_given_back(monkeypatch, where, error):
    """By the request, and not when nobody refers to it any more: its traceback may for long."""
    model, ids, kept = known("qwen3_next"), prompt(61), []
    init = Snapshots.__init__
    monkeypatch.setattr(Snapshots, "__init__", lambda self, *args: (kept.append(self), init(self, *args))[1])
    with kvclient.InMemoryClient(64 << 20) as client, attached(model, client) as kv:
        for good in range(3):  # of the prompt, and of the answer, whose claim is filled at once
            with monkeypatch.context() as patch:
                failing = fail(patch, where, error, good)
                generate(model, torch.cat([prompt(9, seed=good), ids], dim=1), ANSWER)
            client.store.settle()
            assert client.stats()["created"] == 0, "nothing stays claimed"
            kv._rest = Rest()
            if not failing.failed:
                break
        assert good and kept


@pytest.mark.filterwarnings("ignore:generate.. goes on")
def test_nobody_waits_for_a_state_that_cannot_be_stored(monkeypatch):
    """Who wants it waits as long as it is claimed: no longer than until the first token."""
    model, claimed = known("qwen3_next"), []
    with kvclient.InMemoryClient(64 << 20) as client, attached(model, client):
        failing = fail(monkeypatch, (StoredStates, "write"), MemoryError)

        def note(ids, scores):
            claimed.append(client.stats()["created"])
            return scores

        generate(model, prompt(61), ANSWER, logits_processor=[note])
        assert failing.failed
    assert claimed == [0] * ANSWER


@pytest.mark.parametrize("good", range(3))
def test_what_is_claimed_is_given_back_by_who_raises(monkeypatch, good):
    model = known("qwen3_next")
    with kvclient.InMemoryClient(64 << 20) as client, attached(model, client, on_error="raise"):
        failing = fail(monkeypatch, (StoredStates, "write"), MemoryError, good)
        try:
            generate(model, prompt(61), ANSWER)
        except MemoryError as error:
            kept = error  # with its traceback, and whoever it refers to
            assert client.stats()["created"] == 0, kept
        assert failing.failed or good == 2


def test_all_that_was_claimed_is_given_back_whichever_fails():
    """A time limit, unlike a store that is gone, says nothing of the other claims."""

    class Late:
        aborted = 0

        def abort(self):
            Late.aborted += 1
            raise DeadlineExceeded("the daemon stands still")

    with pytest.raises(DeadlineExceeded):
        give_back([Late(), Late(), Late()])
    assert Late.aborted == 3


def test_a_seal_that_fails_behind_a_chunk_is_not_tried_behind_each(model, wanted, monkeypatch):
    """A daemon that stands still costs its time limit once, and not once a chunk."""
    with kvclient.InMemoryClient(64 << 20) as client, attached(model, client):
        failing = fail(monkeypatch, STEPS["seal"], DeadlineExceeded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer, *_ = generate(model, COLD, ANSWER, prefill_chunk_size=BLOCK)
        assert torch.equal(answer, wanted[0]) and failing.failed == 1


def test_a_salt_that_is_told_while_the_daemon_fails_is_followed_later(model, monkeypatch):
    with kvclient.InMemoryClient(64 << 20) as client, attached(model, client) as kv:
        before = kv.identity
        monkeypatch.setattr(type(client), "salt", property(lambda _: b"n" * 32))
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(client, "register_layout", Fails(None, Unavailable, 0))
            generate(model, COLD, ANSWER)
        monkeypatch.setattr(kv, "_rest", Rest())
        generate(model, COLD, ANSWER)
        assert kv.last.published_blocks and kv.identity != before
