"""The disk's own figures: blocks to and from files through native/core/disk, beside fio doing the same.

    python -m bench.disk_figures [--json FILE] [--quick] [--directory DIR]

One file per block, direct I/O, four in flight, warm metadata, checksums on; three contenders alternate:
ours, fio as it is, and fio with shared memory as ours (its own memory is by chance contiguous, which is
worth much to a virtual disk). Files lie under build/ and are removed at the end: ext4 without a journal
is slow to make files where some were just removed. No store and no policy in it. Prints JSON. Never
judges: the reach stands beside.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.install import ROOT, progress

MIB = 1 << 20
DEPTH = 4
ROUNDS, ROUNDS_QUICK = 7, 3
BYTES, BYTES_QUICK = 512 << 20, 256 << 20  # of one contender in one round
SCAN_FILES, SCAN_FILES_QUICK = 200_000, 20_000
RUN_S = 120
SPEED = ROOT / "build" / "dev" / "disk_speed"
APT = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "fio"]


def find_fio() -> str:
    """Where fio is. Root gets it from Debian; RuntimeError says why there is none."""
    if shutil.which("fio") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise RuntimeError("no fio here (on Debian: apt-get install fio)")
        progress("installing fio")
        done = subprocess.run(APT, capture_output=True, text=True, timeout=300)
        if done.returncode != 0 or shutil.which("fio") is None:
            raise RuntimeError(f"apt-get install fio: {(done.stderr.splitlines() or ['failed'])[-1][:160]}")
    return shutil.which("fio") or ""


def ours(directory: Path, what: str, block_bytes: int, blocks: int) -> dict:
    """{"gb_s", "cpu"} of one pass: CPU in cores, all of the process's."""
    command = [SPEED, directory / "ours", what, block_bytes, blocks, DEPTH]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=RUN_S)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-160:])
    found = json.loads(done.stdout)
    return {"gb_s": found["bytes"] / found["seconds"] / 1e9, "cpu": found["cpu_s"] / found["seconds"]}


def fio(program: str, directory: Path, what: str, block_bytes: int, blocks: int, memory: str) -> dict:
    """The same of fio: files opened as they come, made by it if they are not there."""
    home = directory / f"fio-{memory}"
    home.mkdir(exist_ok=True)
    command = [
        program, "--name=blocks", f"--directory={home}", f"--mem={memory}", f"--rw={what}",
        f"--bs={block_bytes}", f"--filesize={block_bytes}", f"--nrfiles={blocks}", "--openfiles=8",
        "--file_service_type=sequential",
        "--ioengine=libaio", f"--iodepth={DEPTH}", "--direct=1", "--output-format=json",
        *(["--create_on_open=1"] if what == "write" else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode != 0:
        raise RuntimeError(f"fio: {done.stderr.strip()[-160:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return {"gb_s": job[what]["bw_bytes"] / 1e9, "cpu": (job["usr_cpu"] + job["sys_cpu"]) / 100}


CONTENDERS = {"ours": "", "fio": "malloc", "fio, shared memory": "mmapshared"}


def alternate(program: str, directory: Path, block_bytes: int, quick: bool) -> dict[str, dict[str, list]]:
    """{"write": {"ours": […], "fio": […], …}, "read": …}: in each round all write anew, then all read it."""
    found = {what: {name: [] for name in CONTENDERS} for what in ("write", "read")}
    blocks = (BYTES_QUICK if quick else BYTES) // block_bytes
    for number in range(ROUNDS_QUICK if quick else ROUNDS):
        home = directory / f"{block_bytes}-{number}"
        home.mkdir()
        names = list(CONTENDERS) if program else ["ours"]
        turned = names[number % len(names) :] + names[: number % len(names)]
        for what, taken in found.items():
            for name in turned:
                if name == "ours":
                    taken[name].append(ours(home, what, block_bytes, blocks))
                else:
                    taken[name].append(fio(program, home, what, block_bytes, blocks, CONTENDERS[name]))
    return found


def cells_of(taken: dict[str, list], reason: str) -> list[dict]:
    """The ratio to fio is the median over rounds, as only neighbours in time compare."""
    cells = []
    for name, runs in taken.items():
        column, variant = ("kvstored", "") if name == "ours" else ("limit", name)
        if not runs:
            cells.append({"column": column, "variant": variant, "absent": reason})
            continue
        cells.append({
            "column": column, "variant": variant, "unit": "GB/s",
            "value": round(median(run["gb_s"] for run in runs), 2),
            "rounds": [round(run["gb_s"], 2) for run in runs],
            "cpu_percent": [round(100 * run["cpu"], 1) for run in runs],
            "note": f"{100 * median(run['cpu'] for run in runs):.0f} % of a core, "
            f"{1000 * median(run['cpu'] / run['gb_s'] for run in runs):.0f} ms a GB",
        })  # fmt: skip
        if taken["fio"] and name != "fio":
            pairs = zip(runs, taken["fio"], strict=True)
            cells[-1]["ratio"] = round(median(ours["gb_s"] / theirs["gb_s"] for ours, theirs in pairs), 2)
            cells[-1]["ratio_of"] = "fio"
    return cells


def scan_row(directory: Path, quick: bool) -> dict:
    """The rate at which a directory of blocks is listed, its metadata in the page cache."""
    from kvstored import _core

    files = SCAN_FILES_QUICK if quick else SCAN_FILES
    tree = directory / "scan"
    for number in range(files):
        name = f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC834 % (1 << 256):064x}"[::-1]
        path = tree / name[0] / name[1]
        if number < 4096:
            path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.kv").touch()
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        count = _core.scan(str(tree)).files
        rates.append(count / (time.perf_counter() - began))
        if count != files:
            raise RuntimeError(f"{count} of {files} files found")
    cell = {"column": "kvstored", "variant": "", "unit": "/s", "value": round(max(rates)), "note": ""}
    return {"id": "disk_scan", "title": f"disk: {files:,} files listed by name and stat", "cells": [cell],
            "reach": "≥ 80,000 files/s"}  # fmt: skip


def checksum_row() -> dict:
    import kvclient

    data, taken = os.urandom(8 * MIB), []
    for _ in range(50):
        began = time.perf_counter()
        kvclient.crc32c(data)
        taken.append(time.perf_counter() - began)
    value = round(len(data) / median(taken) / 1e9, 1)
    cell = {"column": "kvstored", "variant": "", "unit": "GB/s", "value": value, "note": "one core"}
    return {"id": "crc32c", "title": "CRC32C of 8 MiB", "reach": "≥ 10 GB/s", "cells": [cell]}


def measure(directory: Path, quick: bool) -> dict:
    rows, absent, program, reason = [checksum_row()], [], "", ""
    try:
        program = find_fio()
    except RuntimeError as failure:
        reason = str(failure)
        absent.append({"column": "limit", "reason": reason})
    reach = {("read", 1): "≥ 0.9 × fio, CPU ≤ 20 %", ("read", 8): "≥ 0.9 × fio, CPU ≤ 20 %",
             ("write", 1): "≥ 0.85 × fio, CPU ≤ 15 %", ("write", 8): "≥ 0.9 × fio, CPU ≤ 15 %"}  # fmt: skip
    for size in (1, 8):
        taken = alternate(program, directory, size * MIB, quick)
        for what, verb in (("read", "loaded, checksums on"), ("write", "written")):
            title = f"disk alone: blocks of {size} MiB {verb}, direct, {DEPTH} in flight"
            cells = cells_of(taken[what], reason)
            rows.append(
                {"id": f"disk_{what}{size}m", "title": title, "reach": reach[what, size], "cells": cells}
            )
    rows.append(scan_row(directory, quick))
    return {"rows": rows, "absent": absent}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.disk_figures", description=__doc__)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there instead of printing them"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer bytes")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build", metavar="DIR", help="on the disk to measure"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disk-figures-", dir=chosen.directory) as home:
        found = measure(Path(home), chosen.quick)
    text = json.dumps(found, indent=1)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
