"""Goal: what one other user, or nobody in particular, holds open at guests.sock is bounded, and the others
are served beside it. Method: forked children that become other users and hold as much as they can.
"""

import contextlib
import os
import socket
import threading

import grpc
import pytest

from kvclient.conformance.case import SMALL, new_keys
from kvstored.calls import MAX_FOLLOWERS
from kvstored.v1 import store_pb2, transfer_pb2
from tests.fault.children import as_user, eventually
from tests.hostile.test_tenants_grpc import OTHER, WRITER, Guest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

Code = grpc.StatusCode


def test_one_user_holds_half_of_the_calls(daemon, fork):
    """Calls that never end: another user is served beside them, and who shows no token holds none."""
    one = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-calls", "8"))

    def hold(steps) -> None:
        client, over = one.connect(), threading.Event()

        def silent():
            over.wait()
            yield from ()

        full = Code.RESOURCE_EXHAUSTED  # also where more arrive at once than are taken in all
        for guest, most, refusals in (
            (Guest(one, client), 4, {full}),
            (Guest(one, None), 0, {full, Code.UNAUTHENTICATED}),
        ):
            calls = [guest.store.Write.future(silent(), metadata=guest.metadata()) for _ in range(8)]
            eventually(lambda c=calls, n=8 - most: sum(i.done() for i in c) == n, "the others are refused")
            assert {call.code() for call in calls if call.done()} <= refusals
        steps.reached("held")
        over.set()

    def work(_steps) -> None:
        guest = Guest(one, one.connect())
        lookup = store_pb2.LookupRequest(keys=new_keys(1))
        eventually(lambda: guest.ask(guest.store.Lookup, lookup)[0] is Code.OK, "another user is served")

    holder = fork(as_user(WRITER, hold))
    holder.run_to("held")
    fork(as_user(OTHER, work)).finish()
    holder.go_on()
    holder.finish()


@pytest.mark.parametrize("what", ["leases", "followers"])
def test_one_user_holds_half_of_the_leases_and_of_the_followers(daemon, fork, what):
    """A writer opens leases, or follows its own unsealed block, until it is refused, by its share. Another
    user still gets its own."""
    one = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-leases", "8"))
    most = 4 if what == "leases" else MAX_FOLLOWERS // 2

    def create(guest: Guest) -> tuple:
        layout = guest.ask(guest.store.RegisterLayout, store_pb2.RegisterLayoutRequest(blob=SMALL.to_blob()))
        request = store_pb2.CreateRequest(keys=new_keys(1), layout_id=layout[2].layout_id)
        return (*guest.ask(guest.store.Create, request)[:2], request.keys[0])

    def follow(guest: Guest, key: bytes) -> grpc.Call:
        call = guest.transfer.Follow(transfer_pb2.FollowRequest(key=key), metadata=guest.metadata())
        next(iter(call))  # what the block is; no layer of it comes
        return call

    def hold(steps) -> None:
        guest = Guest(one, one.connect())
        code, text, key = create(guest)
        assert code is Code.OK, text
        if what == "leases":
            for _ in range(most - 1):
                assert create(guest)[0] is Code.OK
            code, text, _ = create(guest)
        else:
            held = [follow(guest, key) for _ in range(most)]
            with pytest.raises(grpc.RpcError) as refused:
                follow(guest, key)
            code, text = refused.value.code(), refused.value.details()
            assert len(held) == most
        assert code is Code.RESOURCE_EXHAUSTED and f"this user has {most} of {2 * most}" in text, text
        steps.reached("held")

    def work(_steps) -> None:
        guest = Guest(one, one.connect())
        code, text, key = create(guest)
        assert code is Code.OK, text
        if what == "followers":
            follow(guest, key).cancel()

    holder = fork(as_user(WRITER, hold))
    holder.run_to("held")
    fork(as_user(OTHER, work)).finish()
    holder.go_on()
    holder.finish()


def test_connections_of_strangers_are_bounded(daemon, fork):
    """Anybody may knock at guests.sock. What a stranger holds open costs a bounded number of descriptors, the
    owner notices nothing, and guests are served again when it has gone."""
    one = daemon("8MiB", ("--namespaces", f"default:writers={WRITER}", "--max-sessions", "16"))
    owner = one.connect()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{one.pid}/fd"))

    before = descriptors()

    def knock(steps) -> None:
        held = [socket.socket(socket.AF_UNIX) for _ in range(400)]
        for knocking in held:
            knocking.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                knocking.connect(str(one.dir / "guests.sock"))
        for knocking in held:
            with contextlib.suppress(OSError):
                knocking.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        steps.reached("held")

    def work(_steps) -> None:
        guest = Guest(one, one.connect())
        lookup = store_pb2.LookupRequest(keys=new_keys(1))
        eventually(lambda: guest.ask(guest.store.Lookup, lookup)[0] is Code.OK, "guests are served")

    stranger = fork(as_user(12_399, knock))
    stranger.run_to("held")
    owner.touch(new_keys(1))
    assert descriptors() - before < 16 + 24
    stranger.go_on()
    stranger.finish()
    fork(as_user(WRITER, work)).finish()
