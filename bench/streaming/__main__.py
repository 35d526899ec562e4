"""Models larger than their memory, beside what the disk gives and other programs. `python -m bench.streaming`

The shapes of Qwen2.5-7B with random weights, packed (AWQ), made once under the user's cache: 5.6 GB, and
as much again rearranged. Under each limit (a cgroup of its own where one may be made, else memory=) tokens
are decoded from the disk, with `fio` on the same file before and after; then with drafts; then llama.cpp
on its own file of the same shapes (Q4_0) under the same limit, and accelerate's disk offload of the shapes in
bf16. Owns the cgroup and the processes it
starts. Invariant: a figure that could not be had stands in the table with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.install import DEBS, ROOT, debian_packages, progress, python_environment
from bench.machine import describe, sentence
from bench.streaming.dense import ensure_dense
from bench.streaming.model import ensure
from kvclient.hf.streaming.mover import DEPTH

GROUPS = Path("/sys/fs/cgroup/memory")
RUN_TIMEOUT_S, FIO_SECONDS = 900, 8
# fio as Debian builds it wants all of its engines' libraries, whichever it uses.
FIO_DEBS = [
    "fio", "libaio1", "libboost-thread1.74.0", "libdaxctl1", "libfmt9", "libgfapi0", "libgfrpc0", "libgfxdr0",
    "libglusterfs0", "libibverbs1", "libnbd0", "libndctl6", "libnl-3-200", "libnl-route-3-200", "libpmem1",
    "libpmemblk1", "librados2", "librbd1", "librdmacm1",
]  # fmt: skip
NOT_RUN = {
    "AirLLM 4.0.0": "reads no AWQ on a CPU, and writes 15 GB of the dense shapes once more",
    "KVBoost 0.9.0": "streams on CUDA only, and its speculation crashes on transformers 5",
    "GPU: link share, 32B in 8 GB": "no GPU",
}


@contextlib.contextmanager
def limited(limit: int | None) -> Iterator[Path | None]:
    """A memory cgroup of that limit; None where none may be made, or none is wanted."""
    home = GROUPS / f"kvstored-bench-{os.getpid()}"
    try:
        if limit is None:
            raise OSError
        home.mkdir()
        (home / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield home
    finally:
        home.rmdir()


def run(command: list[str], limit: int | None) -> dict:
    """What the command printed as JSON, with its peak of memory; or `absent`, why not."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with limited(limit) as group:
        if group is not None:  # a shell enters it, then becomes the command
            command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
        try:
            done = subprocess.run(
                command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"absent": f"not done within {RUN_TIMEOUT_S} s"}
        peak = int((group / "memory.max_usage_in_bytes").read_text()) if group is not None else None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"absent": f"ended with {done.returncode}: {last[:120]}", "peak": peak}
    return {**json.loads(lines[-1]), "peak": peak, "cgroup": group is not None}


class Fio:
    """The disk's own rate, asked as DiskMover asks: O_DIRECT, kernel AIO, eight reads of 4 MiB under way."""

    def __init__(self) -> None:
        debian_packages(FIO_DEBS)
        self._program = DEBS / "usr" / "bin" / "fio"
        places = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph")
        self._env = os.environ | {"LD_LIBRARY_PATH": ":".join(str(DEBS / place) for place in places)}

    def rate(self, path: Path) -> float:
        """Bytes a second."""
        asked = ["--name=read", f"--filename={path}", "--rw=read", "--bs=4M", "--direct=1", "--readonly"]
        asked += ["--ioengine=libaio", f"--iodepth={DEPTH}", "--mem=mmap"]
        asked += ["--time_based", f"--runtime={FIO_SECONDS}", "--output-format=json"]
        done = subprocess.run(
            [self._program, *asked], env=self._env, capture_output=True, text=True, check=True, timeout=120
        )
        return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def ours(home: Path, limit: int, args: argparse.Namespace, *more: str) -> dict:
    command = [sys.executable, "-m", "bench.streaming.run", "ours", str(home), "--most", str(limit), *more]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads)]
    return run(command, limit)


def measure(args: argparse.Namespace) -> dict:
    sys.path.insert(0, str(ROOT / "examples"))
    import model as example_model

    home = ensure(example_model.ensure())
    rows, fio, file = [], None, home / "kvstored-streaming.bin"
    if not file.exists():
        progress("rearranging, without a limit")
        ours(home, 64 << 30, argparse.Namespace(tokens=1, threads=args.threads))
    try:
        fio = Fio()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        progress(f"no fio: {error}")
    for gib in args.limits:
        limit = int(gib * (1 << 30))
        row: dict = {"limit_gib": gib, "fio": [], "plain": []}
        row |= dict.fromkeys(("draft", "llama", "accelerate"))
        for _ in range(args.rounds):
            if fio is not None:
                row["fio"].append(fio.rate(file))
            progress(f"{gib} GiB: plain")
            row["plain"].append(ours(home, limit, args))
        if fio is not None:
            row["fio"].append(fio.rate(file))
        progress(f"{gib} GiB: with look-up")
        more = argparse.Namespace(tokens=8 * args.tokens, threads=args.threads)
        row["draft"] = ours(home, limit, more, "--draft")
        rows.append(row)
    if not args.no_llama:
        _llama(rows, args)
    if args.accelerate:
        _accelerate(rows, args)
    return {"machine": describe(), "threads": args.threads, "rows": rows, "not_run": NOT_RUN}


def _llama(rows: list[dict], args: argparse.Namespace) -> None:
    try:
        python = python_environment("xllamacpp", ["xllamacpp==2026.10.11549", "gguf==0.19.0"])
        made = "from bench.streaming.model import ensure_gguf; print(ensure_gguf())"
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, "-c", made], env=env, capture_output=True, text=True, check=True)
        path = done.stdout.strip().splitlines()[-1]
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        for row in rows:
            row["llama"] = {"absent": f"not installed: {str(error)[:120]}"}
        return
    for row in rows:
        progress(f"{row['limit_gib']} GiB: llama.cpp")
        command = [python, "-m", "bench.streaming.run", "llama", path, "--threads", str(args.threads)]
        limit = int(row["limit_gib"] * (1 << 30))
        row["llama"] = run([*command, "--tokens", str(args.tokens), "--most", str(limit)], limit)


def _accelerate(rows: list[dict], args: argparse.Namespace) -> None:
    """One token: it reads 15 GB for each."""
    home = ensure_dense()
    for row in rows:
        progress(f"{row['limit_gib']} GiB: accelerate")
        command = [sys.executable, "-m", "bench.streaming.run", "accelerate", str(home), "--tokens", "1"]
        limit = int(row["limit_gib"] * (1 << 30))
        row["accelerate"] = run([*command, "--threads", str(args.threads)], limit)


def table(found: dict) -> str:
    lines = [
        "| limit | held / read a token | tokens/s | bytes/s ÷ fio | peak | with look-up | llama.cpp "
        "| accelerate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        good = [run for run in row["plain"] if "absent" not in run]
        if not good:
            lines.append(f"| {row['limit_gib']:g} GiB | {row['plain'][0]['absent']} | | | | | | |")
            continue
        rate = median(run["tokens_per_s"] for run in good)
        held, moved = good[0]["bytes_held"] / 2**20, good[0]["bytes_per_pass"] / 2**20
        disk = median(row["fio"]) if row["fio"] else None
        share = median(run["bytes_per_s"] for run in good) / disk if disk and moved else None
        peak = max((run["peak"] or 0) for run in good) / 2**20
        cells = [f"{row['limit_gib']:g} GiB", f"{held:,.0f} / {moved:,.0f} MiB", f"{rate:.2f}"]
        cells += [f"{share:.2f} of {disk / 1e9:.2f} GB/s" if share else "-", f"{peak:,.0f} MiB"]
        cells += [_draft(row, disk, moved), _other(row["llama"], rate), _other(row["accelerate"], rate)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"Not measured: {what} ({why})." for what, why in found["not_run"].items())]
    return "\n".join(lines)


def _draft(row: dict, disk: float | None, moved: float) -> str:
    draft = row["draft"]
    if draft is None or "absent" in draft:
        return "-" if draft is None else draft["absent"]
    text = f"{draft['tokens_per_s']:.2f}/s, {draft['tokens_per_pass']:.1f} a pass"
    if disk and moved:
        text += f", {draft['tokens_per_s'] / (disk / (moved * 2**20)):.1f} × the disk's ceiling"
    return text


def _other(other: dict | None, rate: float) -> str:
    if other is None or "absent" in other:
        return "-" if other is None else other["absent"]
    return f"{other['tokens_per_s']:.2f}/s: {rate / other['tokens_per_s']:.1f} ×"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streaming", description=__doc__.splitlines()[0])
    parser.add_argument("--limits", type=float, nargs="+", default=[1, 2, 3], help="GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="decoded in each round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-llama", action="store_true", help="without llama.cpp")
    parser.add_argument("--accelerate", action="store_true", help="beside disk offload of bf16: 15 GB more")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    print(sentence(found["machine"]))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
