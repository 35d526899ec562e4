"""Proves the HTTP contract on a real server process, by the public openai client and by hand.

Method: a tiny random model with a byte tokenizer, served beside a real daemon or on its own; every answer
against plain generate() or against another way of asking the same.
"""

import contextlib
import functools
import http.client
import json
import socket
import subprocess
import threading
import time
import urllib.parse

import pytest
import torch
import transformers

import kvclient
import kvclient.hf

openai = pytest.importorskip("openai", reason="the openai client is not installed: make test installs it")

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def client(tiny):
    return openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0, timeout=300)


def said(client, text=TEXT, **more):
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return client.chat.completions.create(**{**request, **more})


def test_a_stream_is_the_whole_answer_and_counts_what_was_cached(client):
    whole = said(client)
    chunks = list(said(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert all("usage" not in chunk.model_fields_set for chunk in said(client, stream=True))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 128
    assert {c.choices[0].finish_reason for c in chunks if c.choices} == {None, whole.choices[0].finish_reason}


def test_completions_take_lists_and_ids_and_tell_logprobs(client, tiny):
    ids = tiny.post("/tokenize", {"prompt": "abc"})[2]["tokens"]
    request = {"model": "tiny", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
    by_text, by_ids = (client.completions.create(prompt=p, **request) for p in ("abc", ids))
    assert by_text.choices[0].text == by_ids.choices[0].text
    logprobs = by_text.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == len(ids) + 4
    assert len(client.completions.create(prompt=["a", "b"], n=2, **request).choices) == 4
    scored = client.completions.create(prompt=[70] * 512, **{**request, "max_tokens": 0})  # all its positions
    assert len(scored.choices[0].logprobs.token_logprobs) == 512
    assert tiny.post("/detokenize", {"tokens": ids})[2]["prompt"] == "abc"


def test_json_of_a_schema_and_named_tools(client):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = said(client, "x", response_format=asked, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["k"] in "ab"
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    chosen = {"type": "function", "function": {"name": "look"}}
    answer = said(client, "x", tools=tools, tool_choice=chosen, max_tokens=90)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "look" and json.loads(call.function.arguments)["k"] in "ab"
    pieces = [d for c in said(client, "x", tools=tools, tool_choice=chosen, max_tokens=90, stream=True)
              for d in c.choices[0].delta.tool_calls or []]  # fmt: skip
    assert pieces[0].function.name == "look"
    assert "".join(p.function.arguments or "" for p in pieces) == call.function.arguments


def test_responses(client):
    whole = client.responses.create(model="tiny", input="hello", max_output_tokens=8, temperature=0)
    events = list(
        client.responses.create(model="tiny", input="hello", max_output_tokens=8, temperature=0, stream=True)
    )
    assert whole.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert (events[-1].type, whole.status) == ("response.incomplete", "incomplete")
    assert events[-1].response.output_text == whole.output_text
    turns = [{"role": "user", "content": "hello"}, *whole.output, {"role": "user", "content": "and?"}]
    assert client.responses.create(model="tiny", input=turns, max_output_tokens=2).status == "incomplete"


def test_responses_call_functions_and_take_what_they_gave(client):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "name": "look", "parameters": schema}
    request = {"model": "tiny", "temperature": 0, "tools": [tool], "max_output_tokens": 90}
    chosen = {"tool_choice": {"type": "function", "name": "look"}, "input": "x"}
    whole = client.responses.create(**request, **chosen)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "look", "completed")
    assert json.loads(call.arguments)["k"] in "ab"
    events = list(client.responses.create(**request, **chosen, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1 and "".join(pieces) == call.arguments == events[-1].response.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "three"}
    items = [{"role": "user", "content": "x"}, call.model_dump(), result]
    after = client.responses.create(**{**request, "max_output_tokens": 8}, input=items)
    spelled = {"id": call.call_id, "type": "function",
               "function": {"name": "look", "arguments": call.arguments}}  # fmt: skip
    wanted = client.chat.completions.create(
        model="tiny", temperature=0, max_tokens=8,
        tools=[{"type": "function", "function": {"name": "look", "parameters": schema}}],
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [spelled]},
                  {"role": "tool", "tool_call_id": call.call_id, "content": "three"}],
    )  # fmt: skip
    assert after.output_text == wanted.choices[0].message.content
    shape = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    told = client.responses.create(model="tiny", input="x", text=shape, max_output_tokens=60, temperature=0)
    assert json.loads(told.output_text)["k"] in "ab"


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "beams": 4}, 400, "beams"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
            400,
            "temp",
        ),
        (
            "/v1/chat/completions",
            {"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]},
            404,
            "gpt-4",
        ),
        ("/v1/chat/completions", b'{"model": ', 400, "JSON"),
        ("/v1/chat/completions", b"\xff\xfe{}", 400, ""),
        ("/v1/completions", {"prompt": [999999], "max_tokens": 1}, 400, "999999"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
        ("/v1/completions", {"prompt": "x", "stop": ["s"] * 10_000}, 400, "stop"),
        ("/v1/completions", {"prompt": "x" * 5000, "max_tokens": 4}, 400, "512"),
        ("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 1}', 400, "surrogate"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
        ("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}', 404, "d800"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "body"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{}"}},
            400,
            "chat_template_kwargs.chat_template",
        ),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "5, not nan"),
        ("/v1/completions", b'{"prompt": "x", "top_p": Infinity}', 400, "1, not inf"),
        ("/v1/completions", b'{"prompt": "x", "cache": {"ttl_s": NaN}}', 400, "31536000, not nan"),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {"1": NaN}}', 400, "-100..100, not nan"),
        ("/v1/completions", {"prompt": "x", "repetition_penalty": 1e-40}, 400, "repetition_penalty"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, 400, "return_token_strs"),
        *((path, {"prompt": "x", "model": "other"}, 404, "other") for path in ("/tokenize", "/v1/warm")),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "other"),
        *(
            ("/v1/responses", b'{"input": "x", "stream": true, "tool_choice": "none", "tools": [{"type": '
             b'"function", "name": "f", ' + told + b"}]}", 400, "no JSON in tools")
            for told in (b'"description": "\\ud800"', b'"parameters": {"minimum": NaN}')
        ),
        ("/v1/embeddings", {"input": "x"}, 400, "embeddings"),
        ("/nothing", {}, 404, "nothing"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_names_it(tiny, path, body, status, word):
    got, _, said = tiny.post(path, body)
    assert got == status and set(said["error"]) == {"message", "type", "param", "code"}
    assert word in json.dumps(said)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((a+)+)+$"},
        {"type": "string", "pattern": "(" * 5000 + "a+" + ")" * 5000},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
        functools.reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(200), {}),
    ],
    ids=["backtracks", "nested regex", "a billion items", "deep"],
)
def test_a_schema_that_explodes_is_bounded_and_others_are_served(tiny, schema):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": asked}
    status, _, answer = tiny.post("/v1/chat/completions", body)
    assert status in (200, 400)
    assert status == 200 or len(answer["error"]["message"]) <= 1000
    assert tiny.chat("and now")["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_client_that_hangs_up_stops_its_computing(tiny):
    """Streamed or not: what runs is 0 again, and another answer is right."""
    where = urllib.parse.urlsplit(tiny.url)
    for stream in (True, False):
        asked = {"prompt": "a", "max_tokens": 400, "temperature": 1, "stream": stream, "ignore_eos": True,
                 "n": 8}  # fmt: skip
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
            )
            wait_for(lambda: tiny.stats()["requests_running"] == 8)
            connection.sock.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: tiny.stats()["requests_running"] == 0)
    assert tiny.stats()["requests_cancelled_total"] == 16


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
RAW = {
    "a line break in a header": (HEALTH + b"X-Request-Id: a\rSet-Cookie: b\r\n\r\n", b"400"),
    "a null in a header": (HEALTH + b"X-Request-Id: a\0b\r\n\r\n", b"400"),
    "a folded header": (HEALTH + b"X-Request-Id: a\r\n Set-Cookie: b\r\n\r\n", b"200"),
    "a tab in a number": (HEALTH + b"X-Request-Id: a\tb\r\n\r\n", b"200"),
    "no length": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
    "two kinds of length": (
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"411",
    ),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}", b"400"),
    "a body that is too long": (POST + b"Content-Length: 99999999\r\n\r\n{", b"413"),
    "a length of nonsense": (POST + b"Content-Length: -1\r\n\r\n", b"400"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
}


@pytest.mark.parametrize("raw", RAW)
def test_a_head_cannot_break_the_answer(tiny, raw):
    where = urllib.parse.urlsplit(tiny.url)
    sent, status = RAW[raw]
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(sent)
        head = b""
        while b"\r\n\r\n" not in head and (more := connection.recv(4096)):
            head += more
    assert head.startswith(b"HTTP/1.1 " + status) and b"\nset-cookie:" not in head.lower()
    assert head.count(b"x-request-id:") <= 1


def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing(tiny):
    where, before = urllib.parse.urlsplit(tiny.url), tiny.stats().get("requests_total", 0)
    for _ in range(20):
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            connection.sendall(POST + b'Content-Length: 5000\r\n\r\n{"prompt": "')
    assert tiny.chat("still here")["choices"]
    assert tiny.stats()["requests_total"] == before + 1


def test_keys_are_asked_for_and_share_nothing(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    tiny = server("--store", "64MiB", "--api-key-file", str(keys))
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    assert tiny.post("/v1/chat/completions", body)[0] == 401
    assert tiny.post("/v1/chat/completions", body, Authorization="Bearer alic")[0] == 401

    def cached(key):
        status, _, answer = tiny.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def held(key, **more):
        merged = {**body, **more}
        return tiny.post("/v1/held/chat/completions", merged, Authorization=f"Bearer {key}")[2]["held_tokens"]

    status, _, refused = tiny.post("/v1/messages", {**body, "max_tokens": 2}, **{"x-api-key": "zoe"})
    assert (status, refused["error"]["type"]) == (401, "authentication_error")
    assert [cached("alice"), cached("bob")] == [0, 0]
    assert cached("alice") >= 128
    assert held("alice") >= 128
    by_anthropic = tiny.post("/v1/messages", body, **{"x-api-key": "alice"})[2]
    assert by_anthropic["usage"]["cache_read_input_tokens"] >= 128
    for guess in ("alice", "Bearer alice", "\0alice"):  # a salt leads to nobody else's
        assert held("bob", messages=[{"role": "user", "content": TEXT + "!"}], cache={"salt": guess}) == 0
    wrong = ({**body, "model": "x"}, "bob"), (body, "zoe")
    told = [tiny.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")[2] for body, key in wrong]
    told = json.dumps(told)
    assert "alice" not in told and "bob" not in told


def test_a_full_queue_answers_429_with_when_to_come_again(server):
    tiny = server("--store", "16MiB", "--max-queue", "1", "--max-batch-size", "1")
    statuses, again = [], []

    def ask(index):
        body = {"prompt": f"{index} " + TEXT, "max_tokens": 60, "ignore_eos": True}
        status, headers, _ = tiny.post("/v1/completions", body)
        statuses.append(status)
        again.append(headers.get("Retry-After"))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and "2" in again


NEVER = ("scipy", "boto3", "torch._dynamo.eval_frame", "torch.distributed.tensor")
WATCH = f"""
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {NEVER}:
            print("nothing needs", name, file=sys.stderr, flush=True)
            os._exit(3)

sys.meta_path.insert(0, Watch())
"""


def test_two_servers_share_what_one_computed_and_neithers_nor_a_daemons_death_costs_an_answer(
    daemon, server, tmp_path
):
    """One of them started as a user starts it, with a hash seed of its own: one identity all the same. It
    would end where it imports what takes memory and no server needs.
    """
    started = daemon(memory="64MiB")
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    found = {"PYTHONHASHSEED": "2", "PYTHONPATH": str(tmp_path)}
    first = server("--dir", str(started.dir), python=subprocess.Popen, env=found)
    second = server("--dir", str(started.dir))
    wanted = first.chat(TEXT)
    got = second.chat(TEXT)
    assert got["choices"] == wanted["choices"]
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    turns = [{"role": "user", "content": TEXT}, dict(wanted["choices"][0]["message"]),
             {"role": "user", "content": "and then?"}]  # fmt: skip
    where = urllib.parse.urlsplit(first.url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, timeout=60)) as way:
        long = json.dumps({"messages": turns, "stream": True, "ignore_eos": True})
        way.request("POST", "/v1/chat/completions", long, {"Content-Type": "application/json"})
        begun = way.getresponse().readline()
        assert begun.startswith(b"data: "), begun
        first.process.kill()  # in the middle of its answer
    here, anew = (second.chat("", messages=turns, cache={"read": read}) for read in (True, False))
    assert here["choices"] == anew["choices"]
    assert here["usage"]["prompt_tokens_details"]["cached_tokens"] >= got["usage"]["prompt_tokens"] - 1
    started.kill()
    again = second.chat(TEXT)
    assert again["choices"] == wanted["choices"]


def test_with_their_defaults_server_and_library_share_what_either_computed(daemon, server, home):
    """Completions of token ids, so that both see the same prompt; nobody names a size of blocks."""
    started = daemon("64MiB")
    running = server("--dir", str(started.dir))
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()

    def by_server(ids):
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0}
        status, headers, said = running.post("/v1/completions", asked)
        assert status == 200, said
        return int(headers["X-KV-Reused-Tokens"])

    with kvclient.connect(dir=started.dir) as client, kvclient.hf.attach(model, client) as kv:

        def by_library(ids):
            model.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=False, pad_token_id=0)
            return kv.last.reused_tokens

        for number, (first, then) in enumerate(((by_server, by_library), (by_library, by_server))):
            ids = [5 + (number + 7 * place) % 50 for place in range(200)]
            assert first(ids) == 0
            assert then(ids) == 128


def test_figures_health_and_the_page(tiny):
    tiny.chat("hi")
    health = json.loads(tiny.get("/health")[1])
    assert (health["status"], health["model"], len(health["store"])) == ("ready", "tiny", 32)
    assert "kvclient_serve_requests_total" in tiny.get("/metrics")[1]
    assert json.loads(tiny.get("/v1/models/tiny")[1])["id"] == "tiny"
    page = tiny.get("/")[1]
    assert '<textarea id="message"' in page and "http://" not in page.replace("http://www.w3.org", "")


def wait_for(condition, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)
