"""`python -m bench.engines`: vLLM on a CPU with the store beside its own prefix cache; what look-ups cost.

    python -m bench.engines [--rounds N] [--models tiny,smollm2] [--only lookups|l2|ttft|hit|tiers|cost]
        [--ours] [--json FILE]

Installs nothing: the environments are those of `make engines`, and what is not there is said. Half an hour on
two quiet cores, most of it vLLM's starts. Nothing timed can fail.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.engines import tiers
from bench.engines.l2 import beside
from bench.engines.processes import CACHE, KEEPS_MEMORY, Told, python_of, say
from bench.engines.ttft import BLOCK, Run, expect, ours, prompts, summary
from bench.machine import describe, sentence
from bench.reuse_ttft import daemon
from tests.engines.conftest import TINY

LOOK_UPS = 400
L2_TURNS = 3
COST_ROUNDS = {"tiny": 40, "smollm2": 5}
HIT_ROUNDS = {"tiny": 40, "smollm2": 9}


def model_of(name: str, home: Path) -> tuple[str, int]:
    """Directory and vocabulary."""
    if name == "smollm2":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
        import model

        return str(model.ensure()), 49_000
    target = home / "tiny"
    subprocess.run([python_of("vllm"), "-c", TINY, target, "0"], check=True, capture_output=True)
    return str(target), 500


def look_ups(home: Path) -> dict[str, dict[str, float]]:
    with daemon("256MiB") as directory:
        told = Told(
            "bench.engines.lookups", {"directory": directory, "calls": LOOK_UPS}, home / "lookups.log",
            (CACHE / "lmcache",),
        )  # fmt: skip
        try:
            return told.answer()
        finally:
            told.end()


def first_tokens(name: str, rounds: int, home: Path, others: bool) -> dict:
    with daemon("2GiB") as directory:
        model, vocabulary = model_of(name, home)
        run = Run(model, vocabulary, directory, home, others)
        try:
            row: dict[str, list[dict]] = {}
            for number in range(-1, rounds):  # the first is not counted
                if number == 0:
                    row = {}
                run.hits(row)
                run.misses(row)
                say(f"{name}: round {number + 1} of {rounds}")
            return {"figures": summary(row), "absent": run.absent}
        finally:
            run.end()


def hit(name: str, rounds: int, home: Path) -> dict[str, float]:
    """What another engine stored, against the engine's own prefix cache without a connector."""
    with daemon("1GiB") as directory:
        model, vocabulary = model_of(name, home)
        options = {"model": model, "transfer": ours(directory)}
        first = Told("bench.engines.engine", options, home / "first.log")
        second = Told("bench.engines.hit", options, home / "second.log")
        rows: dict[str, list[float]] = {"store": [], "own": []}
        try:
            first.answer()
            second.answer()
            before: list[int] = []
            for number in range(-1, rounds):
                shared, ends = prompts(number, vocabulary)
                first.ask([{"prompts": [shared + ends[0]], "tokens": 1, "forget": True}])
                found = second.ask({"before": before or shared, "shared": shared, "ends": ends[1:3]})
                before = shared + ends[3]
                for way, row in rows.items():
                    expect({"cached": [found[way]["cached"]]}, len(shared) // BLOCK * BLOCK)
                    if number >= 0:
                        row.append(found[way]["cpu_s"])
        finally:
            first.end()
            second.end()
    ratios = [a / b for a, b in zip(rows["store"], rows["own"], strict=True)]
    return {
        "store_ms": 1e3 * median(rows["store"]), "own_ms": 1e3 * median(rows["own"]), "ratio": median(ratios),
    }  # fmt: skip


def cost(name: str, rounds: int, home: Path) -> dict[str, dict]:
    """Of a connector that finds nothing: one that only looks, and one that saves all."""
    found = {}
    with daemon("2GiB") as directory:
        model, vocabulary = model_of(name, home)
        for what, role in (("looks", "kv_consumer"), ("saves", "kv_both")):
            options = {"model": model, "vocabulary": vocabulary, "transfer": ours(directory, role)}
            told = Told("bench.engines.cost", options, home / "cost.log", more=KEEPS_MEMORY)
            try:
                told.answer()
                found[what] = told.ask(rounds)
            finally:
                told.end()
            say(f"{name}: cost of a connector that {what}")
    return found


def table(result: dict) -> str:
    lines = [sentence(result["machine"]), ""]
    if looks := result.get("look-ups"):
        lines += ["| look-up, processor time | least | middle |", "|---|---|---|"]
        lines += [
            f"| {name} | {us['least_us']:.0f} µs | {us['middle_us']:.0f} |" for name, us in looks.items()
        ]
        lines.append("")
    if rows := result.get("l2"):
        lines += ["| `lmcache bench l2` | ours | fs_native | times |", "|---|---|---|---|"]
        lines += [
            f"| {what} | {row['ours_ms']:.2f} ms | {row['fs_native_ms']:.2f} | {row['ratio']:.2f} |"
            for what, row in rows.items()
        ]
        lines.append("")
    for model in ("tiny", "smollm2"):
        if hit := result.get(f"{model}, hit"):
            lines += [
                f"{model}, one engine: from the store {hit['store_ms']:.2f} ms, from its own cache without a "
                f"connector {hit['own_ms']:.2f}: {hit['ratio']:.3f} x", "",
            ]  # fmt: skip
        if ways := result.get(f"{model}, tiers"):
            lines += [f"| {model}, a hit | processor time | to the fs tier | wall | to the fs tier |",
                      "|---|---|---|---|---|"]  # fmt: skip
            lines += [
                f"| {way} | {hit['cpu_ms']:.1f} ms | {hit['ratio']:.3f} | {hit['wall_ms']:.1f} | "
                f"{hit['wall_ratio']:.3f} |"
                for way, hit in ways.items()
            ]
            lines.append("")
        if costs := result.get(f"{model}, cost"):
            lines += [f"| {model}, nothing found | processor time | to that without |", "|---|---|---|"]
            lines += [
                f"| {what}: {name} | {figures['cpu_ms']:.1f} ms | {figures['ratio']:.3f} |"
                for what, part in costs.items()
                for name, figures in part.items()
            ]
            lines.append("")
        if not (part := result.get(model)):
            continue
        lines += [f"| {model} | processor time | ratio | wall | ratio |", "|---|---|---|---|---|"]
        for name, hit in part["figures"].items():
            ratios = [f"{hit[key]:.3f}" if key in hit else "" for key in ("ratio", "wall_ratio")]
            lines.append(
                f"| {name} | {hit['cpu_ms']:.1f} ms | {ratios[0]} | {hit['wall_ms']:.1f} | {ratios[1]} |"
            )
        lines += [f"\n{name} is not there: {reason}" for name, reason in part["absent"].items()] + [""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default="tiny,smollm2", metavar="LIST")
    parser.add_argument("--only", choices=("lookups", "l2", "ttft", "hit", "tiers", "cost"))
    parser.add_argument("--ours", action="store_true", help="without vLLM's OffloadingConnector and LMCache")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if python_of("vllm") is None:
        print(f"left out: no vLLM in {CACHE}; `make engines` installs it")
        return 0
    result: dict = {"machine": describe()}
    with tempfile.TemporaryDirectory(prefix="kvbench-engines-") as home:
        if chosen.only in (None, "lookups"):
            result["look-ups"] = look_ups(Path(home))
        if chosen.only in (None, "l2"):
            with daemon("4GiB") as directory:
                result["l2"] = beside(directory, Path(home), L2_TURNS)
        for name in chosen.models.split(","):
            if chosen.only in (None, "ttft"):
                result[name] = first_tokens(name, chosen.rounds, Path(home), not chosen.ours)
            if chosen.only in (None, "hit"):
                result[f"{name}, hit"] = hit(name, HIT_ROUNDS[name], Path(home))
            if chosen.only in (None, "tiers"):
                with daemon("2GiB") as directory:
                    model, vocabulary = model_of(name, Path(home))
                    result[f"{name}, tiers"] = tiers.beside(
                        model, vocabulary, directory, Path(home), chosen.rounds
                    )
            if chosen.only in (None, "cost"):
                result[f"{name}, cost"] = cost(name, COST_ROUNDS[name], Path(home))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
