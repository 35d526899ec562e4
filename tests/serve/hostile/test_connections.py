"""Proves that connections which ask for nothing, or take for ever to, cost the others nothing; that one above
the most is told so; and that HEAD is GET without a body.

Method: a real server process by kvclient.serve.listening over an application of three lines, short times, and
raw sockets of loopback: slow heads, slow bodies, heads without end, and as many idle connections as this
process may open, 3,000 at most.
"""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from kvclient.serve.connections import Waiting
from tests.conftest import ROOT

WHOLE_S, WAITING, WAIT_S, MOST = 4.0, 200, 60, 40
PROGRAM = f"""
import asyncio, sys
from kvclient.serve import listening

listening.WHOLE_S, listening.WAITING, *most = {WHOLE_S}, {WAITING}, *map(int, sys.argv[1:])
listening.CONNECTIONS = most[0] if most else listening.CONNECTIONS
going = asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    length = 0
    while (event := await receive())["type"] == "http.request":
        length += len(event["body"])
        if not event.get("more_body"):
            break
    if scope["path"] == "/go":
        going.set()
    if scope["path"] == "/held":
        await going.wait()
    status = 200 if scope["method"] in ("GET", "POST") else 405
    await send({{"type": "http.response.start", "status": status, "headers": [(b"content-length", b"8")]}})
    if scope["path"] == "/stays":
        await send({{"type": "http.response.body", "body": b"a", "more_body": True}})
        await receive()
    await send({{"type": "http.response.body", "body": b"%8d" % length}})

door = listening.bound("test", "127.0.0.1", 0)
print(door.getsockname()[1], flush=True)
listening.serve(app, door)
"""


@contextlib.contextmanager
def started(*args):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *args], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    yield int(process.stdout.readline())
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def port():
    with started() as listens:
        yield listens


def connected(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    return contextlib.closing(connection)


def asked(port, body=b""):
    with connected(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while not answer.endswith(b"%8d" % len(body)):
            more = connection.recv(4096)
            assert more, answer
            answer += more
        return answer.split(b"\r\n")[0]


def closed(connection, sends):
    """Sends a piece at a time until the server has closed the connection. Returns what it said."""
    said, stopped = b"", threading.Event()

    def dribble():
        with contextlib.suppress(OSError):
            while not stopped.wait(0.05):
                connection.sendall(sends)

    sender = threading.Thread(target=dribble)
    sender.start()
    try:
        while more := connection.recv(4096):
            said += more
    except ConnectionError:
        pass
    finally:
        stopped.set()
        sender.join()
    return said


@pytest.mark.parametrize(
    "head",
    [b"POST / HTTP/1.1\r\nHost: x\r\nX-", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"],
    ids=["head", "body"],
)
def test_what_takes_for_ever_is_closed_and_others_are_served(port, head):
    with connected(port) as connection:
        connection.sendall(head)
        assert closed(connection, b"a") == b""
    assert asked(port, b"abc") == b"HTTP/1.1 200 OK"


def test_a_request_behind_another_takes_the_time_it_takes(port):
    """Sent before the first was answered, it had that one's end for its own: its connection was closed."""
    with connected(port) as pair:
        pair.sendall(b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"/", b"/held")))
        said = pair.recv(4096)
        assert said.startswith(b"HTTP/1.1 200 OK")
        with connected(port) as idle:
            assert closed(idle, b"") == b""  # so a time that had begun before is over
        with connected(port) as other:
            other.sendall(b"GET /go HTTP/1.1\r\nHost: x\r\n\r\n")
            while said.count(b"HTTP/1.1 200 OK") < 2:
                more = pair.recv(4096)
                assert more, "it was closed while it was answered"
                said += more


class Clock:
    """A loop's timers, fired by the test."""

    def __init__(self):
        self.due = []

    def call_later(self, seconds, call, argument):
        self.due.append((seconds, call, argument))
        return SimpleNamespace(cancel=lambda: self.due.remove((seconds, call, argument)))


class Connection:
    def __init__(self, name, clock, closed):
        self.loop, self.transport = clock, SimpleNamespace(abort=lambda: closed.append(name))


def test_an_answers_end_begins_the_time_anew_and_the_oldest_goes_first():
    clock, closed, waiting = Clock(), [], Waiting(2, 30.0)
    first, second, third = (Connection(name, clock, closed) for name in "abc")
    for connection in (first, second, first):  # the first's answer has ended: the second is the oldest now
        waiting.add(connection)
    assert len(clock.due) == 2
    waiting.add(third)
    assert closed == ["b"] and waiting.closed == 1 and len(clock.due) == 2
    waiting.drop(third)  # its request is whole
    ((seconds, call, connection),) = clock.due
    assert (seconds, connection) == (30.0, first)
    call(connection)
    assert closed == ["b", "a"] and not clock.due


def test_a_head_without_end_is_refused(port):
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert closed(connection, b"X-Many: " + b"a" * 9000 + b"\r\n").split(b"\r\n")[0] in (
            b"HTTP/1.1 400 Bad Request", b"",
        )  # fmt: skip
    assert asked(port) == b"HTTP/1.1 200 OK"


def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(port):
    """It was the one error that was no JSON."""
    with connected(port) as connection:
        connection.sendall(b"\x16\x03\x01\x02\r\n\r\n")
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert asked(port) == b"HTTP/1.1 200 OK"


def test_thousands_of_idle_connections_keep_nobody_out(port):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3200 if hard == resource.RLIM_INFINITY else min(3200, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    idle = []
    try:
        for index in range(wanted - 200):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            if index % 500 == 499:
                assert asked(port, b"x" * index) == b"HTTP/1.1 200 OK"
        assert asked(port, b"abc") == b"HTTP/1.1 200 OK"
        oldest = idle[0]
        with contextlib.suppress(ConnectionError):
            assert oldest.recv(1) == b"", "the oldest that waits was not closed"
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_head_is_get_without_a_body(port):
    with connected(port) as connection:
        for method, body in ((b"HEAD", b""), (b"GET", b"       0")):
            connection.sendall(method + b" / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
            said = b""
            while not said.endswith(b"\r\n\r\n" + body):
                said += (more := connection.recv(4096))
                assert more, said
            assert said.startswith(b"HTTP/1.1 200 OK") and b"content-length: 8" in said.lower()


def test_a_connection_above_the_most_is_told_so_as_openai_and_anthropic_have_it():
    with started(str(MOST)) as port, contextlib.ExitStack() as stack:
        for _ in range(MOST):  # all under way: of those that wait the oldest are closed
            connection = stack.enter_context(connected(port))
            connection.sendall(b"GET /stays HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1), "its answer has begun"
        for path, outer in ((b"/v1/models", {"error"}), (b"/v1/messages", {"type", "error"})):
            with connected(port) as more:
                more.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)
                head, _, body = closed(more, b"").partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 2" in head, head
            told = json.loads(body)
            assert set(told) == outer and f"{MOST} connections" in told["error"]["message"]
