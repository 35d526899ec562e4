"""Goal: every file, directory, socket and segment that a daemon makes is as open as it must be and no more;
what lies in the way is not followed; secrets stay where they are (peers' case 17). Method: one table of all
that is made, compared with the file system under each kind of configuration; salts read back by clients.
"""

import contextlib
import grp
import os
import re
import socket
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from kvclient.client.connect import default_directory
from kvclient.errors import NotPermitted
from kvclient.testing.conformance.case import SMALL, fill, new_keys
from kvstored.cli import main
from kvstored.errors import Exit
from kvstored.v1 import admin_pb2, admin_pb2_grpc
from tests.conftest import DaemonFailed
from tests.daemon.grpc_calls import CALL_S
from tests.fault.children import as_user, eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
GUEST, GROUP, STRANGER = 12_401, 12_451, 12_402

# What a daemon makes -> its mode with no other user, with one group, with users. "-": it is not made.
MADE = {
    "directory": ("0700", "0710", "0711"),
    "daemon.lock": ("0600", "0600", "0600"),
    "pid": ("0600", "0600", "0600"),
    "state.json": ("0600", "0600", "0600"),
    "default.salt": ("0600", "0600", "0600"),
    "kvstored.sock": ("0600", "0660", "0666"),
    "grpc.sock": ("0600", "0600", "0600"),
    "guests.sock": ("-", "0660", "0666"),
    "guarded.sock": ("-", "0600", "0600"),
    "segment home": ("0600", "0600", "0600"),
    "segment table": ("0600", "0600", "0600"),
    "segment progress": ("0600", "0600", "0600"),
    "segment pool": ("0600", "0600", "0600"),
    "segment s": ("0600", "0600", "0600"),
}
KINDS = {
    "nobody else": "default:salt=generated",
    "one group": f"default:writers=@{GROUP}:salt=generated",
    "users": f"default:writers={GUEST}+@{GROUP}:readers=@{GROUP}:salt=generated",
}


def own_directory(daemon, *args: str, **options):
    """A daemon that makes its runtime directory itself."""
    kvstored = daemon(memory="8MiB", args=args, start=False, **options)
    kvstored.dir.rmdir()
    return kvstored


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(os.lstat(path).st_mode):04o}"


def made(kvstored) -> dict[str, str]:
    prefix = next(iter(kvstored._prefixes))
    found = {"directory": mode(kvstored.dir)} | {path.name: mode(path) for path in kvstored.dir.iterdir()}
    for path in Path("/dev/shm").glob(prefix + "*"):
        found["segment " + path.name.removeprefix(prefix).split(".")[1]] = mode(path)
    return found


@pytest.mark.parametrize(("column", "kind"), list(enumerate(KINDS)), ids=list(KINDS))
def test_modes_of_all_that_is_made(daemon, column, kind):
    if column and os.geteuid() != 0:
        pytest.skip("needs root, to give a socket to a group")
    before = set(Path("/dev/shm").iterdir())
    kvstored = own_directory(daemon, "--namespaces", KINDS[kind]).start()
    client = kvstored.connect()
    client.lookup(new_keys(1))
    wanted = {name: modes[column] for name, modes in MADE.items() if modes[column] != "-"}
    assert made(kvstored) == wanted
    gid = GROUP if kind == "one group" else os.getegid()
    for name in ("kvstored.sock", "guests.sock"):
        if name in wanted:
            assert os.stat(kvstored.dir / name).st_gid == gid
    prefix = next(iter(kvstored._prefixes))
    ours = [path for path in set(Path("/dev/shm").iterdir()) - before if prefix in path.name]
    assert len(ours) == 5, "home, table, progress, pool, one session's page"


def test_modes_of_what_is_made_on_disk(daemon, tmp_path):
    """The disk tier's directories are 0700 and its files 0600, whoever may use the namespaces."""
    (tmp_path / "a").mkdir(mode=0o700)
    disk = ("--disk", str(tmp_path / "a" / "disk"), "--disk-quota", "64MiB", "--disk-write-priority", "0")
    kvstored = daemon(memory="8MiB", args=("--namespaces", f"default=0.5:writers={GUEST},other", *disk))
    for namespace in ("default", "other"):
        client = kvstored.connect(namespace=namespace)
        with client.create(new_keys(3), client.register_layout(SMALL.to_blob())) as writer:
            for index in writer.granted:
                fill(writer[index])
    eventually(lambda: len(list(tmp_path.rglob("*.kv"))) == 6, "all blocks lie on disk")
    found = {(path.is_dir(), mode(path)) for path in (tmp_path / "a").rglob("*")}
    assert found == {(True, "0700"), (False, "0600")}


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["status", "reload", "stop"])
def test_a_command_of_another_user_says_whose_the_daemon_is(daemon, fork, kind, command, tmp_path):
    """Not that there is none: he would start a second one, or look for what has ended it."""
    kvstored = own_directory(daemon, "--namespaces", KINDS[kind]).start()
    with open(tmp_path / "said", "w+") as said:

        def work(_steps) -> None:
            with contextlib.redirect_stderr(said):
                print(main.main([command, "--dir", str(kvstored.dir)]), file=sys.stderr, flush=True)

        fork(as_user(STRANGER, work)).finish()
        said.seek(0)
        text = said.read()
    assert text.endswith(f"\n{Exit.REFUSED:d}\n"), text
    assert re.match("kvstored: .*(Permission denied: only the daemon's own|user 0's: only that) user", text)
    assert kvstored.process.poll() is None


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("on_error", ["raise", "miss"])
@pytest.mark.parametrize("closed", ["directory", "socket"])
def test_a_client_of_another_user_is_told_what_is_closed_to_it(daemon, fork, closed, on_error, monkeypatch):
    """The typed error, not that there is no daemon: it would be tried again for ever."""
    kvstored = own_directory(daemon).start()
    if closed == "socket":
        kvstored.dir.chmod(0o711)
    shut = {"directory": "enter {0.dir}", "socket": "connect to {0.socket_path}, which is user 0's"}
    text = f"user {STRANGER} may not {shut[closed].format(kvstored)}: the daemon's operator can name the user"
    monkeypatch.delenv("KVSTORED_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(kvstored.dir / "inside"))

    def work(_steps) -> None:
        with pytest.raises(NotPermitted, match=re.escape(text)):
            kvstored.connect(on_error=on_error)
        default_directory()  # a place that it may not look into is none of its own

    fork(as_user(STRANGER, work)).finish()


@needs_root
@pytest.mark.root
def test_a_client_that_was_served_takes_a_closed_socket_for_a_daemon_that_starts(daemon, fork):
    """A socket is made 0600 and opened a moment later: on_error="miss" goes on meanwhile."""
    kvstored = own_directory(daemon, "--namespaces", f"default:writers={GUEST}").start()
    kvstored.connect().close()

    def work(steps) -> None:
        client = kvstored.connect(on_error="miss")
        steps.reached("attached")
        assert client.touch(new_keys(1)) == 0 and client.degraded

    child = fork(as_user(GUEST, work))
    child.run_to("attached")
    kvstored.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as starting:
        starting.bind(str(kvstored.socket_path))
        kvstored.socket_path.chmod(0o600)
        starting.listen()
        child.go_on()
        child.finish()


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("kind", KINDS)
def test_who_can_knock(daemon, fork, kind):
    """The modes mean what they should: tried by users, not read from numbers."""
    kvstored = own_directory(daemon, "--namespaces", KINDS[kind]).start()
    kvstored.connect().close()

    def reaches(name: str) -> bool:
        kind_of = socket.SOCK_SEQPACKET if name == "kvstored.sock" else socket.SOCK_STREAM
        with socket.socket(socket.AF_UNIX, kind_of) as knocking:
            try:
                knocking.connect(str(kvstored.dir / name))
            except (PermissionError, FileNotFoundError):
                return False
            return True

    def work(expected: bool):
        def child(_steps) -> None:
            assert [reaches(name) for name in ("kvstored.sock", "guests.sock", "grpc.sock")] == [
                expected,
                expected,
                False,
            ]
            with pytest.raises(PermissionError):
                os.listdir(kvstored.dir)
            for name in ("state.json", "default.salt", "daemon.lock", "pid"):
                with pytest.raises(PermissionError):
                    os.open(kvstored.dir / name, os.O_RDONLY)
            with pytest.raises(PermissionError):
                os.open(kvstored.dir / "mine", os.O_CREAT | os.O_WRONLY)
            with pytest.raises(PermissionError):
                os.unlink(kvstored.dir / "kvstored.sock")

        return child

    fork(as_user(GUEST, work(kind != "nobody else"), gid=GROUP)).finish()
    fork(as_user(STRANGER, work(kind == "users"))).finish()


@needs_root
@pytest.mark.root
def test_what_is_left_behind_goes(daemon):
    """Sockets of a daemon that was killed are replaced; one that no user needs any more is removed; a link in
    the way is removed, not followed."""
    kvstored = own_directory(daemon, "--namespaces", f"default:writers={GUEST}").start()
    kvstored.kill()
    assert (kvstored.dir / "guests.sock").exists()
    victim = kvstored.dir.parent / "victim"
    victim.write_text("untouched")
    (kvstored.dir / "kvstored.sock").unlink()
    for name in ("kvstored.sock", "other.sock"):
        (kvstored.dir / name).symlink_to(victim)
    (kvstored.dir / "grpc.sock").unlink(missing_ok=True)
    (kvstored.dir / "grpc.sock").symlink_to(victim)
    kvstored.args = [arg.replace(f":writers={GUEST}", "") for arg in kvstored.args]
    kvstored.start()
    kvstored.connect().close()
    assert victim.read_text() == "untouched" and mode(victim) == "0644"
    assert not (kvstored.dir / "guests.sock").exists()
    assert mode(kvstored.dir / "kvstored.sock") == mode(kvstored.dir / "grpc.sock") == "0600"
    assert stat.S_ISSOCK(os.lstat(kvstored.dir / "grpc.sock").st_mode)
    assert (kvstored.dir / "other.sock").is_symlink(), "what is not ours by name stays"


# ---- salts


def salt_of(kvstored, **options) -> bytes:
    with kvstored.connect(**options) as client:
        return client.salt


def test_a_generated_salt_is_made_once_and_kept(daemon, tmp_path):
    tmp_path.chmod(0o700)
    lists = "default=0.5:salt=generated,other=0.25:salt=generated,plain"
    kvstored = daemon(memory="8MiB", args=("--namespaces", lists, "--state-dir", str(tmp_path)))
    first, other = salt_of(kvstored), salt_of(kvstored, namespace="other")
    assert len(first) == 32 and len(other) == 32 and first != other
    assert salt_of(kvstored, namespace="plain") == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["default.salt", "other.salt"]
    client = kvstored.connect()
    assert client.salt == first
    kvstored.restart()
    client.lookup(new_keys(1))
    assert client.salt == salt_of(kvstored) == first
    kvstored.stop()
    (tmp_path / "default.salt").unlink()
    kvstored.start()
    client.touch(new_keys(1))
    assert client.salt == salt_of(kvstored) != first, "a client learns of another salt when it attaches anew"
    secret = (tmp_path / "other.salt").read_text()
    with grpc_admin(kvstored) as admin:
        shown = str(admin.Config(admin_pb2.ConfigRequest(), timeout=CALL_S))
        shown += str(admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S))
    for hidden in (secret, first.hex(), other.hex(), salt_of(kvstored).hex()):
        assert hidden not in kvstored.log() + shown + (kvstored.dir / "state.json").read_text()
    assert "salt_generated" in kvstored.log()


@contextlib.contextmanager
def grpc_admin(kvstored):
    with grpc.insecure_channel(f"unix:{kvstored.dir / 'grpc.sock'}") as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def test_a_salt_from_a_file_or_the_configuration_is_the_same_salt(daemon, tmp_path):
    secret = "correct horse battery staple"
    file = tmp_path / "salt"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    from_file = daemon(memory="8MiB", args=("--namespaces", f"default:salt=file:{file}"))
    config = tmp_path / "kvstored.toml"
    config.write_text(f'[namespaces.default]\nsalt = "text:{secret}"\n')
    config.chmod(0o600)
    from_text = daemon(memory="8MiB", args=("--config", str(config)))
    assert salt_of(from_file) == salt_of(from_text) != b""
    assert secret not in from_text.log() + from_file.log()
    with grpc_admin(from_text) as admin:
        shown = str(admin.Config(admin_pb2.ConfigRequest(), timeout=CALL_S))
    assert "text:***" in shown and secret not in shown


@pytest.mark.parametrize(
    ("content", "file_mode", "wanted"),
    [
        ("a secret long enough", 0o644, "chmod o-r"),
        ("short", 0o600, "5 bytes, the limits are 8 and 1024"),
        ("x" * 2000, 0o600, "the limits are 8 and 1024"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_salt_that_is_none_stops_the_start(daemon, tmp_path, content, file_mode, wanted):
    file = tmp_path / "salt"
    if content is not None:
        file.write_text(content)
        file.chmod(file_mode)
    kvstored = daemon(memory="8MiB", args=("--namespaces", f"default:salt=file:{file}"), start=False)
    refused(kvstored, wanted)
    assert content is None or content not in kvstored.log()


def test_a_generated_salt_that_is_foreign_is_not_believed(daemon, tmp_path):
    (tmp_path / "default.salt").write_text("somebody else's salt")
    (tmp_path / "default.salt").chmod(0o666)
    args = ("--namespaces", "default:salt=generated", "--state-dir", str(tmp_path))
    refused(daemon(memory="8MiB", args=args, start=False), "foreign")


@pytest.mark.parametrize(
    ("lists", "wanted"),
    [
        ("default:writers=no_such_user_here", "no user 'no_such_user_here'"),
        ("default:readers=@no_such_group_here", "no group 'no_such_group_here'"),
    ],
)
def test_names_that_the_host_does_not_know_stop_the_start(daemon, lists, wanted):
    refused(daemon(memory="8MiB", args=("--namespaces", lists), start=False), wanted)


def test_the_unmapped_user_is_refused_by_name_too(daemon):
    try:
        name = grp.getgrgid(65_534).gr_name
    except KeyError:
        pytest.skip("this host has no name for group 65534")
    refused(daemon(memory="8MiB", args=("--namespaces", f"default:readers=@{name}"), start=False), "65534")


def refused(kvstored, wanted: str) -> None:
    with pytest.raises(DaemonFailed, match=f"ended with {int(Exit.CANNOT_START)}"):
        kvstored.start()
    assert wanted in kvstored.log()


# ---- metrics


def test_metrics_want_a_token_where_others_are_configured(daemon, tmp_path):
    """Any local user reaches the loopback address, and the labels name namespaces."""
    closed = daemon(
        memory="8MiB", args=("--namespaces", f"default:writers={GUEST}", "--metrics-port", "1"), start=False
    )
    with pytest.raises(DaemonFailed, match=f"ended with {int(Exit.USAGE)}"):
        closed.start()
    assert "metrics_token_file" in closed.log()
    token = tmp_path / "token"
    token.write_text("a token for metrics\n")
    token.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = (
        "--namespaces",
        f"default:writers={GUEST}",
        "--metrics-port",
        str(port),
        "--metrics-token-file",
        str(token),
    )
    daemon(memory="8MiB", args=args)

    def status(path: str, **headers: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                assert b"kvstored_blocks" in answer.read() or path == "/healthz"
                return answer.status
        except urllib.error.HTTPError as error:
            assert b"namespace" not in error.read()
            return error.code

    assert status("/metrics") == 401
    assert status("/metrics", Authorization="Bearer a token for metric") == 401
    assert status("/metrics", Authorization="a token for metrics") == 401
    assert status("/metrics", Authorization="Bearer a token for metrics") == 200
    assert status("/healthz") == 200


def test_layouts_are_not_shared(daemon):
    """What one namespace registered is no layout of another."""
    kvstored = daemon(memory="8MiB", args=("--namespaces", "default=0.5,other=0.5"))
    with kvstored.connect() as here, kvstored.connect(namespace="other") as there:
        layout = here.register_layout(SMALL.to_blob())
        with pytest.raises(ValueError, match="not registered"):
            there.create(new_keys(1), layout)
