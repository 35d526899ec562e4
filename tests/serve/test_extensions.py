"""Proves this server's own fields: how blocks are held and kept, reasoning apart, and models that are packed.

Method: real servers on a tiny model; what is reused shows what was stored, and under which terms.
"""

import asyncio
import json
import shutil
import types

import pytest
import transformers

from kvclient.serve.engine.job import Failed
from kvclient.serve.errors import ApiError
from kvclient.serve.http.answers.run import RETRY_AFTER_S, Run
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.zoo import build
from tests.serve.conftest import Server

openai = pytest.importorskip("openai", reason="the openai client is not installed: make test installs it")

TEXT = "Seven swans swim south along the slow river and do not stop. " * 5


def cached(server, text, **more):
    return server.chat(text, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_blocks_of_one_codec_do_not_serve_another(tiny):
    assert [cached(tiny, "c" + TEXT, kv_codec="int8") for _ in range(2)] == [0, 322]
    assert cached(tiny, "c" + TEXT) == 0 and cached(tiny, "c" + TEXT, kv_codec="int4") == 0
    body = {"messages": [{"role": "user", "content": "c" + TEXT}], "kv_codec": "int8"}
    held = tiny.post("/v1/held/chat/completions", body)[2]
    assert held == {"held_tokens": 256, "prompt_tokens": 323}


def test_what_is_written_with_a_time_to_live_is_gone_after_it(tiny, wait_until):
    for cache in ({"ttl_s": 1}, {"priority": 90}):
        assert cached(tiny, f"{cache}" + TEXT, cache=cache, repair="none") == 0
    body = {"messages": [{"role": "user", "content": str({"ttl_s": 1}) + TEXT}]}
    wait_until(lambda: tiny.post("/v1/held/chat/completions", body)[2]["held_tokens"] == 0)
    assert cached(tiny, str({"priority": 90}) + TEXT) >= 256


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "d" + TEXT}], "max_tokens": 2}),
        ("completions", {"prompt": ["e" + TEXT, "f" + TEXT], "max_tokens": 2}),
        ("responses", {"input": "g" + TEXT, "max_output_tokens": 2}),
        ("messages", {"messages": [{"role": "user", "content": "h" + TEXT}], "max_tokens": 2}),
    ],
)
def test_what_was_reused_stands_in_whole_answers_and_once_near_the_end_of_a_stream(tiny, path, body):
    """A stream that did not ask for usage, and those of responses and messages, told it nowhere."""
    status, _, refused = tiny.post(f"/v1/{path}", {**body, "repair": "auto"})
    assert status == 400 and "this server has calibrated, or none" in refused["error"]["message"]
    body = {**body, "repair": "none" if path == "responses" else "calibrated"}
    whole = tiny.post(f"/v1/{path}", body)[2]
    assert whole["kv_reuse"]["ttft_s"] > 0 and whole["kv_reuse"]["tier"] == "none"
    text = tiny.text(f"/v1/{path}", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    told = [event.get("kv_reuse") or event.get("response", {}).get("kv_reuse") for event in events]
    assert [at for at, reuse in enumerate(told) if reuse] == [len(events) - (2 if path == "messages" else 1)]
    (reuse,) = filter(None, told)
    assert reuse["reused_tokens"] >= 256 and reuse["ttft_s"] > 0 and reuse["tier"] == "memory"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"kv_codec": "int2"}, "kv_codec"),
        ({"repair": "cacheblend"}, "repair"),
        ({"cache": {"priority": 101}}, "priority"),
        ({"cache": {"ttl_s": 0}}, "ttl_s"),
        ({"cache": {"forever": True}}, "cache.forever"),
        ({"kv_codec": "int8", "window": {"recent": 64, "older": 64}}, "kv_codec"),
        ({"cache": {"ttl_s": 60}, "window": {"recent": 64, "older": 64}}, "cache.ttl_s"),
        ({"cache": {"priority": 1}, "window": {"recent": 64, "older": 64}}, "cache.priority"),
    ],
)
def test_what_cannot_be_had_is_named(tiny, more, word):
    body = {"messages": [{"role": "user", "content": "x"}], **more}
    status, _, said = tiny.post("/v1/chat/completions", body)
    assert status == 400 and word in json.dumps(said)


def test_a_prompt_beyond_the_memory_of_all_is_413_with_the_longest_that_fits(server):
    small = server("--store", "16MiB", "--memory-tokens", "100")
    status, _, said = small.post("/v1/completions", {"prompt": "x" * 200, "max_tokens": 10})
    assert status == 413 and "fits has 90" in said["error"]["message"]
    assert said["error"]["code"] == "context_length_exceeded"
    assert small.post("/v1/completions", {"prompt": "x" * 50, "max_tokens": 10})[0] == 200


def test_prompts_cut_at_sentences_and_repairs_of_other_sinks_are_served(server):
    wanted = server("--store", "16MiB", "--repair", "none").chat(TEXT)["choices"][0]["message"]
    flags = ["--chunker", "sentence", "--repair", "selective", "--sink-tokens", "8", "--block-tokens", "32"]
    cut = server("--store", "16MiB", *flags)
    assert cut.chat(TEXT)["choices"][0]["message"] == wanted
    assert cached(cut, TEXT) > 32


def test_a_server_that_ends_says_when_to_come_again():
    class Ends:
        loop = types.SimpleNamespace(submit=lambda job: None, cancel=lambda job: None)

        def jobs(self, ask, salt, tell):
            tell(0, Failed(503, "the server is ending"))
            return [None]

    async def heard():
        with pytest.raises(ApiError) as told:
            async for _ in Run(Ends(), [None], b"").events():
                pass
        return told.value

    error = asyncio.run(heard())
    assert error.status == 503 and error.retry_after_s == RETRY_AFTER_S


def test_reasoning_comes_apart_from_the_answer_streamed_or_not(home, tmp_path, server):
    model = tmp_path / "thinks"
    shutil.copytree(home, model)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant><think>"
    (model / "chat_template.jinja").write_text(template)
    thinking = Server(model, "--store", "16MiB")
    try:
        whole = thinking.chat("why?", max_tokens=12)
        message, spent = whole["choices"][0]["message"], whole["usage"]["completion_tokens_details"]
        assert message["content"] == "" and message["reasoning_content"] and spent["reasoning_tokens"] == 12
        body = {"input": "why?", "max_output_tokens": 12, "temperature": 0}
        spent = thinking.post("/v1/responses", body)[2]["usage"]["output_tokens_details"]
        assert spent["reasoning_tokens"] == 12
        body = {"messages": [{"role": "user", "content": "why?"}], "max_tokens": 12, "temperature": 0,
                "stream": True}  # fmt: skip
        text = thinking.text("/v1/chat/completions", body)
    finally:
        thinking.end()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    told = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in told) == message["reasoning_content"]
    assert not any(delta.get("content") for delta in told)


def test_what_another_model_would_answer_is_422_in_every_apis_shape(home, tmp_path):
    model = tmp_path / "strict"
    shutil.copytree(home, model)
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    strict = Server(model, "--store", "16MiB")
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    try:
        with openai.OpenAI(base_url=strict.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.UnprocessableEntityError, match="turns alternate") as told:
                client.chat.completions.create(model="tiny", messages=turns, max_tokens=2)
            assert (told.value.code, told.value.param) == ("unprocessable", "messages")
            assert client.chat.completions.create(model="tiny", messages=turns[:1], max_tokens=2).choices
        asked = {"model": "tiny", "messages": turns, "max_tokens": 2, "stream": True}
        assert strict.post("/v1/chat/completions", asked)[0] == 422, "before a stream has begun"
        asked["messages"] = [{"role": "assistant", "content": "a"}]
        status, _, said = strict.post("/v1/messages", asked)
    finally:
        strict.end()
    assert (status, said["error"]["type"]) == (422, "invalid_request_error")


def test_an_awq_checkpoint_is_served_packed(home, tmp_path):
    (tmp_path / "awq").mkdir()
    source = write_checkpoint(tmp_path / "awq", build("llama"), 16)
    transformers.AutoTokenizer.from_pretrained(home).save_pretrained(source)
    packed = Server(source, "--store", "64MiB")
    try:
        said = [packed.chat("a" + TEXT) for _ in range(2)]
    finally:
        packed.end()
    assert said[0]["choices"] == said[1]["choices"]
    assert said[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
