"""A command under a limit of memory, and the disk's rate beside it.

Owns the cgroup and the processes it starts. Never decides what is compared. Invariant: what could not be had
is a reason, never a missing figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.install import DEBS, ROOT, debian_packages
from kvclient.hf.streaming.mover import DEPTH

GROUPS = Path("/sys/fs/cgroup")
FIO_SECONDS = 8
# fio as Debian builds it wants all of its engines' libraries, whichever it uses.
FIO_DEBS = [
    "fio", "libaio1", "libboost-thread1.74.0", "libdaxctl1", "libfmt9", "libgfapi0", "libgfrpc0", "libgfxdr0",
    "libglusterfs0", "libibverbs1", "libnbd0", "libndctl6", "libnl-3-200", "libnl-route-3-200", "libpmem1",
    "libpmemblk1", "librados2", "librbd1", "librdmacm1",
]  # fmt: skip


def _controller() -> tuple[Path, str, str]:
    """Where groups are made, and the files of a limit and of a peak there. Raises OSError where no group can
    have a limit.
    """
    if not (GROUPS / "cgroup.controllers").exists():
        return GROUPS / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    if "memory" not in (GROUPS / "cgroup.subtree_control").read_text().split():
        (GROUPS / "cgroup.subtree_control").write_text("+memory")
    return GROUPS, "memory.max", "memory.peak"


@contextlib.contextmanager
def limited(limit: int | None) -> Iterator[tuple[Path, str] | None]:
    """A memory cgroup of that limit, of either version, and the name of its peak; None where none may be
    made, or none is wanted.
    """
    try:
        if limit is None:
            raise OSError
        root, most, peak = _controller()
        home = root / f"kvstored-bench-{os.getpid()}"
        home.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            (home / most).write_text(str(limit))
            if (swap := home / "memory.swap.max").exists():
                swap.write_text("0")
        except OSError:
            yield None
        else:
            yield home, peak
    finally:
        home.rmdir()


def run(command: list[str], limit: int | None, patience_s: float) -> dict:
    """What the command printed as JSON, with its peak of memory; or `absent`, why not."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with limited(limit) as group:
        if group is not None:  # a shell enters it, then becomes the command
            command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group[0]), *command]
        try:
            done = subprocess.run(
                command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=patience_s
            )
        except subprocess.TimeoutExpired:
            return {"absent": f"not done within {patience_s:g} s"}
        told = group is not None and (group[0] / group[1]).exists()  # memory.peak is of Linux 5.19
        peak = int((group[0] / group[1]).read_text()) if told else None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"absent": f"ended with {done.returncode}: {last[:120]}", "peak": peak}
    return {**json.loads(lines[-1]), "peak": peak, "cgroup": group is not None}


def forget(*paths: Path) -> None:
    """The page cache gives these files back: what another process has read counts for no limit."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Fio:
    """The disk's rate, asked as DiskMover asks: O_DIRECT, kernel AIO, eight reads of 4 MiB under way."""

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
