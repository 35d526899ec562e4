"""What the tests of the server share: a tiny model's directory, and a server process on it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.hf.conftest import save_tiny
from tests.warm_python import WarmPython

START_TIMEOUT_S = 300.0  # one that imports torch by itself, beside others


class Server:
    """One kvclient-serve process on a free port of loopback."""

    def __init__(self, model, *args, env=None, python=WarmPython):
        self.process = python(
            [sys.executable, "-m", "kvclient.serve", str(model), "--port", "0", "--dtype", "float32",
             "--served-model-name", "tiny", "--threads", "1", *args],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        deadline, line = time.monotonic() + START_TIMEOUT_S, ""
        while " is ready after " not in line:
            ready, _, _ = select.select([self.process.stdout], [], [], deadline - time.monotonic())
            line = self.process.stdout.readline() if ready else ""
            assert line, f"the server did not start: {self.end()}"
        self.url = line.split(" at ")[1].strip()

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=300) as answer:
            return answer.status, answer.read().decode()

    def post(self, path, body, **headers):
        """(status, headers, JSON)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.headers, json.load(error)

    def text(self, path, body):
        asked = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.read().decode()

    def chat(self, text, **more):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}
        status, _, said = self.post("/v1/chat/completions", body)
        assert status == 200, said
        return said

    def stats(self):
        return json.loads(self.get("/v1/stats")[1])

    def end(self):
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=60)
        return errors


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Its steps go through all layers at once, as larger ones: heads of eight numbers are left to torch."""
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def tiny(home):
    """One on its own for all tests of a module: each asks with words of its own."""
    running = Server(home, "--store", "64MiB")
    yield running
    running.end()


@pytest.fixture
def server(home):
    """`server(*flags)` starts one; all are ended after the test."""
    started = []

    def make(*args, model=home, **options):
        started.append(Server(model, *args, **options))
        return started[-1]

    yield make
    for running in started:
        if running.process.poll() is None:
            running.end()
