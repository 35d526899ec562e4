"""Goal: what one other user, or nobody in particular, holds open at guests.sock is bounded, and the others
are served beside it. Method: forked children that become other users and hold as much as they can.
"""

import contextlib
import mmap
import os
import resource
import socket
import struct
import threading

import grpc
import pytest

from kvclient.errors import PinsExhausted
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from kvstored.access.authorization import NO_TOKEN
from kvstored.access.peer_proxy import MAX_CALLS
from kvstored.rpc.calls import MAX_FOLLOWERS, MAX_WAITS
from kvstored.v1 import store_pb2, transfer_pb2
from tests.fault.children import as_user, eventually
from tests.hostile import raw
from tests.hostile.conftest import GROWTH_BYTES, private_bytes
from tests.hostile.raw import Dropped, RawSession
from tests.hostile.tenants.test_tenants_grpc import OTHER, WRITER, Guest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

Code = grpc.StatusCode
PINS_HIGH_OFFSET, ALLOWANCE_OFFSET = 56, 4200


def test_one_user_pins_its_part_of_a_namespace(daemon, fork):
    """A reader holds a quarter, gets it again after it let go, and two of them share it; one that writes
    every word of its page by hand holds no more. No create of a writer is refused for it."""
    kvstored = daemon("64MiB", ("--namespaces", f"default:writers={WRITER}:readers={OTHER}"))
    owner = kvstored.connect()
    layout = owner.register_layout(BIG.to_blob())

    def put(count: int) -> list[bytes]:
        keys = new_keys(count)
        for key in keys:
            with owner.create([key], layout) as writer:
                assert writer.results == ["granted"]
                fill(writer[0], BIG.num_layers)
        return keys

    keys = put(48)

    def held(client) -> tuple[object, int]:
        blocks, count = client.get(keys), 0
        with contextlib.suppress(PinsExhausted):
            for i in range(len(keys)):
                count += blocks[i] is not None
        return blocks, count

    def read(steps) -> None:
        first, second = (kvstored.connect(read_only=True) for _ in range(2))
        blocks, count = held(first)
        assert 8 <= count <= 16
        with pytest.raises(PinsExhausted, match="a part of the namespace"):
            list(blocks)
        steps.reached("held")
        for i in range(count):
            check(blocks[i], BIG.num_layers)  # still there, whatever was put meanwhile
        blocks.release()
        blocks, count = held(second)
        assert count >= 8
        check(blocks[0], BIG.num_layers)

    def attack(steps) -> None:
        sessions = [RawSession(kvstored.socket_path) for _ in range(8)]
        for session in sessions:
            assert session.attach(read_only=1, max_pins=4096)[0] == 0
            session.ask(raw.request(raw.ALLOW_PINS, 1, struct.pack("<II", 4096, 1)))
            page = session.page()
            table = mmap.mmap(session.fds[0], os.fstat(session.fds[0]).st_size, prot=mmap.PROT_READ)
            records = struct.unpack_from("<Q", table, 32)[0]
            most = struct.unpack_from("<I", table, 12)[0]
            pins = [
                record << 40 | struct.unpack_from("<Q", table, records + 64 * record)[0] >> 24
                for record in range(min(most, 4096))
            ]
            page[raw.PINS_OFFSET : raw.PINS_OFFSET + 8 * len(pins)] = struct.pack(f"<{len(pins)}Q", *pins)
            page[ALLOWANCE_OFFSET : ALLOWANCE_OFFSET + 8] = b"\xff" * 8
            page[PINS_HIGH_OFFSET : PINS_HIGH_OFFSET + 8] = b"\xff" * 8
        steps.reached("held")

    for work in (attack, read):
        reader = fork(as_user(OTHER, work))
        reader.run_to("held")
        put(100)
        reader.go_on()
        reader.finish()
        keys = put(48)


@pytest.mark.parametrize("method", ["Write", "Lookup"])
def test_one_user_holds_half_of_the_calls(daemon, fork, method):
    """Calls whose messages never come, be they to be many or one: another user is served beside them, and who
    shows no token holds none."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-calls", "8"))

    def hold(steps) -> None:
        client, over = kvstored.connect(), threading.Event()

        def silent():
            over.wait()
            yield from ()

        for guest, most, code, text in (
            (Guest(kvstored, client), 4, Code.RESOURCE_EXHAUSTED, "this user has 4 of 8, the most: "),
            (Guest(kvstored, None), 0, Code.UNAUTHENTICATED, NO_TOKEN),
        ):
            start = guest.channel.stream_unary(f"/kvstored.v1.Store/{method}")
            calls = [start.future(silent(), metadata=guest.metadata()) for _ in range(10)]
            eventually(
                lambda c=calls, n=10 - most: sum(i.done() for i in c) == n, "the others are refused", 20
            )
            ended = [call for call in calls if call.done()]
            assert {call.code() for call in ended} == {code}
            assert all(call.details().startswith(text) for call in ended), ended[0].details()
        steps.reached("held")
        over.set()

    def work(_steps) -> None:
        guest = Guest(kvstored, kvstored.connect())
        lookup = store_pb2.LookupRequest(keys=new_keys(1))
        eventually(lambda: guest.ask(guest.store.Lookup, lookup)[0] is Code.OK, "another user is served")

    holder = fork(as_user(WRITER, hold))
    holder.run_to("held")
    fork(as_user(OTHER, work)).finish()
    holder.go_on()
    holder.finish()


@pytest.mark.parametrize("what", ["leases", "followers", "waits"])
def test_one_user_holds_half_of_the_leases_the_followers_and_the_waits(daemon, fork, what):
    """A writer opens leases, or follows or waits for its own unsealed block, until it is refused, by its
    share. Another user still gets its own."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-leases", "8"))
    most = {"leases": 4, "followers": MAX_FOLLOWERS // 2, "waits": MAX_WAITS // 2}[what]

    def create(guest: Guest) -> tuple:
        layout = guest.ask(guest.store.RegisterLayout, store_pb2.RegisterLayoutRequest(blob=SMALL.to_blob()))
        request = store_pb2.CreateRequest(keys=new_keys(1), layout_id=layout[2].layout_id)
        return (*guest.ask(guest.store.Create, request)[:2], request.keys[0])

    def follow(guest: Guest, key: bytes) -> grpc.Call:
        call = guest.transfer.Follow(transfer_pb2.FollowRequest(key=key), metadata=guest.metadata())
        next(iter(call))  # what the block is; no layer of it comes
        return call

    def wait(guest: Guest, key: bytes, wait_ms: int) -> grpc.Call:
        return guest.store.Get(store_pb2.GetRequest(keys=[key], wait_ms=wait_ms), metadata=guest.metadata())

    def hold(steps) -> None:
        guest = Guest(kvstored, kvstored.connect())
        code, text, key = create(guest)
        assert code is Code.OK, text
        if what == "leases":
            for _ in range(most - 1):
                assert create(guest)[0] is Code.OK
            code, text, _ = create(guest)
        elif what == "waits":
            held = [wait(guest, key, 60_000) for _ in range(most)]
            other = Guest(kvstored, guest.client)  # a connection has fewer calls than that
            held += [wait(other, key, 60_000) for _ in range(3)]
            eventually(lambda: sum(call.done() for call in held) == 3, "all but its share are refused", 20)
            code, text = next((call.code(), call.details()) for call in held if call.done())
        else:
            held = [follow(guest, key) for _ in range(most)]
            with pytest.raises(grpc.RpcError) as refused:
                follow(guest, key)
            code, text = refused.value.code(), refused.value.details()
            assert len(held) == most
        assert code is Code.RESOURCE_EXHAUSTED and f"this user has {most} of {2 * most}" in text, text
        steps.reached("held")

    def work(_steps) -> None:
        guest = Guest(kvstored, kvstored.connect())
        code, text, key = create(guest)
        assert code is Code.OK, text
        if what == "followers":
            follow(guest, key).cancel()
        if what == "waits":
            assert [message.found for message in wait(guest, key, 1)] == [False]

    holder = fork(as_user(WRITER, hold))
    holder.run_to("held")
    fork(as_user(OTHER, work)).finish()
    holder.go_on()
    holder.finish()


def test_errors_do_not_fill_a_connection_up(daemon, fork):
    """What a connection may have at a time is bounded: a call that has failed is none of it any more."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}", "--max-calls", "8"))

    def work(_steps) -> None:
        client = kvstored.connect()
        for guest, code in (
            (Guest(kvstored, client), Code.NOT_FOUND),
            (Guest(kvstored, None), Code.UNAUTHENTICATED),
        ):
            for method, request in (
                (guest.store.Lookup, store_pb2.LookupRequest(namespace="none")),
                (guest.store.Get, store_pb2.GetRequest(namespace="none")),
            ):
                assert [guest.ask(method, request)[0] for _ in range(50)] == [code] * 50

    fork(as_user(WRITER, work)).finish()


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def test_refusals_that_nobody_reads_are_bounded(daemon, fork):
    """Somebody without a token begins 9,000 calls on three connections and reads nothing: each is held until
    its refusal is read. 165 MB if a connection may have any number of them, 10 MB with the bound."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}"))
    lookup = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/kvstored.v1.Store/Lookup"),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    head = b"".join(b"\0" + bytes([len(n)]) + n + bytes([len(v)]) + v for n, v in lookup)
    before = private_bytes(kvstored.pid)

    def begin(steps) -> None:
        held = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for wire in held:
            wire.connect(str(kvstored.dir / "guests.sock"))
            wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
            for call in range(3000):
                wire.sendall(frame(1, 4, 2 * call + 1, head))
        steps.reached("held")

    def work(_steps) -> None:
        guest = Guest(kvstored, kvstored.connect())
        for _ in range(20):
            assert guest.ask(guest.store.Lookup, store_pb2.LookupRequest(keys=new_keys(1)))[0] is Code.OK

    stranger = fork(as_user(OTHER, begin))
    stranger.run_to("held")
    fork(as_user(WRITER, work)).finish()
    assert private_bytes(kvstored.pid) - before < GROWTH_BYTES
    stranger.go_on()
    stranger.finish()


@pytest.mark.parametrize("max_sessions", [1, 256, 4096])
def test_all_connections_together_hold_a_bounded_number_of_calls(daemon, max_sessions):
    """Also those that are refused and whose refusals nobody reads: 2 GB of 256 connections that may have 512
    calls each, 0.26 GB with the bound."""
    lists = ("--namespaces", f"default:writers={WRITER}")
    kvstored = daemon("8MiB", (*lists, "--max-sessions", str(max_sessions)))
    with socket.socket(socket.AF_UNIX) as wire, contextlib.ExitStack() as closing:
        wire.settimeout(20)
        wire.connect(str(kvstored.dir / "guests.sock"))
        wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        said = closing.enter_context(wire.makefile("rb"))
        length, kind = int.from_bytes(said.read(3)), said.read(6)[0]
        assert kind == 4, "the first frame is the server's settings"
        settings = dict(struct.iter_unpack(">HI", said.read(length)))
    assert 1 <= settings[3] <= 512 and settings[3] * max_sessions <= MAX_CALLS


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


def knock(kvstored, times: int):
    """A child's work: so many connections that say hello and begin no call; announces how many stay open."""

    def work(steps) -> None:
        held = [socket.socket(socket.AF_UNIX) for _ in range(times)]
        for knocking in held:
            knocking.settimeout(20)
            knocking.connect(str(kvstored.dir / "guests.sock"))
        stay = 0
        for knocking in held:
            with contextlib.suppress(OSError):
                knocking.sendall(HELLO)
                stay += len(knocking.recv(9, socket.MSG_WAITALL)) == 9  # the head of the server's settings
        steps.reached(str(stay))

    return work


def ask_once(kvstored):
    def work(_steps) -> None:
        guest = Guest(kvstored, kvstored.connect())
        lookup = store_pb2.LookupRequest(keys=new_keys(1))
        assert guest.ask(guest.store.Lookup, lookup)[:2] == (Code.OK, "")

    return work


@pytest.mark.parametrize(("who", "has"), [(12_399, 0), (WRITER, 8)], ids=["nobody's", "a writer's"])
def test_one_user_has_half_of_the_idle_connections_and_a_stranger_none(daemon, fork, who, has):
    """Connections on which nothing is called, many times as many as there may be: another user connects
    beside them, the owner notices nothing, and what they cost is bounded and given back."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-sessions", "16"))
    owner = kvstored.connect()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{kvstored.pid}/fd"))

    before = descriptors()
    knocking = fork(as_user(who, knock(kvstored, 400)))
    assert knocking.next_step() == str(has)
    owner.touch(new_keys(1))
    assert descriptors() - before < 3 * has + 16
    fork(as_user(OTHER, ask_once(kvstored))).finish()
    owners = Guest(kvstored, None, "grpc.sock")
    assert owners.ask(owners.store.Lookup, store_pb2.LookupRequest(keys=new_keys(1)))[0] is Code.OK
    knocking.go_on()
    knocking.finish()
    eventually(lambda: descriptors() - before < 16, "they are given back")
    fork(as_user(who, knock(kvstored, 8))).finish()


def test_idle_connections_leave_the_owner_descriptors(daemon, fork):
    """Where the limit on open files is far below what all sessions and connections could need, two users who
    hold all connections they get keep the owner from nothing."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}"), start=False)
    kvstored.command = ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *kvstored.command]
    kvstored.start()
    holders = [fork(as_user(who, knock(kvstored, 60))) for who in (WRITER, OTHER)]
    assert sum(int(holder.next_step()) for holder in holders) > 2
    kvstored.connect().touch(new_keys(1))
    owners = Guest(kvstored, None, "grpc.sock")
    assert owners.ask(owners.store.Lookup, store_pb2.LookupRequest(keys=new_keys(1)))[0] is Code.OK
    for holder in holders:
        holder.go_on()
        holder.finish()


def attach_many(kvstored, times: int):
    """A child's work: as many sessions as it gets; announces how many, and that the others were told why."""

    def work(steps) -> None:
        held, refused = [], 0
        for _ in range(times):
            session = RawSession(kvstored.socket_path)
            try:
                status, why = session.attach()
            except Dropped:  # that the request was lost is told before the reason
                _, status, _, why = session.receive()
            assert status == 0 or b"finds no room" in why, why
            held += [session] if status == 0 else []
            refused += status != 0
        assert refused
        steps.reached(str(len(held)))

    return work


def test_sessions_leave_the_owner_descriptors(daemon, fork):
    """max_sessions is 256, and there are descriptors for a dozen: two users who hold all they get are told
    that there is no room, and the owner is served by both doors."""
    kvstored = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}"), start=False)
    kvstored.command = ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *kvstored.command]
    kvstored.start()
    holders = [fork(as_user(who, attach_many(kvstored, 60))) for who in (WRITER, OTHER)]
    assert 2 <= sum(int(holder.next_step()) for holder in holders) <= 16
    with kvstored.connect() as client:
        client.touch(new_keys(1))
    owners = Guest(kvstored, None, "grpc.sock")
    assert owners.ask(owners.store.Lookup, store_pb2.LookupRequest(keys=new_keys(1)))[0] is Code.OK
    for holder in holders:
        holder.go_on()
        holder.finish()


def test_the_soft_limit_on_open_files_is_raised_as_far_as_sessions_need(daemon):
    kvstored = daemon("8MiB", (), start=False)
    kvstored.command = ["sh", "-c", 'ulimit -Sn 30; exec "$@"', "sh", *kvstored.command]
    kvstored.start()
    soft, hard = resource.prlimit(kvstored.pid, resource.RLIMIT_NOFILE)
    assert min(hard, 2 * 3 * 256) <= soft <= hard
