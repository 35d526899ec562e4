"""Proves that a store which does not answer keeps nobody waiting but who asks for its figures.

Method: the application itself over a store that answers only once the test has had another request answered.
"""

import asyncio
import threading
from types import SimpleNamespace

import httpx2
import pytest

from kvclient.serve.http.app import Shared, create_app
from kvclient.serve.http.asking import Asking
from kvclient.serve.scheduler import Limits

WAIT_S = 20


class Letters:
    """A token a character."""

    chat_template = "{{ messages }}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * len(text)}


class Store:
    """Of a loop; it stands still until it is told to go on."""

    identity, limits = b"", Limits()

    def __init__(self):
        self.asked, self.go_on, self.questions = threading.Event(), threading.Event(), 0
        self.ready = SimpleNamespace(is_set=lambda: True)

    def stats(self):
        return {}

    def store_stats(self):
        self.questions += 1
        self.asked.set()
        assert self.go_on.wait(WAIT_S), "nobody else was answered meanwhile"
        return {"blocks": 7}

    def stored(self, prompt, salt, codec):
        return self.store_stats()["blocks"]


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", "/v1/stats", None, {"store": {"blocks": 7}}),
        ("POST", "/v1/held/completions", {"prompt": "abc"}, {"prompt_tokens": 3, "held_tokens": 7}),
    ],
)
def test_others_are_answered_meanwhile(method, path, body, told):
    """The page asks for these figures every few seconds: each time all streams of the server stood still."""
    store = Store()
    app = create_app(Asking(Letters(), "still", store, 1000, 16), "1")

    async def scenario():
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://still") as client:
            asked = [asyncio.create_task(client.request(method, path, json=body)) for _ in range(3)]
            assert await asyncio.to_thread(store.asked.wait, WAIT_S)
            healthy = await client.get("/health")
            store.go_on.set()
            return healthy, [await answer for answer in asked]

    healthy, answers = asyncio.run(scenario())
    assert healthy.status_code == 200
    assert [answer.json() for answer in answers] == [told] * 3


def test_who_asks_meanwhile_hears_the_same():
    """Over HTTP they may come apart: a key is looked at on a pool of threads, which may be busy."""
    store = Store()

    async def scenario():
        shared = Shared(store.store_stats)
        asked = [asyncio.create_task(shared()) for _ in range(3)]
        assert await asyncio.to_thread(store.asked.wait, WAIT_S)
        store.go_on.set()
        return [await answer for answer in asked]

    assert asyncio.run(scenario()) == [{"blocks": 7}] * 3
    assert store.questions == 1
