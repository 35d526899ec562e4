"""What a put costs the store while others hold pins, as a multiple of the same put beside none; and how long
the store's lock is held at a time.

`build/dev/crowd` (native/bench/crowd.cc) does the work, in processor time of the one thread that serves
all: an idle machine is not needed. The ratio is of the means, so it has in it what a scan of the pins
costs and a put that finds its room does not show. `build/dev/neighbour` measures by the clock what a put
takes in one namespace while another is crowded, and beside two threads that only count, which is what
sharing two cores costs whoever shares them; their ratios are of the medians. `build/dev/holds` prints the
longest that the store's lock is held without a pause, for each operation.
"""

import json
import subprocess
from pathlib import Path

BUILT = Path(__file__).parents[2] / "build" / "dev"
PROGRAM, NEIGHBOUR, HOLDS = BUILT / "crowd", BUILT / "neighbour", BUILT / "holds"
TITLES = {
    "clients": "60 clients with 900 pins each",
    "one": "one client with 40,000 pins",
    "all": "every block pinned",
    "neighbour": "a crowded namespace, in another one, by the clock",
    "counting": "two threads that only count, by the clock",
    "stranger": "100 sessions of a reader with 65,536 pins each, which name every block",
}


def rows(lines: list[str]) -> list[dict]:
    """The cases, each with its ratio to the last case `alone` before it."""
    out, alone = [], None
    for case in map(json.loads, lines):
        if case["case"] == "alone":
            alone = case
        else:
            of = "p50_us" if case["case"] in ("neighbour", "counting") else "mean_us"
            out.append({**case, "alone_us": alone[of], "ratio": case[of] / alone[of]})
    return out


def missing() -> list[str]:
    """Names of the programs that are not built."""
    return [program.name for program in (PROGRAM, NEIGHBOUR, HOLDS) if not program.exists()]


def holds(blocks: int, sessions: int) -> list[dict]:
    command = [str(HOLDS), str(blocks), str(sessions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    for row in figures:
        longest, over = row["longest_hold_us"], row["holds_over_500_us"]
        print(f"{row['case']}: longest hold {longest:.0f} µs, {over} over 500; in all {row['all_ms']:.1f} ms")
    return figures


def puts(blocks: int) -> list[dict]:
    lines: list[str] = []
    for command in ([str(PROGRAM), str(blocks)], [str(NEIGHBOUR)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines += done.stdout.splitlines()
    figures = rows(lines)
    for row in figures:
        times = f"p50 {row['p50_us']:.1f} µs, mean {row['mean_us']:.1f}, worst {row['worst_us']:.0f}"
        alone = f"alone {row['alone_us']:.1f}: {row['ratio']:.1f} x; {row['refused']} refused"
        print(f"put beside {TITLES[row['case']]}: {times}; {alone}")
    return figures
