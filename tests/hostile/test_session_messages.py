"""Goal: whatever arrives at the session socket, the daemon answers with a typed error or closes that
connection, within its bounds, and serves others (invariants 7 to 9). Method: packets spoken by hand: random
bytes, mutated good messages, wrong counts, handles of other sessions, descriptors nobody asked for, replies
nobody reads.
"""

import array
import contextlib
import os
import random
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from tests.fault.children import eventually
from tests.hostile import raw
from tests.hostile.conftest import private_bytes
from tests.hostile.raw import Dropped, RawSession, block_item, create_body, request


def answered_or_dropped(session: RawSession, packet: bytes) -> bool:
    """Sends one packet; True if the connection is still there. The reply must be one to that packet."""
    try:
        session.send(packet)
        op, _status, tag, _body = session.receive()
    except Dropped:
        return False
    assert (op, tag) == struct.unpack_from("<4xH6xI", packet)[:2]
    return True


def good_messages(layout: int, granted: tuple[int, int], key: bytes) -> list[bytes]:
    record, generation = granted
    keys = [key, os.urandom(32)]
    return [
        request(raw.ATTACH, 1, raw.attach_body()),
        request(raw.REGISTER_LAYOUT, 0, SMALL.to_blob()),
        request(raw.CREATE, 2, create_body(keys, layout)),
        request(raw.CREATE, 1, create_body(keys[:1], layout, (block_item(record, generation),))),
        request(raw.SEAL, 1, block_item(record, generation)),
        request(raw.ABORT, 2, block_item(record, generation) * 2),
        request(raw.LOOK_UP, 2, b"".join(keys)),
        request(raw.DELETE, 2, b"".join(keys)),
        request(raw.TOUCH, 2, b"".join(keys)),
        request(raw.STATS, 0),
        request(raw.TOKEN, 0),
        request(raw.PROMOTE, 2, raw.promote_body(keys)),
        request(raw.PROMOTE_FROM, 2, raw.promote_from_body(keys, b"n" * 64)),
        request(raw.SUSPECT, 2, b"".join(keys)),
        request(raw.KEEP, 1, raw.keep_body(block_item(record, generation))),
        request(raw.KEEP, 0, raw.keep_body(b"")),
    ]


def mutate(choose: random.Random, packet: bytes) -> bytes:
    data = bytearray(packet)
    for _ in range(choose.randrange(1, 5)):
        what = choose.randrange(6)
        at = choose.randrange(len(data)) if data else 0
        if what == 0 and data:
            data[at] ^= 1 << choose.randrange(8)
        elif what == 1 and data:
            data[at] = choose.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif what == 2:
            del data[at:]
        elif what == 3:
            data += choose.randbytes(choose.randrange(1, 100))
        elif what == 4 and len(data) >= 20:
            word = 4 * choose.randrange(len(data) // 4)
            data[word : word + 4] = struct.pack(
                "<I", choose.choice([0, 1, 1024, 1025, 1 << 24, (1 << 31) - 1, (1 << 32) - 1])
            )
        elif what == 5 and len(data) >= 24:
            word = 8 * choose.randrange(len(data) // 8)
            data[word : word + 8] = choose.randbytes(8)
    return bytes(data)


def fuzz(watched, rounds: int, seed: int) -> None:
    attacked = watched()
    choose = random.Random(seed)
    session, messages = None, []
    for round_ in range(rounds):
        if session is None:
            session = RawSession(attacked.daemon.socket_path)
            if choose.randrange(8):
                assert session.attach()[0] == 0
                record, _status, generation, _offset, _length = session.create(
                    [os.urandom(32)], attacked.layout
                )[0]
                messages = good_messages(attacked.layout, (record, generation), os.urandom(32))
        packet = (
            mutate(choose, choose.choice(messages))
            if messages and choose.randrange(10)
            else choose.randbytes(choose.randrange(200))
        )
        if (
            not answered_or_dropped(session, packet if len(packet) >= 16 else packet.ljust(16, b"\0"))
            or choose.randrange(100) == 0
        ):
            session.close()
            session = None
        if round_ % 500 == 499:
            attacked.serves()
    if session is not None:
        session.close()
    attacked.survived()


def test_mutated_messages(watched):
    fuzz(watched, rounds=4000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 15))
def test_mutated_messages_for_long(watched, seed):
    fuzz(watched, rounds=200_000, seed=seed)


def test_packets_of_any_size(watched):
    attacked = watched()
    for size in (0, 1, 15, 16, 17, 95, 112, 4096, 65_536, 96 * 1024, 96 * 1024 + 1, 100_000):
        for first in (b"", raw.HEAD.pack(raw.MAGIC, raw.LOOK_UP, 0, 1024, 1)):
            with RawSession(attacked.daemon.socket_path) as session:
                session.attach()
                try:
                    session.send(first + os.urandom(max(0, size - len(first))))
                    session.receive()
                except Dropped:
                    pass
    attacked.survived()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    op=st.integers(0, 0xFFFF),
    count=st.integers(0, 0xFFFFFFFF),
    body=st.binary(max_size=300),
    attach=st.booleans(),
)
def any_request(socket_path, op, count, body, attach):
    with RawSession(socket_path) as session:
        if attach:
            assert session.attach()[0] == 0
        answered_or_dropped(session, request(op, count, body))


def test_any_header_with_any_body(watched):
    attacked = watched()
    any_request(attacked.daemon.socket_path)
    attacked.survived()


@pytest.mark.parametrize(
    "op",
    [op for op in raw.OPS if op not in (raw.ATTACH, raw.REGISTER_LAYOUT, raw.STATS, raw.TOKEN)],
)
def test_counts_that_lie(watched, op):
    attacked = watched()
    for count in (1025, 65_536, (1 << 31) - 1, (1 << 32) - 1):
        with RawSession(attacked.daemon.socket_path) as session:
            session.attach()
            status, text = session.ask(request(op, count, bytes(4096)))
            assert status != 0 and b"1024" in text, f"{count}: the error names the limit"
            status, _ = session.ask(request(op, 3, bytes(40)))
            assert status != 0, "a count that does not fit the length"
            assert session.ask(request(raw.STATS, 0))[0] == 0, (
                "the session goes on after an error of the caller's"
            )
    attacked.survived()


def test_a_create_with_seals_that_lie(watched):
    attacked = watched()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        for seals in (1, 1025, (1 << 32) - 1):
            body = create_body(new_keys(1), attacked.layout, (), seal_count=seals)
            assert session.ask(request(raw.CREATE, 1, body))[0] != 0
        assert session.ask(request(raw.STATS, 0))[0] == 0
    attacked.survived()


def test_attach_is_checked(watched):
    attacked = watched()
    for wrong in (
        {"namespace": b"unknown"},
        {"namespace": b"x" * 64},
        {"namespace": b""},
        {"version": 0},
        {"version": 1},
        {"version": raw.VERSION + 1},
        {"max_pins": 0},
        {"max_pins": (1 << 32) - 1},
    ):
        with RawSession(attacked.daemon.socket_path) as session:
            assert session.attach(**wrong)[0] != 0, wrong
            assert not session.fds
            for op in raw.OPS[1:]:
                assert session.ask(request(op, 0))[0] != 0, "nothing without attaching"
            assert session.attach()[0] == 0, "a second, right attempt"
            assert session.attach()[0] != 0, "attached already"
    attacked.survived()


def test_a_session_cannot_be_taken_over(watched):
    """To resume a session one must know its token and it must not be attached."""
    attacked = watched()
    mine = attacked.client.session
    keys = new_keys(1)
    writer = attacked.client.create(keys, attacked.layout)
    with RawSession(attacked.daemon.socket_path) as session:
        status, body = session.attach(session=mine, token=os.urandom(16))
        if status == 0:
            number, resumed = struct.unpack_from("<II", body)
            assert number != mine and not resumed
        fill(writer[0])
        writer.seal()
    assert attacked.client.session == mine
    with attacked.client.get(keys) as blocks:
        check(blocks[0])
    del blocks
    attacked.survived()


def test_handles_of_others_are_refused(watched):
    """Sealing or aborting by guessed record and generation does nothing to another session's blocks."""
    attacked = watched()
    keys = new_keys(2)
    writer = attacked.client.create(keys, attacked.layout)
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        for op in (raw.SEAL, raw.ABORT):
            for record in range(64):
                items = b"".join(block_item(record, generation) for generation in range(8))
                status, done = session.ask(request(op, 8, items))
                assert status == 0 and 0 not in done
        for record in ((1 << 24) - 1, (1 << 32) - 1):
            status, done = session.ask(request(raw.SEAL, 1, block_item(record, (1 << 64) - 1)))
            assert status != 0 or 0 not in done
    assert list(attacked.client.lookup(keys).states) == [1, 1]
    for index in range(2):
        fill(writer[index])
    writer.seal()
    with attacked.client.get(keys) as blocks:
        for block in blocks:
            check(block)
    del block, blocks
    attacked.survived()


def test_a_client_that_reads_no_replies_is_dropped(watched):
    attacked = watched()
    session = RawSession(attacked.daemon.socket_path)
    session.attach()
    session.socket.settimeout(0.2)
    packet = request(raw.LOOK_UP, 1024, os.urandom(32 * 1024))
    sent = 0
    try:
        for sent in range(20_000):
            session.send(packet)
            if sent % 200 == 0:
                attacked.serves()
    except (Dropped, TimeoutError):
        pass
    assert sent < 20_000 - 1, "the daemon kept answering somebody who does not read"
    attacked.serves()
    session.close()
    attacked.survived()


def test_descriptors_nobody_asked_for_are_not_kept(watched):
    attacked = watched()
    before = attacked.open_descriptors()
    reading, writing = os.pipe()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        gift = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reading] * 100))]
        for _ in range(50):
            session.socket.sendmsg([request(raw.STATS, 0)], gift)
            assert session.receive()[1] == 0
        # One kept of each message would be 50 more; three are the session's, and a thread may open a file.
        eventually(lambda: attacked.open_descriptors() <= before + 10, "none of the 5000 is kept")
    os.close(reading)
    os.close(writing)
    attacked.survived()


def test_more_connections_than_sessions(watched):
    attacked = watched(args=("--max-sessions", "8"))
    hoard, attached = [], 0
    for _ in range(40):
        session = RawSession(attacked.daemon.socket_path)
        hoard.append(session)
        with contextlib.suppress(Dropped):  # or the answer that turns it away comes before its end
            attached += session.attach()[0] == 0
    assert attached == 7, "of eight, beside the client that is watched"
    attacked.serves()
    for session in hoard:
        session.close()
    attacked.survived()


def test_layouts_are_bounded(watched):
    attacked = watched()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        statuses = [
            session.ask(request(raw.REGISTER_LAYOUT, 0, SMALL.to_blob() + b"%d" % i))[0] for i in range(700)
        ]
        assert set(statuses) == {0}, "those without blocks give their places to others"
        listed = attacked.client.create(new_keys(1), attacked.layout)
        assert listed.results == ["granted"], "the decent client's is registered again"
        listed.abort()
    attacked.survived()


def test_a_list_of_what_is_kept_is_bounded(watched):
    """It names what a resumed session has open: nothing else is remembered, and nothing twice. What was
    created since stays open."""
    attacked = watched()
    path = attacked.daemon.socket_path
    with RawSession(path) as session:
        session.attach()
        old = session.create(new_keys(2), attacked.layout)
        token = session.page()[raw.TOKEN_OFFSET : raw.TOKEN_OFFSET + 16]
        session.socket.close()  # its process lives, and may go on writing
        with RawSession(path) as resumed:
            eventually(lambda: attacked.client.stats()["sessions"] == 1, "its connection has ended")
            status, body = resumed.attach(session=session.session, token=token)
            assert status == 0 and struct.unpack_from("<II", body)[1] == 1, "resumed"
            new = resumed.create(new_keys(1), attacked.layout)[0]

            def keep(block: tuple[int, ...], times: int, more: int) -> tuple[int, bytes]:
                items = block_item(block[0], block[2]) * times
                return resumed.ask(request(raw.KEEP, times, raw.keep_body(items, more)))

            assert [keep(new, 1024, 1)[0] for _ in range(4)] == [0] * 4, (
                "it was never quarantined: nothing to keep"
            )
            assert keep(old[0], 1, 1)[0] == 0
            status, text = keep(old[0], 1024, 1)
            assert status != 0 and b"more than the 3 blocks" in text
            assert keep(old[0], 0, 0)[0] == 0
            counters = attacked.client.stats()
            assert counters["quarantined"] == 1, "the one that was named"
            sealed = resumed.ask(request(raw.SEAL, 1, block_item(new[0], new[2])))
            assert sealed == (0, b"\0")
    attacked.survived()


def test_priorities_are_bounded(watched):
    attacked = watched()
    with RawSession(attacked.daemon.socket_path) as session:
        session.attach()
        for priority in (101, (1 << 32) - 1):
            status, text = session.ask(request(raw.PROMOTE, 1, raw.promote_body(new_keys(1), priority)))
            assert status != 0 and str(priority).encode() in text and b"100" in text
            status, text = session.ask(
                request(raw.PROMOTE_FROM, 1, raw.promote_from_body(new_keys(1), b"a", priority))
            )
            assert status != 0 and str(priority).encode() in text and b"100" in text
        assert session.ask(request(raw.PROMOTE, 1, raw.promote_body(new_keys(1), 100)))[0] == 0
        whole = raw.promote_from_body(new_keys(2), b"a")
        for cut in (0, 7, 8, 71, 72, len(whole) - 1):  # of the head, of the name, of the last key
            assert session.ask(request(raw.PROMOTE_FROM, 2, whole[:cut]))[0] != 0
        assert session.ask(request(raw.PROMOTE_FROM, 2, whole)) == (0, bytes(16)), "two that are missing"
    attacked.survived()


def test_lists_that_never_end_are_not_kept(daemon):
    """What a session says that its writers have open is remembered only where it is: 64 MiB of eight sessions
    that go on and on, otherwise, 2 GiB of 128 with a million records."""
    blocks = 1 << 19
    kvstored = daemon("8MiB", ("--max-blocks", str(blocks)))
    with contextlib.ExitStack() as held:
        sessions = [held.enter_context(RawSession(kvstored.socket_path)) for _ in range(8)]
        for session in sessions:
            assert session.attach()[0] == 0
        before = private_bytes(kvstored.pid)
        for session in sessions:
            for at in range(0, blocks, 1024):
                items = b"".join(block_item(record, 1) for record in range(at, at + 1024))
                session.ask(request(raw.KEEP, 1024, raw.keep_body(items, more=1)))
        assert private_bytes(kvstored.pid) - before < 16 << 20
