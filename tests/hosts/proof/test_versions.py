"""Daemons of two versions speak the highest that both know, and one that knows none of ours is refused."""

import contextlib
import socket
import struct

import pytest

from kvstored.cluster import frames

NOW, OLDEST = frames.VERSION, frames.OLDEST_VERSION


@pytest.fixture(scope="module")
def daemon_and_salt(pair_of_hosts):
    with pair_of_hosts[0].connect() as client:
        yield pair_of_hosts, client.salt


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"),
    [
        (NOW, NOW, NOW), (NOW, 0, NOW), (NOW + 1, NOW, NOW), (NOW + 7, 1, NOW),
        (OLDEST, OLDEST, OLDEST), (OLDEST, 0, OLDEST), (NOW + 1, 0, None), (NOW + 2, NOW + 1, None),
        (OLDEST - 1, 1, None), (0, 0, None),
    ],
)  # fmt: skip
def test_the_highest_that_both_know_is_spoken(daemon_and_salt, newest, oldest, spoken, monkeypatch):
    """As a daemon that says these."""
    hosts, salt = daemon_and_salt
    monkeypatch.setattr(frames, "VERSION", newest)
    monkeypatch.setattr(frames, "OLDEST_VERSION", oldest)
    host, _, port = hosts.addresses[0].partition(":")
    said = []
    stream = frames.Stream(socket.create_connection((host, int(port)), timeout=30))
    expect = stream.expect
    stream.expect = lambda kind, count: said.append(expect(kind, count)) or said[-1]
    try:
        with contextlib.suppress(frames.Broken) if spoken is None else contextlib.nullcontext():
            frames.introduce(stream, "n1", "default", salt, "n0")
            assert spoken is not None, "it was let in"
            assert struct.unpack_from("<I", said[0])[0] == spoken
            stream.send(frames.frame(frames.PING, request=3))
            assert stream.take().kind == frames.PONG
    finally:
        stream.close()


def test_we_too_say_the_highest_of_both():
    theirs = ((NOW, NOW, NOW), (NOW + 3, NOW, NOW), (NOW + 3, NOW + 1, None), (1, 0, None))
    for newest, oldest, spoken in theirs:
        assert frames.spoken_with(struct.pack("<II", newest, oldest)) == spoken
