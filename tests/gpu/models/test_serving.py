"""Proves that kvclient-serve computes on a GPU, and that what one server there published another finds in the
daemon's memory.

Method: two server processes and a real daemon on a tiny random model; greedy answers of either, and of one
on a CPU, are the same in fp32; `--device auto` takes the GPU. Several requests at once say what each says
alone.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("kvstored._core", reason="the daemon's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")

from tests.hf.conftest import home
from tests.serve.conftest import Server

__all__ = ["home"]

TEXTS = ["the quick brown fox " * 12 + end for end in ("jumps", "sleeps and", "is red, the dog", "x" * 40)]


@pytest.fixture
def servers():
    started = []

    def make(model, *args):
        started.append(Server(model, "--block-tokens", "16", *args, python=subprocess.Popen))
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.end()


def said(answer):
    return answer["choices"][0]["message"]["content"]


def test_two_servers_on_a_gpu_share_what_one_computed(gpu, home, daemon, servers):
    directory = str(daemon(memory="256MiB").dir)
    by_cpu = servers(home, "--device", "cpu", "--store", "64MiB")
    wanted = [said(by_cpu.chat(text, max_tokens=16)) for text in TEXTS]
    first, second = (servers(home, "--dir", directory) for _ in range(2))
    assert [said(first.chat(text, max_tokens=16)) for text in TEXTS] == wanted
    for text, answer in zip(TEXTS, wanted, strict=True):
        found = second.chat(text, max_tokens=16)
        assert said(found) == answer
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 240
    assert second.stats()["device"].startswith("cuda")


def test_requests_at_once_on_a_gpu_say_what_each_says_alone(gpu, home, servers):
    server = servers(home, "--store", "64MiB")
    wanted = [said(server.chat(text, max_tokens=24)) for text in TEXTS]
    for _ in range(2):
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            assert list(pool.map(lambda text: said(server.chat(text, max_tokens=24)), TEXTS)) == wanted
