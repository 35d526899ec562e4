"""Models larger than their memory, beside what the disk gives and other programs. `python -m bench.streaming`

The shapes of Qwen2.5-7B with random weights, packed (AWQ), made once under the user's cache: 5.6 GB, and
as much again rearranged. Under each limit (a cgroup of its own where one may be made, else memory=) tokens
are decoded from the disk. `--only ROW` measures one row; without it all but those that want 15 GB more. Owns
the command and the file of results, written behind each row. Invariant: a figure that could not be had stands
in the table with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench.install import ROOT, progress
from bench.machine import describe, sentence
from bench.streaming.model import ensure
from bench.streaming.rows import ROWS, Measured

ASKED_FOR = ("accelerate", "airllm")  # only by name
NOT_RUN = {
    "KVBoost 0.9.0": "streams on CUDA only, and its speculation crashes on transformers 5",
    "GPU: link share, 32B in 8 GB": "no GPU",
}


def measure(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import model as example_model

    on = Measured(ensure(example_model.ensure()), args)
    if not on.file.exists():
        progress("rearranging, without a limit")
        if "absent" in (made := on.ours(64, tokens=1)):
            raise SystemExit(f"not rearranged: {made['absent']}")
    found: dict = {"machine": describe(), "threads": args.threads, "rows": {}, "not_run": NOT_RUN}
    print(sentence(found["machine"]), flush=True)
    for name in args.only or [name for name in ROWS if name not in ASKED_FOR]:
        measured, table, what = ROWS[name]
        found["rows"][name] = measured(on)
        print("\n".join(["", f"{name}: {what}", "", *table(found["rows"][name])]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))
    if not args.only:
        print("\n".join(["", *(f"Not measured: {what} ({why})." for what, why in NOT_RUN.items())]))


def main() -> int:
    rows = "; ".join(f"{name}: {what}" for name, (_, _, what) in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.streaming", description=__doc__.splitlines()[0], epilog=f"Rows: {rows}."
    )
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--limits", type=float, nargs="+", default=[1, 2, 3], help="GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="decoded in each round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--patience", type=float, default=900, help="seconds that a program is waited for")
    parser.add_argument("--json", type=Path)
    measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
