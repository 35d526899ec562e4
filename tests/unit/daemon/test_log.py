"""Goal: the log never holds up the daemon: what standard error does not take is left out and counted, a line
has a bound, and the journal is known by what it is. Method: a pipe that nobody reads, and writes that fail
the test where they would wait.
"""

import os
import select
import types

import pytest

from kvstored import log


@pytest.fixture
def pipe(monkeypatch):
    """The reading end of a pipe that is standard error; a write that would wait fails."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr(log, "_threshold", log.LEVELS.index("info"))  # another test may have set it
    write = os.write

    def at_once(fd: int, data: bytes) -> int:
        assert select.select((), (fd,), (), 0)[1] and len(data) <= select.PIPE_BUF, "it would wait"
        return write(fd, data)

    monkeypatch.setattr(os, "write", at_once)
    stream = types.SimpleNamespace(fileno=lambda: writing)
    monkeypatch.setattr(log, "sys", types.SimpleNamespace(stderr=stream))
    yield reading
    os.close(reading)
    os.close(writing)


def taken(reading: int) -> list[str]:
    """The lines in the pipe, which is empty then."""
    data = b""
    while select.select((reading,), (), (), 0)[0]:
        data += os.read(reading, 1 << 20)
    return data.decode().splitlines()


def test_a_full_pipe_costs_lines_and_no_time(pipe):
    for number in range(3000):
        log.info("filling", number=number, text="x" * 50)
    written = taken(pipe)
    assert 0 < len(written) < 3000
    log.info("after")
    lost, after = taken(pipe)
    assert lost.endswith(f" warning log_lines_lost count={3000 - len(written)}")
    assert after.endswith(" info after")
    log.info("again")
    assert len(taken(pipe)) == 1


def test_a_line_is_no_longer_than_what_a_pipe_takes_whole(pipe):
    log.info("long", text="x" * 10_000)
    (line,) = taken(pipe)
    assert len(line) + 1 == log.MAX_LINE_BYTES


def test_a_line_that_could_not_be_written_is_counted_too(pipe, monkeypatch):
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr(log.sys, "stderr", full)
        log.info("lost")
    log.info("lost")  # of a closed one
    monkeypatch.undo()
    assert log._lost == 2
    monkeypatch.setattr(log, "_lost", 0)


def test_the_journal_is_known_by_its_stream(monkeypatch):
    found = os.fstat(2)
    for value, known in ((f"{found.st_dev}:{found.st_ino}", True), ("1:1", False), ("", False)):
        monkeypatch.setenv("JOURNAL_STREAM", value)
        assert log._is_journal() is known
