"""Proves what a router does with servers of several models, of which some are away, and with what comes of
servers in pieces: who is asked, what is said, and that a client can read it.

Method: the router's application, called as an HTTP server calls it, in front of servers that a test plays.
"""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.serve.errors import ApiError
from kvclient.serve.route.app import Router
from kvclient.serve.route.asked import body_of
from kvclient.serve.route.back import MOST_EVENT_BYTES, Events
from kvclient.serve.route.exchange import ServerLost
from kvclient.serve.route.prefixes import pieces_of
from kvclient.serve.route.servers import Probing, Server

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WAIT_S = 60


def chunked(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def playing(model, said=lambda path: b"", most=1 << 30, up=True):
    """A Server as a router has it. said: of a path, the bytes of an answer, behind which the connection is
    closed where it is not whole; most: answers on one connection, behind which it closes."""
    asked = []

    async def serve(reader, writer):
        for _ in range(most):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            path = head.split(b" ")[1].decode()
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
            asked.append((path, body))
            answer = said(path) or WHOLE % (len(model), model.encode())
            writer.write(answer)
            await writer.drain()
            if answer.startswith(STREAM) and not answer.endswith(b"0\r\n\r\n"):
                break
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    server.up, server.model, server.load.store, server.asked = up, model, model, asked
    async with listening:
        yield server
        server.lose()


async def ask(router, path, told=None, method="POST"):
    """(status, body) of what goes back."""
    data = b"" if told is None else json.dumps(told).encode()
    heads = [(b"content-length", str(len(data)).encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": heads}  # fmt: skip
    came, back = [{"type": "http.request", "body": data}], []

    async def receive():
        return came.pop() if came else await asyncio.Event().wait()

    async def send(message):
        back.append(message)

    await asyncio.wait_for(router(scope, receive, send), WAIT_S)
    return back[0]["status"], b"".join(message.get("body", b"") for message in back[1:])


def router_of(*servers):
    return Router(servers, 4, 100, Probing())


PATHS = [
    ("GET", "/v1/models/second", None),
    ("POST", "/tokenize", {"model": "second", "prompt": "x"}),
    ("POST", "/v1/messages/count_tokens", {"model": "second", "messages": []}),
    ("POST", "/v1/warm", {"model": "second", "prompt": "x"}),
    ("POST", "/v1/completions", {"model": "second", "prompt": "x"}),
]


@pytest.mark.parametrize(("method", "path", "told"), PATHS)
def test_who_is_named_is_asked_wherever_it_is_named(method, path, told):
    async def run():
        async with playing("first") as first, playing("second") as second:
            router = router_of(first, second)
            assert [await ask(router, path, told, method) for _ in range(3)] == [(200, b"second")] * 3
            assert not first.asked

    asyncio.run(run())


def test_a_model_whose_servers_are_away_is_not_one_that_does_not_exist():
    """Its clients were told 404, and did not come again."""

    async def run():
        async with playing("first") as first, playing("second", up=False) as second:
            router = router_of(first, second)
            status, said = await ask(router, "/v1/completions", {"model": "second", "prompt": "x"})
            assert (status, json.loads(said)["error"]["code"]) == (503, "no_server")
            status, said = await ask(router, "/v1/completions", {"model": "third", "prompt": "x"})
            assert (status, json.loads(said)["error"]["code"]) == (404, "model_not_found")
            second.model = None  # nobody knows yet what it has
            assert (await ask(router, "/v1/completions", {"model": "third", "prompt": "x"}))[0] == 503

    asyncio.run(run())


def test_a_server_that_never_came_does_not_hide_that_a_model_does_not_exist():
    """Clients of an unknown model were told for ever to come again."""

    async def run():
        async with playing("first") as first, playing(None, up=False) as never:
            router, probing = router_of(first, never), Probing(every_s=0.0)
            probed, codes = asyncio.Semaphore(0), []

            async def probe(timeout_s):
                await probed.acquire()  # each as the test wants it
                codes.append((await ask(router, "/v1/completions", {"model": "third", "prompt": "x"}))[0])
                raise ServerLost("nobody listens")

            never.probe = probe
            watch = asyncio.create_task(never.watch(probing, lambda *_: None))
            async with asyncio.timeout(WAIT_S):
                while len(codes) <= probing.misses:
                    probed.release()
                    await asyncio.sleep(0)
            watch.cancel()
            assert codes[: probing.misses + 1] == [503] * probing.misses + [404]

    asyncio.run(run())


@pytest.mark.parametrize("model", [[], {}, 3, ["first"], True])
def test_what_is_no_name_is_the_servers_to_refuse(model):
    async def run():
        async with playing("first") as first:
            assert await ask(router_of(first), "/v1/completions", {"model": model}) == (200, b"first")

    asyncio.run(run())


def test_two_connections_that_lay_idle_and_are_gone_cost_no_answer():
    """Of a server that started again: both were closed there, and nothing was heard of it yet."""

    async def run():
        async with playing("first") as first:
            router = router_of(first)
            held = [await first.connection() for _ in range(2)]
            for exchange in held:
                await exchange.ask(b"GET", b"/version", [], b"")
                assert b"".join([part async for part in exchange.data()]) == b"first"
                first.done(exchange)
            for exchange in held:  # what is written to them is answered by nobody
                exchange._writer = exchange._reader = Deaf()
            assert await ask(router, "/v1/completions", {"prompt": "x"}) == (200, b"first")

    asyncio.run(run())


class Deaf:
    """A connection whose other end is gone."""

    transport = property(lambda self: self)

    def at_eof(self):
        return False

    is_closing = at_eof

    def write(self, data):
        pass

    async def drain(self):
        raise ConnectionResetError("gone")

    def abort(self):
        pass


def test_a_stream_that_is_cut_within_an_event_ends_with_one_that_can_be_read():
    """What was there of it stood in front of the error, and a client read neither."""

    async def run():
        whole, half = b'data: {"text": "a"}\n\n', b'data: {"te'
        async with playing("first", lambda path: STREAM + chunked(whole) + chunked(half)) as first:
            asked = {"prompt": "x", "stream": True}
            status, said = await ask(router_of(first), "/v1/completions", asked)
        events = [json.loads(event.removeprefix(b"data: ")) for event in said.split(b"\n\n") if event]
        assert status == 200 and events[0] == {"text": "a"}
        assert events[1]["error"]["code"] == "server_lost" and len(events) == 2

    asyncio.run(run())


def test_a_server_that_dies_within_its_first_event_has_answered_nothing():
    async def run():
        async with (
            playing("one", lambda path: STREAM + chunked(b'data: {"te')) as first,
            playing("one", lambda path: STREAM + chunked(b"data: 1\n\n") + b"0\r\n\r\n") as second,
        ):
            second.load.asked = 9  # the other is asked first
            said = await ask(router_of(first, second), "/v1/completions", {"prompt": "x"})
            assert said == (200, b"data: 1\n\n") and first.asked and second.asked

    asyncio.run(run())


@given(st.lists(st.sampled_from([b"data: x", b"\n\n", b"\r\n\r\n", b"\n", b"\r", b"y"])), st.data())
@settings(deadline=None)
def test_the_events_of_a_stream_are_its_bytes_wherever_they_are_cut(parts, data):
    text, events, out = b"".join(parts), Events(), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out.append(events.add(text[start:stop]))
        assert out[-1].endswith((b"\n\n", b"\r\n\r\n")) or not out[-1]
    assert b"".join(out) + events.held == text
    assert not any(mark in events.held for mark in (b"\n\n", b"\r\n\r\n"))


def test_an_event_without_an_end_is_not_held_for_ever():
    events = Events()
    assert events.add(bytes(MOST_EVENT_BYTES)) == b"" and len(events.add(b"x")) == MOST_EVENT_BYTES + 1


def test_a_body_beside_whose_length_another_says_how_long_it_is_is_not_read():
    """It was read as far as it went, whatever its length said."""

    async def receive():
        raise AssertionError("it was read")

    both = [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    for method, headers in ("POST", both), ("GET", both[1:]):
        with pytest.raises(ApiError) as told:
            asyncio.run(body_of({"method": method, "headers": headers}, receive))
        assert told.value.status == 411


def test_a_prompt_of_any_depth_has_pieces():
    """Each level took one of Python's frames."""
    told = ["x" * 300]
    for _ in range(5000):
        told = [told]
    assert pieces_of({"messages": told}, "") == pieces_of({"messages": ["x" * 300]}, "") != []
