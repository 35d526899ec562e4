"""Rows that other files of this folder measure: TTFT with a real model, the daemon's own figures, KVBoost.

Runs them as processes and takes the rows out of the JSON they write; what fails is named with its last
line.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.install import ROOT, progress

ENDING_S = 2.0
SCRIPT_TIMEOUT_S = {
    "bench.reuse_ttft": 420,
    "bench.daemon_figures": 180,
    "bench.disk_figures": 300,
    "bench.disk_daemon": 420,
    "bench.peers.kvboost": 240,
}


def run_script(module: str, column: str, quick: bool, env: dict[str, str] | None = None) -> dict:
    """{"rows": […], "absent": […]} of one script."""
    progress(f"running {module}")
    with tempfile.TemporaryDirectory(prefix="kvbench-") as home:
        target, log = Path(home) / "figures.json", Path(home) / "log"
        command = [sys.executable, "-m", module, "--json", str(target)] + (["--quick"] if quick else [])
        try:
            status = _run_group(command, log, SCRIPT_TIMEOUT_S[module], env or {})
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            for line in lines:
                if line.startswith("bench: "):
                    print(line, file=sys.stderr)
            if status == 0:
                return json.loads(target.read_text())
            reason = f"exit status {status}: {lines[-1][:160] if lines else 'nothing printed'}"
        except subprocess.TimeoutExpired:
            reason = f"not done within {SCRIPT_TIMEOUT_S[module]} s"
        except (OSError, ValueError) as failure:
            reason = str(failure)
    progress(f"{module}: {reason}")
    return {"rows": [], "absent": [{"column": column, "reason": f"{module}: {reason}"}]}


def _run_group(command: list[str], log: Path, timeout_s: float, env: dict[str, str]) -> int:
    """Run in a process group of its own, so that a script that is late or dies leaves no daemon behind."""
    with open(log, "wb") as out:
        script = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            return script.wait(timeout_s)
        finally:
            _end_group(script)


def _end_group(script: subprocess.Popen) -> None:
    """A daemon that is asked to end gives its memory back; one that is killed cannot."""
    try:
        os.killpg(script.pid, signal.SIGTERM)
        time.sleep(ENDING_S)
        os.killpg(script.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody of it is left: as it should be
    script.wait()


def merge_rows(into: list[dict], more: list[dict]) -> None:
    """Rows of the same id become one row with the cells of both."""
    known = {row["id"]: row for row in into}
    for row in more:
        if row["id"] in known:
            known[row["id"]]["cells"] += row["cells"]
        else:
            into.append(row)
            known[row["id"]] = row
