"""Goal: who may read and write changes with `kvstored reload`: new rights hold at once, a right that is taken
away ends its sessions and tokens, what cannot change is named, and a wrong list changes nothing. Method: a
daemon with a configuration file that the test rewrites, and forked children that become other users.
"""

import contextlib
import os
import shutil
import signal
import stat

import pytest

from kvclient.errors import NotPermitted, Unavailable
from kvclient.testing.conformance.case import SMALL, new_keys
from kvstored.access.tenants import Openness, open_directory
from kvstored.errors import Exit
from kvstored.v1 import store_pb2
from tests.conformance.grpc_door import GrpcClient
from tests.daemon.life.test_reload import reload
from tests.fault.children import as_user, eventually
from tests.hostile.raw import Dropped, RawSession

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

FIRST, SECOND, GROUP = 12_501, 12_502, 12_551


@pytest.fixture
def configured(daemon, tmp_path):
    file = tmp_path / "kvstored.toml"

    def lists(**fields: list) -> None:
        file.write_text(
            "[namespaces.default]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
        )

    lists(writers=[FIRST])
    kvstored = daemon("8MiB", ("--config", str(file)))
    kvstored.lists, kvstored.file = lists, file
    kvstored.connect().close()
    return kvstored


def reaches(
    kvstored, uid: int, fork, wanted: bool, read_only: bool = False, groups: tuple[int, ...] = ()
) -> None:
    def work(_steps) -> None:
        try:
            kvstored.connect(read_only=read_only).close()
        except (NotPermitted, Unavailable):
            assert not wanted
        else:
            assert wanted

    fork(as_user(uid, work, groups=groups)).finish()


def test_a_right_that_is_taken_ends_its_sessions(configured, fork):
    owner = configured.connect()
    keys = new_keys(1)

    def work(steps) -> None:
        client = configured.connect()
        writer = client.create(keys, client.register_layout(SMALL.to_blob()))
        assert writer.results == ["granted"]
        with RawSession(configured.socket_path) as reader:
            assert reader.attach(read_only=1)[0] == 0
            steps.reached("attached")
            with pytest.raises((NotPermitted, Unavailable)):
                client.touch(keys)
            with pytest.raises(Dropped):
                reader.receive()
            steps.reached("ended")
            client.touch(keys)  # attaches anew by itself

    child = fork(as_user(FIRST, work))
    child.run_to("attached")
    reaches(configured, SECOND, fork, False)
    configured.lists(writers=[SECOND])
    code, said = reload(configured)
    assert code == Exit.DONE and "namespaces" in said, said
    child.go_on()
    child.run_to("ended")
    eventually(lambda: owner.stats()["sessions"] == 1, "the sessions have ended")
    reaches(configured, FIRST, fork, False, read_only=True)
    reaches(configured, SECOND, fork, True)
    configured.lists(writers=[FIRST, SECOND])
    assert reload(configured)[0] == Exit.DONE
    child.go_on()
    child.finish()


@pytest.mark.parametrize("made", [False, True])
def test_a_right_is_taken_also_where_the_runtime_directory_is_gone(configured, fork, made):
    """Removed by somebody, and made by the daemon or before it: SIGHUP applies the lists and says what could
    not be opened."""
    if made:
        configured.stop()
        shutil.rmtree(configured.dir)
        configured.start()
    owner = configured.connect()

    def work(steps) -> None:
        configured.connect().touch(new_keys(1))
        steps.reached("attached")

    child = fork(as_user(FIRST, work))
    child.run_to("attached")
    aside = configured.dir.with_name("aside")
    configured.dir.rename(aside)
    try:
        configured.lists(writers=[SECOND])
        configured.process.send_signal(signal.SIGHUP)
        eventually(lambda: " reloaded applied=1 " in configured.log(), "it applies", 20)
        eventually(lambda: owner.stats()["sessions"] == 1, "the session has ended", 20)
    finally:
        aside.rename(configured.dir)
    log = configured.log()
    assert "directory_left_as_it_is why=" in log and "Traceback" not in log and "reload_refused" not in log
    child.go_on()
    child.finish()


def test_a_writer_that_becomes_a_reader(configured, fork):
    def work(steps) -> None:
        writing, reading = configured.connect(), configured.connect(read_only=True)
        steps.reached(writing.grpc_token())
        steps.reached(reading.grpc_token())
        with pytest.raises(NotPermitted, match="read-only"):
            writing.touch(new_keys(1))
        session = reading.session
        reading.touch(new_keys(1))
        assert reading.session == session, "what it may still do goes on undisturbed"
        steps.reached("done")

    child = fork(as_user(FIRST, work))
    tokens = [child.next_step()]
    child.go_on()
    tokens.append(child.next_step())
    configured.lists(readers=[FIRST])
    assert reload(configured)[0] == Exit.DONE
    child.go_on()
    child.run_to("done")
    with GrpcClient(str(configured.dir / "guests.sock")) as door:
        for token, lives in zip(tokens, (False, True), strict=True):
            metadata = (("authorization", f"Bearer {token}"),)
            with contextlib.nullcontext() if lives else pytest.raises(Exception, match="UNAUTHENTICATED"):
                door.store.Lookup(store_pb2.LookupRequest(keys=new_keys(1)), metadata=metadata, timeout=10)
    child.go_on()
    child.finish()


def test_groups_come_and_go_and_the_sockets_follow(configured, fork):
    def mode() -> str:
        return f"{stat.S_IMODE(os.stat(configured.socket_path).st_mode):04o}"

    assert mode() == "0666"
    configured.lists(writers=[f"@{GROUP}"])
    assert reload(configured)[0] == Exit.DONE
    assert mode() == "0660" and os.stat(configured.dir / "guests.sock").st_gid == GROUP
    reaches(configured, SECOND, fork, True, groups=(GROUP,))
    reaches(configured, FIRST, fork, False)
    configured.lists(writers=[FIRST], readers=[f"@{GROUP}"])
    assert reload(configured)[0] == Exit.DONE
    assert mode() == "0666"
    reaches(configured, SECOND, fork, False, groups=(GROUP,))
    reaches(configured, SECOND, fork, True, read_only=True, groups=(GROUP,))


def test_a_list_with_a_name_that_is_none_changes_nothing(configured, fork):
    configured.lists(writers=["no_such_user_here", SECOND])
    code, said = reload(configured)
    assert code == Exit.REFUSED and "no user 'no_such_user_here'" in said
    reaches(configured, FIRST, fork, True)
    reaches(configured, SECOND, fork, False)


def test_what_needs_a_restart_is_named_and_the_lists_hold_already(configured, fork):
    configured.file.write_text(
        f"[namespaces.default]\nmemory = 0.5\nwriters = [{SECOND}]\n[namespaces.new]\nwriters = [{FIRST}]\n"
    )
    code, said = reload(configured)
    assert code == Exit.DONE and "after a restart" in said, said
    reaches(configured, SECOND, fork, True)
    reaches(configured, FIRST, fork, False)


def test_the_end_of_the_last_list_holds_at_once(configured, fork):
    """Only the way back, which opens sockets, is of the start."""
    owner = configured.connect()

    def work(steps) -> None:
        configured.connect().touch(new_keys(1))
        steps.reached("attached")

    child = fork(as_user(FIRST, work))
    child.run_to("attached")
    configured.lists()
    code, said = reload(configured)
    assert code == Exit.DONE and "after a restart" not in said, said
    eventually(lambda: owner.stats()["sessions"] == 1, "the session has ended")
    for name in ("kvstored.sock", "guests.sock"):
        assert stat.S_IMODE((configured.dir / name).stat().st_mode) == 0o600
    reaches(configured, FIRST, fork, False, read_only=True)
    configured.lists(writers=[FIRST])
    code, said = reload(configured)
    assert code == Exit.DONE and "after a restart" in said, said
    reaches(configured, FIRST, fork, False)
    child.go_on()
    child.finish()


def test_a_socket_that_was_removed_does_not_keep_a_reload_from_applying(configured, fork):
    os.unlink(configured.dir / "guests.sock")
    configured.lists(writers=[SECOND])
    code, said = reload(configured)
    assert code == Exit.DONE and "applied" in said, said
    assert "socket_left_as_it_is" in configured.log()
    reaches(configured, FIRST, fork, wanted=False)
    reaches(configured, SECOND, fork, wanted=True)


@pytest.mark.parametrize(
    ("mode", "group", "opening", "said"),
    [
        (0o700, 7, Openness(0o711, 0o666), "other users are configured and cannot enter it"),
        (0o710, 7, Openness(0o711, 0o666), "users are configured beside group 7, which alone may enter it"),
        (0o710, 7, Openness(0o710, 0o660, 8), "beside group 7"),
        (0o710, 7, Openness(0o710, 0o660, 7), None),
        (0o711, 7, Openness(0o711, 0o666), None),
        (0o700, 7, Openness(0o700, 0o600), None),
    ],
)
def test_a_directory_that_stays_closed_to_some_is_told(tmp_path, monkeypatch, mode, group, opening, said):
    """One that an earlier daemon made for one group, say, when a second one is listed now."""
    logged = []
    monkeypatch.setattr("kvstored.log.warning", lambda event, **fields: logged.append((event, fields["why"])))
    os.chown(tmp_path, -1, group)
    os.chmod(tmp_path, mode)
    open_directory(str(tmp_path), opening, made=False)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert [event for event, _ in logged] == (["runtime_directory_closed"] if said else [])
    assert all(said in why for _, why in logged)
