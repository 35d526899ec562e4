"""bench/reuse_inside/oracle.py: its forward pass is the model's, and its choice is better than none.

A tiny random model and texts of random tokens.
"""

import contextlib
import types

import pytest
import torch

from bench.reuse_inside import oracle as reuse_oracle
from bench.reuse_inside import swapped as reuse_swapped
from tests.hf.zoo import build, prompt


@pytest.fixture
def subject():
    model = build("llama", layers=4)
    return types.SimpleNamespace(
        torch=torch, model=model, without=lambda _model: contextlib.nullcontext(), encode=None
    )


@pytest.fixture
def mixing(subject, monkeypatch):
    monkeypatch.setattr(reuse_oracle, "SIZE", 48)
    texts = {name: prompt(400, seed=seed)[0].tolist() for seed, name in enumerate("abc", start=1)}
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    return reuse_oracle.Pass(subject, texts, ("a", 10, "b", 20, "c"))


def test_it_is_the_models_pass(mixing, subject):
    ids = torch.tensor([mixing.ids])
    wanted = subject.model(ids).logits[0, mixing.said_from :].log_softmax(-1)
    torch.testing.assert_close(mixing.cold, wanted, rtol=1e-4, atol=1e-4)
    assert len(mixing.cold) == reuse_swapped.POSITIONS


def test_all_chosen_is_a_cold_run_and_none_is_what_was_stored(mixing):
    every = torch.ones(96)
    assert float(mixing.recomputed(every).mean()) < 5e-7 > float(mixing.put_in(every).mean())
    stored = mixing.recomputed(every * 0)
    assert float(stored.mean()) > 1e-6
    torch.testing.assert_close(stored, mixing.put_in(every * 0))


def test_the_choice_is_better_than_none(mixing):
    chosen, kl = reuse_oracle.best(torch, mixing.recomputed, 24)
    stored = mixing.recomputed(torch.zeros(96))
    assert chosen.sum() == 24 and chosen[-reuse_oracle.RECENCY :].all()
    assert kl[reuse_oracle.FITTED].mean() < stored[reuse_oracle.FITTED].mean()


def test_a_row_names_each_part(mixing):
    with torch.no_grad():
        row = reuse_oracle._parts(mixing)
    assert row["last document"] < row["stored"] > row["last document recomputed"]
