"""Proves that a long text, which takes its time to be read as tokens, keeps no other request waiting, and
that no tokenizer is used by two threads.

Method: the application itself with a tokenizer that reads a long text only once the test has had a short one
answered; each copy of it notes who uses it.
"""

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx2
import pytest

from kvclient.serve.http.app import MOST_LONG, SHORT_BODY_BYTES, create_app
from kvclient.serve.http.asking import Asking
from kvclient.serve.scheduler import Limits

WAIT_S = 20
LONG = "x" * (2 * SHORT_BODY_BYTES)


class Slow:
    """A token a character."""

    chat_template = "{{ messages }}"
    eos_token_id = None

    def __init__(self, shared=None):
        self.shared = shared or SimpleNamespace(
            begun=threading.Event(), go_on=threading.Event(), users=set(), long_texts=0
        )

    def __deepcopy__(self, memo):
        return Slow(self.shared)

    def __call__(self, text, add_special_tokens=True):
        self.shared.users.add((id(self), threading.get_ident()))
        if len(text) > SHORT_BODY_BYTES:
            self.shared.long_texts += 1
            self.shared.begun.set()
            assert self.shared.go_on.wait(WAIT_S), "nobody else was answered meanwhile"
        return {"input_ids": [1] * len(text)}

    def __len__(self):
        return 16


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": LONG}, 200),
        ("/v1/completions", {"prompt": LONG}, 400),  # longer than the model's positions
        ("/v1/held/completions", {"prompt": LONG}, 400),
        ("/v1/warm", {"prompt": LONG}, 400),
    ],
)
def test_a_long_text_is_read_beside_the_others(path, body, status):
    tokenizer = Slow()
    shared = tokenizer.shared
    loop = SimpleNamespace(identity=b"", limits=Limits())
    app = create_app(Asking(tokenizer, "slow", loop, 1000, 16), "1")

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://slow") as client:
            long = asyncio.create_task(client.post(path, json=body))
            assert await asyncio.to_thread(shared.begun.wait, WAIT_S)
            short = await client.post("/tokenize", json={"prompt": "abc"})
            shared.go_on.set()
            return short, await long

    short, long = asyncio.run(scenario())
    assert (short.status_code, short.json()["count"]) == (200, 3)
    assert long.status_code == status, long.text
    tokenizers = {tokenizer for tokenizer, _ in shared.users}
    assert len(tokenizers) == len(shared.users), "two threads had one tokenizer"


def test_no_more_than_a_bound_wait_to_be_read():
    tokenizer, loop = Slow(), SimpleNamespace(identity=b"", limits=Limits())
    app = create_app(Asking(tokenizer, "slow", loop, 1000, 16), "1")

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://slow") as client:
            asks = [asyncio.create_task(client.post("/tokenize", json={"prompt": LONG}))
                    for _ in range(MOST_LONG + 3)]  # fmt: skip
            done = asyncio.as_completed(asks, timeout=WAIT_S)
            refused = [await next(done) for _ in range(3)]
            assert {answer.status_code for answer in refused} == {429}  # all are in before one is read
            tokenizer.shared.go_on.set()
            return [(await ask).status_code for ask in asks]

    told = asyncio.run(scenario())
    assert told.count(200) == MOST_LONG and told.count(429) == 3


def asks(client_is_gone):
    """A request for a long text, as a server makes it; its client may have hung up since."""
    body = json.dumps({"prompt": LONG}).encode()
    messages = [{"type": "http.request", "body": body}]
    never = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        if not client_is_gone.is_set():
            await never.wait()
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize", "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("slow", 80),
        "client": ("here", 1),
    }  # fmt: skip
    return scope, receive


def test_what_waits_is_not_read_for_a_client_that_is_gone_nor_behind_the_end():
    tokenizer, loop = Slow(), SimpleNamespace(identity=b"", limits=Limits())
    shared, read = tokenizer.shared, []
    app = create_app(Asking(tokenizer, "slow", loop, 1000, 16), "1")

    async def send(message):
        if message["type"] == "http.response.start":
            read.append(message["status"])

    async def scenario():
        gone, stays = asyncio.Event(), asyncio.Event()
        async with app.router.lifespan_context(app):
            tasks = [asyncio.create_task(app(*asks(stays), send))]
            assert await asyncio.to_thread(shared.begun.wait, WAIT_S)
            tasks += [asyncio.create_task(app(*asks(gone), send)) for _ in range(3)]
            tasks.append(asyncio.create_task(app(*asks(stays), send)))
            here = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=here, base_url="http://slow") as client:
                assert (await client.post("/tokenize", json={"prompt": "abc"})).status_code == 200
            gone.set()
            shared.go_on.set()
            await asyncio.gather(*tasks)
            assert sorted(read) == [200, 200, 499, 499, 499]

    asyncio.run(scenario())
    assert shared.long_texts == 2
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(app(*asks(asyncio.Event()), send))


def test_what_is_no_text_is_refused_by_name():
    tokenizer, loop = Slow(), SimpleNamespace(identity=b"", limits=Limits())
    app = create_app(Asking(tokenizer, "slow", loop, 1000, 16), "1")

    async def scenario():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://slow") as client:
            headers = {"content-type": "application/json"}
            bodies = b'{"prompt": "\\ud800"}', b"{}"
            return [await client.post("/tokenize", content=body, headers=headers) for body in bodies]

    half, none = asyncio.run(scenario())
    assert half.status_code == none.status_code == 400
    assert "surrogate" in half.text and "needed" in none.text
