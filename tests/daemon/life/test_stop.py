"""`kvstored stop` where the pid file, or the user who asks, is not what it seems.

Method: the lock and the pools are real; nobody serves there.
"""

import fcntl
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvstored.cli.main import main
from kvstored.config.config import Config
from kvstored.errors import Exit
from kvstored.tiers import pool_list
from kvstored.tiers.pools import Geometry, Segments
from tests.daemon.grpc_calls import Calls

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
OTHER = 4321


def test_stop_signals_nobody_by_the_number_that_an_earlier_daemon_left(tmp_path, capsys):
    """A daemon that starts has the lock, and has not written its pid: the number there is anybody's."""
    lock = os.open(tmp_path / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with subprocess.Popen("cat", stdin=subprocess.PIPE) as other:
        (tmp_path / "pid").write_text(f"{other.pid}\n")
        assert main(["stop", "--dir", str(tmp_path)]) == Exit.REFUSED
        assert f"pid {other.pid} does not hold" in capsys.readouterr().err
        other.communicate()
        assert other.returncode == 0, "it was signalled"
    os.close(lock)


@needs_root
@pytest.mark.parametrize("pool_dir", ["", "its own"])
def test_root_frees_what_a_daemon_of_another_user_left(capsys, pool_dir):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pools = directory / "pools"
        pools.mkdir()
        for path in (directory, pools):
            os.chown(path, OTHER, OTHER)
        place = ["-t", "tmpfs", "-o", f"uid={OTHER},mode=0700,size=32m", "tmpfs", str(pools)]
        if pool_dir and subprocess.run(["mount", *place], capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        try:
            config = Config(dir=name, memory=8 << 20, pool_dir=str(pools) if pool_dir else "")
            os.seteuid(OTHER)
            try:
                left = Segments(config, [Geometry("default", 8 << 20, 64, 16384, 4096)], os.fstat)
                left.open(fresh=False)
                left.close()
                (directory / "daemon.lock").touch(0o600)
            finally:
                os.seteuid(0)
            files = [*pools.glob("kvstored-*"), *Path("/dev/shm").glob(f"{_prefix(directory)}*")]
            assert main(["stop", "--discard", "--json", "--dir", name]) == Exit.DONE
            told = json.loads(capsys.readouterr().out)
            assert told["kept_bytes"] == 0 and told["freed_bytes"] >= 16384 + 4096
            assert files and not any(path.exists() for path in files)
            assert sorted(path.name for path in directory.iterdir()) == ["daemon.lock", "pools"]
            assert (directory / "daemon.lock").stat().st_uid == OTHER and os.geteuid() == 0
        finally:
            if pool_dir:
                subprocess.run(["umount", "-l", str(pools)], check=True)  # a thread closes the pool later


def test_what_could_not_be_freed_is_not_told_as_freed(tmp_path, capsys, monkeypatch):
    config = Config(dir=str(tmp_path), memory=8 << 20)
    left = Segments(config, [Geometry("default", 8 << 20, 64, 16384, 4096)], os.fstat)
    left.open(fresh=False)
    monkeypatch.setattr("kvstored.tiers.pool_files._unlink", lambda *_: None)
    try:
        assert main(["stop", "--discard", "--json", "--dir", str(tmp_path)]) == Exit.NO
        told = json.loads(capsys.readouterr().out)
        assert told["kept_bytes"] == pool_list.kept_bytes(str(tmp_path)) > 0 and told["freed_bytes"] == 0
    finally:
        monkeypatch.undo()
        left.discard()
        left.close()


def _prefix(directory: Path) -> str:
    return json.loads((directory / "state.json").read_text())["pools"]["default"]["prefix"]


def test_a_start_that_fails_discards_nothing_of_an_earlier_daemon(daemon):
    """--discard is for the end of a daemon that served."""
    kvstored = daemon("64MiB")
    with Calls(kvstored.dir) as calls:
        calls.put("a")
    assert kvstored.stop() == 0
    args = list(kvstored.args)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        kvstored.args += ["--discard", "--metrics-port", str(taken.getsockname()[1])]
        with pytest.raises(AssertionError, match="ended with 6"):
            kvstored.start()
    kvstored.args = args
    kvstored.start()
    with Calls(kvstored.dir) as calls:
        assert calls.get("a") != [None], "an earlier daemon's block is gone"
    kvstored.args += ["--discard"]
    kvstored.restart()
    kvstored.stop()
    assert not (kvstored.dir / "state.json").exists(), "one that served discards"
