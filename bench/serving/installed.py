"""What the contenders are made of, installed when they are first asked for.

Owns where each lies: vLLM in the cache of `make engines`, the others in build/bench-venvs. Never changes the
environment it runs in. Invariant: what has no mark that it is complete is made anew; what cannot be installed
is a NotThere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[2]
ENGINES = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvstored" / "engines"
ENGINES_PROGRAM = ROOT / ".ci" / "engines"
BESIDE = ROOT / "build" / "bench-venvs"
LLAMA = "xllamacpp==2026.10.11549"
MARK = ".complete"


class NotThere(Exception):
    """Why a contender is not measured."""


def vllm() -> Path:
    """Its environment: that of `make engines`, or installed as there (2.5 GB, once). Raises NotThere."""
    home = ENGINES / "vllm"
    if not (home / MARK).exists():
        python = getattr(sys, "_base_executable", sys.executable)
        _run("vLLM", [str(ENGINES_PROGRAM), "vllm"], PYTHON=python)
    return home


def hf() -> list[str]:
    """The command of `transformers`, of the release that is here, with what its server wants: a python of its
    own that sees this one's packages and has what is missing of them. Raises NotThere.
    """
    wanted = f"transformers[serving]=={transformers.__version__}"
    home, program = BESIDE / wanted, Path(sysconfig.get_path("scripts")) / "transformers"
    python = home / "bin" / "python"
    if not program.exists():
        raise NotThere(f"hf serve: there is no {program}")
    if not (home / MARK).exists():
        shutil.rmtree(home, ignore_errors=True)
        _run("hf serve", [sys.executable, "-m", "venv", "--without-pip", str(home)])
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run("hf serve", [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", wanted])
        (home / MARK).touch()
    return [str(python), str(program)]


def llama() -> Path:
    """A folder for PYTHONPATH. Raises NotThere."""
    home = BESIDE / LLAMA
    if not (home / MARK).exists():
        shutil.rmtree(home, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home)]
        _run("llama.cpp", [*pip, LLAMA])
        (home / MARK).touch()
    return home


def _run(name: str, command: Sequence[str], **env: str) -> None:
    """Its output goes to stderr: stdout has the table alone."""
    told = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    ended = subprocess.run(command, env={**os.environ, **told}, stdout=sys.stderr)
    if ended.returncode:
        raise NotThere(f"{name} cannot be installed: {' '.join(command)} ended with {ended.returncode}")
