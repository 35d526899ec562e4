"""What the daemon believes of an earlier one's files, and what it refuses to promise.

Method: a daemon is stopped, its state.json or segments are changed, the next one is started: it either
adopts all of it or starts empty, never half, and never touches what is not its own.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.errors import Exit
from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls
from tests.daemon.life.test_life import start_refused

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def stopped(daemon):
    """A daemon that held one block and has ended."""
    kvstored = daemon(memory="64MiB")
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    kvstored.stop()
    return kvstored


def state_of(kvstored):
    return json.loads((kvstored.dir / "state.json").read_text())


def segment(kvstored, role):
    return Path("/dev/shm") / f"{state_of(kvstored)['pools']['default']['prefix']}.{role}"


def served(kvstored):
    """Whether the block is there after a start; the daemon must work either way."""
    kvstored.start()
    with Calls(kvstored.dir) as calls:
        there = calls.states("a") == [2]
        calls.put("new")
        stats = calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S).namespaces[0]
        calls.admin.Integrity(admin_pb2.IntegrityRequest(), timeout=CALL_S)
    assert stats.adopted == there
    return there


def test_untouched_it_is_adopted(stopped):
    assert served(stopped)


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 2}', "\0" * 4096], ids=["empty", "cut", "another version", "zeros"]
)
def test_a_state_file_that_does_not_fit_means_a_safe_empty_start(stopped, text):
    path = stopped.dir / "state.json"
    old = state_of(stopped)["pools"]["default"]["prefix"]
    path.write_text(text)
    assert not served(stopped)
    assert not list(Path("/dev/shm").glob(old + "*")), "the old pool is nobody's, and there for ever"
    assert old in stopped.log()


def test_a_place_that_is_no_path_means_a_safe_empty_start(stopped):
    state = state_of(stopped)
    old = state["pools"]["default"]["prefix"]
    state["pools"]["default"]["pool_dir"] = "/\ud800"  # half a character: json writes and reads it
    (stopped.dir / "state.json").write_text(json.dumps(state))
    assert not served(stopped)
    assert not list(Path("/dev/shm").glob(old + "*"))


def test_a_lost_state_file_costs_no_memory_and_no_pool_of_another_directory(daemon, stopped):
    other = daemon(memory="64MiB")
    with Calls(other.dir) as calls:
        calls.put("b")
    theirs = state_of(other)["pools"]["default"]["prefix"]
    other.stop()
    old = state_of(stopped)["pools"]["default"]["prefix"]
    (stopped.dir / "state.json").unlink()
    assert not served(stopped)
    assert not list(Path("/dev/shm").glob(old + "*"))
    assert list(Path("/dev/shm").glob(theirs + "*"))
    other.start()
    with Calls(other.dir) as calls:
        assert calls.states("b") == [2]


def test_a_state_file_that_cannot_be_replaced_is_an_error_that_names_it(stopped):
    path = stopped.dir / "state.json"
    path.unlink()
    path.mkdir()
    code, text = start_refused(stopped.dir)
    assert code == Exit.CANNOT_START and "state.json" in text and "Traceback" not in text


@pytest.mark.parametrize(("role", "how"), [("table", "missing"), ("pool", "mode"), ("pool", "shorter")])
def test_a_segment_that_does_not_fit_is_not_adopted(stopped, role, how):
    path = segment(stopped, role)
    if how == "missing":
        path.unlink()
    elif how == "mode":
        path.chmod(0o666)
    else:
        os.truncate(path, 4096)
    assert not served(stopped)


def test_a_table_full_of_garbage_is_replaced(stopped):
    path = segment(stopped, "table")
    size = path.stat().st_size
    with open(path, "r+b") as table:
        table.write(os.urandom(size))
    assert not served(stopped)


@pytest.mark.parametrize(
    "args",
    [
        ("--memory", "32MiB"),
        ("--max-blocks", "500"),
        ("--namespaces", "other"),
        ("--namespaces", "default=0.5,b=0.5"),
    ],
)
def test_another_geometry_starts_empty_and_removes_the_old_pool(stopped, args):
    old = state_of(stopped)["pools"]["default"]["prefix"]
    stopped.args.extend(args)
    stopped.start()
    with Calls(stopped.dir, namespace="other" if "other" in args else "") as calls:
        assert calls.states("a") == [0]
        calls.put("new")
    assert not list(Path("/dev/shm").glob(old + "*"))


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_start_that_fails_costs_no_block_of_another_geometry(stopped, taken_port, tmp_path):
    """What is wrong with the disk or a port is found before the pool of before is given up."""
    (tmp_path / "file").touch()
    wrong = [
        ("--metrics-port", str(taken_port)),
        ("--disk", str(tmp_path / "file"), "--disk-quota", "1GiB"),
        ("--node", "a", "--listen", f"127.0.0.1:{taken_port}", "--peer", "b=127.0.0.1:1"),
    ]
    before = set(Path("/dev/shm").glob(state_of(stopped)["pools"]["default"]["prefix"] + "*"))
    for args in wrong:
        code, text = start_refused(stopped.dir, "--memory", "32MiB", *args)
        assert code == Exit.CANNOT_START, text
        mark = state_of(stopped)["pools"]["default"]["prefix"].rpartition("-")[0]
        assert set(Path("/dev/shm").glob(mark[:-8] + "*")) == before, args
    assert served(stopped), "a start that failed has cost the blocks"


def test_too_little_memory_is_an_error_that_names_both_sizes_and_costs_no_block(stopped):
    system = os.statvfs("/dev/shm")
    wanted = min(16 << 40, system.f_bavail * system.f_frsize * 4 >> 21 << 21)
    code, text = start_refused(stopped.dir, "--memory", str(wanted))
    assert code == Exit.CANNOT_START
    said = re.search(r"has (\d+) bytes free now .*, (\d+) are needed: (\d+) more ", text)
    free, need, lacking = map(int, said.groups())
    assert lacking == need - free > 0 and need >= wanted and "/dev/shm" in text
    assert served(stopped), "a start that failed has cost the blocks"


def test_a_daemon_that_died_while_making_its_segments_leaves_none(stopped):
    """The names are in state.json before the files exist."""
    state = state_of(stopped)
    state["pools"]["default"]["complete"] = False
    (stopped.dir / "state.json").write_text(json.dumps(state))
    old = state["pools"]["default"]["prefix"]
    assert not served(stopped)
    assert not list(Path("/dev/shm").glob(old + "*"))


def test_namespaces_are_apart(daemon):
    kvstored = daemon(memory="64MiB", args=("--namespaces", "default=0.5,batch=0.5"))
    with Calls(kvstored.dir) as default, Calls(kvstored.dir, namespace="batch") as batch:
        default.put("a")
        assert batch.states("a") == [0] and default.states("a") == [2]
        batch.put("a", "b")
    kvstored.restart()
    with Calls(kvstored.dir) as default, Calls(kvstored.dir, namespace="batch") as batch:
        assert default.states("a", "b") == [2, 0] and batch.states("a", "b") == [2, 2]


@pytest.fixture
def memory_dir():
    """A directory on a tmpfs."""
    path = Path("/dev/shm") / f"kvstored-test-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_the_pool_may_lie_in_a_directory(daemon, memory_dir):
    kvstored = daemon(memory="64MiB", args=("--pool-dir", str(memory_dir)))
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    assert {path.suffix for path in memory_dir.iterdir()} == {".pool", ".table", ".progress"}
    assert {path.stat().st_mode & 0o777 for path in memory_dir.iterdir()} == {0o600}
    kvstored.restart(kill=True)
    with Calls(kvstored.dir) as calls:
        assert calls.states("a") == [2]
    kvstored.args.append("--discard")
    kvstored.restart()
    kvstored.stop()
    assert list(memory_dir.iterdir()) == []


def test_a_pool_on_a_disk_is_refused(daemon, tmp_path):
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True
    ).stdout.strip()
    if found in ("tmpfs", "ramfs"):
        pytest.skip("no disk under the temporary directory")
    code, text = start_refused(daemon(start=False).dir, "--pool-dir", str(tmp_path))
    assert code == Exit.CANNOT_START and "tmpfs" in text and str(tmp_path) in text


def test_it_runs_from_any_working_directory(daemon, tmp_path):
    """A relative directory is relative to where the command was given."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstored", "serve", "--dir", "x", "--print-config"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert str(tmp_path / "x") in done.stdout
