"""The disk tier through the daemon: loads and writes beside fio, puts during writing, eviction, restarts.

    python -m bench.disk_daemon [--json FILE] [--quick] [--directory DIR] [--only PART] [--memory GIB]

Method: `kvstored serve --disk` as a process, a client in this one, fio and LMCache in theirs, in turns; a
ratio is taken round by round. CPU is that of the daemon's disk thread alone, from the scheduler. Blocks
have 32 layers and keep their writer's checksums. Each contender reads what it has just written, as LMCache's
own benchmark does: a disk under a hypervisor reads new bytes faster than old ones. Ours leave memory before.
Two of them write where their quota is full, over files that go, as a daemon does that has run for a while:
`ours, quota full` and `fio, over its files`.
Everything lies below --directory and is removed at the end. Prints JSON. Never judges: the reach
stands beside.
"""

import argparse
import contextlib
import gc
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from bench.compare.figures import absent_cell, percentile
from bench.disk_daemon.lmcache import find_lmcache, lmcache
from bench.disk_daemon.restart import restart_rows, warm_rows
from bench.disk_daemon.session import MIB, NOT_WRITTEN, WAIT_S, WRITTEN, Session, new_keys, pools
from bench.disk_figures import find_fio, fio
from bench.install import ROOT, progress
from bench.pace import Yardstick, pace_ns

BYTES, BYTES_QUICK = 512 * MIB, 256 * MIB  # of one contender in one round
ROUNDS, ROUNDS_QUICK = 7, 5
WINDOW_S, WINDOWS, WINDOWS_QUICK = 0.1, 60, 30
LEAST_QUIET_WINDOWS = 5
ON_DISK = 3  # a state that look-ups answer
FULL, OVER = "ours, quota full", "fio, over its files"
FIO = {"fio": "malloc", "fio, shared memory": "mmapshared", OVER: "malloc"}
COLUMN = {
    "ours": ("kvstored", ""),
    "ours, huge pages": ("kvstored", "huge pages"),
    FULL: ("kvstored", "quota full"),
    "fio": ("limit", "fio"),
    "fio, shared memory": ("limit", "fio, shared memory"),
    OVER: ("limit", OVER),
    "LMCache": ("lmcache", "fs_native, O_DIRECT"),
}


def written(session: Session, keys: list[bytes], layout: int, source: np.ndarray) -> dict:
    before, cpu, began = session.figures()["disk_written"], session.cpu_s(), time.perf_counter()
    session.put(keys, layout, source)
    session.wait_written(before + len(keys))
    took = time.perf_counter() - began
    return {"gb_s": len(keys) * source.nbytes / took / 1e9, "cpu": (session.cpu_s() - cpu) / took}


def loaded(session: Session, keys: list[bytes], size: int) -> dict:
    session.push_out(size)
    if (there := session.client.lookup(keys).states.count(ON_DISK)) != len(keys):
        raise RuntimeError(f"{there} of {len(keys)} blocks lie on disk only")
    cpu, began = session.cpu_s(), time.perf_counter()
    session.client.prefetch(keys)
    with session.client.get(keys, wait_s=WAIT_S) as blocks:
        took = time.perf_counter() - began
        if blocks.hits != len(keys):
            raise RuntimeError(f"{blocks.hits} of {len(keys)} blocks were loaded: {session.figures()}")
        return {"gb_s": len(keys) * size / took / 1e9, "cpu": (session.cpu_s() - cpu) / took}


class Contenders:
    """Who writes and reads blocks of one size in turns: daemons with pools of small and of huge pages,
    fio, LMCache."""

    def __init__(self, home: Path, size: int, total: int, rounds: int, stack: contextlib.ExitStack) -> None:
        self.home, self.size, self.blocks, self.rounds = home, size, total // size, rounds
        self.source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        self.sessions: dict[str, Session] = {}
        self.layouts: dict[str, int] = {}
        self.keys: dict[str, list[list[bytes]]] = {}
        self.absent: dict[str, str] = {}
        self.programs: dict[str, str] = {}
        self.lmcache: dict[int, dict] = {}
        for name in ("ours", "ours, huge pages", FULL):
            pool = total * (rounds + 2) if name == FULL else total * 3 // 2  # there nothing is deleted
            self._attempt([name], lambda name=name, pool=pool: self._serve(name, pool, stack))
        self._attempt([*FIO], lambda: self.programs.update(dict.fromkeys(FIO, find_fio())))
        self._attempt(["LMCache"], lambda: self.programs.update({"LMCache": find_lmcache()}))

    def _attempt(self, names: list[str], step: Callable[[], object]) -> None:
        try:
            step()
        except RuntimeError as failure:
            self.absent |= dict.fromkeys(names, str(failure))

    def _serve(self, name: str, pool: int, stack: contextlib.ExitStack) -> None:
        place = self.home / name.replace(", ", "-").replace(" ", "-")
        place.mkdir()
        options = stack.enter_context(pools(place, "huge" if "huge" in name else "", 2 * pool))
        if name == FULL:  # twice a round: what is written in one is not what has to go in it
            options = ["--disk-quota", str(2 * self.blocks * (self.size + 2 * mmap.PAGESIZE))]
        session = self.sessions[name] = stack.enter_context(Session(place, pool, *options))
        session.daemon.wait_faulted()
        self.layouts[name] = session.layout(self.size)
        self.keys[name] = [new_keys(self.blocks) for _ in range(self.rounds)]
        if name == FULL:
            for _ in range(2):
                written(session, new_keys(self.blocks), self.layouts[name], self.source)

    def run(self, name: str, what: str, number: int) -> dict:
        if name in FIO:
            there = self.home / ("fio-over" if name == OVER else f"fio-{number}")
            if name == OVER and not there.exists():
                there.mkdir()
                fio(self.programs[name], there, "write", self.size, self.blocks, FIO[name])
            there.mkdir(exist_ok=True)
            return fio(self.programs[name], there, what, self.size, self.blocks, FIO[name])
        if name == "LMCache":  # writes and reads in one process, which takes seconds to start
            if number not in self.lmcache:
                there = self.home / f"lmcache-{number}"
                self.lmcache[number] = lmcache(self.programs[name], there, self.size, self.blocks)
            return self.lmcache[number][what]
        session, keys = self.sessions[name], self.keys[name][number]
        if what == "write":
            return written(session, keys, self.layouts[name], self.source)
        found = loaded(session, keys, self.size)
        if name != FULL:
            session.client.delete(keys)
        return found


def transfer_rows(home: Path, size: int, quick: bool) -> list[dict]:
    """In each round each in its turn writes anew and reads it back."""
    total, rounds = (BYTES_QUICK, ROUNDS_QUICK) if quick else (BYTES, ROUNDS)
    yardstick = Yardstick.now()
    taken: dict[str, dict[str, list]] = {"write": {}, "read": {}}
    with contextlib.ExitStack() as stack:
        all_of = Contenders(home, size, total, rounds, stack)
        names = [*all_of.sessions, *all_of.programs]
        for found in taken.values():
            found |= {name: [] for name in names}
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for what, found in taken.items():
                    before = pace_ns()
                    run = all_of.run(name, what, number)
                    found[name].append(run | {"pace_ns": max(before, pace_ns())})
            for what, found in taken.items():
                now = ", ".join(f"{name} {runs[-1]['gb_s']:.2f}" for name, runs in found.items())
                progress(f"{size // MIB} MiB {what}, GB/s: {now}")
    yardstick.seen([run["pace_ns"] for found in taken.values() for runs in found.values() for run in runs])
    least = 0.9 if size > MIB else 0.85
    kinds = [("read", "loaded, checksums on", "≥ 0.9 × fio, CPU ≤ 20 %; ≥ 1.3 × LMCache"),
             ("write", "written behind", f"≥ {least} × fio, CPU ≤ 15 %")]  # fmt: skip
    return [
        {
            "id": f"diskd_{what}{size // MIB}m",
            "title": f"disk tier: blocks of {size // MIB} MiB {title}",
            "reach": reach,
            "cells": [cell_of(name, taken[what], yardstick) for name in names]
            + [absent_cell(*COLUMN[name], reason) for name, reason in all_of.absent.items()],
        }
        for what, title, reach in kinds
    ]


def cell_of(name: str, taken: dict[str, list], yardstick: Yardstick) -> dict:
    """Ratios are medians over rounds, as only neighbours in time compare. CPU is that of the rounds whose
    processors were quiet, if there were any: the device is as fast in the others, the processor is not."""
    runs, (column, variant) = taken[name], COLUMN[name]
    ratios = {
        other: median(ours["gb_s"] / theirs["gb_s"] for ours, theirs in zip(runs, taken[other], strict=True))
        for other in ("fio", "LMCache")
        if other in taken and other != name
    }
    notes = [f"{ratios['LMCache']:.2f} × LMCache"] if "LMCache" in ratios and column == "kvstored" else []
    if "cpu" in runs[0]:
        quiet = [run for run in runs if yardstick.quiet(run["pace_ns"])]
        notes += [cpu_of(quiet or runs), f"{len(quiet)} of {len(runs)} rounds quiet"]
        if quiet and len(quiet) < len(runs):
            notes.append(f"all: {cpu_of(runs)}")
    return {
        "column": column,
        "variant": variant,
        "unit": "GB/s",
        "value": round(median(run["gb_s"] for run in runs), 2),
        "rounds": [round(run["gb_s"], 2) for run in runs],
        "note": ", ".join(notes),
    } | ({"ratio": round(ratios["fio"], 2), "ratio_of": "fio"} if "fio" in ratios else {})


def cpu_of(runs: list[dict]) -> str:
    share = 100 * median(run["cpu"] for run in runs)
    return f"{share:.0f} % of a core, {1000 * median(run['cpu'] / run['gb_s'] for run in runs):.0f} ms a GB"


def put_rows(home: Path, quick: bool) -> list[dict]:
    """create + seal while blocks are written behind and while none is, in the same daemon, in turns. The pace
    is taken while nothing is written: what writing does to puts must not decide which puts count."""
    source = np.zeros(MIB, dtype=np.uint8)
    took: dict[int, list[tuple[list[float], int]]] = {WRITTEN: [], NOT_WRITTEN: []}
    yardstick = Yardstick.now()
    with Session(home / "puts", 512 * MIB) as session:
        session.daemon.wait_faulted()
        layout = session.layout(MIB)
        session.put(new_keys(1024), layout, source, NOT_WRITTEN)
        gc.disable()
        for _ in range(WINDOWS_QUICK if quick else WINDOWS):
            for priority, windows in took.items():
                pace, window, until = pace_ns(), [], time.monotonic() + WINDOW_S
                while time.monotonic() < until:
                    window += session.put(new_keys(8), layout, source, priority)
                session.wait(
                    lambda: session.client.stats()["pending_writes"] == 0, "nothing waits to be written"
                )
                windows.append((window, max(pace, pace_ns())))
        gc.enable()
        count = session.figures()["disk_written"]
    every = {priority: [window for window, _ in windows] for priority, windows in took.items()}
    quiet = {
        priority: [window for window, pace in windows if yardstick.quiet(pace)]
        for priority, windows in took.items()
    }
    least = min(map(len, quiet.values()))
    chosen = quiet if least >= LEAST_QUIET_WINDOWS else every
    busy, idle = (_puts_of(chosen[priority]) for priority in (WRITTEN, NOT_WRITTEN))
    all_busy, all_idle = (_puts_of(every[priority]) for priority in (WRITTEN, NOT_WRITTEN))
    shares = [f"{len(quiet[priority])} of {len(every[priority])}" for priority in (WRITTEN, NOT_WRITTEN)]
    cell = {
        "column": "kvstored", "variant": "", "unit": "us", "value": round(busy["p99"], 1),
        "rounds": [round(1e6 * percentile(window, 0.99), 1) for window in chosen[WRITTEN]],
        "ratio": round(busy["p99"] / idle["p99"], 2), "ratio_of": "without",
        "note": f"median {busy['median']:.1f} against {idle['median']:.1f} µs; quiet {' and '.join(shares)} "
        f"windows, all: {all_busy['p99']:.1f} µs, {all_busy['p99'] / all_idle['p99']:.2f} ×; {count} written",
    }  # fmt: skip
    title = "disk tier: p99 of create + seal, 1 MiB, during write behind"
    return [{"id": "diskd_p99", "title": title, "reach": "≤ 1.5 × without", "cells": [cell]}]


def _puts_of(windows: list[list[float]]) -> dict[str, float]:
    """Of all puts of these windows, in microseconds."""
    puts = [1e6 * seconds for window in windows for seconds in window]
    return {"p99": percentile(puts, 0.99), "median": median(puts)}


def storm_rows(home: Path, quick: bool) -> list[dict]:
    """Puts at memory speed into an empty pool, then on into the full one; every block is to be written."""
    rows, size = [], MIB
    pool, rounds = 256 * MIB, 5 if quick else 9
    source = np.zeros(size, dtype=np.uint8)
    with Session(home / "storm", pool) as session:
        session.daemon.wait_faulted()
        layout, rates, longest, refused = session.layout(size), {"empty": [], "full": []}, 0.0, 0
        for _ in range(rounds):
            keys = new_keys(4 * pool // size)
            room = session.client.stats()["capacity_bytes"] * 7 // 8 // size
            for name, part in (("empty", keys[:room]), ("full", keys[pool // size :])):
                before = session.client.stats()["no_space"]
                began = time.perf_counter()
                took = session.put(part, layout, source)
                rates[name].append(len(part) * size / (time.perf_counter() - began) / 1e9)
                refused += session.client.stats()["no_space"] - before
                longest = max(longest, *took)
                if name == "empty":
                    session.put(keys[room : pool // size], layout, source)
            session.wait(lambda: session.client.stats()["pending_writes"] == 0, "nothing waits to be written")
            session.client.delete(keys)
            session.wait(lambda: session.figures()["disk_files"] == 0, "no file is left", 0.02)
            figures = session.figures()
    ratio = median(full / empty for full, empty in zip(rates["full"], rates["empty"], strict=True))
    cell = {
        "column": "kvstored", "variant": "", "unit": "GB/s", "value": round(median(rates["full"]), 2),
        "rounds": [round(rate, 2) for rate in rates["full"]],
        "ratio": round(ratio, 2), "ratio_of": "empty pool",
        "note": f"longest create + seal {1e3 * longest:.1f} ms, {refused} refused, "
        f"{figures['disk_written']} of {figures['creates']} written, the others evicted before",
    }  # fmt: skip
    title = "disk tier: puts of 1 MiB at memory speed into a full pool"
    rows.append({"id": "diskd_storm", "title": title, "reach": "≥ 0.8 × into an empty pool", "cells": [cell]})
    return rows


PARTS: dict[str, Callable[[Path, bool, int], list[dict]]] = {
    "transfer1": lambda home, quick, memory: transfer_rows(home, MIB, quick),
    "transfer8": lambda home, quick, memory: transfer_rows(home, 8 * MIB, quick),
    "puts": lambda home, quick, memory: put_rows(home, quick),
    "storm": lambda home, quick, memory: storm_rows(home, quick),
    "restart": lambda home, quick, memory: restart_rows(home, quick),
    "warm": lambda home, quick, memory: warm_rows(home, memory),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.disk_daemon", description=__doc__)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there instead of printing them"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer bytes")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument(
        "--memory", type=int, metavar="GIB", help="pool of the warm restart; default 8, quick 2"
    )
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build", metavar="DIR", help="on the disk to measure"
    )
    chosen = parser.parse_args()
    found: dict = {"rows": [], "absent": []}
    memory_bytes = (chosen.memory or (2 if chosen.quick else 8)) << 30
    for part in chosen.only or PARTS:
        progress(f"disk tier: {part}")
        with tempfile.TemporaryDirectory(prefix="disk-daemon-", dir=chosen.directory) as home:
            found["rows"] += PARTS[part](Path(home), chosen.quick, memory_bytes)
    text = json.dumps(found, indent=1)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
