"""Goal: the rows of bench.streaming can be had one by one, and their tables say what could not be had.

Method: results as rows give them, their Markdown read back; the command with a row that is none. A cgroup's
process that ends badly, for real.
"""

import subprocess
import sys

import pytest

from bench.streaming import limited
from bench.streaming.__main__ import main
from bench.streaming.limited import run
from bench.streaming.rows import ROWS

GOOD = {
    "loaded_s": 0.5, "first_s": 1.5, "first_cpu_s": 2.0, "settled_s": 0.25, "tokens_per_s": 0.5,
    "bytes_held": 512 << 20, "bytes_per_pass": 2 << 30, "bytes_per_s": 1e9, "filling_bytes_per_s": 2e9,
    "peak": 800 << 20, "tokens_per_pass": 3.0,
}  # fmt: skip
GONE = {"absent": "ended with 137: killed", "peak": 1 << 30}


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_tables_say_ratios_and_reasons():
    table = {name: row[1] for name, row in ROWS.items()}
    rows = [{"limit_gib": 1.0, "plain": [GOOD], "fio": [2e9]}, {"limit_gib": 2.0, "plain": [GONE], "fio": []}]
    said = cells(table["decode"](rows))
    assert said[0][3] == "0.50 of 2.00 GB/s" and said[0][4] == "800 MiB"
    assert said[1][1] == GONE["absent"]
    faster = {**GOOD, "tokens_per_s": 2.0}
    rows = [{"limit_gib": 1.0, "drafted": faster, "plain": GOOD, "fio": float(2 << 30)}]
    assert cells(table["draft"](rows))[0][3:] == ["4.0 ×", "2.0 × of 1.00/s"]
    ours = {4: {**GOOD, "bare": {"first_s": 1.0}}, 8: {**GOOD, "bare": GONE}, 35: {**GONE, "bare": GONE}}
    rows = [{"limit_gib": 1.0, "first": ours, "weights": 2e9}]
    said = cells(table["first"](rows))
    assert [row[2] for row in said] == ["0.25 s", "0.25 s", ""]
    assert [row[5] for row in said] == ["2.00; 2.00", "2.00", ""]
    assert said[0][4] == "1.00 s; 1.00 s" and said[1][4] == f"1.00 s; {GONE['absent']}"
    rows = [{"limit_gib": 1.0, "plain": GOOD, "other": {"tokens_per_s": 0.05, "peak": None}}]
    rows.append({"limit_gib": 2.0, "plain": GOOD, "other": GONE})
    said = cells(table["accelerate"](rows))
    assert said[0][3] == "10.0 ×" and said[1][2:] == [GONE["absent"], "-", "1,024 MiB"]
    products = {"rows": 512, "layer": {"packed": [2.0, 2.0], "numbers": [1.5, 1.6]}}
    assert [row[3] for row in cells(table["prefill"](products))] == ["0.75", "0.80"]
    held = {"ours": GOOD, "weights": 4e9, "bandwidth": {"bytes_per_s": 4e9}, "llama": GONE}
    said = cells(table["resident"](held))
    assert said[0][2] == GONE["absent"] and said[2][1] == "0.50"


def test_a_row_that_is_none_is_refused_with_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.streaming", "--only", "nothing"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert all(name in said for name in ROWS)


def test_another_programs_run_needs_neither_torch_nor_kvclient():
    """llama.cpp's environment has neither: its rows said "No module named torch" and nothing else."""
    program = "import sys; sys.modules['torch'] = sys.modules['kvclient'] = None; import bench.streaming.run"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_is_a_group_of_either_version(tmp_path, monkeypatch, version):
    """Where there is cgroup v2 alone, rows ran without any limit."""
    monkeypatch.setattr(limited, "GROUPS", tmp_path)
    (tmp_path / "memory").mkdir()
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
        (tmp_path / "cgroup.subtree_control").write_text("cpu")
    with limited.limited(1 << 30) as (home, peak):
        most = home / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        assert most.read_text() == str(1 << 30) and peak.startswith("memory.")
        assert home.parent == (tmp_path if version == 2 else tmp_path / "memory")
        most.unlink()  # no file of a real group has to go before it
    assert not home.exists()
    if version == 2:
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    with limited.limited(None) as nothing:
        assert nothing is None
    monkeypatch.setattr(limited, "GROUPS", tmp_path / "nowhere")
    with limited.limited(1 << 30) as nothing:
        assert nothing is None


def test_what_a_command_could_not_do_is_a_reason():
    program = "import sys; sys.exit('no such thing')"
    assert run([sys.executable, "-c", program], 1 << 30, 60)["absent"] == "ended with 1: no such thing"
    late = run([sys.executable, "-c", "import signal; signal.pause()"], None, 0.2)
    assert late == {"absent": "not done within 0.2 s"}
    assert run([sys.executable, "-c", "print('{\"rate\": 2}')"], 1 << 30, 60)["rate"] == 2
