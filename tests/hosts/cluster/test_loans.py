"""Goal: a loan that is over is told until the daemon has read it, or the memory would be nobody's for good.

Method: the fabric's listener on loopback, asked as the daemon asks it, by streams that break.
"""

import socket
import threading
import time

import pytest

from kvstored import _core
from kvstored.cluster import frames
from kvstored.cluster.answers import Answers
from kvstored.cluster.frames import Stream

SALT, LOAN, DEADLINE_S = bytes(32), 7, 10.0


@pytest.fixture
def answers():
    made = Answers(None, "a", "a", {"s": SALT}, {}, 0)
    threading.Thread(target=made.serve, daemon=True).start()
    return made


def asked(answers) -> Stream:
    stream = Stream(socket.create_connection(answers._listener.getsockname()))
    frames.introduce(stream, "a", "s", SALT, "a")
    return stream


def ping(stream) -> list[bytes]:
    """What is told of loans before the answer."""
    stream.send(frames.frame(frames.PING, b"", 1))
    told = []
    while (frame := stream.take()).kind != frames.PONG:
        assert frame.kind == frames.OVER
        told.append(frame.payload)
    return told


def test_a_loan_is_told_again_until_it_was_read(answers):
    word = LOAN.to_bytes(8, "little")
    answers.loan_is_over("s", LOAN)
    stream = asked(answers)
    assert ping(stream) == [word]
    stream.close()  # nobody knows whether it was read
    end = time.monotonic() + DEADLINE_S
    while True:
        stream = asked(answers)
        if ping(stream) == [word]:
            break
        stream.close()
        assert time.monotonic() < end, "the loan is not told again"
    assert ping(stream) == []  # who asks on has read it
    stream.close()
    stream = asked(answers)
    assert ping(stream) == []
    stream.close()


def test_of_a_stranger_no_more_is_read_than_a_greeting_has(answers):
    """Or whoever is on this host could have it hold a gigabyte for each connection."""
    head = frames.HEAD.pack(frames.MAGIC, frames.HELLO, 0, 0, 0, 1 << 29, 0, 0)
    with socket.create_connection(answers._listener.getsockname(), timeout=DEADLINE_S) as stranger:
        stranger.sendall(head[:-4] + _core.crc32c(head[:-4]).to_bytes(4, "little"))
        with pytest.raises(ConnectionError):
            stranger.sendall(bytes(64 << 20))
