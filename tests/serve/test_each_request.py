"""Proves that a request gets what it asks for, and not what the one beside it asked for: its length, its
temperature, its penalties, its stream; and that what the server tells is what any client can read.

Method: a real server process on a tiny model; requests of token ids side by side, each against itself alone
and against the model's own greedy tokens. These are defects that older servers of this kind had.
"""

import concurrent.futures
import json
import urllib.error
import urllib.parse
import urllib.request

import pytest
import torch
import transformers

import kvclient
from tests.serve.conftest import Server

IDS = [5 + (11 * place) % 80 for place in range(40)]


def completion(tiny, **more):
    status, _, told = tiny.post("/v1/completions", {"prompt": IDS, "temperature": 0, "max_tokens": 8, **more})
    assert status == 200, told
    return told["choices"][0]["text"], told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def narrow(home):
    """One that answers one request at a time and lets one wait."""
    running = Server(home, "--store", "16MiB", "--max-queue", "1", "--max-batch-size", "1")
    yield running
    running.end()


def test_figures_are_json_before_and_after_the_first_request(narrow):
    def no_json(word):
        raise AssertionError(f"{word} is no JSON")

    for _ in range(2):
        for path in ("/v1/stats", "/health", "/v1/models"):
            assert json.loads(narrow.get(path)[1], parse_constant=no_json)
        assert "nan" not in narrow.get("/metrics")[1].lower()
        completion(narrow)


def test_temperature_zero_is_the_models_first_choice(tiny, home):
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    wanted = tiny.post("/detokenize", {"tokens": ids[0, len(IDS) :].tolist()})[2]["prompt"]
    for chosen in ({"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-6},
                   {"temperature": 1, "min_p": 1.0}):  # fmt: skip
        assert completion(tiny, ignore_eos=True, **chosen) == (wanted, "length", 8), chosen


def test_each_of_a_batch_has_its_length_and_its_temperature(tiny):
    asked = [
        {"prompt": IDS[: 7 + 5 * index], "max_tokens": length, "temperature": heat, "seed": index,
         "ignore_eos": True}
        for index, (length, heat) in enumerate([(2, 0), (40, 0), (11, 1.5), (3, 0), (25, 0.7), (8, 0)])
    ]  # fmt: skip
    alone = [completion(tiny, **each) for each in asked]
    assert [answer[2] for answer in alone] == [each["max_tokens"] for each in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: completion(tiny, **each), asked))
    assert together == alone


def test_what_is_asked_for_is_done(tiny):
    plain, _, _ = completion(tiny, max_tokens=30, ignore_eos=True)
    assert completion(tiny, max_tokens=30, ignore_eos=True)[0] == plain
    for change in ({"repetition_penalty": 5.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
                   {"logit_bias": {"7": 100}}, {"temperature": 2, "seed": 1}):  # fmt: skip
        assert completion(tiny, max_tokens=30, ignore_eos=True, **change)[0] != plain, change
    drawn = {"temperature": 2, "seed": 1, "max_tokens": 30, "ignore_eos": True}
    assert completion(tiny, **drawn, top_k=-1) == completion(tiny, **drawn), "-1 is all, as vLLM has it"
    cut = plain[3:5]
    said, reason, _ = completion(tiny, max_tokens=30, ignore_eos=True, stop=[cut])
    assert (said, reason) == (plain[: plain.index(cut)], "stop")
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_completion_tokens": 3}
    chat = tiny.post("/v1/chat/completions", body)[2]
    assert chat["usage"]["completion_tokens"] == 3


def test_the_prompt_of_a_completion_is_text_so_far_and_that_of_a_chat_is_not(tiny):
    """presence_penalty: what a completion goes on with is present in it (OpenAI: "appear in the text so
    far"); in a chat what others said is not the answer's.
    """
    messages = [{"role": "user", "content": "hello"}]
    there = tiny.post("/tokenize", {"messages": messages})[2]["tokens"]
    held, new = there[-1], next(token for token in range(5, 90) if token not in there)
    wanted = {"logit_bias": {str(held): 100, str(new): 99}, "temperature": 0, "max_tokens": 1,
              "presence_penalty": 2.0, "ignore_eos": True}  # fmt: skip

    def spelled(token):
        return tiny.post("/detokenize", {"tokens": [token]})[2]["prompt"]

    assert completion(tiny, **{**wanted, "prompt": there})[0] == spelled(new)
    assert completion(tiny, **{**wanted, "prompt": there, "presence_penalty": 0.5})[0] == spelled(held)
    said = tiny.post("/v1/chat/completions", {"messages": messages, **wanted})[2]
    assert said["choices"][0]["message"]["content"] == spelled(held)


def test_a_completion_is_streamed_while_it_is_computed(tiny):
    asked = {"prompt": IDS, "temperature": 0, "max_tokens": 300, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        tiny.url + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        assert first.startswith(b"data: {")
        assert tiny.stats()["requests_running"] == 1, "the first piece came when all was computed"
        rest = [line for line in answer.read().split(b"\n") if line.startswith(b"data: {")]
    pieces = [json.loads(line[6:])["choices"] for line in (first, *rest)]
    assert len(pieces) > 50
    text = "".join(choice["text"] for choices in pieces for choice in choices)
    assert text == completion(tiny, max_tokens=300, ignore_eos=True)[0]


def test_streams_wait_in_the_same_queue(narrow):
    body = {"prompt": IDS, "max_tokens": 60, "ignore_eos": True, "stream": True}

    def ask(_):
        request = urllib.request.Request(
            narrow.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {200, 429}


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_more_answers_than_may_ever_wait_are_no_full_queue(narrow, more):
    """A client that was told to come again came again, for ever."""
    status, headers, told = narrow.post("/v1/completions", {"prompt": IDS, "max_tokens": 2, **more})
    assert status == 400 and headers["Retry-After"] is None
    assert told["error"]["param"] == "n" and "takes 1" in told["error"]["message"]


def test_it_is_of_the_packages_version(tiny):
    assert json.loads(tiny.get("/version")[1]) == {"version": kvclient.__version__}


def test_without_a_word_it_listens_on_loopback(tiny):
    port = urllib.parse.urlsplit(tiny.url).port
    with open("/proc/net/tcp") as table, open("/proc/net/tcp6") as table6:
        rows = [line.split() for line in (*list(table)[1:], *list(table6)[1:])]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    assert [where.split(":")[0] for where in listening] == ["0100007F"]
