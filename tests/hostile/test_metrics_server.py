"""Proves that who connects to the daemon's /metrics and asks nothing keeps no scraper from its answer, and
that the token is compared as bytes behind a scheme of any case.

Method: the server over asyncio, many more idle connections than it bears, and raw sockets.
"""

import asyncio
import contextlib
import errno
import socket

import pytest

from kvstored.telemetry.metrics_server import MAX_CONNECTIONS, MetricsServer

WAIT_S = 60
TOKEN = "Schlüssel"


async def asked(port, head=b"", path=b"/metrics"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        answer = await asyncio.wait_for(reader.read(-1), WAIT_S)
    return int(answer.split(b" ")[1])


@contextlib.asynccontextmanager
async def serving(token="", held=None, all_are=None, error=None):
    """The port. held: what each answer waits for; all_are: set when as many wait as may; error: raised by
    each."""
    asking = 0

    async def text():
        nonlocal asking
        asking += 1
        if error is not None:
            raise error
        if held is not None:
            if asking == MAX_CONNECTIONS:
                all_are.set()
            await held.wait()
        return "metrics 1\n"

    server = MetricsServer(text, text, token)
    port = await server.start(0)
    try:
        yield port
    finally:
        server.close()


def test_idle_connections_keep_nobody_out():
    async def scenario():
        async with serving() as port:
            with contextlib.ExitStack() as open_ones:
                idle = []
                for _ in range(3 * MAX_CONNECTIONS):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
                    idle.append(open_ones.enter_context(contextlib.closing(connection)))
                assert [await asked(port) for _ in range(5)] == [200] * 5
                ended = await asyncio.to_thread(idle[0].recv, 1)  # the oldest was let go
                assert ended == b""

    asyncio.run(scenario())


def test_as_many_as_are_answered_at_a_time_are_the_limit():
    async def scenario():
        held, all_are = asyncio.Event(), asyncio.Event()
        async with serving(held=held, all_are=all_are) as port:
            under_way = [asyncio.create_task(asked(port)) for _ in range(MAX_CONNECTIONS)]
            await asyncio.wait_for(all_are.wait(), WAIT_S)
            assert await asked(port) == 503
            held.set()
            assert [await task for task in under_way] == [200] * MAX_CONNECTIONS
            assert await asked(port) == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (f"Bearer {TOKEN}".encode(), 200), (f"bearer {TOKEN}".encode(), 200),
        (f"BEARER  {TOKEN}".encode(), 200), (f"Basic {TOKEN}".encode(), 401), (TOKEN.encode(), 401),
        (b"Bearer", 401), (b"", 401),
        (f"Bearer {TOKEN}".encode("latin-1"), 401), (f"Bearer {TOKEN}x".encode(), 401),
    ],
)  # fmt: skip
def test_the_token_is_compared_as_bytes(shown, status):
    async def scenario():
        async with serving(TOKEN) as port:
            assert await asked(port, b"Authorization: " + shown + b"\r\n") == status

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptor"), KeyError("x"), RuntimeError("x")])
def test_what_cannot_be_scraped_says_so_and_the_log_why(error, capfd):
    async def scenario():
        async with serving(error=error) as port:
            assert await asked(port) == 500

    asyncio.run(scenario())
    assert "scrape_failed path=/metrics error=" in capfd.readouterr().err


def test_a_scraper_may_send_parameters():
    async def scenario():
        async with serving() as port:
            assert await asked(port, path=b"/metrics?name%5B%5D=x") == 200
            assert await asked(port, path=b"/metricsx") == 404

    asyncio.run(scenario())
