"""The reuse examples run as a user runs them, and reuse what they say: on a tiny random model instead of
SmolLM2, but where texts are moved. Of a model that nobody has calibrated nothing is reused then.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_python import run as run_warm

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# name -> (lines that must tell of reuse, of what kind)
WANTED = {
    "rag": (2, "exact"),
    "rag --moved": (3, "moved"),
    "chatbot": (2, "exact"),
    "multiturn": (3, "exact"),
    "fewshot": (3, "exact"),
    "code_context": (3, "exact|moved"),
    "two_processes": (1, "moved"),
}


@pytest.mark.slow  # a process or three each
@pytest.mark.parametrize("name", WANTED)
def test_it_reuses(name, home, model_dir, tmp_path):
    """Copied, and from another directory."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    file, *options = name.split()
    count, kinds = WANTED[name]
    model = model_dir if "moved" in kinds else home
    done = subprocess.run(
        [sys.executable, f"examples/{file}.py", *options, "--model", model, "--tokens", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if "baseline" in line and "with the store" in line]
    reused = [line for line in told if re.search(rf"(?:{kinds}) +[1-9]", line)]
    assert len(reused) >= count, done.stdout


@pytest.mark.parametrize("name", WANTED)
def test_it_is_short(name):
    assert len((EXAMPLES / f"{name.split()[0]}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", [*(name for name in WANTED if " " not in name), "demo", "upgrade_demo"])
def test_help_needs_neither_torch_nor_a_model(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_a_daemon_that_does_not_start_is_shown_in_its_own_words(tmp_path, home):
    done = run_warm(
        [sys.executable, EXAMPLES / "rag.py", "--model", home],
        env={**os.environ, "KVSTORED_MAX_PINS": "x"}, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the daemon did not start" in done.stderr and "max_pins: 'x' (environment)" in done.stderr
