"""python -m bench.serving: OpenAI-compatible servers side by side, with JSON, a table and a plot.

    python -m bench.serving [MODEL] [--contenders ours vllm] [--loads a b c d] [--rounds 3] [--own …] [--add]

Contenders are installed when they are first asked for, and take turns, round by round. Wall times of a busy
machine are noise: CPU seconds and ratios count. With --add a run goes on where others left off, so that a
long one can be had in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from bench import machine
from bench.serving import loads, own
from bench.serving.contenders import CONTENDERS, ROOT
from bench.serving.installed import NotThere
from bench.serving.pieces import LOADS, add, earlier
from bench.serving.plot import plot
from bench.serving.processes import Served
from bench.serving.table import table

OUT = ROOT / "bench" / "out"
DEFAULT = ["ours", "hf", "vllm", "llama"]
REST_S = 3.0  # behind which a server has nothing to compute for a while


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--contenders", nargs="*", default=DEFAULT, choices=[*CONTENDERS])
    parser.add_argument("--loads", nargs="*", default=LOADS, choices=LOADS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--own",
        nargs="*",
        default=[],
        choices=["servers", "disk", "split", "at-once", "hang-up"],
        help="rows that no contender has",
    )
    parser.add_argument("--json", type=Path, default=OUT / "serving.json")
    parser.add_argument("--add", action="store_true", help="to what the JSON file has, instead of anew")
    args = parser.parse_args()
    model = args.model or _example()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompts = loads.Prompts(lambda text: len(tokenizer(text)["input_ids"]))
    out: dict[str, Any] = {"machine": machine.describe(), "model": model.name, "rounds": [], "own": {}}
    if args.add and args.json.exists():
        out = earlier(json.loads(args.json.read_text()), out)
    for round_ in range(args.rounds):
        for name in args.contenders:
            row = {"contender": name, "round": round_, **_measured(name, model, prompts, round_, args.loads)}
            add(out["rounds"], row)
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(out, indent=1) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    rows = {
        "servers": lambda: own.shared_between_servers(model, prompts, 0),
        "disk": lambda: own.from_disk(model, prompts, 0),
        "split": lambda: own.split_over_two(model, prompts, 0),
        "at-once": lambda: own.at_once(model),
        "hang-up": lambda: own.hang_up(model, prompts, 0),
    }
    out["own"] |= {name: _own(rows[name]) for name in args.own}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(out, indent=1) + "\n")
    print(table(out))
    if any({*LOADS} & row.keys() for row in out["rounds"]):
        print(plot(out, args.json.with_suffix(".png")))
    return 0


def _own(row: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return row()
    except RuntimeError as reason:
        return {"not_there": str(reason)}


def _measured(name: str, model: Path, prompts: loads.Prompts, seed: int, wanted: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        try:
            with CONTENDERS[name](model, Path(home)) as server:
                return _loads(server, _named(name, model), prompts, seed, wanted)
        except (NotThere, RuntimeError) as reason:
            return {"not_there": str(reason)}


def _loads(
    server: Served, named: str, prompts: loads.Prompts, seed: int, wanted: list[str]
) -> dict[str, Any]:
    out: dict[str, Any] = {"start_s": server.start_s}
    loads.tiny(server, named, 1, 1)  # what is set up at the first request is nobody's time
    out["pss_before_loads_mib"], _ = server.pss_mib()
    if "a" in wanted:
        out["a"] = loads.one_long(server, named, prompts, seed)
    if "b" in wanted:
        out["b"] = loads.eight([server], named, prompts, seed, True)
    if "c" in wanted:
        out["c"] = loads.eight([server], named, prompts, seed, False)
    if "d" in wanted:
        out["d"] = {str(beside): loads.tiny(server, named, beside, 32) for beside in (1, 8, 32)}
    out["pss_mib"], _ = server.pss_mib()
    time.sleep(REST_S)
    out["pss_at_rest_mib"], out["pool_mib"] = server.pss_mib()
    return out


def _named(contender: str, model: Path) -> str:
    return str(model) if contender.startswith("hf") else model.name


def _example() -> Path:
    sys.path.insert(0, str(ROOT / "examples"))
    import model as example_model

    return example_model.ensure()


if __name__ == "__main__":
    sys.exit(main())
