"""What a put costs the store while others hold pins, as a multiple of the same put beside none.

    make native-tests && python -m bench.crowd [--blocks 65536] [--json FILE]
    python -m bench.crowd --holds [--blocks 1048576] [--sessions 1000]    (1M blocks: 4 GiB of memory)

`build/dev/crowd` (native/bench/crowd.cc) does the work, in processor time of the one thread that serves
all: an idle machine is not needed. The ratio is of the means, so it has in it what a scan of the pins
costs and a put that finds its room does not show. `build/dev/neighbour` measures by the clock what a put
takes in one namespace while another is crowded, and beside two threads that only count, which is what
sharing two cores costs whoever shares them; their ratios are of the medians. `--holds` runs
`build/dev/holds` instead: the longest that the store's lock is held without a pause, for each operation.
"""

import argparse
import json
import subprocess
from pathlib import Path

BUILT = Path(__file__).parent.parent / "build" / "dev"
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


def print_holds(blocks: int, sessions: int, to: Path | None) -> None:
    command = [str(HOLDS), str(blocks), str(sessions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    for row in figures:
        print(f"{row['case']}: longest hold {row['longest_hold_us']:.0f} µs, in all {row['all_ms']:.1f} ms")
    if to:
        to.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=65536, help="blocks of 4 KiB (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--holds", action="store_true", help="how long the lock is held, by operation")
    parser.add_argument("--sessions", type=int, default=1000, help="with --holds: that end together")
    chosen = parser.parse_args()
    missing = [program.name for program in (PROGRAM, NEIGHBOUR, HOLDS) if not program.exists()]
    if missing:
        parser.error(f"not built: {', '.join(missing)}; run `make native-tests`")
    if chosen.holds:
        print_holds(chosen.blocks, chosen.sessions, chosen.json)
    else:
        print_puts(chosen.blocks, chosen.json)


def print_puts(blocks: int, to: Path | None) -> None:
    lines: list[str] = []
    for command in ([str(PROGRAM), str(blocks)], [str(NEIGHBOUR)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines += done.stdout.splitlines()
    figures = rows(lines)
    for row in figures:
        times = f"p50 {row['p50_us']:.1f} µs, mean {row['mean_us']:.1f}, worst {row['worst_us']:.0f}"
        alone = f"alone {row['alone_us']:.1f}: {row['ratio']:.1f} x; {row['refused']} refused"
        print(f"put beside {TITLES[row['case']]}: {times}; {alone}")
    if to:
        to.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
