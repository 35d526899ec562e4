"""Goal: the soak itself sees what it must see - a wrong byte, a byte that nobody gives back - and passes when
there is nothing. Method: its checks on damage made here; then a short soak, and a minute of it.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.soak.account import Account
from tests.soak.truth import MODELS, SHARED, Count, Ledger, Universe, as_words, block_bytes, is_right, words

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def layer(key: bytes, number: int, count: int = 512) -> np.ndarray:
    return words(key, number, count).view(np.float16).reshape(2, -1)


@pytest.mark.parametrize(
    "wrong",
    [
        layer(OTHER, 0),
        layer(KEY, 1),
        np.zeros((2, 1024), np.float16),
        np.concatenate([layer(KEY, 0, 256), layer(OTHER, 0, 256)]),
        np.roll(layer(KEY, 0).reshape(-1), 4),
    ],
    ids=["another block's", "another layer's", "zeroes", "half another's", "moved by a word"],
)
def test_wrong_bytes_are_seen(wrong):
    assert is_right(KEY, 0, layer(KEY, 0))
    assert not is_right(KEY, 0, wrong)
    flipped = layer(KEY, 0).copy()
    as_words(flipped)[77] ^= np.uint64(1 << 40)
    assert not is_right(KEY, 0, flipped)


def test_what_is_gone_stays_gone_until_somebody_puts_it():
    ledger = Ledger(2, 3)
    ledger.may_be_found(1)
    assert ledger.should_be_gone(0) and not ledger.should_be_gone(1)
    ledger.is_gone(1)
    assert ledger.should_be_gone(1)
    ledger.forget_deletions()
    assert not ledger.should_be_gone(1) and ledger.lives() == 1
    ledger.may_be_found(2, until_s=1.0)
    assert ledger.should_be_gone(2)
    ledger.add(1, Count.wrong, 2)
    assert ledger.total(Count.wrong) == 2


def test_a_leak_is_seen(rig):
    """A block of no key of the universe, a file of no block, and a pin that nobody drops."""
    kv = rig()
    universe = Universe(1, 1, (2, 1, 1))
    assert len(set(universe.keys)) == len(universe.keys) == 4 * len(MODELS)
    assert len(universe.numbers(0, 0)[SHARED]) == 2 and block_bytes(MODELS[0]) == 4096
    kv.drop_client()
    account = Account(kv.daemon.dir, kv.directory, universe)
    assert account.settle(wait_s=1.0) == 0 and not account.problems
    kv.put_on_disk(2)
    kv.drop_client()
    assert account.settle(wait_s=1.0) > 0
    assert any("in use after deleting all" in problem for problem in account.problems), account.problems
    assert any("files are left" in problem for problem in account.problems), account.problems


def soak(minutes: float, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes", str(minutes), "--seed", str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "wrong bytes: 0    leaked bytes: 0" in done.stdout


def test_a_few_seconds_of_soak():
    soak(0.1, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_minute_of_soak(seed):
    soak(1.0, seed)
