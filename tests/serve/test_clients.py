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
NODE = Path(__file__).with_name("client.mjs")


@pytest.fixture(scope="module")
def wanted(tiny):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    return tiny.post("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]


def test_openai_for_node(tiny, wanted, tmp_path, wait_until):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    (tmp_path / "package.json").write_text("{}")
    install = [npm, "install", "--silent", "openai@6"]
    got = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"npm cannot install openai: {got.stderr[-200:]}")
    shutil.copy(NODE, tmp_path)
    done = subprocess.run(
        [node, NODE.name, tiny.url, json.dumps(MESSAGES)], cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] == told["streamed"] == told["helper"] == wanted
    assert told["usage"]["completion_tokens"] == 8
    assert (told["error"], told["bad"]) == ("NotFoundError", "BadRequestError") and told["response"]
    wait_until(lambda: tiny.stats()["requests_running"] == 0)


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
    given = {"model": "openai/tiny", "api_base": tiny.url + "/v1", "api_key": "none", "messages": MESSAGES,
             "max_tokens": 8, "temperature": 0}  # fmt: skip
    assert litellm.completion(**given).choices[0].message.content == wanted
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, stream=True)]
    assert "".join(pieces) == wanted
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**given, "model": "openai/gpt-4"})


def test_lm_evals_loglikelihoods_are_the_models(tiny, home):
    pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
    os.environ.setdefault("OPENAI_API_KEY", "none")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    pairs = [("Herons stand", " still."), ("The quick brown fox", " jumps over"), ("A", " B C D")]
    api = LocalCompletionsAPI(
        base_url=tiny.url + "/v1/completions", model="tiny", tokenizer=str(home), num_concurrent=1,
        tokenizer_backend="huggingface", tokenized_requests=True, batch_size=1, max_length=500,
    )  # fmt: skip
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    for (context, then), (got, greedy) in zip(pairs, api.loglikelihood(asked), strict=True):
        first, ids = (tokenizer(text)["input_ids"] for text in (context, context + then))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        steps = range(len(first) - 1, len(ids) - 1)
        assert got == pytest.approx(sum(float(logprobs[i, ids[i + 1]]) for i in steps), abs=1e-3)
        assert greedy == all(int(logprobs[i].argmax()) == ids[i + 1] for i in steps)
    asked = ("ab", {"until": ["zz"], "max_gen_toks": 4})
    (text,) = api.generate_until([Instance("generate_until", {}, asked, 0)])
    assert isinstance(text, str)
