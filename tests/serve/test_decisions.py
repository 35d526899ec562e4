"""Proves System One's API: its answers are the model's own probabilities of the labels, and a state is
computed once for all its questions.

Method: a server process on a tiny random model, against a forward pass of that model over the same prompt;
the sums of confidence and score against transformers' own decision pipeline, which has this API too.
"""

import math

import pytest
import torch
import transformers

STATE = {"message": "I was charged twice and want my money back. " * 6, "channel": "mail"}
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund wanted?", "criteria": {"true": "money back"}},
    "team": {"type": "choice", "instructions": "Who is to answer?",
             "criteria": {"billing": "Payments", "technical": None, "sales": {"who": "sells"}}},
    "urgency": {"type": "score", "instructions": ["How", "urgent?"], "criteria": ["low", "high", "now"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tiny):
    status, _, told = tiny.post("/v1/systemone", {"state": STATE, "questions": QUESTIONS})
    assert status == 200, told
    return told


def by_hand(home, question):
    """The shares of its labels, by the model alone."""
    from kvclient.serve.http.decisions import DecisionRequest, _labels, _text, wording

    parsed = DecisionRequest(state=STATE, questions={"q": question}).questions["q"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    text = f"<user>{_text(STATE)}\n\n{wording(parsed)}<assistant>"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    first = [tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in _labels(parsed)]
    with torch.no_grad():
        return model(ids).logits[0, -1][first].softmax(-1).tolist(), ids.shape[1]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_probabilities_are_the_models_own(told, home, name):
    shares, _ = by_hand(home, QUESTIONS[name])
    answer = told["answers"][name]
    got = [answer["noul"], 1 - answer["noul"]] if name == "refund" else list(answer["probabilities"].values())
    assert got == pytest.approx(shares, abs=1e-5) and math.isclose(sum(got), 1)


@pytest.mark.parametrize("name", ["team", "urgency"])
def test_what_is_made_of_them_is_what_transformers_makes(told, name):
    decision = pytest.importorskip(
        "transformers.decision.template_utils", reason="this transformers has none"
    )
    from transformers.decision import DecisionConfig

    question = decision.Question.from_request(name, QUESTIONS[name], DecisionConfig())
    answer = told["answers"][name]
    wanted = question.answer(list(answer["probabilities"].values()))
    assert set(answer) == set(wanted)
    for field, value in wanted.items():
        assert answer[field] == (pytest.approx(value) if isinstance(value, float) else value)


def test_a_state_is_computed_once_for_all_its_questions(tiny):
    state = "Another state altogether. " * 12
    _, _, first = tiny.post("/v1/systemone", {"state": state, "questions": {"a": QUESTIONS["refund"]}})
    assert first["usage"]["cached_tokens"] == 0 and first["usage"]["output_tokens"] == 0
    _, _, then = tiny.post("/v1/systemone", {"state": state, "questions": QUESTIONS})
    assert then["usage"]["cached_tokens"] >= 3 * 256
    assert then["answers"]["refund"]["noul"] == pytest.approx(first["answers"]["a"]["noul"], abs=1e-5)


@pytest.mark.parametrize(
    ("more", "status", "word"),
    [
        ({"questions": {}}, 400, "questions"),
        ({"questions": {"q": {"type": "guess"}}}, 400, "questions"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, 400, "criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": {str(i): None for i in range(27)}}}}, 400, "26"),
        ({"assets": {"i": {"type": "image"}}}, 400, "assets"),
        ({"model": "jev-latest"}, 404, "jev-latest"),
        ({"stream": True}, 400, "stream"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_names_it(tiny, more, status, word):
    body = {"state": "It rains.", "questions": {"q": {"type": "noul", "instructions": "Is it wet?"}}, **more}
    got, _, told = tiny.post("/v1/systemone", body)
    assert got == status and word in str(told)
