"""Goal: over the session socket a user gets exactly the right that a namespace's lists give, and what lies
elsewhere cannot be told from what does not exist (docs/tenants.md; cases 17 and 19 of docs/proof.md). Method:
forked children that become other users after all imports, and try what their right does not cover: attaching,
writing, reopening descriptors, probing names and keys by hand-made packets.
"""

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path

import pytest

from kvclient.errors import NotPermitted, Unavailable
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from tests.fault.children import as_user, eventually
from tests.hostile import raw
from tests.hostile.raw import Dropped, RawSession, block_item, create_body, request

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

WRITER, READER, OTHER, STRANGER, NOBODY = 12_301, 12_302, 12_303, 12_304, 65_534
WRITERS, READERS = 12_351, 12_352  # groups
NOT_PERMITTED, NOT_FOUND = 6, 2  # statuses: 1 + kv::Code
LISTS = (
    f"default=0.5:writers={WRITER}+@{WRITERS}:readers={READER}+@{READERS},"
    f"other=0.25:writers={OTHER}:salt=generated,closed"
)


@pytest.fixture
def tenants(daemon):
    return daemon(memory="16MiB", args=("--namespaces", LISTS))


@pytest.fixture
def with_disk(daemon, tmp_path):
    """What is sealed is written to disk at once."""
    disk = ("--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB", "--disk-write-priority", "0")
    kvstored = daemon(memory="16MiB", args=("--namespaces", LISTS, *disk))
    kvstored.disk = tmp_path / "disk"
    return kvstored


def put(client, keys):
    layout = client.register_layout(SMALL.to_blob())
    with client.create(keys, layout) as writer:
        for index in writer.granted:
            fill(writer[index])
    return layout


def right(started, namespace: str = "default") -> str:
    """What this process may do there: "", "read" or "write"."""
    try:
        started.connect(namespace=namespace, read_only=True).close()
    except (NotPermitted, Unavailable):
        with pytest.raises((NotPermitted, Unavailable), match=r"no namespace|refused"):
            started.connect(namespace=namespace)
        return ""
    try:
        started.connect(namespace=namespace).close()
    except NotPermitted as error:
        assert "attach read-only" in str(error)
        return "read"
    return "write"


MANY = tuple(range(20_000, 20_059))


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "wanted"),
    [
        pytest.param(0, 0, (), "write", id="root"),
        pytest.param(WRITER, STRANGER, (), "write", id="a writer by name"),
        pytest.param(STRANGER, WRITERS, (), "write", id="a writer by primary group"),
        pytest.param(STRANGER, STRANGER, (WRITERS,), "write", id="a writer by supplementary group"),
        pytest.param(STRANGER, STRANGER, (*MANY, WRITERS), "write", id="the sixtieth group"),
        pytest.param(READER, READER, (WRITERS,), "write", id="both lists"),
        pytest.param(READER, READER, (), "read", id="a reader by name"),
        pytest.param(STRANGER, STRANGER, (READERS,), "read", id="a reader by supplementary group"),
        pytest.param(OTHER, OTHER, (), "", id="another namespace's writer"),
        pytest.param(STRANGER, STRANGER, MANY, "", id="a stranger"),
        pytest.param(WRITERS, STRANGER, (), "", id="a user with a group's number"),
        pytest.param(STRANGER, WRITER, (), "", id="a group with a user's number"),
        pytest.param(NOBODY, STRANGER, (), "", id="the unmapped user"),
        pytest.param(NOBODY, WRITERS, (READERS,), "", id="the unmapped user in the right groups"),
    ],
)
def test_a_user_has_the_right_of_the_lists(tenants, fork, uid, gid, groups, wanted):
    tenants.connect().close()

    def work(_steps) -> None:
        assert right(tenants) == wanted
        assert right(tenants, "closed") == ("write" if uid == 0 else "")

    fork(as_user(uid, work, gid, groups)).finish()


@pytest.mark.parametrize("pool", ["shm", "memfd"])
def test_a_reader_writes_nothing(daemon, fork, pool):
    """Neither by messages nor by memory: every op that changes something, every way to a writable map."""
    tenants = daemon(memory="16MiB", args=("--namespaces", LISTS, "--pool", pool))
    owner = tenants.connect()
    keys = new_keys(2)
    layout = put(owner, keys)
    blob = SMALL.to_blob()

    def by_message() -> None:
        with RawSession(tenants.socket_path) as session:
            status, text = session.attach()
            assert status == NOT_PERMITTED and b"attach read-only" in text
            assert session.attach(read_only=1)[0] == 0
            for packet in (
                request(raw.REGISTER_LAYOUT, 0, blob),
                request(raw.CREATE, 1, create_body(new_keys(1), layout)),
                request(raw.CREATE, 0, create_body([], layout, (block_item(0, 1),))),
                request(raw.SEAL, 1, block_item(0, 1)),
                request(raw.ABORT, 1, block_item(0, 1)),
                request(raw.DELETE, 1, keys[0]),
            ):
                assert session.ask(packet)[0] == NOT_PERMITTED, packet[4]
            for packet in (
                request(raw.LOOK_UP, 1, keys[0]),
                request(raw.TOUCH, 1, keys[0]),
                request(raw.PROMOTE, 1, raw.promote_body(keys[:1])),
                request(raw.SUSPECT, 1, keys[0]),  # the daemon looks itself before it drops anything
            ):
                assert session.ask(packet)[0] == 0, packet[4]

    def by_memory() -> None:
        with RawSession(tenants.socket_path) as session:
            assert session.attach(read_only=1)[0] == 0
            assert len(session.fds) == 4
            for fd in session.fds[:3]:  # table, progress, pool; the fourth is its own page
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                readable = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
                with pytest.raises(TypeError):
                    readable[0:1] = b"x"
                for change in (lambda fd=fd: os.pwrite(fd, b"x", 0), lambda fd=fd: os.ftruncate(fd, 0)):
                    with pytest.raises(OSError):
                        change()
                for path in (f"/proc/self/fd/{fd}", f"/dev/fd/{fd}"):
                    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
                        with pytest.raises(PermissionError):
                            os.open(path, flags)
                with pytest.raises(PermissionError):
                    os.fchmod(fd, 0o666)

    def work(_steps) -> None:
        by_message()
        by_memory()
        with tenants.connect(read_only=True) as client, client.get(keys) as blocks:
            check(blocks[0])

    fork(as_user(READER, work)).finish()
    with owner.get(keys) as blocks:
        for block in blocks:
            check(block)


NAMES = [
    b"other", b"closed", b"nothere", b"", b"defaul", b"defaultx", b"Default", b"x" * 64,
    b"../default", b"/etc/passwd", b"default/../other", b"other\0default", b".", b"\xff\xfe\0", b"default\n",
]  # fmt: skip


def mapped_segments(pid: int) -> set[str]:
    """Names of what the daemon has mapped of shared memory, the sessions' pages left out."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if "/dev/shm/" in line and ".s." not in line}


def test_what_one_may_not_see_answers_like_what_does_not_exist(tenants, fork):
    """Names of namespaces that exist, that do not, and tricks: one status, one text, and nothing is
    made by them."""
    put(tenants.connect(namespace="other"), new_keys(1))
    segments = mapped_segments(tenants.pid)
    assert segments
    files = sorted(path.name for path in tenants.dir.iterdir())

    def work(_steps) -> None:
        for read_only in (0, 1):
            for name in NAMES:
                with RawSession(tenants.socket_path) as session:
                    status, text = session.attach(namespace=name, read_only=read_only)
                    assert status == NOT_FOUND and not session.fds, (name, status)
                    assert text == b"no namespace " + name.split(b"\0")[0]
                    status, _ = session.attach(read_only=1)
                    assert status == 0, "the connection is none the worse for it"
        with pytest.raises(NotPermitted) as hidden:
            tenants.connect(namespace="other")
        with pytest.raises(NotPermitted) as absent:
            tenants.connect(namespace="nothere")
        assert str(hidden.value).replace("other", "nothere") == str(absent.value)

    fork(as_user(WRITER, work)).finish()
    eventually(lambda: tenants.connect().stats()["sessions"] <= 2, "its sessions are gone")
    assert sorted(path.name for path in tenants.dir.iterdir()) == files
    assert mapped_segments(tenants.pid) == segments


def test_keys_of_another_namespace_are_nothing(with_disk, fork):
    """Sealed there, being written there, never seen: the same bytes come back, and both may create
    the key."""
    tenants = with_disk
    owner = tenants.connect(namespace="other")
    sealed, unsealed, absent = new_keys(1)[0], new_keys(1)[0], new_keys(1)[0]
    layout = put(owner, [sealed])
    eventually(lambda: list(tenants.disk.rglob("*.kv")), "it lies on disk too")
    pending = owner.create([unsealed], layout)
    assert pending.results == ["granted"]
    with RawSession(tenants.socket_path) as session:
        assert session.attach(namespace=b"other")[0] == 0
        theirs = session.session, bytes(session.page()[40:56])

        def work(_steps) -> None:
            with RawSession(tenants.socket_path) as mine:
                # The token of a session of another namespace resumes nothing here.
                assert mine.attach(session=theirs[0], token=theirs[1])[0] == 0
                assert len(mine.fds) == 4, "a new session, not theirs"
                for op in (raw.LOOK_UP, raw.DELETE, raw.TOUCH, raw.SUSPECT, raw.PROMOTE):
                    head = raw.promote_body([]) if op == raw.PROMOTE else b""
                    answers = {
                        key: mine.ask(request(op, 1, head + key)) for key in (sealed, unsealed, absent)
                    }
                    assert len(set(answers.values())) == 1, op
                for item in (block_item(0, 1), block_item(1, 1)):
                    assert mine.ask(request(raw.SEAL, 1, item)) == mine.ask(
                        request(raw.SEAL, 1, block_item(200, 9))
                    )
            client = tenants.connect()
            with client.get([sealed, unsealed, absent]) as blocks:
                assert blocks.hits == 0
            with client.create([sealed, unsealed, absent], client.register_layout(SMALL.to_blob())) as writer:
                assert writer.results == ["granted"] * 3
                for index in range(3):
                    fill(writer[index])
            assert client.delete([sealed, unsealed, absent]) == 3

        fork(as_user(WRITER, work)).finish()
    with owner.get([sealed]) as blocks:
        check(blocks[0])
    pending.abort()


def test_how_long_an_answer_takes(tenants, fork):
    """Timing is measured and printed, and decides nothing: it is not isolated, and the documents say so."""
    owner = tenants.connect(namespace="other")
    put(owner, new_keys(64))

    def refusals(name: bytes, rounds: int) -> float:
        took = []
        with RawSession(tenants.socket_path) as session:
            for _ in range(rounds):
                began = time.perf_counter_ns()
                status, _text = session.attach(namespace=name)
                took.append(time.perf_counter_ns() - began)
                assert status == NOT_FOUND
        return sorted(took)[rounds // 2] / 1000

    def work(_steps) -> None:
        figures = {name: refusals(name, 400) for name in (b"other", b"nothr", b"other", b"nothr")}
        print(
            "median microseconds of a refusal:", {name.decode(): round(us, 1) for name, us in figures.items()}
        )

    fork(as_user(WRITER, work)).finish()


def test_a_stranger_hears_that_it_is_on_no_list(tenants, fork):
    """By the library: not that the daemon is gone. The refusal and the request may cross each other."""

    def work(_steps) -> None:
        for name in ("default", "nothere") * 8:
            with pytest.raises(NotPermitted, match=r"in no namespace's `readers` or `writers`"):
                tenants.connect(namespace=name)

    fork(as_user(STRANGER, work)).finish()


def test_a_stranger_is_told_the_same_whatever_it_asks(tenants, fork):
    """Whoever is on no list gets a refusal and the end of the connection, and nothing it sends is read."""

    def work(_steps) -> None:
        said = set()
        asked = [request(raw.ATTACH, 1, raw.attach_body(name)) for name in (b"default", b"nothere")]
        for packet in (*asked, request(raw.STATS, 0), b"x" * 16):
            with RawSession(tenants.socket_path) as session:
                with contextlib.suppress(Dropped):
                    session.send(packet)
                with contextlib.suppress(Dropped):  # that it was not read may be told first
                    said.add(session.receive())
                    continue
                said.add(session.receive())
                with pytest.raises(Dropped):
                    session.receive()
        (told,) = said
        assert told[:3] == (raw.ATTACH, NOT_PERMITTED, 0) and not session.fds

    tenants.connect().close()
    fork(as_user(STRANGER, work)).finish()
    fork(as_user(NOBODY, work)).finish()


def test_one_user_is_not_shown_what_others_hold(tenants, fork):
    """The figures that a client may ask for are those of its own namespace."""
    owner = tenants.connect(namespace="other")
    put(owner, new_keys(5))

    def work(_steps) -> None:
        stats = tenants.connect().stats()
        assert stats["blocks"] == stats["used_bytes"] == stats["creates"] == 0
        assert stats["sessions"] == 1 and stats["capacity_bytes"] == 8 << 20

    fork(as_user(WRITER, work)).finish()


def test_one_user_cannot_use_up_the_sessions(daemon, fork):
    """Another user holds at most half of them: the owner and others are served as before."""
    crowded = daemon(
        memory="8MiB", args=("--namespaces", f"default:writers={WRITER}+{OTHER}", "--max-sessions", "8")
    )
    owner = crowded.connect()

    def work(steps) -> None:
        held = [RawSession(crowded.socket_path) for _ in range(4)]
        assert [session.attach()[0] for session in held] == [0] * 4
        for _ in range(20):
            with contextlib.suppress(Dropped, OSError), RawSession(crowded.socket_path) as more:
                status, why = more.ask(request(raw.ATTACH, 1, raw.attach_body()))
                assert status != 0 and b"finds no room" in why, "a fifth session"
        steps.reached("full")

    def neighbour(_steps) -> None:
        crowded.connect().close()

    greedy = fork(as_user(WRITER, work))
    greedy.run_to("full")
    crowded.connect().close()
    fork(as_user(OTHER, neighbour)).finish()
    assert owner.lookup(new_keys(1)).resident == 0
    greedy.go_on()
    greedy.finish()


def test_several_users_cannot_shut_out_the_owner(daemon, fork):
    """Who belongs to a group may have many user ids (subuid(5)), and half of the sessions under each. A
    stranger, who may do nothing here, holds none, attached or not."""
    crowded = daemon(
        memory="8MiB", args=("--namespaces", f"default:writers=@{WRITERS}", "--max-sessions", "8")
    )

    def hold(most: int):
        def work(steps) -> None:
            held = []
            for _ in range(50):
                with contextlib.suppress(Dropped, OSError):
                    session = RawSession(crowded.socket_path)
                    held += [session] if session.attach()[0] == 0 else []
            assert len(held) == most
            steps.reached("full")

        return work

    greedy = [
        fork(as_user(STRANGER, hold(0))),
        fork(as_user(WRITER, hold(4), gid=WRITERS)),
        fork(as_user(OTHER, hold(3), gid=WRITERS)),
    ]
    for child in greedy:
        child.run_to("full")
    crowded.connect().close()
    for child in greedy:
        child.go_on()
        child.finish()


def test_a_session_of_another_user_is_resumed_only_with_its_token(tenants, fork):
    """The page that holds the token is the session's own: mode 0600, handed to nobody else."""
    with RawSession(tenants.socket_path) as session:
        assert session.attach()[0] == 0
        number = session.session

        def work(_steps) -> None:
            for token in (bytes(16), os.urandom(16)):
                with RawSession(tenants.socket_path) as thief:
                    status, body = thief.attach(session=number, token=token)
                    assert status == 0
                    assert struct.unpack_from("<II", body) != (number, 1), "resumed"

        fork(as_user(WRITER, work)).finish()
