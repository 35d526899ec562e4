"""Rows that other files of this folder measure: TTFT with a real model, the daemon's own figures, KVBoost.

Runs them as processes and takes the rows out of the JSON they write; what fails is named with its last
line.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.install import ROOT, progress

SCRIPT_TIMEOUT_S = {"bench.reuse_ttft": 420, "bench.daemon_figures": 120, "bench.peers.kvboost": 240}


def run_script(module: str, column: str, quick: bool, env: dict[str, str] | None = None) -> dict:
    """{"rows": […], "absent": […]} of one script."""
    progress(f"running {module}")
    with tempfile.TemporaryDirectory(prefix="kvbench-") as home:
        target = Path(home) / "figures.json"
        command = [sys.executable, "-m", module, "--json", str(target)] + (["--quick"] if quick else [])
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
                timeout=SCRIPT_TIMEOUT_S[module],
                env={**os.environ, **(env or {})},
            )
            sys.stderr.write(done.stderr)
            if done.returncode == 0:
                return json.loads(target.read_text())
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [
                f"exit status {done.returncode}"
            ]
            reason = lines[-1][:160]
        except subprocess.TimeoutExpired:
            reason = f"not done within {SCRIPT_TIMEOUT_S[module]} s"
        except (OSError, ValueError) as failure:
            reason = str(failure)
    progress(f"{module}: {reason}")
    return {"rows": [], "absent": [{"column": column, "reason": f"{module}: {reason}"}]}


def merge_rows(into: list[dict], more: list[dict]) -> None:
    """Rows of the same id become one row with the cells of both."""
    known = {row["id"]: row for row in into}
    for row in more:
        if row["id"] in known:
            known[row["id"]]["cells"] += row["cells"]
        else:
            into.append(row)
            known[row["id"]] = row
