"""Goal: on guests.sock a call can do what the session can whose token it shows, while that session lives, and
nothing else; what lies elsewhere cannot be told from what does not exist. Method: forked children that become
other users, get tokens from the session socket and call every method of the store with right, wrong, guessed
and dead ones.
"""

import contextlib
import os
import stat

import grpc
import pytest

from kvclient.testing.conformance.case import SMALL, fill, new_keys
from kvstored.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from tests.daemon.grpc_calls import CALL_S
from tests.fault.children import as_user, eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

WRITER, READER, OTHER = 12_301, 12_302, 12_303
LISTS = f"default=0.5:writers={WRITER}:readers={READER},other=0.25:writers={OTHER},closed"
Code = grpc.StatusCode


@pytest.fixture
def tenants(daemon):
    return daemon(memory="16MiB", args=("--namespaces", LISTS, "--lease-timeout-s", "20"))


class Guest:
    """The methods of the store on one socket, each as (status, text, answer)."""

    def __init__(self, started, shown, socket: str = "guests.sock") -> None:
        """`shown`: a client, whose session lives as long as this does, or a token, or None."""
        self.client = shown if hasattr(shown, "grpc_token") else None
        self.token = self.client.grpc_token() if self.client else shown
        self.channel = grpc.insecure_channel(
            f"unix:{started.dir / socket}",
            options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)],  # one of its own
        )
        self.store = store_pb2_grpc.StoreStub(self.channel)
        self.transfer = transfer_pb2_grpc.TransferStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)

    def metadata(self) -> tuple:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def ask(self, method, request, metadata=None):
        try:
            answer = method(
                request, timeout=CALL_S, metadata=self.metadata() if metadata is None else metadata
            )
            return Code.OK, "", list(answer) if hasattr(answer, "__next__") else answer
        except grpc.RpcError as error:
            return error.code(), error.details(), None

    def everything(self, namespace: str, key: bytes, lease: int = 77) -> dict[str, tuple]:
        """Every method once: what it answers in that namespace."""
        s, here = store_pb2, {"namespace": namespace}
        reading = {
            "ListLayouts": (self.store.ListLayouts, s.ListLayoutsRequest(**here)),
            "Lookup": (self.store.Lookup, s.LookupRequest(keys=[key], **here)),
            "Touch": (self.store.Touch, s.TouchRequest(keys=[key], **here)),
            "Get": (self.store.Get, s.GetRequest(keys=[key], **here)),
            "Follow": (self.transfer.Follow, transfer_pb2.FollowRequest(key=key, timeout_ms=10, **here)),
        }
        writing = {
            "RegisterLayout": (
                self.store.RegisterLayout,
                s.RegisterLayoutRequest(blob=SMALL.to_blob(), **here),
            ),
            "Create": (self.store.Create, s.CreateRequest(keys=[key], **here)),
            "Write": (self.store.Write, iter([s.WriteRequest(lease_id=lease, key=key, data=b"x", **here)])),
            "MarkLayer": (
                self.store.MarkLayer,
                s.MarkLayerRequest(lease_id=lease, key=key, layers=1, **here),
            ),
            "Seal": (self.store.Seal, s.SealRequest(lease_id=lease, **here)),
            "Abort": (self.store.Abort, s.AbortRequest(lease_id=lease, **here)),
            "KeepAlive": (self.store.KeepAlive, s.KeepAliveRequest(lease_id=lease, **here)),
            "Delete": (self.store.Delete, s.DeleteRequest(keys=[key], **here)),
            "Push": (self.store.Push, s.PushRequest(keys=[key], to="b", **here)),
        }
        self.writing = set(writing)
        return {name: self.ask(*call)[:2] for name, call in {**reading, **writing}.items()}


def put(client, keys):
    layout = client.register_layout(SMALL.to_blob())
    with client.create(keys, layout) as writer:
        for index in writer.granted:
            fill(writer[index])
    return layout


def test_a_writer_writes_and_reads(tenants, fork):
    keys = new_keys(2)
    owner = tenants.connect()
    put(owner, keys[:1])

    def work(_steps) -> None:
        client = tenants.connect()
        guest = Guest(tenants, client.grpc_token())
        layout = guest.store.RegisterLayout(
            store_pb2.RegisterLayoutRequest(blob=SMALL.to_blob()), metadata=guest.metadata()
        ).layout_id
        code, text, created = guest.ask(
            guest.store.Create, store_pb2.CreateRequest(keys=keys, layout_id=layout)
        )
        assert code is Code.OK, text
        assert [result.status for result in created.results] == [2, 1], "one exists, one is granted"
        lease = created.lease.id
        pieces = [store_pb2.WriteRequest(lease_id=lease, key=keys[1], data=b"guest")]
        assert guest.ask(guest.store.Write, iter(pieces))[0] is Code.OK
        whole = store_pb2.SealRequest(lease_id=lease, zero_rest=True)
        assert guest.ask(guest.store.Seal, whole)[0] is Code.OK
        code, _, messages = guest.ask(guest.store.Get, store_pb2.GetRequest(keys=keys))
        assert [message.found for message in messages] == [True, True]
        assert messages[1].data.startswith(b"guest")

    fork(as_user(WRITER, work)).finish()
    assert owner.lookup(keys).resident == 2


def test_a_reader_reads(tenants, fork):
    owner = tenants.connect()
    (key,) = keys = new_keys(1)
    put(owner, keys)

    def work(_steps) -> None:
        guest = Guest(tenants, tenants.connect(read_only=True))
        answers = guest.everything("", key)
        for name, (code, text) in answers.items():
            assert code is (Code.PERMISSION_DENIED if name in guest.writing else Code.OK), (name, text)
        _, _, messages = guest.ask(guest.store.Get, store_pb2.GetRequest(keys=keys))
        assert messages[0].found and sum(len(message.data) for message in messages) > 0

    fork(as_user(READER, work)).finish()
    assert owner.lookup(keys).resident == 1


def test_a_session_that_chose_to_read_has_a_readers_token(tenants, fork):
    def work(_steps) -> None:
        guest = Guest(tenants, tenants.connect(read_only=True))
        request = store_pb2.DeleteRequest(keys=new_keys(1))
        assert guest.ask(guest.store.Delete, request)[0] is Code.PERMISSION_DENIED

    tenants.connect().close()
    fork(as_user(WRITER, work)).finish()


def test_another_namespace_answers_like_none(tenants, fork):
    """Every method, for a namespace that exists and for names that do not: the same status and text. A lease
    of another namespace is as unknown as one that never was."""
    owner = tenants.connect(namespace="other")
    (key,) = new_keys(1)
    put(owner, [key])

    def work(steps) -> None:
        theirs = tenants.connect(namespace="other")
        layout = theirs.register_layout(SMALL.to_blob())
        guest = Guest(tenants, theirs)
        request = store_pb2.CreateRequest(namespace="other", keys=new_keys(1), layout_id=layout)
        lease = guest.ask(guest.store.Create, request)[2].lease.id
        steps.reached(str(lease))

    holder = fork(as_user(OTHER, work))
    lease = int(holder.next_step())

    def probe(_steps) -> None:
        guest = Guest(tenants, tenants.connect())
        for probed in (key, new_keys(1)[0]):
            hidden = guest.everything("other", probed, lease)
            for absent in ("nothere", "closed", "../other", "other\0", "o" * 1000):
                found = guest.everything(absent, probed, lease)
                renamed = {
                    name: (code, text.replace(repr(absent[:64]), "'other'"))  # an error shows no more of it
                    for name, (code, text) in found.items()
                }
                assert renamed == hidden, absent
            assert {code for code, _ in hidden.values()} == {Code.NOT_FOUND}
        here = guest.everything("default", key, lease)
        never = guest.everything("default", new_keys(1)[0], lease ^ 2)
        assert {n: (c, t.replace(str(lease), "N")) for n, (c, t) in here.items()} == {
            n: (c, t.replace(str(lease ^ 2), "N")) for n, (c, t) in never.items()
        }
        assert guest.ask(guest.store.Lookup, store_pb2.LookupRequest(keys=[key]))[2].resident == 0

    fork(as_user(WRITER, probe)).finish()
    holder.go_on()
    holder.finish()


def test_what_is_no_token_of_a_living_session_opens_nothing(tenants, fork):
    """Absent, malformed, guessed, altered, doubled, dead: one answer for all, on every method."""
    (key,) = keys = new_keys(1)
    put(tenants.connect(), keys)

    def work(_steps) -> None:
        client = tenants.connect()
        token = client.grpc_token()
        assert token == client.grpc_token() and len(token) == 80, "one token a session"
        again = tenants.connect()
        assert again.grpc_token() != token
        flipped = [
            f"{int(token[at], 16) ^ 1:x}".join((token[:at], token[at + 1 :])) for at in (0, 15, 16, 40, 79)
        ]
        wrong = [None, "", "x", "00" * 40, token[:-2], token + "00", token[:16] + "0" * 64, *flipped]
        answers = set()
        for shown in wrong:
            guest = Guest(tenants, shown)
            answers |= set(guest.everything("default", key).values())
        guest = Guest(tenants, token)
        lookup = store_pb2.LookupRequest(keys=keys)
        for metadata in (
            (("authorization", f"Bearer {token}"),) * 2,
            (("authorization", f"bearer {token}"),),
            (("authorization", f"Basic {token}"),),
            (("authorization", token),),
            (("x-authorization", f"Bearer {token}"),),
        ):
            answers.add(guest.ask(guest.store.Lookup, lookup, metadata)[:2])
        assert guest.ask(guest.store.Lookup, lookup)[0] is Code.OK
        client.close()
        # The daemon sees the end of the connection an instant later.
        eventually(lambda: guest.ask(guest.store.Lookup, lookup)[0] is not Code.OK, "the token is dead")
        answers |= set(guest.everything("default", key).values())
        assert len(answers) == 1, answers
        ((code, text),) = answers
        assert code is Code.UNAUTHENTICATED and token not in text
        assert Guest(tenants, again.grpc_token()).everything("", key)["Lookup"][0] is Code.OK

    fork(as_user(WRITER, work)).finish()


def test_a_token_dies_with_its_process_and_with_its_daemon(tenants, fork):
    tenants.connect().close()

    def work(steps) -> None:
        client = tenants.connect()
        client.lookup(new_keys(1))
        steps.reached(client.grpc_token())
        fresh = Guest(tenants, client.grpc_token())  # attaches anew by itself
        assert fresh.everything("", new_keys(1)[0])["Lookup"][0] is Code.OK
        steps.reached(client.grpc_token())

    child = fork(as_user(WRITER, work))
    first = child.next_step()
    lookup = store_pb2.LookupRequest(keys=new_keys(1))

    def answer(token: str):
        guest = Guest(tenants, token)
        return guest.ask(guest.store.Lookup, lookup)[0]

    assert answer(first) is Code.OK, (
        "a token is a bearer's: whoever has it may use it while its session lives"
    )
    tenants.restart()
    assert answer(first) is Code.UNAUTHENTICATED
    child.go_on()
    second = child.next_step()
    assert second != first and answer(second) is Code.OK
    child.kill()
    eventually(lambda: answer(second) is Code.UNAUTHENTICATED, "the token is dead")


def test_a_stream_of_writes_ends_with_its_token(tenants, fork):
    """A long stream is no way around: each piece is admitted anew."""

    def work(_steps) -> None:
        client = tenants.connect()
        layout = client.register_layout(SMALL.to_blob())
        guest = Guest(tenants, client.grpc_token())
        keys = new_keys(1)
        created = guest.ask(guest.store.Create, store_pb2.CreateRequest(keys=keys, layout_id=layout))[2]
        probe = Guest(tenants, guest.token)

        def pieces():
            yield store_pb2.WriteRequest(lease_id=created.lease.id, key=keys[0], data=b"a")
            client.close()
            eventually(
                lambda: probe.ask(probe.store.Lookup, store_pb2.LookupRequest(keys=keys))[0] is not Code.OK,
                "the token is dead",
            )
            for _ in range(3):
                with contextlib.suppress(grpc.RpcError):
                    yield store_pb2.WriteRequest(data=b"b", offset_bytes=1)

        assert guest.ask(guest.store.Write, pieces())[0] is Code.UNAUTHENTICATED

    tenants.connect().close()
    fork(as_user(WRITER, work)).finish()


def test_admin_is_the_owners(tenants, fork):
    """No admin method, health detail or reflection on the guests' socket, and the owner's is closed."""
    tenants.connect().close()

    def work(_steps) -> None:
        guest = Guest(tenants, tenants.connect())
        for name in (method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods):
            request = getattr(admin_pb2, f"{name}Request")()
            assert guest.ask(getattr(guest.admin, name), request)[0] is Code.UNIMPLEMENTED, name
        for path in (
            "/grpc.health.v1.Health/Check",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            assert guest.ask(guest.channel.unary_unary(path), b"")[0] is Code.UNIMPLEMENTED
        with pytest.raises(PermissionError):
            os.open(tenants.dir / "grpc.sock", os.O_WRONLY)
        owners = Guest(tenants, guest.token, "grpc.sock")
        assert (
            owners.ask(owners.store.Lookup, store_pb2.LookupRequest(keys=new_keys(1)))[0] is Code.UNAVAILABLE
        )

    fork(as_user(WRITER, work)).finish()


def test_no_token_is_written_anywhere(tenants, fork):
    """Neither the log at its most talkative, nor a file, nor what the owner is shown has a token in it."""
    tenants.stop()
    tenants.args += ["--log-level", "debug"]
    tenants.start()

    def work(steps) -> None:
        client = tenants.connect()
        token = client.grpc_token()
        guest = Guest(tenants, token)
        guest.everything("default", new_keys(1)[0])
        Guest(tenants, token[:-1] + "g").everything("default", new_keys(1)[0])
        steps.reached(token)

    tenants.connect().close()
    child = fork(as_user(WRITER, work))
    token = child.next_step()
    owner = Guest(tenants, None, "grpc.sock")
    seen = [
        tenants.log(),
        str(owner.admin.Stats(admin_pb2.StatsRequest())),
        str(owner.admin.Sessions(admin_pb2.SessionsRequest())),
    ]
    for path in tenants.dir.iterdir():
        if stat.S_ISREG(path.stat().st_mode):
            seen.append(path.read_text(errors="replace"))
    assert not [text for text in seen if token in text or token[16:48] in text]
    child.go_on()
    child.finish()


def test_without_other_users_there_is_no_second_socket(daemon):
    alone = daemon(memory="8MiB")
    assert not (alone.dir / "guests.sock").exists()
