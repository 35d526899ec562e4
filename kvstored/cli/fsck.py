"""`kvstored fsck`: the offline check of directories of blocks. Owns what is printed and the exit code; the
check itself is native (`native/core/files/fsck.h`). Never talks to a daemon.

Invariant: without --repair nothing in the directories changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, TextIO

from kvstored import _core
from kvstored.cli import render
from kvstored.cli.answers import complain
from kvstored.config.units import approximate_size
from kvstored.errors import Exit, StoreError
from kvstored.tiers.pool_list import advice

IDENTITIES = 8  # named in the line of one directory; the JSON has all
MAX_LISTED = 10_000  # findings in the JSON of one directory; the counts count all


def trees(directory: str) -> list[str]:
    """The directories of blocks below one given to --disk: itself, or one per namespace."""
    if not _is_tree(directory):
        with os.scandir(directory) as found:
            below = sorted(entry.path for entry in found if entry.is_dir(follow_symlinks=False))
        if any(map(_is_tree, below)):  # one may have lost its tmp/, and still hold blocks
            return [path for path in below if _is_tree(path) or _holds_blocks(path)]
    return [directory]


def _holds_blocks(path: str) -> bool:
    return any(name.endswith(".kv") or set(name) <= set("0123456789abcdef") for name in os.listdir(path))


def _is_tree(directory: str) -> bool:
    temporary = os.path.join(directory, "tmp")
    return os.path.isdir(temporary) and not os.path.isdir(os.path.join(temporary, "tmp"))


def _count(directory: str) -> int:
    return sum(name.endswith(".kv") for _, _, names in os.walk(directory) for name in names)


class _Progress:
    """One line on a terminal, rewritten; nothing elsewhere. The whole is what a look at the names counted."""

    def __init__(self, stream: TextIO, directory: str) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._whole = _count(directory) if self._shown else 0

    def __call__(self, files: int, size_bytes: int) -> None:
        if self._shown:
            bar = render.bar(files, max(files, self._whole), 30)
            size = approximate_size(size_bytes)
            self._stream.write(f"\r\x1b[K{bar} {files} of {self._whole} blocks, {size} checked")
            self._stream.flush()

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def check(directory: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One directory of blocks. What is wrong is printed when found, or listed in the result (--json)."""
    findings: list[dict[str, str]] = []
    progress = _Progress(sys.stderr, directory)

    def finding(kind: str, path: str, why: str, action: str) -> None:
        shown = render.printable(path).replace("\n", "\\n")
        if not arguments.json:
            progress.clear()
            print(f"{kind:<9}  {shown}  {why}" + (f": {action}" if action else ""))
        elif len(findings) < MAX_LISTED:
            findings.append({"kind": kind, "path": shown, "why": why, "action": action})

    report = _core.fsck(
        directory,
        repair=arguments.repair,
        keep_corrupt=arguments.keep_corrupt,
        layers=not arguments.no_layers,
        finding=finding,
        progress=progress,
    )
    progress.clear()
    return {"directory": directory, **report, "findings": findings}


def _by_identity(blocks: dict[str, int]) -> str:
    """The models whose blocks lie there, by the first digits of their reuse identities, most blocks first."""
    ranked = sorted(blocks.items(), key=lambda counted: (-counted[1], counted[0]))
    shown = [f"{name[:12]} {count}" for name, count in ranked[:IDENTITIES]]
    more = [f"{len(ranked) - IDENTITIES} more"] if len(ranked) > IDENTITIES else []
    return "identities: " + ", ".join(shown + more)


def summary(result: dict[str, Any]) -> str:
    counted = [f"{count} {kind}" for kind, count in result["found"].items() if count]
    parts = [
        f"{result['directory']}: {result['files']} blocks, {approximate_size(result['bytes'])}, "
        f"{approximate_size(result['read_bytes'])} of it read",
        ", ".join(counted) or "nothing wrong",
    ]
    if result["identities"]:
        parts.append(_by_identity(result["identities"]))
    if result["errors"]:
        parts.append(f"{result['errors']} could not be listed")
    if result["repaired"]:
        parts.append(f"{result['repaired']} repaired")
    if result["failed"]:
        parts.append(f"{result['failed']} repairs failed")
    if result["aside"]:
        parts.append(f"{result['aside']} kept aside earlier")
    return "; ".join(parts)


def run(arguments: argparse.Namespace) -> int:
    results = []
    if arguments.keep_corrupt and not arguments.repair:
        return complain("--keep-corrupt is a way to repair: give --repair too", Exit.USAGE, arguments)
    try:
        for directory in arguments.directories:
            for tree in trees(directory):
                results.append(check(tree, arguments))
                if not arguments.json:
                    print(summary(results[-1]))
    except OSError as error:
        if error.filename is None:
            raise  # of our output, which main() tells
        return complain(f"{error.filename!r}: {error.strerror}", Exit.USAGE, arguments)
    except StoreError as error:
        return complain(str(error), Exit.REFUSED, arguments)
    if advised := advice():
        print(f"kvstored: shared memory: {advised}", file=sys.stderr)
    wrong = sum(result["wrong"] for result in results)
    if arguments.json:
        print(render.as_json({"wrong": wrong, "directories": results}))
    return Exit.NO if wrong else Exit.DONE
