"""The reuse examples run as a user runs them, on a tiny random model instead of SmolLM2, and reuse what they
say.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# name -> (lines that must tell of reuse, of what kind)
WANTED = {
    "rag": (3, "moved"),
    "chatbot": (2, "exact"),
    "multiturn": (5, "exact"),
    "fewshot": (3, "exact"),
    "code_context": (3, "exact|moved"),
    "two_processes": (1, "moved"),
}


@pytest.mark.slow  # a process or three each
@pytest.mark.parametrize("name", WANTED)
def test_it_reuses(name, home):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--model", home, "--tokens", "4"],
        capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    count, kinds = WANTED[name]
    told = [line for line in done.stdout.splitlines() if "baseline" in line and "with the store" in line]
    reused = [line for line in told if re.search(rf"(?:{kinds}) +[1-9]", line)]
    assert len(reused) >= count, done.stdout


@pytest.mark.parametrize("name", WANTED)
def test_it_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
