"""Proves the contracts beside OpenAI's on a real server process: Anthropic's messages API, by the public
anthropic client and by hand, and System One's decisions, whose answers are the model's own probabilities of
the labels, with a state computed once for all its questions.

Method: a tiny random model with a byte tokenizer; every answer against /v1/chat/completions of the same
words, every stream against the whole answer; probabilities against a forward pass of the model over the same
prompt, and what is made of them against transformers' own decision pipeline.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from tests.hf.conftest import save_tiny

anthropic = pytest.importorskip(
    "anthropic", reason="the anthropic client is not installed: make test does it"
)

ASKED = [{"role": "user", "content": "The heron stands in the shallow water. " * 5}]
SCHEMA = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
          "additionalProperties": False}  # fmt: skip
LOOK = [{"role": "user", "content": "Look!"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Its answers have readable letters, of which stop strings are cut."""
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(tiny):
    return anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0, timeout=300)


GIVEN = {"model": "tiny", "messages": ASKED, "extra_body": {"temperature": 0}}  # it has no name there now


def said(client, **more):
    return client.messages.create(**{**GIVEN, "max_tokens": 8, **more})


def chat(tiny, messages, **more):
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
    status, _, told = tiny.post("/v1/chat/completions", body)
    assert status == 200, told
    return told["choices"][0]["message"]


def test_an_answer_is_that_of_a_chat_and_its_stream_is_the_whole(client, tiny):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = said(client, system=system)
    wanted = chat(tiny, [{"role": "system", "content": "Be brief."}, *ASKED])
    assert whole.content[0].text == wanted["content"] and whole.type == "message"
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 8)
    assert whole.usage.cache_read_input_tokens == 0 < whole.usage.input_tokens
    with client.messages.stream(**GIVEN, max_tokens=8, system=system) as got:
        kinds = [event.type for event in got if event.type != "text"]
        final = got.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    used = final.usage
    assert used.cache_read_input_tokens >= 128 and used.output_tokens == 8
    assert used.cache_read_input_tokens + used.input_tokens == whole.usage.input_tokens
    counted = client.messages.count_tokens(model="tiny", messages=ASKED, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens


def test_a_stop_sequence_is_named(client):
    text = said(client, max_tokens=12).content[0].text
    stop = text[5:7]
    got = said(client, max_tokens=12, stop_sequences=[stop])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert got.content[0].text == text[: text.index(stop)]


def test_an_answer_goes_on_where_the_last_turn_ends(client, tiny):
    turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Once upon"}]
    prompt = "<user>Go on.<assistant>Once upon"  # by the tiny model's template
    wanted = tiny.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})[2]
    assert said(client, messages=turns).content[0].text == wanted["choices"][0]["text"]


def test_no_tokens_are_a_prompt_computed_ahead(client):
    words = [{"role": "user", "content": "Computed before anybody asks. " * 8}]
    nothing = said(client, messages=words, max_tokens=0)
    assert (nothing.content, nothing.usage.output_tokens) == ([], 0)
    assert said(client, messages=words).usage.cache_read_input_tokens >= 128


def test_tools_are_called_whole_and_in_pieces_and_their_results_are_taken(client, tiny):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    chosen = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 90}
    whole = said(client, messages=LOOK, **chosen)
    (call,) = whole.content
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "look", "tool_use")
    assert call.input["k"] in "ab" and call.id.startswith("toolu_")
    with client.messages.stream(**{**GIVEN, "messages": LOOK}, **chosen) as got:
        pieces = [event.partial_json for event in got if event.type == "input_json"]
        final = got.get_final_message()
    assert len(pieces) > 1 and final.content[0].input == call.input and final.stop_reason == "tool_use"
    any_of = said(client, messages=LOOK, **{**chosen, "tool_choice": {"type": "any"}})
    assert any_of.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "three"}]}
    turns = [*LOOK, {"role": "assistant", "content": [call.model_dump()]},
             {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]  # fmt: skip
    after = said(client, messages=turns, tools=[TOOL], max_tokens=4)
    call_of_chat = {"id": call.id, "type": "function",
                    "function": {"name": "look", "arguments": json.dumps(call.input)}}  # fmt: skip
    told = [*LOOK, {"role": "assistant", "content": "", "tool_calls": [call_of_chat]},
            {"role": "tool", "tool_call_id": call.id, "content": "three"},
            {"role": "user", "content": "And now?"}]  # fmt: skip
    function = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    wanted = chat(tiny, told, tools=[{"type": "function", "function": function}], max_tokens=4)
    assert after.content[0].text == wanted["content"]


def test_a_call_that_is_cut_is_the_same_whole_and_streamed(client):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    wide = {**SCHEMA, "properties": {"k": {"type": "string", "minLength": 80}}}
    chosen = {"tools": [{**TOOL, "input_schema": wide}], "tool_choice": {"type": "any"}, "max_tokens": 50}
    whole = said(client, messages=LOOK, **chosen)
    with client.messages.stream(**{**GIVEN, "messages": LOOK}, **chosen) as got:
        final = got.get_final_message()
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.content[0].input == final.content[0].input


def test_json_of_a_schema(client):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
    told = said(client, max_tokens=60, output_config=shape)
    assert json.loads(told.content[0].text)["k"] in "ab"


@pytest.mark.parametrize(
    ("more", "status", "kind", "word"),
    [
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
        ({"beams": 4}, 400, "invalid_request_error", "beams"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "budget"),
        ({"thinking": {"type": "adaptive"}}, 400, "invalid_request_error", "think"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, 400, "invalid_request_error", "tools"),
        ({"tools": [{**TOOL, "name": "x" * 128}]}, 400, "invalid_request_error", "name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400,
         "invalid_request_error", "content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error", "512"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_an_error_in_its_shape(tiny, more, status, kind, word):
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}], **more}
    got, headers, told = tiny.post("/v1/messages", body)
    assert (got, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert word in told["error"]["message"] and headers["request-id"]


STATE = {"message": "I was charged twice and want my money back. " * 6, "channel": "mail"}
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund wanted?", "criteria": {"true": "money back"}},
    "team": {"type": "choice", "instructions": "Who is to answer?",
             "criteria": {"billing": "Payments", "technical": None, "sales": {"who": "sells"}}},
    "urgency": {"type": "score", "instructions": ["How", "urgent?"], "criteria": ["low", "high", "now"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def decided(tiny):
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
def test_the_probabilities_are_the_models_own(decided, home, name):
    shares, _ = by_hand(home, QUESTIONS[name])
    answer = decided["answers"][name]
    got = [answer["noul"], 1 - answer["noul"]] if name == "refund" else list(answer["probabilities"].values())
    assert got == pytest.approx(shares, abs=1e-5) and math.isclose(sum(got), 1)


@pytest.mark.parametrize("name", ["team", "urgency"])
def test_what_is_made_of_them_is_what_transformers_makes(decided, name):
    decision = pytest.importorskip(
        "transformers.decision.template_utils", reason="this transformers has none"
    )
    from transformers.decision import DecisionConfig

    question = decision.Question.from_request(name, QUESTIONS[name], DecisionConfig())
    answer = decided["answers"][name]
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
def test_what_cannot_be_decided_is_an_error_that_names_it(tiny, more, status, word):
    body = {"state": "It rains.", "questions": {"q": {"type": "noul", "instructions": "Is it wet?"}}, **more}
    got, _, told = tiny.post("/v1/systemone", body)
    assert got == status and word in str(told)


def test_the_questions_of_the_page_are_answered(tiny):
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    asked = json.loads(text.split("```json\n")[1].split("```")[0])
    got, _, told = tiny.post("/v1/systemone", asked)
    assert got == 200 and set(told["answers"]) == set(asked["questions"])
