"""pin(): it holds what it says, and whatever happens to one call, every pin has an owner.

A tiny random model and the in-memory fake, whose figures say how many pins there are. Two calls at once meet
at a barrier inside the search.
"""

import threading

import pytest
import torch

from kvclient.errors import Unavailable
from kvclient.hf import Engine
from kvclient.hf.engine import engine
from tests.hf.zoo import generate, prompt

BLOCK, DEADLINE_S = 16, 60
DOCUMENT = prompt(4 * BLOCK, seed=5) % 250 + 3  # of the bytes that the tokenizer has
TEXT = DOCUMENT[0].tolist()


@pytest.fixture
def pinning(home, client):
    """An engine whose store has the document behind twelve preambles."""
    options = {"block_tokens": BLOCK, "repair": "none", "self_test": False}
    with Engine.from_pretrained(home, client, dtype=torch.float32, **options) as engine:
        for seed in range(100, 112):
            with engine.kv.limited(inside=False):
                generate(engine.model, torch.cat([prompt(BLOCK, seed=seed), DOCUMENT], dim=1), 1)
        yield engine
    assert client.stats()["pins"] == 0


def test_one_copy_of_each_block_is_held(pinning, client):
    assert client.stats()["blocks"] >= 12 * 5
    assert pinning.pin(TEXT) == client.stats()["pins"] == 4
    assert pinning.pin(TEXT) == client.stats()["pins"] == 4  # once more is no more
    pinning.unpin(TEXT)
    assert client.stats()["pins"] == 0


def test_a_pin_that_fails_leaves_the_one_before(pinning, client, monkeypatch):
    pinning.pin(TEXT)

    def fail(*_args, **_given):
        raise Unavailable("no search")

    with monkeypatch.context() as patched, pytest.raises(Unavailable):
        patched.setattr(engine, "plan", fail)
        pinning.pin(TEXT)
    assert client.stats()["pins"] == 4 and pinning.stats()["pinned"] == 1


def test_two_pins_of_a_text_at_once_are_one(pinning, client, monkeypatch):
    meet, plan = threading.Barrier(2), engine.plan

    def both(*args, **kwargs):
        found = plan(*args, **kwargs)
        meet.wait(DEADLINE_S)
        return found

    monkeypatch.setattr(engine, "plan", both)
    threads = [threading.Thread(target=pinning.pin, args=(TEXT,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert client.stats()["pins"] == 4 and pinning.stats()["pinned"] == 1
    pinning.unpin(TEXT)
    assert client.stats()["pins"] == 0
