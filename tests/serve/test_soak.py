"""Proves that many clients at once lose nothing: each request has one right answer, or hears to wait.

Method: 200 clients for SOAK_MINUTES (default half a minute) against one server beside a daemon that is killed
and started again, with hang-ups and bad requests between; greedy answers against those of a quiet server.
`make soak-serving MINUTES=10` is the long run.
"""

import contextlib
import http.client
import json
import os
import random
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CLIENTS, PROMPTS, NEW = 200, 12, 6
SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "0.5"))
MOST_GROWTH_KIB = 96 << 10  # of the server's memory, from a third of the run on


class Client(threading.Thread):
    """One after another until the end; what it cannot explain is a problem."""

    def __init__(self, number, url, wanted, end, problems, counts):
        super().__init__(name=f"client {number}")
        self.choose, self.wanted, self.end = random.Random(number), wanted, end
        self.problems, self.counts, self.where = problems, counts, urllib.parse.urlsplit(url)
        self.asked = self.answered = 0

    def run(self):
        while time.monotonic() < self.end:
            try:
                self.one()
            except Exception as error:
                self.problems.append(f"{self.name}: {type(error).__name__}: {error}")
                return

    def one(self):
        number = self.choose.randrange(PROMPTS)
        chance, ident = self.choose.random(), f"{self.name}-{self.asked}".replace(" ", "-")
        body = {"prompt": text(number), "max_tokens": NEW, "temperature": 0, "stream": chance < 0.4}
        if chance > 0.95:
            body["beams"] = 2
        self.asked += 1
        connection = http.client.HTTPConnection(self.where.hostname, self.where.port, timeout=300)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "X-Request-Id": ident}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            if 0.85 < chance <= 0.95:
                self.counts["hung up"] += 1
                self.answered += 1
                return
            answer = connection.getresponse()
            said = answer.read().decode()
        self.counts[answer.status] += 1
        self.answered += 1
        if answer.headers["X-Request-Id"] != ident:
            self.problems.append(f"{self.name}: the answer to {answer.headers['X-Request-Id']}")
        if answer.status == 200 and told(said, body["stream"]) != self.wanted[number]:
            self.problems.append(f"{self.name}: prompt {number} was answered {said[-300:]}")
        elif answer.status != 200 and answer.status != (400 if "beams" in body else 429):
            self.problems.append(f"{self.name}: {answer.status} {said[:300]}")
        elif answer.status == 429 and not answer.headers["Retry-After"]:
            self.problems.append(f"{self.name}: 429 without Retry-After")


def test_two_hundred_clients_lose_nothing(daemon, server, wait_until):
    kvstored = daemon(memory="64MiB")
    running = server("--dir", str(kvstored.dir), "--max-queue", "100", "--max-batch-size", "32")
    wanted = [running.post("/v1/completions", {"prompt": text(n), "max_tokens": NEW, "temperature": 0})[2]
              ["choices"][0]["text"] for n in range(PROMPTS)]  # fmt: skip
    problems, counts, began = [], Counter(), time.monotonic()
    clients = [Client(n, running.url, wanted, began + SECONDS, problems, counts) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_until(lambda: problems or time.monotonic() > began + SECONDS / 3, timeout_s=SECONDS)
    early = resident_kib(running)
    kvstored.kill()
    steps = running.stats()["steps_total"]
    wait_until(lambda: problems or running.stats()["steps_total"] > steps, "it computes without a daemon")
    kvstored.start()
    for client in clients:
        client.join(600)
    assert not problems, "\n".join(problems[:20])
    assert all(client.asked == client.answered > 0 for client in clients)
    wait_until(lambda: running.stats()["requests_running"] == running.stats()["requests_waiting"] == 0)
    assert counts[200] > CLIENTS / 2 and counts["hung up"] > 0 and counts[400] > 0
    grown = resident_kib(running) - early
    assert grown < MOST_GROWTH_KIB
    assert running.stats().get("requests_failed_total", 0) == 0
    print(f"{dict(counts)} in {SECONDS:.0f} s; its memory {grown:+} KiB")


def text(number):
    return f"{number} " + "All the birds of the marsh are counted in spring. " * (2 + number % 4)


def told(said, stream):
    if not stream:
        return json.loads(said)["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def resident_kib(server):
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
