"""Proves the router on real servers: the right one is asked, answers pass unchanged, dead ones cost nothing.

Method: two or three kvclient-serve processes on a tiny model with stores of their own, which are killed,
stopped and started again under requests; each answer against the same request asked of a server directly.
"""

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest

from tests.conftest import ROOT, START_TIMEOUT_S
from tests.serve.conftest import Server
from tests.warm_python import WarmPython

openai = pytest.importorskip("openai", reason="the openai client is not installed: make test installs it")

TEXT = "A heron stands in the shallow water and waits for a fish. " * 6


class Route(Server):
    """One router process in front of servers."""

    def __init__(self, *servers, flags=()):
        urls = [server if isinstance(server, str) else server.url for server in servers]
        self.process = WarmPython(
            [sys.executable, "-m", "kvclient.serve", "route", *urls, "--port", "0", "--health-interval",
             "0.1", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        ready, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        assert "is ready at" in line, f"the router did not start: {self.end()}"
        self.url = line.split(" at ")[1].split(",")[0]

    def up(self):
        try:
            return sum(entry["up"] for entry in json.loads(self.get("/health")[1])["servers"])
        except urllib.error.HTTPError:
            return 0

    def asked(self, text, **more):
        """(the server that answered, the answer)."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}
        status, headers, said = self.post("/v1/chat/completions", body)
        assert status == 200, said
        return headers["X-KV-Server"], said


@pytest.fixture(scope="module")
def pair(home):
    """Two with stores of their own, for the tests that kill none."""
    both = [Server(home, "--store", "64MiB") for _ in range(2)]
    yield both
    for running in both:
        running.end()


@pytest.fixture
def route():
    started = []

    def make(*servers, flags=()):
        started.append(Route(*servers, flags=flags))
        wait_for(lambda: started[-1].up() == len(servers))
        return started[-1]

    yield make
    for running in started:
        running.end()


def test_a_prefix_goes_to_the_server_that_holds_it_and_answers_pass_unchanged(pair, route):
    first, second = pair
    router = route(first, second)
    where, said = router.asked(TEXT + "One.")
    others = {router.asked(f"{n} " + TEXT)[0] for n in range(3)}
    assert len(others | {where}) == 2, "the load went to one server only"
    again, more = router.asked(TEXT + "Two.")
    assert again == where and more["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    direct = (first if first.url.endswith(where) else second).chat(TEXT + "One.")
    assert direct["choices"] == said["choices"]
    client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0, timeout=60)
    request = {"model": "tiny", "messages": [{"role": "user", "content": TEXT + "One."}], "max_tokens": 8,
             "temperature": 0}  # fmt: skip
    chunks = client.chat.completions.create(**request, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == said["choices"][0]["message"]["content"]
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(**{**request, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="beams"):
        client.chat.completions.create(**request, extra_body={"beams": 2})
    assert "<textarea" in router.get("/")[1] and "kvclient_route_server_up" in router.get("/metrics")[1]


def test_a_router_that_has_seen_nothing_asks_who_holds_a_prompt(pair, route):
    first, second = pair
    text = "Nobody saw this. " + TEXT
    second.chat(text)
    for order in ((first, second), (second, first)):
        where, said = route(*order).asked(text)
        assert second.url.endswith(where) and said["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_servers_of_one_daemon_share_the_load_of_one_prefix(daemon, server, route):
    kvstored = daemon(memory="64MiB")
    router = route(*(server("--dir", str(kvstored.dir)) for _ in range(2)))
    places = [router.asked(TEXT) for _ in range(4)]
    assert len({where for where, _ in places}) == 2
    cached = [said["usage"]["prompt_tokens_details"]["cached_tokens"] for _, said in places]
    assert cached[0] == 0 and min(cached[1:]) >= 128
    assert len({json.dumps(said["choices"]) for _, said in places}) == 1


def test_servers_that_die_cost_no_answer_and_a_stream_ends_with_an_error(server, route):
    first, second = server("--store", "64MiB"), server("--store", "64MiB")
    router = route(first, second, flags=["--imbalance", "0"])
    wanted = {n: router.asked(f"{n} " + TEXT, max_tokens=40)[1]["choices"] for n in range(6)}
    said: dict[int, object] = {}

    def ask(n):
        said[n] = router.asked(f"{n} " + TEXT, max_tokens=40)[1]["choices"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in wanted]
    for thread in threads:
        thread.start()
    wait_for(lambda: first.stats()["requests_running"] + first.stats()["requests_waiting"] > 0)
    first.process.kill()
    for thread in threads:
        thread.join()
    assert said == wanted
    wait_for(lambda: router.up() == 1)
    asked = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 1}
    with streamed(router, asked) as answer:
        assert answer.readline().startswith(b"data: ")
        second.process.kill()
        rest = answer.read()
    assert b"server_lost" in rest and b"[DONE]" not in rest
    status, headers, body = router.post("/v1/completions", {"prompt": "x"})
    assert status == 503 and headers["Retry-After"] and body["error"]["code"] == "no_server"
    assert json.loads(router.get("/v1/models")[1])["data"] == []


def test_a_silent_server_is_lost_and_comes_back(pair, route):
    first, second = pair
    router = route(first, second, flags=["--health-timeout", "1", "--imbalance", "0"])
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        places = [router.asked(f"{n} " + TEXT)[0] for n in range(3)]  # the first may wait until it is lost
        assert all(second.url.endswith(place) for place in places)
        wait_for(lambda: router.up() == 1)
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    wait_for(lambda: router.up() == 2)


def test_a_client_that_hangs_up_stops_the_computing_behind_the_router(pair, route):
    behind = pair[0]
    router, before = route(behind), behind.stats().get("requests_cancelled_total", 0)
    for stream in (True, False):
        asked = {"prompt": "a", "max_tokens": 400, "stream": stream, "ignore_eos": True, "temperature": 1}
        where = urllib.parse.urlsplit(router.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
            )
            wait_for(lambda: behind.stats()["requests_running"] == 1)
        wait_for(lambda: behind.stats()["requests_running"] == 0)
    assert behind.stats()["requests_cancelled_total"] == before + 2


def test_a_full_server_is_passed_by_and_all_full_is_said(server, route):
    flags = ("--store", "16MiB", "--max-queue", "1", "--max-batch-size", "1")
    full = [server(*flags) for _ in range(2)]
    router = route(*full, flags=["--imbalance", "1000"])
    router.asked(TEXT)  # from now on one of the two is the one to ask
    statuses, places = [], []

    def ask():
        body = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True}
        status, headers, _ = router.post("/v1/completions", body)
        statuses.append((status, headers.get("Retry-After")))
        places.append(headers.get("X-KV-Server"))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in statuses} == {200, 429} and (429, "2") in statuses
    assert len(set(places)) == 2


@contextlib.contextmanager
def streamed(router, asked):
    where = urllib.parse.urlsplit(router.url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        yield connection.getresponse()


def wait_for(condition, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def test_anthropics_api_goes_through_and_its_errors_are_in_its_shape(pair):
    router = Route(*pair)
    try:
        wait_for(lambda: router.up() == 2)
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0}
        told = [router.post("/v1/messages", body) for _ in range(2)]
        assert [status for status, _, _ in told] == [200, 200]
        assert told[0][2]["content"] == told[1][2]["content"]
        assert told[0][1]["X-KV-Server"] == told[1][1]["X-KV-Server"]
        assert told[1][2]["usage"]["cache_read_input_tokens"] >= 128
        status, _, refused = router.post("/v1/messages", {**body, "model": "claude"})
        assert (status, refused["error"]["type"]) == (404, "not_found_error")
        assert "event: message_stop" in router.text("/v1/messages", {**body, "stream": True})
    finally:
        router.end()
