"""What was proven of a model on this machine, kept in the user's cache directory: a proof costs passes.

Owns the files, one per proof, and what a proof depends on beside the model: this library's own files, the
releases of Python, torch and transformers, and the processor. Never proves anything and never keeps a
refusal. Invariant: a file that is damaged, of another version or of another key counts as none, so the proof
is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from kvclient.blocks.identity import encode

VERSION = 1
MAX_BYTES = 4096
MOST_FILES = 1024  # the oldest go
PLACE = "KVCLIENT_VERDICTS_DIR"


def directory() -> Path:
    """$KVCLIENT_VERDICTS_DIR, else kvstored/verdicts in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get(PLACE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    homeless = base.startswith("~")  # a user of whom nothing is known, as in a container: nothing is kept
    return Path(os.devnull if homeless else base) / "kvstored" / "verdicts"


def key(proof: str, facts: Sequence[Any]) -> str:
    """Of a proof by that name of what the facts say, on this machine."""
    return hashlib.sha256(encode([VERSION, proof, list(facts), surroundings()])).hexdigest()


@functools.cache
def surroundings() -> list[Any]:
    """What a proof may depend on beside the model."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    code = [[str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    releases = [platform.python_version(), torch.__version__, transformers.__version__]
    return [*releases, platform.machine(), _processor(), code]


def load(name: str) -> dict[str, Any] | None:
    """What was found, if that proof was made."""
    try:
        with open(directory() / f"{name}.json", encoding="utf-8") as file:
            kept = json.loads(file.read(MAX_BYTES))
        if kept["version"] != VERSION or kept["key"] != name or not isinstance(kept["found"], dict):
            return None
        return kept["found"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save(name: str, found: Mapping[str, Any]) -> None:
    """Complete or not at all; where it cannot be kept, the next process proves it again."""
    place = directory()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = place / f"{name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps({"version": VERSION, "key": name, "found": dict(found)}))
        os.replace(temporary, place / f"{name}.json")
        files = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[: max(0, len(files) - MOST_FILES)]:
            old.unlink(missing_ok=True)
    except OSError:
        return


def _processor() -> str:
    """Its name and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = ("model name", "flags")
    return "\n".join(next((line for line in lines if line.startswith(what)), "") for what in said)
