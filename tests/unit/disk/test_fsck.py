"""Goal: `kvstored fsck` says what it found and did, in text and JSON, with the promised exit codes.

Method: directories made in plain Python, the command in this process, and once on a pseudo-terminal. What it
finds is the business of tests/hostile/test_block_files.py.
"""

import fcntl
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

from kvstored.cli.fsck import trees
from kvstored.cli.main import main
from kvstored.errors import Exit
from tests.golden import reference_block_file as reference

ROOT = Path(__file__).resolve().parents[3]


def put(directory: Path, number: int, corrupt: bool = False) -> Path:
    key, file = reference.block(number)
    path = directory / f"{key.hex()}.kv"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file[:-1] + b"\xff" if corrupt else file)
    return path


def test_text_names_what_is_wrong_and_sums_up(tmp_path, capsys):
    put(tmp_path, 1)
    path = put(tmp_path, 2, corrupt=True)
    assert main(["fsck", str(tmp_path)]) == Exit.NO
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"corrupt    {path.name}  the bytes behind the layers differ"
    assert lines[1].startswith(f"{tmp_path}: 2 blocks, 16 KiB, 16 KiB of it read; 1 corrupt")
    assert main(["fsck", "--repair", str(tmp_path)]) == Exit.DONE
    assert capsys.readouterr().out.splitlines()[0].endswith(": removed")
    assert main(["fsck", str(tmp_path)]) == Exit.DONE
    identity = reference.read(reference.block(1)[1])[0]["identity"].hex()
    assert capsys.readouterr().out.endswith(f"nothing wrong; identities: {identity[:12]} 1\n")


def test_what_is_kept_is_told(tmp_path, capsys):
    put(tmp_path, 2, corrupt=True)
    assert main(["fsck", "--repair", "--keep-corrupt", str(tmp_path)]) == Exit.DONE
    assert capsys.readouterr().out.splitlines()[0].endswith(": kept aside")
    assert main(["fsck", str(tmp_path)]) == Exit.DONE
    assert "1 kept aside earlier" in capsys.readouterr().out


def test_keeping_without_repairing_is_refused_and_moves_nothing(tmp_path, capsys):
    """Who says --keep-corrupt expects something to be moved."""
    assert main(["fsck", "--keep-corrupt", str(tmp_path)]) == Exit.USAGE
    assert "--repair" in capsys.readouterr().err


def test_headers_only_reads_less(tmp_path, capsys):
    put(tmp_path, 1, corrupt=True)
    assert main(["fsck", "--no-layers", "--json", str(tmp_path)]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["wrong"] == 0


def test_several_directories_and_namespaces(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "disk" / name / "tmp").mkdir(parents=True)
        put(tmp_path / "disk" / name, 1, corrupt=name == "b")
    (tmp_path / "disk/b/tmp").rmdir()  # somebody tidied up
    (tmp_path / "disk/lost+found").mkdir()
    put(tmp_path / "other", 1)
    assert trees(str(tmp_path / "disk")) == [str(tmp_path / "disk" / name) for name in ("a", "b")]
    assert trees(str(tmp_path / "disk/a")) == [str(tmp_path / "disk/a")]
    assert main(["fsck", "--json", str(tmp_path / "disk"), str(tmp_path / "other")]) == Exit.NO
    found = json.loads(capsys.readouterr().out)
    assert [directory["wrong"] for directory in found["directories"]] == [0, 1, 0]
    assert found["wrong"] == 1


def test_what_cannot_be_checked_is_an_error(tmp_path, capsys):
    assert main(["fsck", str(tmp_path / "none")]) == Exit.USAGE
    (tmp_path / "file").touch()
    assert main(["fsck", str(tmp_path / "file")]) == Exit.USAGE
    assert capsys.readouterr().err.count("\n") == 2


def test_a_directory_in_use_is_not_repaired(tmp_path, capsys):
    put(tmp_path, 1)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert main(["fsck", "--repair", str(tmp_path)]) == Exit.REFUSED
    assert "in use" in capsys.readouterr().err
    assert main(["fsck", str(tmp_path)]) == Exit.DONE
    os.close(held)
    assert main(["fsck", "--repair", str(tmp_path)]) == Exit.DONE


def test_progress_is_for_terminals_only(tmp_path):
    """Three blocks are checked at once: what is looked for is the cleared line at the end."""
    put(tmp_path, 1)
    command = [sys.executable, "-m", "kvstored", "fsck", str(tmp_path)]
    leader, terminal = pty.openpty()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=terminal, timeout=60, check=True)
    os.close(terminal)
    assert b"\x1b[K" in os.read(leader, 4096)
    os.close(leader)
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    # What may stand there is a word on pools that nobody owns: this host's, not the disk's.
    assert not any(sign in plain.stderr for sign in (b"\x1b", b"\r", b"checked"))


def test_what_a_running_daemon_writes_is_no_leftover(tmp_path, capsys):
    """Not while somebody holds the directory; of one that has ended it is."""
    put(tmp_path, 1)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(4096))
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert main(["fsck", str(tmp_path)]) == Exit.DONE
    assert "leftover" not in capsys.readouterr().out
    os.close(held)
    assert main(["fsck", str(tmp_path)]) == Exit.NO
    assert "left over by a daemon that ended" in capsys.readouterr().out
