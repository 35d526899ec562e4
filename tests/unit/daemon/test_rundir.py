"""The runtime directory's lock and small files when others look at it, the disk is full or its owner lies.

Method: real files; what the kernel answers is replaced where it cannot be made to.
"""

import errno
import fcntl
import os
import subprocess

import pytest

from kvstored.cli.main import main
from kvstored.errors import Exit, StartupError
from kvstored.process import runtime_dir


def test_a_command_that_looks_does_not_keep_a_daemon_from_starting(tmp_path, monkeypatch):
    looking = os.open(tmp_path / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(runtime_dir.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    runtime_dir.Lock(str(tmp_path)).close()
    os.close(looking)


def test_a_file_is_written_whole_in_pieces_or_not_at_all(tmp_path, monkeypatch):
    path, write = str(tmp_path / "state.json"), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    runtime_dir.write_whole(path, b"0123456789")
    assert (tmp_path / "state.json").read_bytes() == b"0123456789"

    def full(fd, data):
        if os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StartupError, match="No space left"):
        runtime_dir.write_whole(path, b"new")  # fits: the first piece is all of it
        runtime_dir.write_whole(path, b"newer")
    assert (tmp_path / "state.json").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("text", ["0", "-1", "4194305", "99999999999999999999", "x", ""])
def test_a_pid_that_no_process_has_is_none(tmp_path, text):
    (tmp_path / "pid").write_text(text)
    assert runtime_dir.read_pid(str(tmp_path)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("foreign", ["", "daemon.lock"])
def test_stop_signals_no_process_of_another_user_than_the_directorys(tmp_path, capsys, foreign):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as victim:
        lock = runtime_dir.Lock(str(tmp_path))
        (tmp_path / "pid").write_text(str(victim.pid))
        os.chown(tmp_path / foreign, 4321, -1)
        try:
            assert main(["stop", "--dir", str(tmp_path), "--timeout-s", "0.1"]) == Exit.REFUSED
            assert f"pid {victim.pid} is not of the user who owns" in capsys.readouterr().err
            assert victim.poll() is None
        finally:
            lock.close()
        victim.stdin.close()
        assert victim.wait(20) == 0, "it was signalled"
