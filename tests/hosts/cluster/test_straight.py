"""What a daemon is told by its fabric of blocks that come straight to their place: the test is the daemon,
the pool lies on hosts that are dictionaries, and memory is a file."""

import os
import socket
import struct
import threading

import pytest

from kvstored.cluster import frames
from kvstored.cluster.answers import ROOM, Answers
from kvstored.cluster.frames import Broken, Frame, Stream
from kvstored.cluster.pool import Pool
from kvstored.cluster.stored import Described, describe, pack
from tests.hosts.cluster.machines import KEY, WAIT_S, Machines, block
from tests.hosts.hosts import free_port

BIG = block(tokens=64, bytes_per_token=4096)  # two layers of 256 KiB
SALT = b"s" * 32
AT = 8192  # where its extent is, in memory


class Daemon:
    """Asks for the block, and lends memory."""

    def __init__(self, port: int) -> None:
        self.stream = Stream(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        frames.introduce(self.stream, "d", "default", SALT, "pool")
        self.over: list[int] = []

    def ask(self, key: bytes = KEY) -> Frame:
        """What is answered when layout and head have come."""
        self.stream.send(frames.frame(frames.FETCH, key, 1))
        while (said := self.next()).kind in (frames.LAYOUT, frames.BLOCK_HEAD):
            pass
        return said

    def next(self) -> Frame:
        while (said := self.stream.take(WAIT_S)).kind in (frames.WAITING, frames.OVER):
            self.over += struct.unpack(f"<{len(said.payload) // 8}Q", said.payload)
        return said

    def lend(self, loan: int) -> Frame:
        room = ROOM.pack(AT, len(known().places_bytes), loan)
        self.stream.send(frames.frame(frames.ROOM, room, 1))
        return self.next()

    def ping(self) -> None:
        self.stream.send(frames.frame(frames.PING, b"", 2))
        assert self.next().kind == frames.PONG


class known:
    """Of BIG: its object, and the extent in it."""

    def __init__(self) -> None:
        self.data = pack(BIG)
        self.said: Described = describe(self.data, KEY, len(self.data))
        self.places_bytes = self.data[self.said.at :]


@pytest.fixture
def three():
    machines = Machines(3)
    pool = Pool(machines, 2, machines.hosts)
    pool.put("default", KEY, BIG)
    memory = os.memfd_create("memory")
    os.truncate(memory, 1 << 21)
    port = free_port()
    answers = Answers(pool, "pool", "d", {"default": SALT}, {"default": (memory, 1 << 21)}, port)
    threading.Thread(target=answers.serve, daemon=True).start()
    yield machines, pool, memory, Daemon(port)
    machines.over.set()
    os.close(memory)


def test_a_large_block_is_brought_to_its_place_and_nowhere_else(three):
    _, pool, memory, daemon = three
    assert daemon.ask().payload == known().said.sums.payload
    assert daemon.lend(loan=7).kind == frames.PLACED
    extent = known().places_bytes
    whole = os.pread(memory, 1 << 21, 0)
    assert whole[AT : AT + len(extent)] == extent
    assert not any(whole[:AT]) and not any(whole[AT + len(extent) :])
    daemon.stream.send(Frame(frames.CHECKED, 0, 1, 1, b"").encoded(0, 1))
    daemon.ping()
    assert pool.counts["straight"] == pool.counts["hits"] == 1 and daemon.over == []


def test_what_is_not_the_block_is_sent_from_another_replica(three):
    machines, pool, _, daemon = three
    first = pool.find("default", KEY)[0].endpoint
    spoilt = machines.objects[first]
    name = next(iter(spoilt))
    spoilt[name] = spoilt[name][:-5000] + bytes(5000)
    daemon.ask()
    assert daemon.lend(loan=7).kind == frames.PLACED
    daemon.stream.send(Frame(frames.CHECKED, 0, 1, 0, b"").encoded(0, 1))
    assert [daemon.next().kind for _ in range(4)] == [frames.META, frames.LAYER, frames.LAYER, frames.WHOLE]
    assert pool.counts["corrupt"] == 1 and pool.counts["straight"] == 0


def test_of_a_host_that_stands_still_the_loan_is_over_when_the_transfer_is(three):
    machines, pool, memory, daemon = three
    late = pool.find("default", KEY)[0].endpoint
    daemon.ask()
    machines.still.add(late)
    assert daemon.lend(loan=7).kind == frames.META, "another replica, as frames"
    rest = [daemon.next() for _ in range(3)]
    assert [frame.payload for frame in rest] == [frame.payload for frame in BIG[3:]]
    daemon.ping()
    assert daemon.over == [], "it may write there still"
    machines.over.set()
    for _ in range(1000):
        daemon.ping()
        if daemon.over:
            break
    assert daemon.over == [7]
    assert not any(os.pread(memory, 1 << 21, 0))


def test_a_host_that_is_dead_costs_nothing_and_all_dead_is_a_loss(three):
    machines, pool, _, daemon = three
    daemon.ask()
    machines.dead.add(pool.find("default", KEY)[0].endpoint)
    assert daemon.lend(loan=7).kind == frames.PLACED, "the next replica, to the same place"
    daemon.stream.send(Frame(frames.CHECKED, 0, 1, 1, b"").encoded(0, 1))
    pool._alone.clear()
    daemon.ask()
    machines.dead |= set(machines.objects)
    assert daemon.lend(loan=8).kind == frames.LOST
    daemon.ping()
    assert daemon.over == [8]


def test_memory_that_is_not_lent_is_not_written(three):
    _, _, memory, daemon = three
    daemon.ask()
    assert daemon.lend(loan=0).kind == frames.META
    assert [daemon.next().kind for _ in range(3)] == [frames.LAYER, frames.LAYER, frames.WHOLE]
    assert not any(os.pread(memory, 1 << 21, 0))
    daemon.ask()
    daemon.stream.send(frames.frame(frames.ROOM, ROOM.pack(0, 0, 0), 1))  # not wanted any more
    daemon.ping()
    daemon.ask()
    with pytest.raises(Broken):
        daemon.stream.send(frames.frame(frames.ROOM, ROOM.pack(1 << 40, len(known().places_bytes), 9), 1))
        daemon.next()


def test_every_byte_of_a_description_counts():
    data = pack(BIG)
    said = describe(data, KEY, len(data))
    for at in range(said.at):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            found = describe(flipped, KEY, len(data))
        except Broken:
            continue
        assert (found.layout, found.head, found.sums) == (said.layout, said.head, said.sums), at
    for key, length in ((bytes(32), len(data)), (KEY, len(data) - 1), (KEY, len(data) + 4096)):
        with pytest.raises(Broken):
            describe(data, key, length)
