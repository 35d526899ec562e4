"""Proves that a prompt is computed by the server that is there for it and answered by another, and that the
death of either costs no answer.

Method: the rule alone; then two kvclient-serve processes on one daemon behind a router, each killed in turn;
answers against each other, what each computed by its own figures.
"""

import pytest

from kvclient.serve.route.balance import Load
from kvclient.serve.route.prefill import prefiller, worth
from kvclient.serve.route.servers import Server as Known
from tests.serve.route.test_route import TEXT, Route, wait_for


@pytest.mark.parametrize(
    ("path", "pieces", "held", "wanted"),
    [
        (b"/v1/chat/completions", 40, 0, True),
        (b"/v1/chat/completions", 40, 9, False),
        (b"/v1/chat/completions", 31, 0, False),
        (b"/v1/warm", 40, 0, False),
        (b"/v1/models", 40, 0, False),
    ],
)
def test_only_what_is_long_and_missing_is_computed_elsewhere(path, pieces, held, wanted):
    assert worth(path, pieces, held, 4096) is wanted


def test_one_of_the_same_store_is_asked_first_and_the_least_busy_of_those():
    servers = [Known(f"http://127.0.0.1:{port}", prefills=True) for port in (1, 2, 3)]
    for server, store, busy in zip(servers, ("far", "near", "near"), (0, 5, 2), strict=True):
        server.load.store, server.load.under_way = store, busy
    assert prefiller(servers, Load("x", "near")) is servers[2]
    assert prefiller(servers, Load("x", "elsewhere")) is servers[0]
    assert prefiller([], Load("x", "near")) is None


@pytest.mark.slow
def test_a_pair_computes_a_prompt_once_and_either_may_die(daemon, server):
    kvstored = daemon(memory="64MiB")
    computes, answers = (server("--dir", str(kvstored.dir)) for _ in range(2))
    router = Route(answers, flags=["--prefill", computes.url, "--prefill-bytes", "256"])
    try:
        wait_for(lambda: router.up() == 2)
        where, said = router.asked(TEXT + "One.")
        assert answers.url.endswith(where)
        prompt = said["usage"]["prompt_tokens"]
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        assert computes.stats()["prompt_tokens_computed_total"] >= prompt
        assert answers.stats()["prompt_tokens_computed_total"] < 128
        assert "kvclient_route_prefilled_total 1" in router.get("/metrics")[1]
        router.asked("short")
        assert computes.stats()["requests_total"] == 2, "its own first and the long one"
        computes.process.kill()
        text = "Nobody has this. " + TEXT
        where, alone = router.asked(text)
        assert answers.url.endswith(where)
        assert alone["choices"] == answers.chat(text)["choices"]
    finally:
        router.end()


@pytest.mark.slow
def test_where_nobody_else_is_there_the_one_that_prefills_answers(server):
    answers, computes = server("--store", "64MiB"), server("--store", "64MiB")
    router = Route(answers, flags=["--prefill", computes.url, "--prefill-bytes", "256"])
    try:
        wait_for(lambda: router.up() == 2)
        wanted = router.asked(TEXT)[1]["choices"]
        answers.process.kill()
        where, said = router.asked(TEXT)
        assert computes.url.endswith(where) and said["choices"] == wanted
    finally:
        router.end()
