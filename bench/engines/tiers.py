"""A hit in a second vLLM engine on a CPU by our tier and by vLLM's own file tier, and by our connector.

vLLM's memory on the host, under which both tiers lie, has no worker for a CPU: a test's copies there
(tests/engines/vllm/offloading/vllm_tier_on_cpu.py), all else is vLLM's own. One engine computes 1,000 shared
tokens and stores them in both tiers, the readers have never seen them; the files lie in /dev/shm. Figures are
processor time of the reader's process, with its threads, and the time that passed. Never compares different
runs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines.processes import Told, say
from bench.engines.ttft import BLOCK, SHARED, expect, ours, prompts

CPU_BYTES = 1 << 28
OURS, FILES, CONNECTOR = "our tier", "vLLM's fs tier", "our connector"


def over(*tiers: dict[str, Any]) -> dict[str, Any]:
    """vLLM's OffloadingConnector with those beneath its memory on the host."""
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "TierOnCpu", "spec_module_path": "tests.engines.vllm.offloading.vllm_tier_on_cpu",
            "cpu_bytes_to_use": CPU_BYTES, "secondary_tiers": list(tiers)},
    }  # fmt: skip


def beside(
    model: str, vocabulary: int, directory: str, home: Path, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a hit by way, and to that of vLLM's file tier."""
    root = tempfile.mkdtemp(prefix="kvbench-fs-", dir="/dev/shm")
    tier = {"type": "KvstoredTier", "module_path": "kvclient.integrations.vllm", "dir": directory}
    files = {"type": "fs", "root_dir": root}
    wanted = {
        "both": over(tier, files), OURS: over(tier), FILES: over(files), "first": ours(directory),
        CONNECTOR: ours(directory),
    }  # fmt: skip
    engines: dict[str, Told] = {}
    rows: dict[str, list[dict]] = {OURS: [], FILES: [], CONNECTOR: []}
    try:
        for name, transfer in wanted.items():
            log = home / f"tiers_{name.replace(' ', '_')}.log"
            engines[name] = Told("bench.engines.engine", {"model": model, "transfer": transfer}, log)
            engines[name].answer()
            say(f"{name} is up")
        for number in range(-1, rounds):  # the first is not counted
            shared, ends = prompts(number, vocabulary)
            stored = {"prompts": [shared + ends[0]], "tokens": 1, "forget": True}
            between = {"prompts": [ends[3] * 2], "tokens": 4}  # steps in which it goes down
            for writer in ("both", "first"):
                engines[writer].ask([stored, between, between])
            for turn in range(len(rows)):
                name = list(rows)[(turn + number) % len(rows)]
                again = {"prompts": [shared + ends[1]], "tokens": 1, "forget": True}
                (hit,) = engines[name].ask([again])
                expect(hit, SHARED // BLOCK * BLOCK)
                if number >= 0:
                    rows[name].append(hit)
            say(f"tiers: round {number + 1} of {rounds}")
    finally:
        for told in engines.values():
            told.end()
        shutil.rmtree(root, ignore_errors=True)
    return {
        name: {
            "cpu_ms": 1e3 * median(hit["cpu_s"] for hit in hits),
            "wall_ms": 1e3 * median(hit["wall_s"] for hit in hits),
            "ratio": median(a["cpu_s"] / b["cpu_s"] for a, b in zip(hits, rows[FILES], strict=True)),
            "wall_ratio": median(a["wall_s"] / b["wall_s"] for a, b in zip(hits, rows[FILES], strict=True)),
        }
        for name, hits in rows.items()
    }  # fmt: skip
