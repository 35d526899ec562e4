"""Proves that an answer is computed no further once its client has left, wherever the stream stands then.

Method: the response over a run that remembers whether it was closed, an ASGI server that is the test's, and
Python's collector switched off: it would hide that something is held.
"""

import asyncio
import gc

import pytest

from kvclient.serve.http.answers.run import as_events
from kvclient.serve.http.app import Streamed

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/"}


class Run:
    over = closed = False

    def close(self):
        self.closed = True


async def left(stands):
    """A client that leaves while the next token is computed, while a piece is sent that it does not read, or
    before the first."""
    run, leaves, there = Run(), asyncio.Event(), asyncio.Event()

    async def chunks():
        yield {"token": 1}
        there.set()
        await asyncio.Event().wait()

    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if stands == "sending" and message["type"] == "http.response.body":
            there.set()
            await asyncio.Event().wait()

    if stands == "before":
        leaves.set()
    answer = Streamed(run, as_events(chunks(), run, "/v1/completions"))
    passing = asyncio.create_task(answer(SCOPE, receive, send))
    if stands != "before":
        await there.wait()
        leaves.set()
    await asyncio.wait_for(passing, 60)
    return run.closed  # now: at its end asyncio closes all that is open


@pytest.mark.parametrize("stands", ["computing", "sending", "before"])
def test_an_answer_ends_with_its_client(stands):
    gc.disable()
    try:
        assert asyncio.run(left(stands))
    finally:
        gc.enable()
