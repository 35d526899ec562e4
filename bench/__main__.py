"""`python -m bench`: installs the peers, measures, writes JSON, prints the table. Nothing timed can fail."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from bench.compare.contenders import Contenders
from bench.compare.first_pass import run_first_pass
from bench.compare.readers import run_readers
from bench.compare.rounds import run_row
from bench.compare.rows import COLUMNS, ROWS, Row
from bench.compare.scripts import merge_rows, run_script
from bench.compare.table import compact, markdown
from bench.install import ROOT, Installed, install, progress
from bench.machine import describe
from bench.pace import Yardstick
from bench.pages import huge_pages_to_be_had

SESSION_OF = {"index": "index", "readers": "index", "bulk": "bulk", "first_pass": "bulk"}
SCRIPTS = {
    "reuse": ["bench.reuse_ttft", "bench.peers.kvboost"],
    "daemon": ["bench.daemon_figures"],
    "disk": ["bench.disk_figures"],
    "tier": ["bench.disk_daemon"],
}
BUDGET_S = 0.3  # of one contender in one round


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: about 4 minutes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="ROW",
        default=[],
        help="this row, or all that start with this; may be repeated: " + ", ".join(row.id for row in ROWS),
    )
    parser.add_argument(
        "--columns", default=",".join(COLUMNS), metavar="LIST", help="contenders (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="alternations (default 7, quick 3)")
    parser.add_argument(
        "--pages",
        choices=("huge", "small"),
        help="of the memory that ours, LMDB and memcpy share (default: huge where they can be had)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the figures go (default bench/out/TIME.json)"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="replace these rows in an earlier run's file, or begin one"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="measure nothing: print the table of this file"
    )
    parser.add_argument("--compact", action="store_true", help="with --table: as the README has it")
    chosen = parser.parse_args(words)
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    unknown = [only for only in chosen.only if not any(row.id.startswith(only) for row in ROWS)]
    if unknown or chosen.rounds < 1:
        parser.error(f"unknown row {', '.join(unknown)}" if unknown else "--rounds is at least 1")
    return chosen


def run_session(
    session: str,
    rows: list[Row],
    columns: list[str],
    chosen,
    installed: Installed,
    yardstick: Yardstick,
    run: dict,
) -> None:
    budget_s = BUDGET_S / 3 if chosen.quick else BUDGET_S
    together = [row for row in rows if row.session == "readers"]
    read: dict[str, list[dict]] = {}
    with Contenders(installed, session, columns, chosen.quick, run["pages"]) as up:
        for row in rows:
            progress(f"row {row.id}")
            started = time.monotonic()
            if row.session == "readers":
                read = read or run_readers(together, up, chosen.rounds, chosen.quick)
                cells = read[row.id]
            elif row.session == "first_pass":
                cells = run_first_pass(row, up, chosen.rounds)
            else:
                cells = run_row(row, up, chosen.rounds, budget_s, yardstick)
            run["rows"].append(
                {
                    "id": row.id,
                    "title": row.title,
                    "reach": row.reach,
                    "cells": cells,
                    "took_s": round(time.monotonic() - started, 1),
                }
            )
        run["versions"].update(up.versions)


def run_scripts(rows: list[Row], columns: list[str], quick: bool, installed: Installed, run: dict) -> None:
    for row in rows:
        found: list[dict] = []
        for module in SCRIPTS[row.id]:
            column = "kvboost" if module.endswith("kvboost") else "kvstored"
            if column not in columns:
                continue
            if column in installed.absent:
                run["absent"].append({"column": column, "reason": installed.absent[column]})
                continue
            env = {"KVBENCH_KVBOOST": installed.kvboost_path, "KVBENCH_LMCACHE": installed.lmcache}
            answer = run_script(module, column, quick, {**env, "OMP_NUM_THREADS": "1"})
            merge_rows(found, answer["rows"])
            if column == "kvboost" and answer["rows"]:
                run["versions"]["kvboost"] = "KVBoost 0.9.0"
            run["absent"] += answer.get("absent", [])
        run["rows"] += found


def new_run(chosen) -> dict:
    return {
        "format": 1,
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "quick": chosen.quick,
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "rounds": chosen.rounds,
        "machine": describe(),
        "pages": chosen.pages or ("huge" if huge_pages_to_be_had() else "small"),
        "versions": {},
        "absent": [],
        "rows": [],
    }


def measure(chosen, run: dict) -> None:
    """Fill `run` row by row: what was measured before an interrupt is kept."""
    rows = [row for row in ROWS if not chosen.only or any(row.id.startswith(only) for only in chosen.only)]
    columns = [column for column in COLUMNS if column in chosen.columns.split(",")]
    installed = install(set(columns) if any(row.id == "tier" for row in rows) else set(columns) - {"lmcache"})
    timed = [row for row in rows if row.session in SESSION_OF]
    if timed:
        yardstick = Yardstick.now()
        for session in dict.fromkeys(SESSION_OF[row.session] for row in timed):
            mine = [row for row in timed if SESSION_OF[row.session] == session]
            run_session(session, mine, columns, chosen, installed, yardstick, run)
        run["pace_us"] = round(yardstick.best_ns / 1e3)
    run_scripts([row for row in rows if row.session == "script"], columns, chosen.quick, installed, run)


def replaced(old: dict, new: dict) -> dict:
    """An earlier run with the rows of a later one in their places; each row keeps its own run's beginning."""
    fresh = {row["id"]: {**row, "started": new["started"]} for row in new["rows"]}
    rows = [fresh.pop(row["id"], row) for row in old["rows"]] + list(fresh.values())
    return {**old, "rows": rows, "versions": {**old["versions"], **new["versions"]}}


def main() -> int:
    chosen = arguments()
    if chosen.table:
        run = json.loads(chosen.table.read_text())
        print((compact if chosen.compact else markdown)(run), end="")
        return 0
    run, started = new_run(chosen), time.monotonic()
    try:
        measure(chosen, run)
    except KeyboardInterrupt:
        progress("interrupted: the rows so far are kept")
    run["took_s"] = round(time.monotonic() - started, 1)
    run["load_after"] = round(os.getloadavg()[0], 2)
    target = chosen.json or ROOT / "bench" / "out" / time.strftime("%Y%m%d-%H%M%S.json", time.gmtime())
    if chosen.into:
        target = chosen.into
        run = replaced(json.loads(target.read_text()), run) if target.exists() else run
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(run, indent=1) + "\n")
    print(markdown(run), end="")
    progress(f"{time.monotonic() - started:.0f} s; figures in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
