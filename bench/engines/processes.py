"""The processes of a run: engines with their own Python, each told by lines of JSON.

Owns their life: none outlives its `with`. Never measures. Invariant: an engine that does not start is a
reason, not an exception.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bench.engines.engine import ANSWER

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvstored" / "engines"
ANSWER_S = 900.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    "LMCACHE_CHUNK_SIZE": "32", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip


# glibc else gives memory back and takes it again: in each engine by as many page faults as it happens to lie.
KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 27),
}  # fmt: skip


def python_of(engine: str) -> Path | None:
    """None: `make engines` was not run."""
    python = CACHE / engine / "bin" / "python"
    return python if python.exists() else None


class Told:
    """A module run with vLLM's Python that answers lines of JSON. `more`: variables."""

    def __init__(
        self,
        module: str,
        first: Any,
        log: Path,
        path: tuple[Path, ...] = (),
        more: dict[str, str] | None = None,
    ) -> None:
        self._log = log
        paths = {"PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [str(python_of("vllm")), "-m", module],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **ENVIRONMENT, **paths, **(more or {})},
            )  # fmt: skip
        self.tell(first)

    def tell(self, what: Any) -> None:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Raises RuntimeError with the end of its log if it ended or says nothing."""
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line[len(ANSWER) :])
        finally:
            watchdog.cancel()
        raise RuntimeError(f"it ended, or said nothing for {ANSWER_S} s:\n" + self._log.read_text()[-3000:])

    def ask(self, what: Any) -> Any:
        self.tell(what)
        return self.answer()

    def end(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def say(text: str) -> None:
    print(f"bench: engines: {text}", file=sys.stderr, flush=True)
