"""Goal: verify() and calibrate() measure where it counts, at the positions of answers; a calibration that was
interrupted goes on where it was, and says how far it is.

Method: tiny random models, whose approximate KV is far off; an exception in the middle, and
files written over. The cache directory is the test's.
"""

import json

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.proof import measure
from kvclient.hf.reuse.quality import verify
from kvclient.hf.reuse.quality.partial import Partial
from tests.hf.zoo import prompt

ANSWER = prompt(9, seed=7)[0].tolist()
PAIRS = [(prompt(150, seed=seed)[0].tolist(), ANSWER) for seed in (1, 2)]
WAYS = 6  # prefix, selective, three of cacheblend, attention


def test_a_pair_is_measured_at_its_answers_positions(model, kv, monkeypatch):
    """The distribution of each token of the answer, behind the whole prompt and the answer before it."""
    seen = []
    original = verify._said

    def said(model, out, following):
        seen.append((following, original(model, out, following)))
        return seen[-1][1]

    monkeypatch.setattr(verify, "_said", said)
    measured = kv.verify(PAIRS)
    assert measured["prefix"].passed and not measured["none"].passed
    assert all(following == ANSWER for following, _ in seen)
    with torch.no_grad():
        ids = torch.tensor([PAIRS[0][0] + ANSWER[:-1]])
        wanted = model(ids).logits[0, -len(ANSWER) :].double().log_softmax(-1)
    assert torch.allclose(seen[0][1], wanted, atol=1e-4)
    assert measured["none"].first_divergence is None or measured["none"].first_divergence < len(ANSWER)


def test_a_text_alone_has_its_end_for_an_answer():
    text = prompt(200)[0].tolist()
    question = verify.question_of(text)
    assert question.ids + question.answer == text and len(question.answer) == 50
    assert verify.question_of((text, (1, 2))) == (text, [1, 2])
    for wrong in ([1, 2], ([1, 2], [3]), (text, [])):
        with pytest.raises(InvalidArgument, match="96 tokens"):
            verify.question_of(wrong)


class Stop(Exception):
    pass


def steps_until(monkeypatch, kv, stop, pairs=PAIRS):
    """Ways of reuse that calibrate() tried, until so many were; and what it said of its progress."""
    tried, said = [], []
    original = verify._tried

    def once(*args):
        if len(tried) == stop:
            raise Stop
        tried.append(0)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(verify, "_tried", once)
        try:
            kv.calibrate(pairs, progress=lambda *step: said.append(step))
        except Stop:
            pass
    return len(tried), said


def test_an_interrupted_calibration_goes_on(kv, monkeypatch, cache):
    monkeypatch.setattr(verify, "MAX_MEAN_KL", 100.0)
    assert steps_until(monkeypatch, kv, 7)[0] == 7
    assert len(list(cache.glob("*.partial"))) == 1 and not list(cache.glob("*.json"))
    tried, said = steps_until(monkeypatch, kv, 99)
    assert tried == 2 * WAYS - 7 and said == [(step, 2 * WAYS) for step in range(1, 2 * WAYS + 1)]
    assert not list(cache.glob("*.partial")) and kv.repair is not None
    assert steps_until(monkeypatch, kv, 99)[0] == 2 * WAYS, "the next one begins anew"


def test_only_the_same_questions_go_on(kv, monkeypatch, cache):
    steps_until(monkeypatch, kv, 3)
    assert steps_until(monkeypatch, kv, 99, PAIRS[::-1])[0] == 2 * WAYS


@pytest.mark.parametrize("text", ["", "[]", "null", '{"version": 0}', "[" * 4000])
def test_what_is_no_partial_measurement_holds_nothing(tmp_path, text):
    path = tmp_path / "x.partial"
    Partial(path, "key").put(0, "prefix", {"kl": [0.0]})
    assert Partial(path, "key").get(0, "prefix") == {"kl": [0.0]}
    assert Partial(path, "another").get(0, "prefix") is None
    path.write_text(text)
    assert Partial(path, "key").get(0, "prefix") is None


@pytest.mark.parametrize("what", ["{", "lists", "numbers", "version"])
def test_a_damaged_file_counts_as_none(kv, monkeypatch, cache, what):
    steps_until(monkeypatch, kv, 3)
    (path,) = cache.glob("*.partial")
    kept = json.loads(path.read_text())
    found = next(iter(kept["found"].values()))
    if what == "lists":
        found["kl"] = [0.0]
    elif what == "numbers":
        found["ttft_s"] = "soon"
    elif what == "version":
        kept["version"] = 0
    path.write_text(json.dumps(kept) if what in ("lists", "numbers", "version") else what)
    missing = 1 if what in ("lists", "numbers") else 3
    assert steps_until(monkeypatch, kv, 99)[0] == 2 * WAYS - 3 + missing


def test_what_cannot_be_kept_is_measured_all_the_same(kv, monkeypatch):
    monkeypatch.setenv("KVCLIENT_CALIBRATION_DIR", "/proc/kvstored-test")
    assert steps_until(monkeypatch, kv, 99)[0] == 2 * WAYS


def test_an_engine_takes_pairs_of_texts(home, client):
    texts = [("A question about something that is rather long. " * 4, "An answer."), "A text alone. " * 12]
    with kvclient.hf.Engine.from_pretrained(home, client, block_tokens=16, self_test=False) as engine:
        measured = engine.verify(texts)
        assert measured["prefix"].passed
        assert engine._questions(texts)[0][1] == engine.encode("An answer.")
    assert measure.Question is verify.Question
