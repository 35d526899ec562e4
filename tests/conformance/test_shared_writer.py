"""Goal: a writer that two threads share is safe: a copy under way is over before its block is sealed or given
back, so no block is sealed half and no other block's memory is written to.

Method: one thread copies many MiB, the other ends the block as soon as the first of its bytes are there. The
pool has room for one such block, so that what is granted next lies where the copy went.
"""

import threading

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
