"""Two documents that come back in the other order, ten pairs of them.

    python -m bench.reuse_inside --case swapped [--tokens 600 1000]
    python -m bench.reuse_inside --case others      # nine more

Owns this case and the means over rows; the model, the store and the contenders are bench.reuse_inside's.
Never compares times of different runs.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import difflib
import functools
import heapq
import inspect
import json.decoder
import json.encoder
import tarfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.reuse_ttft import ROOT

POSITIONS = 64  # that KL is taken over
QUESTION = 20  # tokens behind a document
DOCUMENTS = ("docs/design.md", "docs/formats.md", "docs/tour.md", "LICENSE")
SWAPPED = (600,)  # tokens of a document
MODULES = (argparse, functools, heapq, tarfile, textwrap)
OTHER_DOCUMENTS = ("docs/operations.md", "docs/disk.md", "docs/kernels.md", "docs/gpu.md", "CONTRIBUTING.md")
OTHER_MODULES = (ast, configparser, difflib, json.decoder, json.encoder)
LICENCES = Path("/usr/share/common-licenses")  # where Debian has them
# The text that comes last, from which token; the other one, from which; what stands around both. Where a text
# is too short for that, its end.
PAIRS = (
    ("LICENSE", 600, "argparse", 5000, "docs/tour.md"),
    ("tarfile", 12000, "heapq", 300, "docs/tour.md"),
    ("docs/tour.md", 900, "functools", 2000, "LICENSE"),
    ("textwrap", 600, "docs/tour.md", 1000, "LICENSE"),
    ("docs/design.md", 2000, "tarfile", 4000, "LICENSE"),
    ("heapq", 500, "docs/formats.md", 1500, "LICENSE"),
    ("docs/formats.md", 3000, "LICENSE", 300, "argparse"),
    ("argparse", 3000, "tarfile", 9000, "LICENSE"),
    ("docs/formats.md", 800, "docs/design.md", 2500, "LICENSE"),
    ("docs/tour.md", 200, "docs/design.md", 300, "LICENSE"),
)
# The constants of kvclient.hf.reuse.drift and Repair.attended_ratio were found on those. Of these
# the first five were looked at meanwhile, the last four when all was fixed.
OTHERS = (
    ("LGPL-3", 300, "GPL-3", 1200, "LICENSE"),
    ("json.decoder", 200, "json.encoder", 300, "docs/tour.md"),
    ("docs/operations.md", 400, "docs/disk.md", 300, "LICENSE"),
    ("configparser", 1500, "MPL-1.1", 400, "docs/tour.md"),
    ("docs/kernels.md", 600, "docs/gpu.md", 200, "LICENSE"),
    ("difflib", 2000, "configparser", 4000, "LICENSE"),
    ("GFDL-1.3", 700, "MPL-1.1", 2000, "docs/tour.md"),
    ("CONTRIBUTING.md", 200, "docs/operations.md", 1500, "LICENSE"),
    ("ast", 500, "docs/kernels.md", 1500, "docs/tour.md"),
)


def others(subject: Any) -> Iterator[dict[str, Any]]:
    return swapped(subject, pairs=OTHERS)


def swapped(
    subject: Any, sizes: Sequence[int] = SWAPPED, pairs: Sequence[tuple[Any, ...]] = PAIRS
) -> Iterator[dict[str, Any]]:
    """Two documents, in the other order; the continuation is that of the one that now comes last. Beside it,
    what the other one means to it: the KL of the same prompt without that, computed cold.
    """
    texts = texts_of(subject)
    if missing := {name for pair in pairs for name in pair[::2]} - set(texts):
        raise SystemExit(f"no {', '.join(sorted(missing))} in {LICENCES}: Debian's base-files has them")
    for size in sizes:
        every = []
        for pair in pairs:
            rows = _pair(subject, texts, size, *pair)
            every += rows
            yield from averaged(f"two documents of {size}, swapped: {pair[2]}, {pair[0]}", rows)
        yield from averaged(f"two documents of {size}, swapped: {len(pairs)} pairs", every)


def texts_of(subject: Any) -> dict[str, list[int]]:
    read = {name: (ROOT / name).read_text() for name in (*DOCUMENTS, *OTHER_DOCUMENTS)}
    read |= {module.__name__: inspect.getsource(module) for module in (*MODULES, *OTHER_MODULES)}
    licences = (LICENCES / name for name in ("GPL-3", "LGPL-3", "MPL-1.1", "GFDL-1.3"))
    read |= {path.name: path.read_text() for path in licences if path.exists()}
    return {name: subject.encode(text) for name, text in read.items()}


def parts_of(
    texts: dict[str, list[int]], size: int, last: str, start: int, other: str, other_start: int,
    around: str,
) -> tuple[list[int], ...]:  # fmt: skip
    """(the prompt that is stored; of the one that is asked: what stands before, the two documents, and what
    stands behind).
    """
    start = min(start, len(texts[last]) - size - QUESTION - POSITIONS)
    other_start = min(other_start, len(texts[other]) - size)
    first = texts[last][start : start + size]
    second = texts[other][other_start : other_start + size]
    behind, before = texts[last][start + size :], texts[around][200:233]
    return texts[around][:40] + first + second + texts[around][100:160], before, second, first, behind


def _pair(subject: Any, texts: dict[str, list[int]], size: int, *pair: Any) -> list[dict[str, Any]]:
    source, before, second, first, behind = parts_of(texts, size, *pair)
    following = behind[QUESTION : QUESTION + POSITIONS]
    subject.fresh()
    subject.store(source)
    rows = subject.measured(before + second + first + behind[:QUESTION], behind[QUESTION:])
    said = [
        subject.said(out.logits[0], out.past_key_values, following, plain=True)
        for ids in (before + second + first, before + first)
        for out, _ in [subject.generate(ids + behind[:QUESTION], plain=True)]
    ]
    without = subject.far(*said)
    return [row | {"kl_without_the_other": without} for row in rows]


def averaged(case: str, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Per repair the means over the rows."""
    for name in dict.fromkeys(row["repair"] for row in rows):
        same = [{k: v for k, v in row.items() if k != "repair"} for row in rows if row["repair"] == name]
        yield {"case": case, "repair": name, **{key: mean(row[key] for row in same) for key in same[0]}}
