"""A checkpoint's own files as the arrangement: nothing is written, each layer is read from where it lies.

Owns the stretches that hold a layer's tensors. Never reads a weight but the scales, which must be finite.
Invariant: a stretch is whole pages; the first read of each says what every later one must be. Embedding and
head stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvclient.hf.streaming.files.headers import Source, tensors
from kvclient.hf.streaming.files.index import Arrangement, Part, Stored, part_of, sources
from kvclient.hf.streaming.files.rearrange import check_finite, layers_of
from kvclient.hf.streaming.mover import PAGE, Piece
from kvclient.hf.streaming.residency import PARTS

GAP_BYTES = 64 << 10  # of other tensors between two of a layer, up to which both come in one read


def in_place(home: Path) -> Arrangement:
    """Raises InvalidArgument for a checkpoint without layers, headers that lie, scales that are infinite."""
    files = sources(home)
    found = tensors(home, files)
    prefix, layers = layers_of(home, found)
    paths = tuple(home / name for name in files)
    numbers = {path: i for i, path in enumerate(paths)}
    for layer in layers:
        for name, source in layer.items():
            if name.endswith(".scales"):
                check_finite(source, source.read())
    parts = tuple({part: _part(_of(layer, part), numbers) for part in PARTS} for layer in layers)
    return Arrangement(paths, prefix, parts, {}, in_place=True)


def _of(layer: Mapping[str, Source], part: str) -> dict[str, Source]:
    return {name: source for name, source in layer.items() if part_of(name) == part}


def _part(held: Mapping[str, Source], numbers: Mapping[Path, int]) -> Part:
    names = sorted(held, key=lambda name: (numbers[held[name].path], held[name].offset))
    pieces: list[Piece] = []
    stored: list[Stored] = []
    at = 0
    for group in _groups([held[name] for name in names]):
        begin = group[0].offset // PAGE * PAGE
        end = max(source.offset + source.length for source in group)
        piece = Piece(begin, -(-(end - begin) // PAGE) * PAGE, None, numbers[group[0].path], end - begin)
        for source in group:
            name = names[len(stored)]
            place = at + source.offset - begin
            stored.append(Stored(name, source.dtype, source.shape, place, source.length))
        pieces.append(piece)
        at += piece.length
    return Part(tuple(pieces), tuple(stored))


def _groups(held: Sequence[Source]) -> list[list[Source]]:
    """Neighbours in a file, in order."""
    found: list[list[Source]] = []
    for source in held:
        if found and found[-1][-1].path == source.path:
            last = found[-1][-1]
            if source.offset - (last.offset + last.length) <= GAP_BYTES:
                found[-1].append(source)
                continue
        found.append([source])
    return found
