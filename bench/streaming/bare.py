"""A pass over the weights without a model: what the disk and fresh memory allow the first token.

Owns the memory it reads into: two slots, and a place for each layer that stays, as a plan has them. Never
computes but the checksums that every read has. Invariant: the first pass begins before any of that memory was
touched; the second finds all of it touched.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvclient.hf.streaming.files.index import read_index, sources
from kvclient.hf.streaming.mover import DiskMover, Piece, pages
from kvclient.hf.streaming.residency import spread

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
SLOTS, READERS = 2, 3  # readers: as the scheduler has them


def units_of(path: Path) -> tuple[list[Path], list[tuple[Piece, ...]], list[tuple[Piece, ...]]]:
    """The files, the layers' pieces, and the head's, one by one. Raises SystemExit where it was not
    rearranged.
    """
    found = read_index(path, sources(path), TABLES)
    if found is None:
        raise SystemExit(f"{path} is not rearranged")
    layers = [tuple(piece for part in layer.values() for piece in part.pieces) for layer in found.layers]
    return list(found.paths), layers, [(piece,) for piece in found.tables[TABLES[1]].pieces]


def bare(args: argparse.Namespace) -> dict:
    """Seconds of a pass, and of the same once more; of processor too. args.stay: layers that stay."""
    paths, layers, head = units_of(args.path)
    stays = spread(len(layers), args.stay)
    units = [(pieces, stay) for pieces, stay in zip(layers, stays, strict=True)]
    units += [(pieces, False) for pieces in head]
    most = max(sum(piece.length for piece in pieces) for pieces, stay in units if not stay)
    mover, found = DiskMover(*paths), {}
    began = _now()
    slots = [pages(most) for _ in range(SLOTS)]
    kept = [pages(sum(piece.length for piece in pieces)) for pieces, stay in units if stay]
    for name in ("first", "again"):
        _read(mover, units, slots, kept)
        ended = _now()
        found |= {f"{name}_s": ended[0] - began[0], f"{name}_cpu_s": ended[1] - began[1]}
        began = _now()
    mover.close()
    return found


def _now() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def _read(
    mover: DiskMover, units: Sequence[tuple[tuple[Piece, ...], bool]], slots: Sequence[memoryview],
    kept: Sequence[memoryview],
) -> None:  # fmt: skip
    places, turn, under_way = iter(kept), 0, dict[int, Future[None]]()
    with ThreadPoolExecutor(READERS) as readers:
        left = []
        for number, (pieces, stay) in enumerate(units):
            if stay:
                left.append(readers.submit(mover.fill, number, pieces, next(places)))
                continue
            turn = (turn + 1) % len(slots)
            if (before := under_way.get(turn)) is not None:
                before.result()
            under_way[turn] = readers.submit(mover.fill, number, pieces, slots[turn])
        for future in [*left, *under_way.values()]:
            future.result()
