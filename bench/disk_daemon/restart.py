"""Starts of a daemon with a disk tier: over many files, and over the memory of one that was killed.

Owns the two measurements; `bench.disk_daemon` runs them. Never judges.
"""

import hashlib
import select
import signal
import time
from pathlib import Path
from statistics import median

from bench.disk_daemon.session import MIB, NOT_WRITTEN, WAIT_S, Session, new_keys

FILES, FILES_QUICK = 200_000, 20_000
ROUNDS = 3


def restart_rows(home: Path, quick: bool) -> list[dict]:
    """A cold start over many files: when the first look-up is answered, and when all are indexed."""
    files = FILES_QUICK if quick else FILES
    tree, content = home / "restart" / "disk" / "default", bytes(8192)
    tree.mkdir(parents=True)
    (home / "restart" / "disk").chmod(0o700), tree.chmod(0o700)
    for number in range(files):
        name = hashlib.sha256(number.to_bytes(4)).hexdigest()
        place = tree / name[0] / name[1]
        if number < 4096:
            place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.kv").write_bytes(content)
    first_ms, rates, done_ms = [], [], []
    for _ in range(ROUNDS):
        with Session(home / "restart-run", 64 * MIB, "--disk", str(home / "restart" / "disk")) as session:
            began = time.monotonic() - session.ready_ms / 1e3
            session.client.lookup([bytes(32)])
            first_ms.append(1e3 * (time.monotonic() - began))
            seen = [(time.monotonic(), session.figures())]
            while seen[-1][1]["disk_indexing"]:
                select.select([], [], [], 0.02)
                seen.append((time.monotonic(), session.figures()))
            done_ms.append(1e3 * (seen[-1][0] - began))
            if (found := seen[-1][1]["disk_files"]) != files:
                raise RuntimeError(f"{found} of {files} files found")
            (first_s, first), (last_s, last) = seen[0], seen[-1]
            left = last["disk_listed"] - first["disk_listed"]
            rates.append(left / (last_s - first_s) if left else files / (first_s - began))
    return [
        {"id": "diskd_restart", "title": f"disk tier: start over {files:,} files to the first answer",
         "reach": "at once", "cells": [{"column": "kvstored", "variant": "", "unit": "ms",
         "value": round(median(first_ms), 1), "note": f"complete after {median(done_ms):.0f} ms"}]},
        {"id": "diskd_index", "title": f"disk tier: {files:,} files indexed, from the first answer on",
         "reach": "≥ 80,000 files/s", "cells": [{"column": "kvstored", "variant": "", "unit": "/s",
         "value": round(median(rates)), "note": ""}]},
    ]  # fmt: skip


def warm_rows(home: Path, memory_bytes: int) -> list[dict]:
    """From the end of a killed daemon until its successor hands out a block that it had sealed."""
    size = 8 * MIB
    with Session(home / "warm", memory_bytes) as session:
        session.daemon.wait_faulted()
        layout, keys = session.layout(size), new_keys(memory_bytes // 4 * 3 // size)
        for key in keys:
            session.client.create([key], layout, priority=NOT_WRITTEN).seal(zero_rest=True)
        held, times = session.client.lookup(keys).resident, []
        if held != len(keys):
            raise RuntimeError(f"{held} of {len(keys)} blocks are in memory")
        for _ in range(5):
            session.daemon.end(signal.SIGKILL)
            began = time.monotonic()
            session.daemon.start()
            while (
                session.client.lookup(keys).resident != held
                or session.client.get(keys[:64]).hits != min(64, held)
            ):
                if time.monotonic() - began > WAIT_S:
                    raise RuntimeError("the blocks did not come back")
                select.select([], [], [], 0.001)
            times.append(1e3 * (time.monotonic() - began))
    title = f"disk tier: daemon killed with {held * size / (1 << 30):.1f} GiB sealed, until served again"
    cell = {"column": "kvstored", "variant": "", "unit": "ms", "value": round(median(times), 1),
            "rounds": [round(ms, 1) for ms in times], "note": f"longest {max(times):.0f} ms"}  # fmt: skip
    return [{"id": "diskd_warm", "title": title, "reach": "≤ 1 s at 16 GiB", "cells": [cell]}]
