"""Goal: a client that abuses the memory it was given harms at most its own namespace, and the daemon stays up
(docs/design.md §9): a client can harm its own namespace only; the daemon touches pool bytes only through
calls that can fail. Method: children that write garbage into their session page and progress words, truncate
and punch what they may write, hoard pins and unsealed blocks; a decent client beside them.
"""

import ctypes
import mmap
import os
import random
import signal
import struct

import pytest

from kvclient.errors import KVClientError, PinsExhausted
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from tests.fault.children import eventually
from tests.hostile.raw import PINS_OFFSET, RING_HEAD_OFFSET, RawSession

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def test_garbage_in_the_own_session_page(watched):
    """Wild pins, a ring head that jumps, a count of pins beyond the page, its own description overwritten."""
    attacked = watched()
    choose = random.Random(4)
    for round_ in range(30):
        with RawSession(attacked.daemon.socket_path) as session:
            session.attach(max_pins=1024)
            page = session.page()
            if round_ % 3 == 0:
                page[: len(page)] = choose.randbytes(len(page))
            elif round_ % 3 == 1:
                for at in range(
                    PINS_OFFSET, len(page), 8
                ):  # plausible pins: small records, small generations
                    page[at : at + 8] = struct.pack(
                        "<Q", choose.randrange(200) << 40 | choose.randrange(1, 50)
                    )
                page[RING_HEAD_OFFSET - 8 : RING_HEAD_OFFSET + 8] = struct.pack("<QQ", 1 << 60, (1 << 64) - 1)
            else:
                page[RING_HEAD_OFFSET:PINS_OFFSET] = b"\xff" * (PINS_OFFSET - RING_HEAD_OFFSET)
            attacked.serves()
            attacked.client.stats()
            page.close()
    attacked.survived()


def test_a_truncated_session_page(watched):
    attacked = watched()
    for length in (0, 4096, PINS_OFFSET + 8):
        with RawSession(attacked.daemon.socket_path) as session:
            session.attach(max_pins=4096)
            os.ftruncate(session.fds[3], length)
            attacked.client.stats()
            attacked.serves()
    attacked.survived()


def test_garbage_in_the_progress_words(watched):
    attacked = watched()
    keys = new_keys(2)
    writer = attacked.client.create(keys, attacked.layout)
    follower = attacked.daemon.connect()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        progress = mmap.mmap(session.fds[1], os.fstat(session.fds[1]).st_size)
        with follower.get(keys, follow=True) as blocks:
            assert blocks.hits == 2
            progress[: len(progress)] = b"\xff" * len(progress)
            for index in range(2):
                fill(writer[index])
            writer.seal()
            for block in blocks:
                block.wait_layer(SMALL.num_layers - 1, timeout_s=20.0)
                check(block)
        del block, blocks
        progress.close()
    follower.close()
    attacked.survived()


def abuse(attacked, fork, work) -> None:
    """Runs `work(session)` in a child that may well be killed by what it does."""

    def child(steps) -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        session = RawSession(attacked.daemon.socket_path)
        assert session.attach()[0] == 0
        work(session)
        steps.reached("done")

    hostile = fork(child)
    hostile.run_to("done")
    hostile.kill()


def test_a_truncated_pool_fences_its_namespace_only(watched, fork):
    attacked = watched(args=("--namespaces", "default=0.5,other=0.5"))
    other = attacked.daemon.connect(namespace="other")
    layout = other.register_layout(SMALL.to_blob())
    abuse(attacked, fork, lambda session: os.ftruncate(session.fds[2], 4096))

    def refused() -> bool:
        try:
            writer = attacked.client.create(new_keys(1), attacked.layout)
            writer.abort()
        except KVClientError as error:
            assert "default" in str(error) or "truncat" in str(error) or "fence" in str(error), error
            return True
        return False

    eventually(refused, "the namespace is fenced with a named error")
    assert attacked.daemon.process.poll() is None
    keys = new_keys(3)
    with other.create(keys, layout) as writer:
        for index in writer.granted:
            fill(writer[index])
    with other.get(keys) as blocks:
        for block in blocks:
            check(block)
    del block, blocks
    assert attacked.daemon.restart(kill=True).process.poll() is None, "its successor starts"
    assert other.lookup(keys).resident == 3


def test_a_pool_with_holes(watched, fork):
    """Holes are zeroes: wrong bytes for this namespace, whose writers trust each other, but nothing else."""
    attacked = watched()

    def punch(session) -> None:
        length = os.fstat(session.fds[2]).st_size
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        assert libc.fallocate(session.fds[2], mode, ctypes.c_long(0), ctypes.c_long(length)) == 0

    abuse(attacked, fork, punch)
    attacked.client.delete(attacked.kept)
    attacked.put(attacked.kept)
    attacked.survived()


def test_the_table_cannot_be_written(watched):
    attacked = watched()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        table = session.fds[0]
        with pytest.raises(OSError):
            mmap.mmap(table, 4096)
        with pytest.raises(OSError):
            os.ftruncate(table, 0)
        with pytest.raises(OSError):
            os.pwrite(table, b"x", 0)
    attacked.survived()


def test_pins_held_for_ever(watched, fork):
    """They keep what they pin and nothing else: the rest is served, and all of it when the holder ends."""
    attacked = watched()
    layout = attacked.client.register_layout(BIG.to_blob())
    keys = new_keys(4)
    with attacked.client.create(keys, layout) as writer:
        for index in writer.granted:
            fill(writer[index], BIG.num_layers)

    def hold(steps) -> None:
        client = attacked.daemon.connect(max_pins=64)
        held = [client.get(keys) for _ in range(16)]
        with pytest.raises(PinsExhausted):
            list(client.get(keys))
        steps.reached("holding")
        assert held

    hostile = fork(hold)
    hostile.run_to("holding")
    for _ in range(20):
        with attacked.client.create(new_keys(1), layout) as writer:
            assert writer.results == ["granted"]
            fill(writer[0], BIG.num_layers)
    assert attacked.client.lookup(keys).resident == 4
    attacked.serves()
    hostile.kill()
    eventually(lambda: attacked.client.stats()["pins"] == len(attacked.kept), "its pins are gone")
    attacked.survived()


def test_blocks_hoarded_unsealed(watched):
    attacked = watched()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        for _ in range(3):
            session.create(new_keys(1000), attacked.layout)
        writer = attacked.client.create(new_keys(1), attacked.layout)
        assert writer.results == ["no_space"], "there is no memory left, and the answer says so at once"
        with attacked.client.get(attacked.kept) as blocks:
            assert blocks.hits in (0, 3)
        del blocks
    eventually(lambda: attacked.client.stats()["created"] == 0, "its blocks are aborted")
    attacked.client.delete(attacked.kept)
    attacked.put(attacked.kept)
    attacked.survived()
