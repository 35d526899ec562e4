"""What stays in shared memory is named, and can be freed: pools, stop --discard, and starts that fail.

Method: real daemons, ended in each way; what lies in /dev/shm under their pools' names is counted before and
after the command. Only the test's own pools are ever named to --remove.
"""

import json
import os
import re
import secrets
import shutil
import socket
import sys
from pathlib import Path

import pytest

from kvstored.cli.main import main
from kvstored.errors import Exit
from kvstored.tiers import pool_files, pool_list
from tests.daemon.grpc_calls import Calls
from tests.warm_python import WarmDaemon, run

ROOT = Path(__file__).resolve().parents[3]
SHM = Path("/dev/shm")


def started(*words):
    """A command that ends by itself: a daemon that must not start."""
    return run([sys.executable, "-m", "kvstored", *words], timeout=60, python=WarmDaemon, cwd=ROOT)


def prefix_of(kvstored):
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]{16}-\d+", (kvstored.dir / "state.json").read_text()))
    return prefix


def files(prefix):
    return sorted(path.name.rpartition(".")[2] for path in SHM.glob(prefix + ".*"))


@pytest.fixture
def pools(capsys):
    """`pools(prefix, ...)` -> the pool's row of --json."""

    def look(prefix, *arguments, code=Exit.DONE):
        assert main(["pools", prefix, *arguments, "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        (row,) = found["pools"]
        return row | {"freed_bytes": found["freed_bytes"]}

    return look


def test_a_pool_is_listed_with_its_owner_through_its_life(daemon, pools, capsys):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    row = pools(prefix)
    assert (row["state"], row["pid"], row["directory"]) == ("served", kvstored.pid, str(kvstored.dir))
    assert row["size_bytes"] > 0
    kvstored.stop()
    assert pools(prefix)["state"] == "kept"
    assert pools(prefix, "--remove")["state"] == "kept" and "pool" in files(prefix)
    assert main(["pools", prefix]) == Exit.DONE
    assert f"waits for the next daemon in {kvstored.dir}" in capsys.readouterr().out


def test_a_pool_whose_directory_is_gone_is_removed_when_nobody_has_it_open(daemon, pools):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    client = kvstored.connect()
    kvstored.kill()
    shutil.rmtree(kvstored.dir)
    assert pools(prefix)["state"] == "held", "the client still reads"
    assert pools(prefix, "--remove")["freed_bytes"] == 0 and "pool" in files(prefix)
    client.close()
    assert pools(prefix)["state"] == "orphan"
    assert prefix in {pool.prefix for pool in pool_list.pools() if pool.state == "orphan"}
    assert "kvstored pools --remove" in pool_list.advice()
    row = pools(prefix, "--remove")
    assert row["state"] == "removed" and row["freed_bytes"] > 0 and files(prefix) == []


def test_memory_that_is_short_and_fsck_name_what_nobody_owns(daemon, tmp_path, capfd):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    kvstored.kill()
    shutil.rmtree(kvstored.dir)
    try:
        (tmp_path / "disk/tmp").mkdir(parents=True)
        assert main(["fsck", str(tmp_path / "disk")]) == Exit.DONE
        assert "kvstored pools --remove" in capfd.readouterr().err
        done = started("serve", "--dir", str(tmp_path / "r"), "--memory", "8TiB")
        assert done.returncode == Exit.CANNOT_START
        assert "bytes free now" in done.stderr and "kvstored pools --remove" in done.stderr
    finally:
        main(["pools", prefix, "--remove"])
    assert files(prefix) == []


def test_an_unknown_pool_is_an_answer_no(capsys):
    assert main(["pools", "kvstored-0000000000000000-0"]) == Exit.NO
    assert "no such pool" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes other users' files")
def test_another_users_files_hide_no_pool(tmp_path, monkeypatch):
    """An ordinary user lists /dev/shm, and may make files there of any name."""
    mine, other = 12345, 12346
    home, shm = tmp_path / "run", tmp_path / "shm"
    home.mkdir(), shm.mkdir()
    for module in (pool_list, pool_files):
        monkeypatch.setattr(module, "SHM_DIR", str(shm))
    monkeypatch.setattr(pool_list, "MAX_POOLS", 3)
    prefix = pool_files.new_prefix(str(home), 0)
    pool_files.note_home(prefix, str(home))
    (shm / f"{prefix}.pool").write_bytes(bytes(4096))
    for path in shm.iterdir():
        os.chown(path, mine, mine)
    (shm / f"{prefix}.x").touch()
    for number in range(200):
        (shm / f"kvstored-{number:016x}-0.pool").touch()
    for path in shm.iterdir():
        if path.stat().st_uid != mine:
            os.chown(path, other, other)
    for user in (mine, 0):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert pool_list.kept_bytes(str(home)) >= 4096
        kept = [pool for pool in pool_list.pools() if pool.state == "kept"]
        assert [(pool.prefix, pool.uid, len(pool.paths)) for pool in kept] == [(prefix, mine, 2)]
        assert len(pool_list.pools()) == 1 + 3


def test_a_place_that_cannot_be_listed_is_no_empty_one(tmp_path, capsys):
    assert main(["pools", "--pool-dir", str(tmp_path / "none")]) == Exit.USAGE
    assert f"--pool-dir: {tmp_path / 'none'}: No such file" in capsys.readouterr().err


def test_a_daemon_whose_directory_was_removed_leaves_no_pool(daemon):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    shutil.rmtree(kvstored.dir)
    kvstored.process.terminate()
    assert kvstored.process.wait(60) == 0 and files(prefix) == []


def test_stop_says_what_stays_and_frees_it_if_asked(daemon, capsys):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    assert main(["stop", "--dir", str(kvstored.dir), "--json"]) == Exit.DONE
    said = json.loads(capsys.readouterr().out)
    assert said["stopped"] == kvstored.pid and said["kept_bytes"] > 0 and said["freed_bytes"] == 0
    assert "pool" in files(prefix)
    assert main(["stop", "--dir", str(kvstored.dir), "--discard"]) == Exit.DONE
    assert re.fullmatch(r"no daemon ran; .* freed\n", capsys.readouterr().out)
    assert files(prefix) == [] and not (kvstored.dir / "state.json").exists()
    assert main(["stop", "--dir", str(kvstored.dir), "--discard"]) == Exit.UNREACHABLE


def test_stop_counts_a_pool_that_lies_elsewhere(daemon, capsys):
    place = SHM / f"kvstored-test-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    try:
        kvstored = daemon("64MiB", ["--pool-dir", str(place)])
        assert main(["stop", "--dir", str(kvstored.dir), "--json"]) == Exit.DONE
        kept_bytes = json.loads(capsys.readouterr().out)["kept_bytes"]
        held_bytes = sum(path.stat().st_blocks * 512 for path in place.iterdir())
        assert kept_bytes >= held_bytes > 64 << 10  # and the file in /dev/shm that names the directory
        assert main(["stop", "--dir", str(kvstored.dir), "--discard", "--json"]) == Exit.DONE
        assert json.loads(capsys.readouterr().out)["freed_bytes"] == kept_bytes
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place)


def test_stop_discard_ends_a_daemon_and_its_readers_attach_anew(daemon, capsys):
    kvstored = daemon(memory="64MiB")
    prefix = prefix_of(kvstored)
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    assert main(["stop", "--dir", str(kvstored.dir), "--discard", "--json"]) == Exit.DONE
    said = json.loads(capsys.readouterr().out)
    assert said["kept_bytes"] == 0 and said["freed_bytes"] > 0 and files(prefix) == []
    kvstored.process.wait(60)
    kvstored.start()
    with Calls(kvstored.dir) as calls:
        assert calls.states("a") == [0]


@pytest.mark.parametrize("discard", [(), ("--discard",)])
@pytest.mark.parametrize("wrong", ["port", "disk"])
def test_a_start_that_fails_leaves_no_pool(tmp_path, wrong, discard):
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o777)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = {
            "port": ("--metrics-port", str(taken.getsockname()[1])),
            "disk": ("--disk", str(disk), "--disk-quota", "64MiB"),
        }[wrong]
        done = started("serve", "--dir", str(tmp_path / "r"), "--memory", "64MiB", *flags, *discard)
    assert done.returncode == Exit.CANNOT_START, done.stderr
    assert "disk: disk" not in done.stderr
    mine = {row.prefix for row in pool_list.pools() if row.home == str(tmp_path / "r")}
    assert not mine and not (tmp_path / "r/state.json").exists()


STOPPED = """
import os, signal, sys
from kvstored import server
from kvstored.cli.main import main

def stopped(*_):
    os.kill(os.getpid(), signal.SIGTERM)

setattr(server, sys.argv[1], stopped)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("at", ["Shared", "Servers"])  # behind the pools, behind the socket of sessions
def test_a_start_that_is_stopped_leaves_no_pool(tmp_path, at):
    command = [sys.executable, "-c", STOPPED, at, "serve", "--dir", str(tmp_path / "r"), "--memory", "64MiB"]
    done = run(command, timeout=60, python=WarmDaemon, cwd=ROOT)
    assert done.returncode == 0 and "info namespace name=default" in done.stderr, done.stderr
    assert not [row for row in pool_list.pools() if row.home == str(tmp_path / "r")]
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["daemon.lock"]


def test_a_start_that_fails_keeps_the_pool_of_before(daemon):
    kvstored = daemon(memory="64MiB")
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    kvstored.stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = started(*kvstored.args, "--metrics-port", port)
    assert done.returncode == Exit.CANNOT_START
    kvstored.start()
    with Calls(kvstored.dir) as calls:
        assert calls.states("a") == [2]
