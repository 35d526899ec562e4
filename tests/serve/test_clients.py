"""Proves that public clients, unmodified, get from the server what they get from others.

Method: each client against a server on a tiny model; what it returns against this suite's own plain HTTP, and
lm-eval's log-likelihoods against the model's own forward pass. A client that is not installed is skipped with
its name.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "Say something about herons."}]
HERE = Path(__file__).parent
VLLM = Path.home() / ".cache" / "kvstored" / "engines" / "vllm" / "bin" / "vllm"


@pytest.fixture(scope="module")
def wanted(tiny):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    said = tiny.post("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
    assert said
    return said


def by_node(program, packages, tiny, where):
    """What a program of this folder prints, with these npm packages."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    (where / "package.json").write_text("{}")
    got = subprocess.run([npm, "install", "--silent", *packages], cwd=where, capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"npm cannot install {' '.join(packages)}: {got.stderr[-200:]}")
    shutil.copy(HERE / program, where)
    told = [node, program, tiny.url, json.dumps(MESSAGES)]
    done = subprocess.run(told, cwd=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai_for_node(tiny, wanted, tmp_path, wait_until):
    told = by_node("client.mjs", ["openai@7"], tiny, tmp_path)
    assert told["whole"] == told["streamed"] == told["helper"] == wanted
    assert told["usage"]["completion_tokens"] == 8
    assert (told["error"], told["bad"], told["response"]) == ("NotFoundError", "BadRequestError", wanted)
    wait_until(lambda: tiny.stats()["requests_running"] == 0)


def test_the_ai_sdk(tiny, wanted, tmp_path):
    told = by_node("sdk.mjs", ["ai@7", "@ai-sdk/openai-compatible@3"], tiny, tmp_path)
    assert told["whole"] == told["streamed"] == wanted and told["usage"] == 8
    ((name, letter),) = told["called"]
    assert name == "look" and letter in "ab" and told["calledInPieces"] == told["called"]


def test_langchain(tiny, wanted):
    chat = pytest.importorskip("langchain_openai", reason="pip install langchain-openai").ChatOpenAI
    llm = chat(model="tiny", base_url=tiny.url + "/v1", api_key="none", max_tokens=8, temperature=0)
    whole = llm.invoke(MESSAGES)
    assert whole.content == wanted and whole.usage_metadata["output_tokens"] == 8
    assert "".join(piece.content for piece in llm.stream(MESSAGES)) == wanted
    schema = {"title": "k", "type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
              "additionalProperties": False}  # fmt: skip
    roomy = chat(model="tiny", base_url=tiny.url + "/v1", api_key="none", max_tokens=90, temperature=0)
    for method in ("json_schema", "function_calling"):
        assert roomy.with_structured_output(schema, method=method).invoke("x")["k"] in "ab"


def test_litellm(tiny, wanted):
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    request = {"model": "openai/tiny", "api_base": tiny.url + "/v1", "api_key": "none", "messages": MESSAGES,
             "max_tokens": 8, "temperature": 0}  # fmt: skip
    assert litellm.completion(**request).choices[0].message.content == wanted
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**request, stream=True)]
    assert "".join(pieces) == wanted
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**request, "model": "openai/gpt-4"})


def test_lm_evals_loglikelihoods_are_the_models(tiny, home):
    pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
    os.environ.setdefault("OPENAI_API_KEY", "none")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    pairs = [("Herons stand", " still."), ("The quick brown fox", " jumps over"), ("A", " B C D")]
    api = LocalCompletionsAPI(
        base_url=tiny.url + "/v1/completions", model="tiny", tokenizer=str(home), num_concurrent=1,
        tokenizer_backend="huggingface", tokenized_requests=True, batch_size=1, max_length=500,
    )  # fmt: skip
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    told = api.loglikelihood(asked)
    for (context, then), (got, greedy) in zip(pairs, told, strict=True):
        first, ids = (tokenizer(text)["input_ids"] for text in (context, context + then))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        steps = range(len(first) - 1, len(ids) - 1)
        assert got == pytest.approx(sum(float(logprobs[i, ids[i + 1]]) for i in steps), abs=1e-3)
        assert greedy == all(int(logprobs[i].argmax()) == ids[i + 1] for i in steps)
    # …and those of its own backend for models in this process
    backend = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=500)
    for (ours, greedy), (theirs, wanted) in zip(told, backend.loglikelihood(asked), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3) and bool(greedy) == bool(wanted)
    asked = ("ab", {"until": ["zz"], "max_gen_toks": 4})
    (text,) = api.generate_until([Instance("generate_until", {}, asked, 0)])
    assert isinstance(text, str)


@pytest.mark.engines
def test_vllms_own_load_is_answered(server, home, tmp_path):
    if not VLLM.exists():
        pytest.skip("vLLM is not installed: make engines")
    tiny = server("--store", "64MiB")
    command = [
        str(VLLM), "bench", "serve", "--backend", "openai-chat", "--base-url", tiny.url, "--endpoint",
        "/v1/chat/completions", "--model", "tiny", "--tokenizer", str(home), "--dataset-name",
        "prefix_repetition", "--prefix-repetition-prefix-len", "160", "--prefix-repetition-suffix-len", "16",
        "--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "8", "--num-prompts", "8",
        "--save-result", "--result-filename", str(tmp_path / "told.json"), "--ready-check-timeout-sec", "0",
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": named_vllm(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["completed"] == 8 and told["failed"] == 0
    assert tiny.stats()["cached_tokens_total"] >= 6 * 128, "eight prompts begin in two ways"


def named_vllm(home):
    from bench.serving.contenders import _named_vllm

    return str(_named_vllm(home))
