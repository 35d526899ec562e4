"""Goal: no damage to a block's file passes for the block, and none makes the check hang, crash or touch what
is not ours. Method: every damage of tests/hostile/block_damages.py on a good file made in plain Python, then
`kvstored fsck` as an operator runs it; the native half of the matrix is native/tests/block_file_test.cc.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from kvstored import _core
from kvstored.cli.main import main
from kvstored.errors import Exit
from tests.golden import reference_block_file as reference
from tests.hostile.block_damages import SPECIAL, data_damages, header_damages

SIZES = (48, 96, 48)
TOKENS = 16
STARTS = [4096, 4096 + 1024, 4096 + 1024 + 1536]
TAIL = STARTS[2] + 1024
SIZE = len(reference.block(1, TOKENS, SIZES)[1])
DAMAGES = {**header_damages(), **data_damages(STARTS, TAIL, SIZE), **SPECIAL}


def put(directory: Path, number: int) -> Path:
    key, file = reference.block(number, TOKENS, SIZES)
    name = key.hex()
    path = directory / name[0] / name[1] / f"{name}.kv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file)
    return path


def fsck(directory: Path, capsys, *options: str) -> tuple[int, dict]:
    code = main(["fsck", "--json", *options, str(directory)])
    return code, json.loads(capsys.readouterr().out)["directories"][0]


def test_the_good_file_is_good(tmp_path, capsys):
    put(tmp_path, 1)
    code, found = fsck(tmp_path, capsys)
    assert (code, found["files"], found["findings"]) == (Exit.DONE, 1, [])
    assert found["read_bytes"] == SIZE


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_found_and_repaired(name, tmp_path, capsys):
    good, path = put(tmp_path, 2), put(tmp_path, 1)
    DAMAGES[name](path)
    code, found = fsck(tmp_path, capsys)
    assert code == Exit.NO
    wrong = [finding for finding in found["findings"] if finding["kind"] != "foreign"]
    assert [finding["path"] for finding in wrong] == [str(path.relative_to(tmp_path))]
    assert wrong[0]["action"] == "" and os.path.lexists(path)
    code, found = fsck(tmp_path, capsys, "--repair")
    if name == "directory":  # may hold anything: not ours to remove
        assert code == Exit.NO and (path / "inside").exists()
        return
    assert code == Exit.DONE and found["repaired"] == 1
    assert not os.path.lexists(path)
    code, found = fsck(tmp_path, capsys)
    assert (code, found["files"]) == (Exit.DONE, 1) and good.exists()


def test_swapped_files_are_both_wrong(tmp_path, capsys):
    first, second = put(tmp_path, 1), put(tmp_path, 2)
    spare = tmp_path / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    code, found = fsck(tmp_path, capsys, "--repair", "--keep-corrupt")
    assert code == Exit.DONE
    assert sorted(finding["why"] for finding in found["findings"]) == ["of another block"] * 2
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == sorted(
        f"{path.name}.0" for path in (first, second)
    )


def test_a_file_in_anothers_directory_is_wrong(tmp_path, capsys):
    path = put(tmp_path, 1)
    elsewhere = tmp_path / "0" / "0" / path.name
    assert path.parent != elsewhere.parent
    elsewhere.parent.mkdir(parents=True)
    path.rename(elsewhere)
    code, found = fsck(tmp_path, capsys)
    assert code == Exit.NO and found["found"]["misplaced"] == 1


def test_a_linked_directory_is_not_followed(tmp_path, capsys):
    path = put(tmp_path / "tree", 1)
    level = path.parent.parent
    shutil.move(level, tmp_path / "outside")
    level.symlink_to(tmp_path / "outside")
    code, found = fsck(tmp_path / "tree", capsys, "--repair")
    assert code == Exit.NO  # a block of that name could not be written
    assert (found["files"], found["found"]["unusable"], found["repaired"]) == (0, 1, 0)
    assert (tmp_path / "outside" / path.parent.name / path.name).exists()


@pytest.mark.parametrize(
    "name",
    ["notes", "a.kv", "A" * 64 + ".kv", "0" * 63 + ".kv", "0" * 65 + ".kv", "0" * 64 + ".kv~", "0" * 64,
     ".hidden", "tmp/0.tmp", "tmp/0123456789abcdef.tmp.kept", "aside/what", "a b\n\x1b[2J", "\udcff\udcfe"],
)  # fmt: skip
def test_a_name_that_is_no_key_is_kept(name, tmp_path, capsys):
    put(tmp_path, 1)
    stray = tmp_path / name
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("mine")
    code, found = fsck(tmp_path, capsys, "--repair")
    assert (code, found["wrong"]) == (Exit.DONE, 0)
    assert found["found"]["foreign"] == (0 if name.startswith("aside") else 1)
    assert stray.read_text() == "mine"
    assert main(["fsck", str(tmp_path)]) == Exit.DONE
    assert "\x1b" not in capsys.readouterr().out  # nor does a name reach a terminal as it is


def test_leftovers_are_removed(tmp_path, capsys):
    put(tmp_path, 1)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(100))
    assert fsck(tmp_path, capsys)[0] == Exit.NO
    assert fsck(tmp_path, capsys, "--repair")[0] == Exit.DONE
    assert list((tmp_path / "tmp").iterdir()) == []


def test_random_files_never_pass(tmp_path, capsys):
    path = put(tmp_path, 1)
    good = path.read_bytes()
    for seed in range(50):
        noise = os.urandom(SIZE)
        path.write_bytes(noise[: 160 * seed] + good[160 * seed :] if seed else noise)
        assert fsck(tmp_path, capsys, "--no-layers" if seed < 25 else "--repair")[0] == (
            Exit.NO if seed < 25 else Exit.DONE
        )
        assert path.exists() == (seed < 25)


def test_a_finding_that_raises_ends_the_check(tmp_path):
    DAMAGES["cut to 1"](put(tmp_path, 1))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.fsck(
            str(tmp_path),
            repair=False,
            keep_corrupt=False,
            layers=True,
            finding=stop,
            progress=lambda *_: None,
        )
