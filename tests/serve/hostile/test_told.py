"""Proves that the server tells nobody what is not theirs: no prompt in what it prints, no answer to scripts
of pages that nobody named, no time that says how much of a key was right.

Method: one server process with keys and a named origin, asked in every way that could print a prompt, and all
it printed read at its end; the comparison of keys counted.
"""

import contextlib
import hmac
import http.client
import json
import signal
import urllib.parse

import pytest

from kvclient.serve.errors import ApiError
from kvclient.serve.http.asking import Asking
from kvclient.serve.keys import Keys

SECRET = "the-heron-is-in-the-safe"
NAMED = "https://chat.example"


def asked(server, method, path, body=None, **headers):
    where = urllib.parse.urlsplit(server.url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, timeout=60)) as way:
        way.request(method, path, body, headers)
        answer = way.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_nothing_is_told_to_whom_it_does_not_belong(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice-key\n")
    running = server("--store", "32MiB", "--api-key-file", str(keys), "--allow-origin", NAMED)
    alice = {"Authorization": "Bearer alice-key", "Content-Type": "application/json"}
    chat = {"messages": [{"role": "user", "content": SECRET * 4}], "max_tokens": 4, "user": SECRET}
    path = "/v1/chat/completions"

    for origin, answer in ((NAMED, NAMED), ("https://evil.example", None), ("null", None)):
        status, headers, _ = asked(running, "POST", path, json.dumps(chat), Origin=origin, **alice)
        assert (status, headers.get("access-control-allow-origin")) == (200, answer)
        before = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        status, headers, _ = asked(running, "OPTIONS", path, Origin=origin, **before)
        assert (status == 200, headers.get("access-control-allow-origin")) == (answer is not None, answer)
    assert "x-kv-tier" in asked(running, "GET", "/health", Origin=NAMED)[1][
        "access-control-expose-headers"
    ].lower()
    # What a form of another page may send without asking is no request here.
    plain = {**alice, "Content-Type": "text/plain"}
    assert asked(running, "POST", path, json.dumps(chat), **plain)[0] == 400

    for body in ({**chat, "beams": SECRET}, {**chat, "temperature": SECRET}, {**chat, "stream": True},
                 {"messages": SECRET}, {**chat, "messages": [{"role": SECRET, "content": "x"}]}):  # fmt: skip
        asked(running, "POST", path, json.dumps(body), **alice)
    asked(running, "POST", path, SECRET.encode() + b"\xff", **alice)
    asked(running, "POST", "/" + SECRET, "{}", **alice)
    assert asked(running, "POST", path, json.dumps(chat), Authorization=f"Bearer {SECRET}")[0] in (400, 401)
    metrics = asked(running, "GET", "/metrics")[2].decode()
    running.process.send_signal(signal.SIGINT)
    said = "".join(running.process.communicate(timeout=60))
    assert SECRET not in said + metrics and "alice-key" not in said + metrics


def test_without_a_named_origin_no_page_elsewhere_is_answered(tiny):
    _, headers, _ = asked(tiny, "GET", "/health", Origin=NAMED)
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("shown", ["alice", "alicf", "", "x" * 100_000, "Bearer bob", "Bearer alice"])
def test_a_key_is_compared_with_all_keys_by_digests_of_one_length(monkeypatch, shown):
    compared, digests = [], hmac.compare_digest

    def counting(known, presented):
        compared.append((len(known), len(presented)))
        return digests(known, presented)

    monkeypatch.setattr("kvclient.serve.keys.hmac.compare_digest", counting)
    asking = Asking.__new__(Asking)
    asking._keys = Keys([b"alice", b"bob", b"carol"])
    with contextlib.suppress(ApiError):
        assert asking.salt_of(shown.encode())
    assert compared == [(32, 32)] * 3
