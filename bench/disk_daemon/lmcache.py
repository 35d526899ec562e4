"""LMCache's disk, through its own benchmark: `lmcache bench l2` with `fs_native` and O_DIRECT.

The program comes as KVBENCH_LMCACHE (bench/install.py has a virtual environment for it). Its loads verify
nothing: LMCache has no checksums.
"""

import json
import os
import subprocess
from pathlib import Path

ROUNDS = 3
OPERATIONS = {"write": "Store", "read": "Load"}
RUN_S = 120
QUIET = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}


def find_lmcache() -> str:
    """RuntimeError says why there is none."""
    program = os.environ.get("KVBENCH_LMCACHE", "")
    if not program:
        raise RuntimeError("KVBENCH_LMCACHE names no LMCache (python -m bench sets it)")
    return program


def lmcache(program: str, directory: Path, size: int, blocks: int) -> dict[str, dict]:
    """{"write": {"gb_s"}, "read": …}, each the median of a few rounds in one process."""
    adapter = {"type": "fs_native", "base_path": str(directory), "use_odirect": True}
    target = directory.with_suffix(".json")
    command = [program, "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", str(blocks)]
    command += ["--data-size-kb", str(size >> 10), "--l1-align-bytes", "4096", "--rounds", str(ROUNDS)]
    command += ["-q", "--format", "json", "--output", str(target)]
    directory.mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env={**os.environ, **QUIET})
    if done.returncode != 0:
        raise RuntimeError(f"lmcache: {done.stderr.strip()[-160:]}")
    found = json.loads(target.read_text())["metrics"].values()
    taken = {row["operation"]: row["duration_p50_ms"] / 1e3 for row in found if "operation" in row}
    return {what: {"gb_s": size * blocks / taken[name] / 1e9} for what, name in OPERATIONS.items()}
