"""What the soak does to a directory of blocks and to the life of a daemon.

Owns no process. Every harm is one that a disk, an operator or a power cut can do. Invariant: a harm changes
files below the directory and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

PAGE = 4096


def flip(path: Path, choose: random.Random) -> None:
    with path.open("r+b") as file:
        at = choose.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1 << choose.randrange(8)]))


def zero_page(path: Path, choose: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(choose.randrange(path.stat().st_size) // PAGE * PAGE)
        file.write(bytes(PAGE))


def cut(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.choice([0, PAGE, choose.randrange(path.stat().st_size)]))


def grow(path: Path, choose: random.Random) -> None:
    os.truncate(path, path.stat().st_size + choose.choice([1, PAGE, 1 << 20]))


def foreign(path: Path, choose: random.Random) -> None:
    """The whole of another block, under this one's name."""
    other = choose.choice(list(path.parents[1].rglob("*.kv")))
    path.write_bytes(other.read_bytes())


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def directory(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def strange_name(path: Path, choose: random.Random) -> None:
    path.with_name(f"{choose.getrandbits(64):x}.kv").write_bytes(b"x" * choose.randrange(9000))


HARMS: list[Callable[[Path, random.Random], None]] = [flip, flip, zero_page, cut, grow, foreign, remove]
HARMS += [directory, link, strange_name]


def harm_a_file(below: Path, choose: random.Random) -> bool:
    """Whether one was there to be harmed."""
    level = below
    with contextlib.suppress(OSError, ValueError, IndexError):
        while not level.suffix:
            names = [name for name in os.listdir(level) if name not in ("tmp", "aside")]
            level = level / choose.choice(names)
        if level.is_file() and not level.is_symlink():
            choose.choice(HARMS)(level, choose)
            return True
    return False


def clear_away(below: Path) -> None:
    """Removes what no daemon would: links, directories in place of files, names that are no keys."""
    for path in below.rglob("*.kv"):
        if path.is_symlink() or (path.is_file() and len(path.stem) != 64):
            path.unlink()
        elif path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()


def a_schedule(choose: random.Random) -> str:
    """Failures for the next daemon (native/core/files/faults.h), often none."""
    seed = f"seed={choose.randrange(1 << 30)}"
    steps = ["open", "create", "publish", "remove", "read", "write", "done"]
    errors = ["create_eio", "create_enospc", "create_enomem", "write_eio", "write_short", "publish_eio"]
    errors += ["open_emfile", "open_eio", "read_eio", "read_short", "read_full", "write_full", "read_flip"]
    kind = choose.randrange(5)
    if kind == 0:
        return f"{seed},{choose.choice(steps)}_kill=@{choose.randrange(1, 60)}"
    if kind == 1:
        return f"{seed},power_loss_after={choose.randrange(1, 400)}"
    if kind == 2:
        return ",".join(
            [seed, *(f"{error}={choose.choice([0.002, 0.02])}" for error in choose.sample(errors, 5))]
        )
    return ""
