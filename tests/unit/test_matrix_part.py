"""Goal: of a test of every architecture `make test` runs a third of the cases, three such tests have every
architecture among them, and what failed runs when it is asked for again (tests/matrix_part.py).

Method: a file of such tests, run by pytest in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import pytest

NAMES = [f"name{number}" for number in range(30)]

@pytest.mark.matrix(0, "name3")
@pytest.mark.parametrize("name", NAMES)
def test_first(name):
    assert name != "name3"

@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", NAMES)
def test_second(name):
    pass

@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", NAMES)
def test_third(name):
    pass

def test_without_architectures():
    assert False
"""


def ran(directory: Path, *arguments: str) -> list[tuple[str, str, str]]:
    """(test, name, result) of each case that ran."""
    plugins = ("-p", "tests.processors", "-p", "tests.matrix_part", "-p", "timeout")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--disable-plugin-autoload", *plugins,
         "--rootdir", str(directory), *arguments],
        cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    return re.findall(r"::(\w+)(?:\[(\w+)\])? (PASSED|FAILED)", done.stdout)


def test_a_third_of_each_and_again_what_failed(tmp_path):
    (tmp_path / "test_matrix.py").write_text(FILE)
    cases = ran(tmp_path, "test_matrix.py")
    names = [name for _, name, _ in cases if name]
    assert set(names) == {f"name{number}" for number in range(30)} and len(names) <= 31
    failed = [("test_first", "name3"), ("test_without_architectures", "")]
    assert [case[:2] for case in cases if case[2] == "FAILED"] == failed
    assert [case[:2] for case in ran(tmp_path, "--last-failed", "test_matrix.py")] == failed
    named = [f"test_matrix.py::{test}[name4]" for test in ("test_first", "test_second", "test_third")]
    assert len(ran(tmp_path, *named)) == 3
