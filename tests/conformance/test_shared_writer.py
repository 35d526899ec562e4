"""Goal: a writer that two threads share is safe: a copy under way is over before its block is sealed or given
back, so no block is sealed half and no other block's memory is written to.

Method: one thread copies many MiB, the other ends the block as soon as the first of its bytes are there. The
pool has room for one such block, so that what is granted next lies where the copy went. Who waits does it
without the GIL: the daemon that is waited for stands still until another thread tells it to go on.
"""

import contextlib
import os
import platform
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import kvclient
from kvclient.integrations.pages import page_layout
from tests.conftest import wait_for

BLOCK, TAIL = 64 << 20, 1 << 20
SMALL = kvclient.Layout(1, 1, 8, "uint8", 4, meta_fixed=0, meta_per_token=0)
COPIES = {  # layers, and who copies
    "copy_from": (4, lambda writer, source: writer[0].copy_from(source)),
    "copy_layer": (1, lambda writer, source: writer.copy_layer(0, source, [0], [0])),
    "copy_in": (1, lambda writer, source: writer.copy_in(0, [source], [0])),
}


class Copy:
    """Ones, copied into a block of zeros by another thread, and under way."""

    def __init__(self, client, how: str) -> None:
        layers, copy = COPIES[how]
        self.layout = client.register_layout(page_layout((BLOCK // layers,) * layers))
        self.writer = client.create([b"a" * 32], self.layout)
        self.memory = np.frombuffer(self.writer[0].view, np.uint8)
        self.memory[:] = 0
        source = np.ones(BLOCK, np.uint8)
        self.thread = threading.Thread(target=copy, args=(self.writer, source))
        self.thread.start()
        wait_for(lambda: self.memory[:: BLOCK // 256].any(), "a byte that was copied")


@pytest.fixture
def client(daemon):
    with daemon(memory=f"{BLOCK * 3 // 2 >> 20}MiB").connect() as opened:
        yield opened


def test_what_is_given_back_is_written_to_by_nobody(client):
    for how in COPIES:
        copy = Copy(client, how)
        copy.writer.abort()
        with pytest.raises(RuntimeError), client.create([b"b" * 32], copy.layout) as writer:
            memory = np.frombuffer(writer[0].view, np.uint8)
            assert memory.ctypes.data == copy.memory.ctypes.data, "the pool has room for one"
            memory[-TAIL:] = 2
            copy.thread.join()
            assert (memory[-TAIL:] == 2).all(), how
            raise RuntimeError("gives it back")


@pytest.mark.parametrize("by", ["seal", "create"])
def test_what_is_sealed_is_whole(client, by):
    small = client.register_layout(SMALL)
    for how in COPIES:
        copy = Copy(client, how)
        if by == "seal":
            copy.writer.seal()
        else:
            client.create([b"b" * 32], small, sealing=copy.writer).abort()
        with client.get([b"a" * 32]) as blocks:
            assert (np.frombuffer(blocks[0].view, np.uint8)[-TAIL:] == 1).all(), how
        copy.thread.join()
        assert client.delete([b"a" * 32]) == 1


def test_what_was_ended_takes_no_copy(client):
    writer = client.create([b"a" * 32], client.register_layout(SMALL))
    source = np.ones(64, np.uint8)
    writer.abort()
    for refused in (
        lambda: writer[0].copy_from(source),
        lambda: writer.copy_layer(0, source, [0], [0]),
        lambda: writer.copy_in(0, [source], [0]),
    ):
        with pytest.raises(kvclient.Closed):
            refused()


RECVMSG, FUTEX = "47", "202"
numbered = pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers here")
WAITS = {
    **{how: copy for how, (_, copy) in COPIES.items()},
    "mark_layer": lambda writer, source: writer[0].mark_layer(0),
}


class Other(threading.Thread):
    """Calls it in a thread of its own; `error` is what it raised."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call, self.error = call, None
        self.start()

    def run(self) -> None:
        try:
            self.call()
        except kvclient.KVClientError as error:
            self.error = error

    def waits_in(self, system_call: str) -> bool:
        """For ever: who waits for the GIL does so for a moment at a time."""
        if not self.is_alive():
            return True
        with contextlib.suppress(OSError):  # it has just ended
            number, *arguments = Path(f"/proc/self/task/{self.native_id}/syscall").read_text().split()
            return number == system_call and (number != FUTEX or int(arguments[3], 16) == 0)
        return True


class Stopped:
    """A client with a writer of one block, and its daemon, which answers nobody until told to go on."""

    def __init__(self, server) -> None:
        self.client = server.connect(timeout_s=20.0)
        self.small = self.client.register_layout(SMALL)
        self.writer = self.client.create([b"a" * 32], self.small)
        self.writer[0].view  # noqa: B018  (asked for, so that it may be sealed)
        self.source = np.ones(64, np.uint8)
        self.pid = server.pid
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def stopped(daemon):
    made = Stopped(daemon())
    yield made
    made.go_on()
    made.client.close()


@numbered
@pytest.mark.parametrize("how", WAITS)
def test_who_fills_a_block_waits_for_its_seal_without_the_gil(stopped, how):
    """With it, nobody here could have the daemon go on, and the seal would end at its deadline."""
    client, writer = stopped.client, stopped.writer
    sealing = Other(lambda: client.create([b"b" * 32], stopped.small, sealing=writer))
    wait_for(lambda: sealing.waits_in(RECVMSG), "the daemon is asked")
    filling = Other(lambda: WAITS[how](writer, stopped.source))
    wait_for(lambda: filling.waits_in(FUTEX), "who fills waits")
    stopped.go_on()
    sealing.join(), filling.join()
    assert sealing.error is None
    assert isinstance(filling.error, kvclient.Closed)


@numbered
def test_a_writer_that_goes_waits_without_the_gil(stopped):
    going = Other(lambda: delattr(stopped, "writer"))
    wait_for(lambda: going.waits_in(RECVMSG), "the daemon is told")
    stopped.go_on()
    going.join()
    assert stopped.client.attached
