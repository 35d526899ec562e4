"""LMCache's own `lmcache bench l2`, with our L2 adapter and with its `fs_native` on files in the page cache,
in turns: stores, loads and look-ups of 64 objects of 256 KiB.

Owns the files of fs_native, in a directory that the caller removes. Its loads compare nothing; ours compare
checksums.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import median

from bench.engines.processes import CACHE, ENVIRONMENT, ROOT, python_of

OBJECTS, OBJECT_KB, ROUNDS = 64, 256, 10
RUN_S = 900
OPERATIONS = {"store": "Store", "load": "Load", "look-up": "Lookup"}


def contenders(directory: str, home: Path, turn: int) -> dict[str, dict]:
    """What `--l2-adapter` is told, by who it is. No turn finds what an earlier one stored."""
    ours = {
        "type": "plugin", "module_path": "kvclient.integrations.lmcache", "class_name": "KvstoredL2Adapter",
        "adapter_params": {"dir": directory, "model_identity": f"turn {turn}"},
    }  # fmt: skip
    return {"ours": ours, "fs_native": {"type": "fs_native", "base_path": str(home / f"files{turn}")}}


def run(adapter: dict, target: Path) -> dict[str, float]:
    """The median milliseconds of one operation on all objects. Raises RuntimeError with what it said."""
    command = [
        str(python_of("vllm")), str(CACHE / "lmcache/bin/lmcache"), "bench", "l2", "-q",
        "--l2-adapter", json.dumps(adapter), "--num-keys", str(OBJECTS), "--data-size-kb", str(OBJECT_KB),
        "--rounds", str(ROUNDS), "--lookup-max-hit-rate", "1", "--format", "json", "--output", str(target),
    ]  # fmt: skip
    path = f"{CACHE / 'lmcache'}:{ROOT}"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode != 0 or not target.exists():
        raise RuntimeError(
            f"lmcache bench l2 ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:]
        )
    rows = [row for row in json.loads(target.read_text())["metrics"].values() if "operation" in row]
    found = {row["operation"]: row["duration_p50_ms"] for row in rows}
    return {what: found[name] for what, name in OPERATIONS.items()}


def beside(directory: str, home: Path, turns: int) -> dict[str, dict[str, float]]:
    """Of each operation our and fs_native's milliseconds, and how many times theirs ours is (median)."""
    taken: dict[str, list[dict[str, float]]] = {}
    for turn in range(turns):
        (home / f"files{turn}").mkdir()
        for who, adapter in contenders(directory, home, turn).items():
            taken.setdefault(who, []).append(run(adapter, home / f"{who}{turn}.json"))
    return {
        what: {
            **{f"{who}_ms": median(row[what] for row in rows) for who, rows in taken.items()},
            "ratio": median(
                theirs[what] / mine[what]
                for mine, theirs in zip(taken["ours"], taken["fs_native"], strict=True)
            ),
        }
        for what in OPERATIONS
    }
